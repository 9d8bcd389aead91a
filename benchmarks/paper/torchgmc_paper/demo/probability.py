"""Probabilities that are right in every group, end to end, in seconds on one core.

A network learns to predict an event from an archive in which some groups are rare and behave differently; it does not see
the groups. Its probabilities look well calibrated overall and are not, group by group. They are used as they are, recalibrated
for everyone at once, and multicalibrated (:class:`torchgmc.ProbabilityHead`), and each is audited on fresh examples at every
level of the prediction.

    $ torchgmc demo probability
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchgmc as gmc
from torchgmc.report import Section, Table, picture
from torchgmc_paper.demo.progress import Bar, train
from torchgmc_paper.demo.stage import Found, Page, Result, marked, show, trained

METHODS = ("unprocessed", "one curve", "GMC")
GROUPS = ("all", "young", "rural", "night", "returning", "rural at night")


@dataclass(frozen=True)
class Setting:
    """Sizes of the demo; the defaults are what ``torchgmc demo probability`` shows."""

    alpha: float = 0.005
    delta: float = 0.05
    bins: int = 5
    num_train: int = 20_000
    num_calibration: int = 20_000
    num_test: int = 50_000
    prevalence: float = 0.15  # of the groups in the archive, against 1 in use
    epochs: int = 4
    batch_size: int = 256
    learning_rate: float = 3e-3


QUICK = Setting(num_train=1000, num_calibration=1000, num_test=2000, epochs=1)
"""Everything once, in a second; the model learns little."""


class Cases(NamedTuple):
    """Features ``(n, 8)``, outcomes ``(n,)`` and membership ``(n, 6)``."""

    x: Tensor
    y: Tensor
    groups: Tensor


@dataclass(frozen=True, kw_only=True)
class ProbabilityResult(Result):
    """What the demo found, on the test examples.

    Attributes:
        curves: by method, mean prediction and share of events of each group and level set, ``(6, bins, 2)`` as lists.
    """

    demo: ClassVar[str] = "probability"
    standard: ClassVar[Setting] = Setting()
    quick: ClassVar[Setting] = QUICK
    curves: dict[str, list[Any]]

    def worst(self) -> dict[str, dict[str, float]]:
        """Largest |deviation| over the level sets, by group and method."""
        return {
            group: {
                name: max(abs(row["estimate"]) for row in audit.rows() if row["group"] == group)
                for name, audit in self.audits.items()
            }
            for group in GROUPS
        }

    def findings(self) -> dict[str, Any]:
        """Worst cells, Brier scores and reliability curves."""
        brier = {name: audit.cost["Brier score after"] for name, audit in self.audits.items()}
        return {"worst_by_group": self.worst(), "brier": brier, "curves": self.curves}

    def __rich__(self) -> Any:
        alpha = self.setting.alpha
        return show(
            "Worst deviation over levels of the prediction, by group",
            ["group"],
            METHODS,
            [([group], [marked(f"{row[name]:.4f}", row[name], alpha) for name in METHODS]) for group, row in self.worst().items()],
            [["Brier score", *(f"{self.audits[name].cost['Brier score after']:.4f}" for name in METHODS)]],
            f"!  beyond the promised {alpha:g} on these {self.setting.num_test} test examples",
            self.certificate,
        )

    @staticmethod
    def work(setting: Setting, seed: int, bar: Bar) -> Found:
        def met(num: int, own: int, used: bool) -> Cases:
            return draw(num, own, 1.0 if used else setting.prevalence)

        model, known, test = trained(setting, seed, bar, met, train_network)
        with bar.clock("calibrate and audit"):
            with torch.no_grad():
                probs, fresh = (model(part.x).squeeze(1).sigmoid() for part in (known, test))
            overall = gmc.ProbabilityHead(setting.alpha, bins=setting.bins).fit(probs, known.y)
            head = _head(setting).fit(probs, known.y, known.groups)
            outputs = {"unprocessed": fresh, "one curve": overall(fresh), "GMC": head(fresh, test.groups)}
            audits = {name: _audit(f, test, setting) for name, f in outputs.items()}
            curves = {name: _curves(f, test, setting.bins).tolist() for name, f in outputs.items()}
        return Found(head, audits, {"curves": curves}, _page)


run = ProbabilityResult.run


def draw(num: int, seed: int, prevalence: float) -> Cases:
    """Examples of a population in which ``prevalence`` scales how common the groups are."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(num, 8, generator=rng)
    young, rural, night, returning = (torch.rand(num, 4, generator=rng) < prevalence * torch.tensor([0.35, 0.3, 0.25, 0.4])).unbind(
        1
    )
    # What drives the event: features, groups the model is not told of, and, for the young, weaker features.
    signal = 1.2 * x[:, 0] - 0.8 * x[:, 1] + 0.6 * x[:, 2] * x[:, 3] - 0.8
    logit = signal * (1 - 0.5 * young) + 0.9 * rural - 0.7 * returning + 0.8 * (rural & night) - 0.3 * night
    y = torch.rand(num, generator=rng) < logit.sigmoid()
    return Cases(x, y, torch.stack([torch.ones_like(young), young, rural, night, returning, rural & night], 1))


