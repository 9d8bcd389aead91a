r"""De-biased text generation: the paper's third experiment.

Prompts that mention women, men or both have one masked word. Half of them calibrate, half test; the promise is

.. math:: \left| P(A) \big(P(o \in U \mid A) - P(o \in U)\big) \right| \le \alpha

for both groups A and six lists of words U. Two sets of prompts (five corpora; templates) and two models (the one in the data,
and the same one made biased on purpose) make four parts. Each part's alpha is the paper's, 0.002, where that is less than half
of the worst bias of the unprocessed model over all prompts, and that half (two digits), the paper's own rule, where it is not.

Sampling noise. The target, P(o in U), is estimated on the same prompts, so a prompt contributes :math:`(1_A - P(A)) (q - E q)`
to a deviation, where q is its probability of U; the spread of that is what :func:`torchgmc_paper.measures.noise` is given.
Beside it, ``oracle`` is ``kl`` fitted on *all* prompts, calibration and test: it knows the distribution of the splits.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import torchgmc as gmc
from torchgmc_paper.datasets import GenderPrompts
from torchgmc_paper.demo.progress import Bar
from torchgmc_paper.frame import Prepared, cached, digest
from torchgmc_paper.masked_lm import list_tokens, load_model, read, stereotype
from torchgmc_paper.measures import MEASURES, measure, noise

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from torchgmc_paper.tables import Summary

NAME = "text"
TITLE = "De-biased text generation"
SEEDS = 10
METHODS = ("unprocessed", "euclidean paper", "euclidean exact", "kl", "oracle")
OURS = METHODS[1:4]
PACKAGES = ("transformers", "tokenizers")
MODELS = ("given", "biased")
SETS = ("prompts", "templates")
LISTS = ("female_adj", "male_adj", "female_occupation", "male_occupation", "pleasant", "unpleasant")
#: Rows of logits at a time: 128 x 30,522 numbers.
ROWS = 128

_PAPER = {
    "GMC": {
        "female": (0.0012, 0.0003, 0.0004, 0.0025, 0.0027, 0.0004),
        "male": (0.0018, 0.0005, 0.0004, 0.0018, 0.0031, 0.0004),
    },
    "unprocessed": {
        "female": (0.0017, 0.0003, 0.0004, 0.0031, 0.0034, 0.0004),
        "male": (0.0019, 0.0004, 0.0004, 0.0025, 0.0026, 0.0005),
    },
}


def promise(group: str, name: str) -> str:
    """Name of a group and list in tables."""
    return f"{group}: {name}"


def part_of(model: str, source: str) -> str:
    """Name of a model and set of prompts in tables."""
    return f"{source}, {model} model"


#: The paper does not say which of its two sets its table is of, nor its model's biases in sign.
PAPER: dict[str, dict[str, dict[str, float]]] = {
    part_of("given", "prompts"): {
        method: {promise(g, name): v for g, values in table.items() for name, v in zip(LISTS, values, strict=True)}
        for method, table in _PAPER.items()
    }
}


@dataclass(frozen=True)
class Setting:
    """What the results depend on.

    Attributes:
        alpha: the paper's.
        rule: alpha is at most this share of the worst bias of the unprocessed model.
        strength: by how much the biased model's logits of the stereotypes' words move, up or down, on average.
        masked: randomly masked words to measure the cost on, in each seed; none of a sentence that calibrates.
        max_steps: maximum number of fixed steps of `paper`; tens are enough for all prompts, thousands are taken for a few.
        limit: no more prompts, templates and masked words than this; 0 for all.
    """

    alpha: float = 0.002
    rule: float = 0.5
    strength: float = 1.5
    masked: int = 400
    max_steps: int = 10_000
    limit: int = 0


QUICK = Setting(masked=32, max_steps=40, limit=96)
"""A hundred prompts of each kind."""


# -- once ------------------------------------------------------------------------------------------------------------------


def prepare(data: Path, out: Path, bar: Bar, setting: Setting) -> Prepared:
    """Runs the model over all texts, once: about two minutes on one core."""
    sets = {name: _Texts(data, name, setting.limit) for name in (*SETS, "random_mask")}
    source = sets["prompts"].source
    files = [source.root / f"{name}.jsonl.gz" for name in sets] + [source.root / "word_lists.json"]
    settings = {"data": digest(*files, *sorted(source.model_dir.glob("*.safetensors"))), "limit": setting.limit}
    lists = {name: entry.words for name, entry in source.word_lists.items()}

    def make() -> dict[str, Tensor]:
        model, tokenizer = load_model(source.model_dir)
        last: Any = model.get_output_embeddings()  # type: ignore[operator]
        bias = last.weight.new_zeros(len(last.weight)) if last.bias is None else last.bias
        known = {"weight": last.weight.detach().clone(), "bias": bias.detach().clone()}
        known |= {f"list {name}": torch.tensor(ids) for name, ids in list_tokens(tokenizer, lists).items()}
        return known | {name: read(model, tokenizer, texts.texts, bar, text=f"read {name}") for name, texts in sets.items()}

    tensors = cached(out / "outputs.safetensors", settings, make)
    attributes = {name: tensors.pop(f"list {name}").tolist() for name in lists}
    tensors["direction"] = setting.strength * stereotype(tensors["weight"], attributes)
    for name, texts in sets.items():
        tensors |= {f"member {name}": texts.member, f"sentence {name}": texts.sentence}
    tensors["labels"] = torch.tensor(sets["random_mask"].column("token_id"))
    extra: dict[str, Any] = {"attributes": attributes, "groups": list(GenderPrompts.group_names), "setting": setting}
    prepared = Prepared({}, tensors, (), extra)

    def lists_of() -> dict[str, Tensor]:  # of the unprocessed models
        rows = {name: torch.arange(len(sets[name].texts)) for name in SETS}
        return {part_of(m, name): evaluate(prepared, m, name, rows[name], {"": None})[""]["q"] for m in MODELS for name in SETS}

    plain = cached(out / "lists.safetensors", {**settings, "strength": setting.strength}, lists_of)
    worst = {
        part_of(m, name): float(bias_of(plain[part_of(m, name)], sets[name].member).abs().max()) for m in MODELS for name in SETS
    }
    extra["alpha"] = {part: float(f"{min(setting.alpha, setting.rule * value):.2g}") for part, value in worst.items()}
    notes = _notes(sets, lists, attributes, worst, extra["alpha"], setting)
    return Prepared({**settings, "alphas": extra["alpha"]}, tensors, notes, extra)


class _Texts:
    """One file of the data: texts, who is mentioned, and a number for each sentence whatever word of it is masked."""

    def __init__(self, data: Path, name: str, limit: int) -> None:
        self.source = GenderPrompts(data, part=name)
        step = -(-len(self.source) // limit) if limit else 1  # spread over the corpora
        self.rows = range(0, len(self.source), step)
        self.texts = [self.source.texts[k] for k in self.rows]
        self.member = self.source.groups[::step]
        whole = [text.replace("[MASK]", str(word), 1).lower() for text, word in zip(self.texts, self.column("word"), strict=True)]
        self.sentence = torch.tensor([_number(text) for text in whole])

    def column(self, name: str) -> list[Any]:
        return [self.source.metadata[name][k] for k in self.rows]


def _number(text: str) -> int:
    """A number of 62 bits for a text, the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 2


