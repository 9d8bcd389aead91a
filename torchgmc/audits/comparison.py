"""Audits of several heads side by side."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchgmc.audits.audit import MAX_SHOWN, Audit
from torchgmc.audits.tabular import Table, Tabular, row_name, shown
from torchgmc.engine.files import write_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from torchgmc.heads.base import Head


@dataclass(frozen=True)
class Comparison(Tabular):
    """Several heads, one promise.

    Attributes:
        audits: the audit of each head, by name.
        table: ``group``, ``what`` and, for each head, its ``estimate``, ``interval`` (low, high) and ``verdict`` (None where a
            head has no such g); the group that is worst for any head first.
        summary: for each head: largest violation, alpha it can certify, whether the promise holds, and every cost; first
            of all its alpha, if the audits differ in it.
    """

    audits: dict[str, Audit]
    table: dict[str, list[Any]]
    summary: dict[str, dict[str, Any]]

    def plot(self, **options: Any) -> "Figure":
        """Deviation of each group for every head (extra ``report``); options of :func:`torchgmc.plots.deviation`."""
        from torchgmc import plots

        return plots.deviation(self.audits, **options)

    def to_json(self, path: str | Path) -> Path:
        """Write the audits by name to a file, completely or not at all; returns its path."""
        return write_json(path, {name: audit.to_dict() for name, audit in self.audits.items()})

    def to_html(self, path: str | Path, title: str = "Audits side by side", head: "Head | None" = None, **options: Any) -> Path:
        """Write the full report with all heads side by side; returns its path. Options of :func:`torchgmc.report.write`."""
        from torchgmc import report

        return report.write(path, self, head, title=title, **options)

    def __repr__(self) -> str:
        return f"Comparison({'; '.join(f'{name}: {audit!r}' for name, audit in self.audits.items())})"

    def __str__(self) -> str:
        names = list(self.audits)
        wide = [max(len(name), 19) for name in names]

        def line(label: str, cells: Iterable[str]) -> str:
            return " ".join([f"{label[:28]:28s}", *(f"{text:>{w}s}" for text, w in zip(cells, wide, strict=True))])

        lines = [line("group", names)]
        labels = list(map(row_name, self.table["group"], self.table["what"]))
        for k, label in enumerate(labels[:MAX_SHOWN]):  # the largest estimates come first
            cells = [(self.table[f"{name} estimate"][k], self.table[f"{name} verdict"][k]) for name in names]
            lines.append(line(label, ["-" if value is None else f"{value:+.4f} {verdict:9s}" for value, verdict in cells]))
        if len(labels) > MAX_SHOWN:
            lines.append(f"... and {len(labels) - MAX_SHOWN} more with smaller estimates: all are in `comparison.table`.")
        return "\n".join([*lines, *(line(row, cells) for row, cells in self._summary().items())])

    def _summary(self) -> dict[str, list[str]]:
        """The summary as it is shown: of each figure its value for every head."""
        rows = dict.fromkeys(key for values in self.summary.values() for key in values)
        return {row: [shown(values.get(row)) for values in self.summary.values()] for row in rows}

    def _repr_html_(self) -> str:
        """Summary for notebooks."""
        from torchgmc.audits.page import brief

        return brief(Table(["", *self.audits], [[row, *cells] for row, cells in self._summary().items()]))


def compare(audits: Mapping[str, Audit]) -> Comparison:
    """Audits of several heads side by side.

    Args:
        audits: by display name; all conditional or all mass-weighted. Verdicts are comparable only if all audits use one
            alpha: ``gmc.audit(head, data, alpha=0.01)`` or ``audit.view(..., alpha=0.01)``.

    Example:
        >>> masks = torch.rand(200, 8, 8) < 0.5
        >>> scores = torch.sigmoid(2 * masks + torch.randn(200, 8, 8))
        >>> heads = {"GMC": gmc.ThresholdHead(0.1, 0.01), "conformal": gmc.baselines.ConformalRiskControl(0.1)}
        >>> both = gmc.compare({name: gmc.audit(head.fit(scores, masks), (scores, masks)) for name, head in heads.items()})
        >>> list(both.summary["GMC"])[:3]
        ['promised alpha', 'worst deviation', 'certified alpha']
    """
    if not isinstance(audits, Mapping) or not audits or not all(isinstance(a, Audit) for a in audits.values()):
        raise TypeError(f"`audits` must map names to audits, as in {{'GMC': head.audit(...)}}, got {audits!r:.80}.")
    if len({audit.conditional for audit in audits.values()}) > 1:
        raise ValueError("`audits` must be all conditional or all mass-weighted; convert them with `audit.view(...)`.")
    found = {name: {(r["group"], r["what"]): r for r in audit.rows()} for name, audit in audits.items()}
    keys = dict.fromkeys(key for rows in found.values() for key in rows)
    order = sorted(keys, key=lambda key: -max(0.0, *(abs(rows[key]["estimate"]) for rows in found.values() if key in rows)))
    table: dict[str, list[Any]] = {"group": [group for group, _ in order], "what": [what for _, what in order]}
    for name, rows in found.items():
        here = [rows.get(key) for key in order]
        table[f"{name} estimate"] = [row and row["estimate"] for row in here]
        table[f"{name} interval"] = [row and (row["low"], row["high"]) for row in here]
        table[f"{name} verdict"] = [row and row["verdict"] for row in here]
    alphas = {audit.alpha for audit in audits.values()}
    summary: dict[str, dict[str, Any]] = {}
    for name, audit in audits.items():
        summary[name] = {"promised alpha": audit.alpha} if len(alphas) > 1 else {}
        summary[name] |= {"worst deviation": audit.max_violation, "certified alpha": audit.certified_alpha}
        summary[name] |= {"certified": None if audit.alpha is None else audit.certified, "violated": audit.violated}
        summary[name] |= audit.cost
    return Comparison(dict(audits), table, summary)


def by_name(audits: Any, name: str = "audits") -> dict[str, Audit]:
    """The audits of an audit, a comparison or a mapping, by display name; ``name`` is that of the argument."""
    if isinstance(audits, Audit):
        return {audits.name or "head": audits}
    found = audits.audits if isinstance(audits, Comparison) else audits
    if not isinstance(found, Mapping) or not all(isinstance(one, Audit) for one in found.values()):
        raise TypeError(f"`{name}` must be an audit, a comparison or a mapping from names to audits, got {audits!r:.80}.")
    if not found:
        raise ValueError(f"`{name}` must have at least one audit, as in {{'GMC': head.audit(...)}}, got none.")
    return dict(found)
