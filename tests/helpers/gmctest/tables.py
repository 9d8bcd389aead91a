"""An audit from moments alone, for tests of its intervals."""

from torchgmc.audits.audit import Audit, Evidence


def summarize(moments, alpha, delta, conditional, groups, what, target, bounds, num_examples):
    evidence = Evidence(moments, tuple(groups), tuple(what), target, bounds)
    return Audit(evidence.table(alpha, delta, conditional), alpha, delta, conditional, num_examples, evidence=evidence)