def bias_of(q: Tensor, member: Tensor) -> Tensor:
    """P(A) (P(U | A) - P(U)), ``(a, u)``, from the probability of each list in each prompt, ``(n, u)``."""
    return gmc.violations(member, q - q.mean(0))


def _notes(
    sets: Mapping[str, _Texts],
    lists: Mapping[str, Sequence[str]],
    attributes: Mapping[str, Sequence[int]],
    worst: Mapping[str, float],
    alpha: Mapping[str, float],
    setting: Setting,
) -> list[str]:
    words, tokens = sum(map(len, lists.values())), sum(map(len, attributes.values()))
    sizes = ", ".join(f"{len(texts.texts)} {name}" for name, texts in sets.items())
    return [
        f"Texts: {sizes}. Of {words} entries of the six lists {tokens} are one token and count.",
        "The biased model is the given one, made biased on purpose: the vector that enters its last layer is moved along one "
        "direction for prompts about women and against it for prompts about men, so that the logits of female_adj, "
        "female_occupation and pleasant words rise (and those of male_adj, male_occupation and unpleasant words fall) by "
        f"{setting.strength:g} on average for women, and the other way round for men.",
        "Worst bias of the unprocessed model over all prompts, and alpha: "
        + "; ".join(f"{part} {value:.4f}, {alpha[part]:g}" for part, value in worst.items())
        + f". Alpha is {setting.alpha:g}, or {setting.rule:g} of the worst bias where that is less (the paper's rule).",
        "euclidean: the paper's projections onto the simplex, with its fixed step (`paper`) or exact ones (`exact`); kl: ours. "
        "oracle: kl fitted on the test prompts too; what it shows on test is not a fault of the fit.",
        f"Costs are of {setting.masked} randomly masked words per seed, in sentences that were not used to calibrate: NLL "
        "is the true negative log-likelihood in nats. A label at probability 0 makes it infinite: such labels are "
        "counted, and left out of "
        "NLL and of its increase. `printed` is the figure the paper prints, the cross-entropy of softmax(p).",
    ]