def train_network(data: Cases, setting: Setting, seed: int, bar: Bar) -> nn.Module:
    """Two hidden layers, AdamW, binary cross-entropy."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))
    rng = torch.Generator().manual_seed(seed)
    order = torch.cat([torch.randperm(len(data.x), generator=rng) for _ in range(setting.epochs)])

    def loss(rows: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(data.x[rows]).squeeze(1), data.y[rows].float())

    return train(model, torch.split(order, setting.batch_size), loss, setting.learning_rate, bar, "train the network")


def _head(setting: Setting) -> gmc.ProbabilityHead:
    return gmc.ProbabilityHead(setting.alpha, list(GROUPS), bins=setting.bins)


def _audit(f: Tensor, test: Cases, setting: Setting) -> gmc.Audit:
    """Audit of probabilities as they are: by a head that changes nothing."""
    identity = _head(setting)
    identity.load_state_dict(identity.state_dict() | {"fitted": torch.tensor(True)})
    return identity.audit(f, test.y, test.groups, delta=setting.delta)


def _curves(f: Tensor, test: Cases, bins: int) -> Tensor:
    """Mean prediction and share of events in each group and level set, ``(6, bins, 2)``; NaN where there are none."""
    level = F.one_hot((f * bins).long().clamp(max=bins - 1), bins).double()
    member = test.groups.double().T  # (6, n)
    count = member @ level
    sums = [member @ (level * value.double()[:, None]) for value in (f, test.y)]
    return torch.stack([total / count for total in sums], -1)


def _reliability(result: ProbabilityResult, dark: bool) -> Any:
    """One panel per group: share of events against the prediction, for each method."""
    from torchgmc import plots

    theme = plots.DARK if dark else plots.LIGHT
    figure, panels = plots.new_figure(theme, (13.0, 8.6), rows=2, columns=3)
    for place, (axes, group) in enumerate(zip(panels, GROUPS, strict=True)):
        axes.plot([0, 1], [0, 1], color=theme.faint, linewidth=2, zorder=0)
        for k, name in enumerate(METHODS):
            points = torch.tensor(result.curves[name][place])
            axes.plot(*points.T.tolist(), color=theme.series[k], marker=plots.MARKERS[k], label=name, linewidth=2, markersize=7)
        axes.set_title(group, color=theme.ink, fontsize=14)
        axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="predicted", ylabel="observed")
    plots.set_title(figure, "Share of events against the prediction, by group", theme)
    plots.set_legend(figure, panels[0], theme)
    return figure


def _page(result: ProbabilityResult) -> Page:
    setting = result.setting
    caption = "Share of events against the prediction, one panel per group"
    reliability = picture(lambda dark: _reliability(result, dark), caption)
    worst = Table(
        ["group", *METHODS],
        [[group, *(f"{row[name]:.4f}" for name in METHODS)] for group, row in result.worst().items()],
        METHODS,
    )
    text = (
        "Deviation of a cell: its share of all examples times (mean prediction - share of events). The table shows the "
        f"worst of the {setting.bins} levels of the prediction; at most {setting.alpha:g} is promised."
    )
    return {"reliability.png": reliability.png}, {
        "title": "A probability that means the same in every group",
        "lead": f"A network predicts an event. Three ways to use its probabilities, audited on {setting.num_test} fresh examples.",
        "certificate": result.certificate,
        "sections": [
            Section("Worst deviation of each group", [text], [worst]),
            Section("Reliability", ["On the diagonal, predictions come true as often as they say."], pictures=[reliability]),
        ],
    }
