"""Costs and benefits of de-biasing: likelihood, divergence, tokens lost, and the bias table in the paper's form."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchgmc.conformity import of_label
from torchgmc.heads.distribution.head import DistributionHead


@dataclass
class Quality:
    r"""Quality of a head's output against the model's own, summed over batches of randomly masked text.

    NLL is the true negative log-likelihood of the masked-out tokens in nats; perplexity is its exponential. ``printed`` is
    the figure the paper prints: cross-entropy of softmax(p) instead of p, near ln(vocabulary) whatever the model (its 9.93).

    Example:
        >>> head = gmc.DistributionHead({"a": [1]}, 0.001, ["x"]).fit(torch.randn(50, 9), torch.arange(50)[:, None] % 2 == 0)
        >>> quality = gmc.text.Quality()
        >>> quality.update(head, torch.zeros(4, 9), torch.zeros(4, 1).bool(), torch.tensor([0, 1, 2, 3]))
        >>> round(quality.compute()["NLL before"], 4)
        2.1972
    """

    sums: dict[str, float] = field(default_factory=dict)
    count: int = 0

    @torch.no_grad()
    def update(self, head: DistributionHead, logits: Tensor, groups: Tensor, labels: Tensor) -> None:
        """Add a batch.

        Args:
            head: a fitted head.
            logits: ``(n, vocabulary)``.
            groups: membership ``(n, a)``.
            labels: the true tokens, ``(n,)``.
        """
        head.check_batch(logits, groups)
        before = torch.log_softmax(logits.float() if logits.dtype != torch.float64 else logits, -1)
        after = head(before, groups)
        p, q = before.exp(), after.exp()
        values = {
            "NLL before": -of_label(before, labels),
            "NLL after": -of_label(after, labels),
            "KL": torch.where(q > 0, q * (after - before), torch.zeros_like(q)).sum(1).clamp_min(0.0),  # never below 0 by rounding
            "zeros": ((q == 0) & (p > 0)).sum(1),
            "printed before": torch.logsumexp(p, 1) - of_label(p, labels),
            "printed after": torch.logsumexp(q, 1) - of_label(q, labels),
            "infinite": torch.isinf(of_label(after, labels)),
        }
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value.double().sum())
        self.count += len(logits)

    def compute(self) -> dict[str, float]:
        """Means over all tokens; ``infinite`` is the share of labels that got probability 0."""
        if self.count == 0:
            raise ValueError("no tokens yet: call `update` first.")
        means = {name: value / self.count for name, value in self.sums.items()}
        for when in ("before", "after"):
            nll = means[f"NLL {when}"]
            means[f"perplexity {when}"] = math.exp(nll) if nll < 700 else math.inf
        return means


@torch.no_grad()
def bias_table(head: DistributionHead, logits: Tensor, groups: Tensor, weight: Tensor | None = None) -> dict[str, list[Any]]:
    """P(A) (P(o in U | A) - P(o in U)) of every group and list, before and after: the paper's table.

    Args:
        head: a fitted head.
        logits: ``(n, vocabulary)``.
        groups: membership ``(n, a)``, bool.
        weight: of each prompt, ``(n,)``.

    Returns:
        Columns ``group``, ``list``, ``before``, ``after``, and ``P(U) before``, ``P(U) after``.
    """
    _, member, weights, _ = head.check_batch(logits, groups, weight)
    average = weights / weights.sum()
    plain = torch.log_softmax(logits.float() if logits.dtype != torch.float64 else logits, -1)
    masses = {"before": plain[:, head.ids].double().exp() @ head.directions.T, "after": head.measure(logits, member)[0]}
    lists = list(head.attributes)
    table: dict[str, list[Any]] = {"group": [name for name in head.groups for _ in lists], "list": lists * head.num_groups}
    for when, p in masses.items():
        mean = average @ p  # (u,)
        bias = (member.double() * average[:, None]).T @ (p - mean)  # (a, u)
        table[when] = bias.flatten().tolist()
        table[f"P(U) {when}"] = mean.tolist() * head.num_groups
    return table