# -- a seed ------------------------------------------------------------------------------------------------------------------


def run_seed(prepared: Prepared, seed: int) -> list[dict[str, Any]]:
    """One split 1:1 of each set of prompts, both models, all methods."""
    rows: list[dict[str, Any]] = []
    for source in SETS:
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(prepared.tensors[f"member {source}"]), generator=generator)
        half = len(order) // 2
        calibration, test = order[:half].sort().values, order[half:].sort().values
        masked = _masked(prepared, calibration, generator) if source == "prompts" else None
        for model in MODELS:
            rows += _part(prepared, model, source, calibration, test, masked)
    return rows


def _masked(prepared: Prepared, calibration: Tensor, generator: torch.Generator) -> Tensor:
    """Randomly masked words in sentences that are not among the calibration prompts."""
    used = prepared.tensors["sentence prompts"][calibration]
    free = (~torch.isin(prepared.tensors["sentence random_mask"], used)).nonzero()[:, 0]
    wanted = torch.randperm(len(free), generator=generator)[: prepared.extra["setting"].masked]
    return free[wanted].sort().values


def _part(
    prepared: Prepared, model: str, source: str, calibration: Tensor, test: Tensor, masked: Tensor | None
) -> list[dict[str, Any]]:
    part = part_of(model, source)
    alpha = prepared.extra["alpha"][part]
    heads: dict[str, Any] = {"unprocessed": None, **_fit(prepared, model, source, calibration, test, alpha)}
    on_test = evaluate(prepared, model, source, test, heads)
    on_masked: dict[str, dict[str, Tensor]] = {}
    if masked is not None:
        on_masked = evaluate(prepared, model, "random_mask", masked, heads, prepared.tensors["labels"][masked])
    member = prepared.tensors[f"member {source}"]
    names = (prepared.extra["groups"], list(prepared.extra["attributes"]))
    rows: list[dict[str, Any]] = []
    for method in METHODS:
        cost = {"KL on test": float(on_test[method]["KL"].mean())} | (_cost(on_masked[method]) if on_masked else {})
        known = heads["kl"].report.violations_before
        if heads[method] is not None:
            fit = heads[method].report
            cost |= {"steps": float(fit.iterations), "converged": float(fit.converged)}
            known = fit.violations_after
        share = (member if method == "oracle" else member[calibration]).double().mean(0)
        rows += deviations(method, on_test[method]["q"], member[test], *names, known, share, len(calibration), part=part, cost=cost)
    return [{**row, "alpha": alpha} for row in rows]


def _fit(
    prepared: Prepared, model: str, source: str, calibration: Tensor, test: Tensor, alpha: float
) -> dict[str, gmc.DistributionHead]:
    options = (prepared.extra["attributes"], alpha, prepared.extra["groups"])
    # The paper compares at one alpha: every method goes there, noise included.
    kl, oracle, euclidean = (gmc.DistributionHead(*options, geometry=name, noise_floor=False) for name in ("kl", "kl", "euclidean"))
    for logits, member in _batches(prepared, model, source, calibration):
        for head in (kl, oracle, euclidean):
            head.observe(logits, member)
    for logits, member in _batches(prepared, model, source, test):
        oracle.observe(logits, member)
    exact = copy.deepcopy(euclidean)
    return {
        "euclidean paper": euclidean.calibrate(solver="paper", max_iter=prepared.extra["setting"].max_steps),
        "euclidean exact": exact.calibrate(),
        "kl": kl.calibrate(),
        "oracle": oracle.calibrate(),
    }


