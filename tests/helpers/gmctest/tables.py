"""An audit from bare rows, for tests of its intervals."""

import torch

from torchgmc.audits.audit import Audit, Evidence
from torchgmc.audits.intervals import Rows


def rows_of(who, s, bounds, weight=None, cluster=None, **options):
    s = s[:, None] if s.dim() == 1 else s
    weight = torch.ones(len(s)).double() if weight is None else weight
    cluster = torch.zeros(len(s), 0, dtype=torch.int64) if cluster is None else cluster[:, None]
    return Rows.of(s, who, weight, cluster, bounds, **options)


def summarize(who, s, alpha, delta=0.05, conditional=False, bounds=(-0.4, 0.6), method="exact", **options):
    rows = rows_of(who, s, bounds, **options)
    names = tuple(f"g{j}" for j in range(who.shape[1]))
    evidence = Evidence(rows, names, tuple(str(k) for k in range(rows.s.shape[1])), torch.zeros(rows.s.shape[1]).double())
    table = evidence.table(alpha, delta, conditional, method)
    return Audit(table, alpha, delta, conditional, len(s), evidence=evidence, method=method)