def _batches(prepared: Prepared, model: str, source: str, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits and membership of some rows."""
    known = prepared.tensors
    for part in torch.split(rows, ROWS):
        z, member = known[source][part], known[f"member {source}"][part]
        if model == "biased":
            side = member[:, :1].to(z.dtype) - member[:, 1:].to(z.dtype)  # women 1, men -1, both 0
            z = z + side * known["direction"]
        yield torch.addmm(known["bias"], z, known["weight"].T), member


@torch.no_grad()
def evaluate(
    prepared: Prepared,
    model: str,
    source: str,
    rows: Tensor,
    heads: Mapping[str, gmc.DistributionHead | None],
    labels: Tensor | None = None,
) -> dict[str, dict[str, Tensor]]:
    """What each head returns on some rows, one number per row.

    Args:
        prepared: see :func:`prepare`.
        model: ``"given"`` or ``"biased"``.
        source: ``"prompts"``, ``"templates"`` or ``"random_mask"``.
        rows: which ones, ``(n,)``.
        heads: fitted, by method; None is the model as it is.
        labels: the true token of each row, ``(n,)``.

    Returns:
        By method, see :func:`quantities`.
    """
    lists = [torch.tensor(ids) for ids in prepared.extra["attributes"].values()]
    found: dict[str, list[dict[str, Tensor]]] = {method: [] for method in heads}
    start = 0
    for logits, member in _batches(prepared, model, source, rows):
        before = torch.log_softmax(logits, -1)
        at = None if labels is None else labels[start : start + len(logits)]
        start += len(logits)
        for method, head in heads.items():
            found[method].append(quantities(before, before if head is None else head(before, member), lists, at))
    return {method: {name: torch.cat([part[name] for part in parts]) for name in parts[0]} for method, parts in found.items()}


def quantities(before: Tensor, after: Tensor, lists: Sequence[Tensor], labels: Tensor | None = None) -> dict[str, Tensor]:
    """Numbers of each row from the log-probabilities of the model and of a method, ``(n, vocabulary)``.

    Returns:
        ``q``: probability of each list, ``(n, u)``; ``KL`` of the method from the model; ``zeros``: tokens that lost all
        probability; with labels ``before`` and ``after``: NLL; ``top1``: whether the label is the likeliest; ``printed``: NLL
        of softmax(p), as the paper prints it.
    """
    h, p = before.exp(), after.exp()
    ratio = torch.where(p > 0, after - before, torch.zeros_like(p))
    near = ratio.clamp(-1.0, 1.0)
    # sum p log(p / h) - p + h is KL, and rounding of either normaliser cancels; h (e^r r - e^r + 1) is the same for small r.
    terms = torch.where(ratio.abs() < 1, h * (near * near.exp() - torch.expm1(near)), p * ratio - p + h)
    values = {
        "q": torch.stack([p[:, ids].sum(1) for ids in lists], 1).double(),
        "KL": torch.where(p > 0, terms, h).sum(1).double(),
        "zeros": ((p == 0) & (h > 0)).sum(1),
    }
    if labels is None:
        return values
    at = labels[:, None]
    return values | {
        "before": -before.gather(1, at)[:, 0].double(),
        "after": -after.gather(1, at)[:, 0].double(),
        "top1": after.argmax(1) == labels,
        "printed": (torch.logsumexp(p, 1) - p.gather(1, at)[:, 0]).double(),
    }


def _cost(found: Mapping[str, Tensor]) -> dict[str, float]:
    """Means over the randomly masked words."""
    there = found["after"].isfinite()
    return {
        "NLL": float(found["after"][there].mean()),
        "NLL increase": float((found["after"] - found["before"])[there].mean()),
        "labels at 0": float((~there).double().mean()),
        "KL": float(found["KL"].mean()),
        "top-1": float(found["top1"].double().mean()),
        "tokens at 0": float(found["zeros"].double().mean()),
        "printed": float(found["printed"].mean()),
    }


def deviations(
    method: str,
    q: Tensor,
    member: Tensor,
    groups: Sequence[str],
    lists: Sequence[str],
    known: Tensor,
    share: Tensor,
    num_calibration: int,
    part: str = "",
    cost: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Rows of one method: every group and list, with the sampling noise of a target that is estimated too.

    Args:
        method, part, cost: see :func:`torchgmc_paper.measures.measure`.
        q: probability of each list in the test prompts, ``(n, u)``.
        member: their membership, bool, ``(n, a)``.
        groups, lists: names.
        known: violation on the calibration prompts, ``(a, u)``, mass-weighted.
        share: P(A) there, ``(a,)``.
        num_calibration: number of calibration prompts.
    """
    names = [promise(group, name) for group in groups for name in lists]
    a, u = known.shape
    centre = q.mean(0)  # P(U)
    who = member[:, :, None].expand(-1, a, u).flatten(1)  # (n, a u)
    s = (q - centre)[:, None, :].expand(-1, a, u).flatten(1)
    calibration = {"mass": known.flatten(), "conditional": (known / share[:, None]).flatten()}
    rows = measure(
        method,
        names,
        who,
        s,
        target=centre.repeat(a),
        calibration=calibration,
        num_calibration=num_calibration,
        part=part,
        cost=cost,
    )
    spread = contributions(q, member).flatten(1)  # (n, a u)
    mass = member.double().mean(0)[:, None].expand(a, u).flatten()
    for name in MEASURES:
        oracle, fitted, worst = noise(spread / mass if name == "conditional" else spread, num_calibration)
        for row, one, both in zip((r for r in rows if r["measure"] == name), oracle.tolist(), fitted.tolist(), strict=True):
            row |= {"noise": one, "noise_fitted": both, "worst_noise": float(worst)}
    return rows


def contributions(q: Tensor, member: Tensor) -> Tensor:
    r"""What each prompt adds to a deviation whose target is estimated on the same prompts, centred, ``(n, a, u)``.

    The deviation is a covariance, :math:`\frac1n \sum_i (1_A(x_i) - \bar 1_A)(q_i - \bar q)`; to first order its error is the
    mean of the terms of this sum, centred. The group's own mean, not the mean of all, is taken off its members (and that of the
    others off the others): an oracle's groups all have the same one, and a bias is not noise.

    Args:
        q: ``(n, u)``.
        member: bool, ``(n, a)``.
    """
    inside = member.double()
    count = torch.stack([inside.sum(0), len(q) - inside.sum(0)])  # (2, a)
    means = [(side.T @ q) / number.clamp_min(1)[:, None] for side, number in zip((inside, 1 - inside), count, strict=True)]
    own = torch.where(member[:, :, None], means[0], means[1])  # (n, a, u)
    return (inside - inside.mean(0))[:, :, None] * (q[:, None, :] - own)


# -- figures -------------------------------------------------------------------------------------------------------------------


def figures(summary: Summary, setting: Setting) -> dict[str, Figure]:
    """A figure for each part in the paper's form: lists side by side, a panel for the prompts about women and about men."""
    from torchgmc_paper import figures as frame
    from torchgmc_paper.tables import slug

    found: dict[str, Figure] = {}
    for part in summary.parts():
        panels = []
        for group in GenderPrompts.group_names:
            table = {m: _lists(summary.find(part=part, measure="mass", method=m), group) for m in METHODS}
            panels.append((f"prompts that mention a {group} word", table))
        for group in GenderPrompts.group_names if part in PAPER else ():
            cells = {
                method: _lists([{"group": g, "mean": v, "sd": None, "noise": None} for g, v in values.items()], group)
                for method, values in PAPER[part].items()
            }
            panels.append((f"the paper's own figures (BERT, alpha = {setting.alpha:g}; grey is its GMC): {group} prompts", cells))
        name = f"{NAME}-{slug(part)}.png"
        title = f"Bias P(A) (P(U | A) - P(U)) on test: {part}"
        found[name] = frame.stacked(panels, METHODS, summary.alpha(part), title)
        for axes in found[name].axes[2:]:  # the paper's tolerance in the paper's panels, not ours
            axes.lines[-1].set_ydata([setting.alpha, setting.alpha])
    return found


def _lists(rows: Sequence[Mapping[str, Any]], group: str) -> dict[str, Mapping[str, Any]]:
    """Rows of one group by the list's name."""
    start = promise(group, "")
    return {str(row["group"])[len(start) :]: row for row in rows if str(row["group"]).startswith(start)}
