"""Prediction sets and intervals behind a model: one module from inputs to bool sets, or to two ends."""

import contextlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torchgmc import conformity, distributed
from torchgmc.audits.audit import Audit
from torchgmc.deploy.adapters import Adapter, adapt, gives_logits
from torchgmc.deploy.attach import CalibratedModel
from torchgmc.engine import checks
from torchgmc.engine.folds import deal
from torchgmc.engine.modes import evaluating
from torchgmc.groups.cells import pattern_ids
from torchgmc.heads import finite
from torchgmc.heads.quantile.head import QuantileHead
from torchgmc.heads.state import ABOUT, read_about

INTERVALS = ("auto", "absolute", "normalised", "cqr")
#: Names of the groups that are classes: "class 3", "classes 0, 4, 7".
CLASSES = re.compile(r"class(?:es)? (\d+(?:, \d+)*)")
#: Share of the calibration examples from which classes are clustered, 1 in so many; the others are calibrated on.
SPLIT = 4
#: Levels of the quantiles by which classes are clustered.
LEVELS = (0.5, 0.6, 0.7, 0.8, 0.9)
#: A class with fewer examples in the first part goes to the cluster of the rare.
FEWEST = 10
#: Combinations of groups and classes tabulated beyond those seen, at most.
MOST = 4096
_Same = TypeVar("_Same", bound="_Conformal")


class SetsOf(nn.Module):
    """Classes whose score is at most the threshold, bool ``(n, C)``; scores of :func:`torchgmc.conformity.class_scores`."""

    output = "sets"

    def __init__(self, score: str, randomized: bool, penalty: float, free: int, version: int) -> None:
        super().__init__()
        self.score, self.randomized, self.penalty, self.free, self.version = score, randomized, penalty, free, version

    def scores(self, probs: Tensor) -> Tensor:
        """Of every class, ``(n, C)``."""
        return conformity.unchecked_scores(probs, self.score, self.randomized, self.penalty, self.free, self.version)

    def forward(self, probs: Tensor, thresholds: Tensor) -> Tensor:
        """Thresholds ``(n,)``, or one per class, ``(n, C)``; classes after the last have none, and are in."""
        if thresholds.dim() == 1:
            thresholds = thresholds.unsqueeze(1)
        elif thresholds.shape[1] < probs.shape[1]:
            thresholds = nn.functional.pad(thresholds, (0, probs.shape[1] - thresholds.shape[1]), value=float("inf"))
        return self.scores(probs).to(torch.float64) <= thresholds


class IntervalOf(nn.Module):
    """Both ends, ``(n, 2)``, from the model's output: a prediction, a prediction and a scale, or two quantiles."""

    output = "interval"

    def __init__(self, score: str) -> None:
        super().__init__()
        self.score = score

    def parts(self, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Low and high end at the threshold 0, and by how much they move with it, ``(n,)`` each."""
        columns = output.unsqueeze(1) if output.dim() == 1 else output.flatten(1)
        kind = ("absolute" if columns.shape[1] == 1 else "cqr") if self.score == "auto" else self.score
        wanted = 1 if kind == "absolute" else 2
        if columns.shape[1] != wanted:
            raise ValueError(
                f"score={kind!r} needs an output of shape (n, {wanted}) "
                f"({'the prediction' if wanted == 1 else 'prediction and scale, or two quantiles'}), got {tuple(output.shape)}."
            )
        low, high = columns[:, 0], columns[:, -1]
        return (low, low, high) if kind == "normalised" else (low, high, torch.ones_like(low))

    def forward(self, output: Tensor, thresholds: Tensor) -> Tensor:
        """Thresholds ``(n,)``."""
        low, high, unit = (part.to(torch.float64) for part in self.parts(output))
        move = thresholds.reshape(-1) * unit
        return torch.stack([low - move, high + move], 1).to(output.dtype)


class ByClass(nn.Module):
    """Thresholds of every class, ``(n, C)``: a table by combination of groups and cluster of classes."""

    known: Tensor
    table: Tensor
    cluster: Tensor

    def __init__(self, known: Tensor, table: Tensor, cluster: Tensor) -> None:
        super().__init__()
        self.register_buffer("known", known, persistent=False)  # (P, a) bool; all of it follows from the head
        self.register_buffer("table", table, persistent=False)  # (P, K)
        self.register_buffer("cluster", cluster, persistent=False)  # (C,)

    def forward(self, member: Tensor) -> Tensor:
        return finite.look_up(member.to(torch.float64), self.known, self.table, float("inf")).index_select(1, self.cluster)


class _Conformal(CalibratedModel):
    """What sets and intervals share: fit, audit, answer."""

    head: QuantileHead
    reader: QuantileHead

    def __init__(self, model: nn.Module | None, head: QuantileHead, groups: Any, adapter: Adapter | None, ending: Any) -> None:
        checks.kind("model", model, nn.Module | None, "an nn.Module, or None for its outputs themselves")
        if getattr(head, "takes", "") != "groups":
            raise TypeError(f"`head` must be a QuantileHead (finite_sample=True for a guarantee), got {type(head).__name__}.")
        if head.bins is not None or head.learns:
            raise ValueError(
                "`head` must be a QuantileHead without `bins` or `learn`: thresholds must depend on groups only. Attach such a "
                "head itself, gmc.attach(model, head, features=...): it returns the output and the threshold."
            )
        model = nn.Identity() if model is None else model
        super().__init__(model, head, groups, adapt(model, head, adapter))
        self.ending = ending

    def forward(self, *inputs: Any, groups: Any = None, **kwargs: Any) -> Tensor:
        """Bool sets ``(n, C)``, or both ends ``(n, 2)``, whatever type of output the model has."""
        args, kwargs, member = self.divide(inputs, groups, kwargs)
        found = self._output(args, kwargs)
        self.check_output(found)
        return self.ending(found, self.thresholds(self.placed(member, found), len(found)))  # type: ignore[no-any-return]

    def _output(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """What scores are computed from; without a model it may come as an array or a frame."""
        if isinstance(self.model, nn.Identity):
            args = tuple(map(checks.tensor_of, args))
        return self.adapter.scores(self.model(*args, **kwargs))

    def fit(self: _Same, inputs: Any, y: Any, groups: Any = None, **options: Any) -> _Same:
        """Fit the head on calibration data: the model's input, the truth ``(n,)``, and the groups; returns the module.

        ``inputs``: of the model: a tensor, or a mapping of keyword arguments. ``y``: class ids, or outcomes. ``groups``:
        membership ``(n, a)``, Groups, or a frame. ``options``: of ``head.fit``.
        """
        return self.fit_batches([(inputs, y, groups)], **options)

    def fit_batches(self: _Same, batches: Iterable[Any], **options: Any) -> _Same:
        """:meth:`fit` from batches (input, truth, groups), tuples or dicts, as :meth:`torchgmc.Adapter.split` reads them."""
        with distributed.together():
            self._fit(*self._read(batches), options)
        return self

    def audit(self, inputs: Any, y: Any, groups: Any = None, delta: float = 0.05, **options: Any) -> Audit:
        """:meth:`torchgmc.Head.audit` of the coverage on held-out data, passed as to :meth:`fit`."""
        with distributed.together():
            scores, labels, member = self._read([(inputs, y, groups)])
            return self.head.audit(scores, self._wide(labels, member), delta=delta, **options)

    def measure(self, inputs: Any, y: Any, groups: Any = None) -> dict[str, Any]:
        """Coverage and size on held-out data, passed as to :meth:`fit`: overall, and the coverage of each group."""
        with torch.no_grad(), evaluating(self.model):
            answer = self(inputs, groups=groups)
        truth = checks.numbers("y", y).to(answer.device)
        found = self._measure(answer, truth)
        covered = found.pop("covered")
        by_group = {}
        if self.reader.grouped:
            member = self.reader.check_groups(groups, len(truth), answer.device).double()
            by_group = dict(zip(self.reader.groups, ((covered @ member) / member.sum(0)).tolist(), strict=True))
        return {"coverage": float(covered.mean()), **found, "coverage by group": by_group}

    def _read(self, batches: Iterable[Any]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Conformity scores of the truth, the truth, and the membership, of all batches."""
        rows = []
        with torch.no_grad(), evaluating(self.model):
            for batch in batches:
                part = self.adapter.split(batch)
                output = self._output(part.args, part.kwargs)
                y = checks.numbers("y", part.target).to(output.device)
                member = self.reader.check_groups(part.groups, len(output), output.device) if self.reader.grouped else None
                rows.append((self._score(output, y), y, member))
        if not rows:
            raise ValueError("`batches` has no batch to fit or audit.")
        scores, labels, members = zip(*rows, strict=True)
        return torch.cat(scores), torch.cat(labels), None if members[0] is None else torch.cat(members)

    def _fit(self, scores: Tensor, labels: Tensor, member: Tensor | None, options: dict[str, Any]) -> None:
        self.head.fit(scores, member, **options)

    def _wide(self, labels: Tensor, member: Tensor | None) -> Tensor | None:
        """The membership that the head takes."""
        return member

    def _score(self, output: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError  # abstract

    def _measure(self, answer: Tensor, truth: Tensor) -> dict[str, Any]:
        raise NotImplementedError  # abstract

    def thresholds(self, member: Tensor | None, rows: int) -> Tensor:
        """Of each example, ``(n,)``, or of each example and class, ``(n, C)``."""
        if self.by_class is None:
            return self.head(member).expand(rows)  # type: ignore[no-any-return]
        if member is None:
            member = torch.ones(rows, 1, device=self.by_class.table.device)
        elif self.reader.check_member(member).shape[1:] != self.by_class.known.shape[1:]:
            raise ValueError(f"`groups` must have shape (n, {self.reader.num_groups}), got {tuple(member.shape)}.")
        return self.by_class(member)  # type: ignore[no-any-return]

    def check_output(self, found: Tensor) -> None:
        """Eager calls: is this what scores can be computed from?"""


class PredictionSets(_Conformal):
    r"""Sets of classes that hold the true one with the target probability: for every group, and for every class if asked.

    .. math:: C(x) = \{c : S(x, c) \le q(x)\}, \qquad \text{or } q(x, c) \text{ with class\_conditional=True}

    A :class:`~torchgmc.QuantileHead` finds q on the scores of the true classes. With ``finite_sample=True`` coverage is at
    least the target, on average over calibration sets, for every group, however the groups overlap. With
    ``class_conditional`` the classes (or clusters of them) are groups too, so it holds for every class as well.

    Args:
        model: its output (after the adapter's activation) is probabilities ``(n, C)`` with rows that sum to 1; None to pass
            these themselves.
        head: a :class:`~torchgmc.QuantileHead` without ``bins``: to be fitted by :meth:`fit`, or fitted (on the same score).
        score: ``"lac"``, ``"aps"``, ``"raps"``, ``"saps"`` or ``"topk"``, see :func:`torchgmc.conformity.class_scores`.
        groups, adapter: as for :func:`torchgmc.attach`.
        class_conditional: one threshold per class. A class with too few examples is in every set.
        clusters: with ``class_conditional``, classes that share a threshold: the cluster of each class ``(C,)``, or their
            number: then classes with similar scores are found on a quarter of the calibration examples, which the fit leaves
            out, and classes with fewer than 10 of them share a cluster.
        randomized, penalty, free: of the score.

    Attributes:
        head: fitted by :meth:`fit`. With ``class_conditional`` it has the classes as further groups, "class 3"; saved and
            loaded with ``gmc.save`` and ``gmc.load``, it can be passed here again.

    Example:
        >>> labels = torch.randint(5, (2000,))
        >>> probs = (torch.randn(2000, 5) + 2 * torch.nn.functional.one_hot(labels, 5)).softmax(1)
        >>> groups = torch.arange(2000)[:, None] % 2 == torch.arange(2)
        >>> head = gmc.QuantileHead(target=0.9, alpha=None, groups=["even", "odd"], finite_sample=True)
        >>> sets = gmc.PredictionSets(None, head, score="aps").fit(probs[:1000], labels[:1000], groups[:1000])
        >>> sets(probs[1000:], groups[1000:]).shape
        torch.Size([1000, 5])
        >>> measures = sets.measure(probs[1000:], labels[1000:], groups[1000:])
        >>> measures["coverage"] > 0.87, list(measures)
        (True, ['coverage', 'mean size', 'CovGap', 'SSCV', 'coverage by group'])
    """

    def __init__(
        self,
        model: nn.Module | None,
        head: QuantileHead,
        score: str = "aps",
        groups: str | nn.Module | Callable[..., Tensor] | None = None,
        adapter: Adapter | None = None,
        class_conditional: bool = False,
        clusters: int | Sequence[int] | None = None,
        randomized: bool = False,
        penalty: float = 0.1,
        free: int = 1,
    ) -> None:
        conformity.check_score(score, randomized, penalty, free)
        self_conditional = checks.flag("class_conditional", class_conditional)
        if clusters is not None and not self_conditional:
            raise ValueError("`clusters` are of classes: pass class_conditional=True as well.")
        version = getattr(head, "noise_version", 2)
        fitted = self_conditional and getattr(head, "is_fitted", False)
        plain = _without_classes(head) if fitted else head
        super().__init__(model, plain, groups, adapter, SetsOf(score, randomized, penalty, free, version))
        if (adapter is None or adapter.activation == "auto") and gives_logits(self.model):
            self.adapter.activation = "softmax"
        self.class_conditional = self_conditional
        self.clusters = checks.count("clusters", clusters, 1) if isinstance(clusters, int) else clusters
        self.register_load_state_dict_post_hook(_adopt_loaded)  # type: ignore[no-untyped-call]
        if fitted:
            self._adopt(head)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Of a fitted module: its head has the classes as further groups."""
        place = f"{prefix}head."
        groups = read_about(state_dict.get(place + ABOUT)).get("groups") if self.class_conditional else None
        own = list(self.reader.groups) if self.reader.grouped else []
        if groups and groups[: len(own)] == own and all(map(_numbers, groups[len(own) :])):
            wide = QuantileHead(**(self.reader.config() | {"groups": groups, "patterns": None})).to(self.head.offsets.device)
            state = {name.removeprefix(place): value for name, value in state_dict.items() if name.startswith(place)}
            with contextlib.suppress(RuntimeError):  # the head that is there says what is wrong with the state
                wide.load_state_dict(state)
                self.head = wide
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _score(self, output: Tensor, y: Tensor) -> Tensor:
        probs = conformity.check_probs(output)
        self.num_classes = probs.shape[1]
        return conformity.of_label(self.ending.scores(probs), y)

    def check_output(self, found: Tensor) -> None:
        """Rows that sum to 1."""
        conformity.check_probs(found)

    def _measure(self, answer: Tensor, truth: Tensor) -> dict[str, Any]:
        covered = conformity.of_label(answer, truth).double()
        size = answer.sum(1).double()
        target = self.reader.target
        gap, strata = conformity.covgap(covered, truth, target), conformity.sscv(covered, size, target)
        return {"covered": covered, "mean size": float(size.mean()), "CovGap": gap, "SSCV": strata}

    def _fit(self, scores: Tensor, labels: Tensor, member: Tensor | None, options: dict[str, Any]) -> None:
        if not self.class_conditional:
            return super()._fit(scores, labels, member, options)
        cluster = torch.arange(self.num_classes, device=labels.device)
        if isinstance(self.clusters, int):
            if distributed.active():
                raise ValueError("`clusters` is a number, which one process finds; pass the cluster of each class.")
            first = deal(SPLIT, *(part for part in (scores, labels, member) if part is not None)) == 0
            cluster = similar_classes(scores[first], labels[first], self.num_classes, self.clusters)
            scores, labels, member = scores[~first], labels[~first], None if member is None else member[~first]
        elif self.clusters is not None:
            cluster = checks.numbers("clusters", self.clusters).long().to(labels.device)
            if cluster.shape != (self.num_classes,):
                raise ValueError(f"`clusters` must be of shape ({self.num_classes},), one per class, got {tuple(cluster.shape)}.")
        own = list(self.reader.groups) if self.reader.grouped else []
        seen = torch.zeros_like(cluster).index_fill(0, labels.long(), 1)  # classes without an example have no group
        seen = distributed.total(seen, distributed.active()) > 0
        names = [_name((cluster == k).nonzero()[:, 0].tolist()) for k in sorted(set(cluster[seen].tolist()))]
        config = self.reader.config() | {"groups": [*own, *names]}
        if self.reader.finite_sample:
            every = finite.all_patterns(len(own))
            rows = (pattern_ids(member)[1] if every is None and member is not None else every)[:, : len(own)]  # type: ignore[index]
            listed = [[name for name, inside in zip(own, row, strict=True) if inside] for row in rows.tolist()]
            config["patterns"] = [[*row, name] for row in listed for name in names] if len(rows) * len(names) <= MOST else None
        made = QuantileHead(**config).to(scores.device)
        self.class_names = names
        made.fit(scores, self._wide(labels, member), **options)
        self._adopt(made)

    def _adopt(self, head: QuantileHead) -> None:
        """A fitted head whose last groups are classes, and its thresholds as a table by group pattern and class."""
        self.head, device = head, head.offsets.device
        own = self.reader.num_groups if self.reader.grouped else 0
        self.class_names = head.groups[own:]
        count = len(self.class_names)
        patterns = finite.wanted_patterns(head.groups[:own], head.known[:, :own], None)
        whose = torch.eye(count, dtype=torch.bool, device=device)
        wide = torch.cat([patterns.repeat_interleave(count, 0), whose.repeat(len(patterns), 1)], 1)
        table = head(wide).view(len(patterns), count)
        table = torch.cat([table, torch.full_like(table[:, :1], torch.inf)], 1)  # of classes without a group
        classes = [_numbers(name) for name in self.class_names]
        cluster = torch.full((1 + max(map(max, classes)),), count, device=device)
        for k, part in enumerate(classes):
            cluster[part] = k
        self.by_class = ByClass(patterns if own else torch.ones(1, 1, dtype=torch.bool, device=device), table, cluster)

    def _wide(self, labels: Tensor, member: Tensor | None) -> Tensor | None:
        if not self.class_conditional:
            return member
        inside = torch.stack([torch.isin(labels, torch.tensor(_numbers(name)).to(labels)) for name in self.class_names], 1)
        return inside if member is None else torch.cat([member, inside], 1)


class Intervals(_Conformal):
    r"""Intervals that hold the outcome with the target probability for every group, ``(n, 2)``.

    Args:
        model: its output; None to pass this itself.
        head: a :class:`~torchgmc.QuantileHead` without ``bins`` (``finite_sample=True`` for a guarantee), to be fitted by
            :meth:`fit`, or fitted on the same score.
        score: ``"absolute"``: the output is a prediction, ``(n,)`` or ``(n, 1)``, and the interval prediction :math:`\pm q`.
            ``"cqr"``: two quantiles ``(n, 2)``, :math:`[l - q, u + q]`, empty (low above high) where they cross.
            ``"normalised"``: a prediction and a scale above 0, ``(n, 2)``, prediction :math:`\pm q` scale.
            ``"auto"``: the first for one column, ``"cqr"`` for two.
        groups, adapter: as for :func:`torchgmc.attach`.

    Example:
        >>> x, y = torch.randn(2000, 3), torch.randn(2000)
        >>> net = torch.nn.Linear(3, 1)
        >>> head = gmc.QuantileHead(target=0.9, alpha=None, finite_sample=True)
        >>> intervals = gmc.Intervals(net, head).fit(x[:1000], y[:1000])
        >>> intervals(x[1000:]).shape, intervals.measure(x[1000:], y[1000:])["coverage"] > 0.86
        (torch.Size([1000, 2]), True)
    """

    def __init__(
        self,
        model: nn.Module | None,
        head: QuantileHead,
        score: str = "auto",
        groups: str | nn.Module | Callable[..., Tensor] | None = None,
        adapter: Adapter | None = None,
    ) -> None:
        super().__init__(model, head, groups, adapter, IntervalOf(checks.option("score", score, INTERVALS)))

    def _score(self, output: Tensor, y: Tensor) -> Tensor:
        low, high, unit = self.ending.parts(checks.scores("output", output))
        if bool((unit <= 0).any()):
            raise ValueError(f"the scale of score='normalised' must be above 0, got {float(unit.min()):.4g}; apply softplus.")
        return conformity.cqr(low, high, _outcomes(y, len(low)).to(low.dtype)) / unit  # type: ignore[no-any-return]

    def _measure(self, answer: Tensor, truth: Tensor) -> dict[str, Any]:
        truth = _outcomes(truth, len(answer))
        covered = ((answer[:, 0] <= truth) & (truth <= answer[:, 1])).double()
        width = (answer[:, 1] - answer[:, 0]).double()
        edges = sorted(set(width[width.isfinite()].quantile(torch.linspace(0.2, 0.8, 4).to(width)).tolist()))
        strata = conformity.sscv(covered, width, self.reader.target, edges)
        return {"covered": covered, "mean width": float(width.mean()), "SSCV": strata}


def _outcomes(y: Tensor, rows: int) -> Tensor:
    if y.shape[:1] != (rows,) or y.numel() != rows or bool(y.isnan().any()):
        raise ValueError(f"`y` must hold {rows} outcomes, one per row of the output, and no NaN, got shape {tuple(y.shape)}.")
    return y.reshape(rows)


def _adopt_loaded(module: nn.Module, keys: Any) -> None:
    if isinstance(module, PredictionSets) and module.class_conditional and module.head.is_fitted:
        module._adopt(module.head)


def _name(classes: list[int]) -> str:
    return f"class{'es' if len(classes) > 1 else ''} {', '.join(map(str, classes))}"


def _numbers(name: str) -> list[int]:
    found = CLASSES.fullmatch(name)
    return [int(part) for part in found[1].split(", ")] if found else []


def _without_classes(head: QuantileHead) -> QuantileHead:
    """The head that reads memberships, without the groups that are classes."""
    own = [name for name in head.groups if not CLASSES.fullmatch(name)]
    if len(own) == len(head.groups):
        raise ValueError(
            "class_conditional=True needs a head that is not fitted yet (`fit` then adds the classes to its groups), or one "
            f"that was fitted so; this one has the groups {checks.listing(head.groups, 4)}."
        )
    return QuantileHead(**(head.config() | {"groups": own or None, "patterns": None}))


def similar_classes(scores: Tensor, labels: Tensor, classes: int, clusters: int) -> Tensor:
    """Cluster of each class, ``(C,)``: k-means on quantiles of its scores, weighted by the root of its number.

    Classes with fewer than ``FEWEST`` examples share the last cluster. The order of the examples does not matter.
    """
    count = torch.bincount(labels, minlength=classes)
    order = scores.argsort()
    order = order[labels[order].argsort(stable=True)]
    level = torch.tensor(LEVELS, dtype=torch.float64, device=scores.device)
    place = (count.cumsum(0) - count)[:, None] + (level * count[:, None]).ceil().long().clamp_min(1) - 1
    points = scores[order].double()[place.clamp_max(len(scores) - 1)]  # (C, levels)
    rich = (count >= FEWEST).nonzero()[:, 0]
    cluster = torch.full((classes,), clusters, device=labels.device)
    if not len(rich):
        return cluster
    points, weight = points[rich], count[rich].double().sqrt()[:, None]
    found = points.mean(1).argsort().argsort() * clusters // len(rich)  # begins with an even split
    for _ in range(50):
        inside = nn.functional.one_hot(found, clusters).double() * weight  # (C', M)
        centre = inside.T @ points / inside.sum(0)[:, None].clamp_min(1e-12)
        away = (points[:, None] - centre).square().sum(2).masked_fill(inside.sum(0) == 0, torch.inf)
        if torch.equal(away.argmin(1), found):
            break
        found = away.argmin(1)
    cluster[rich] = found
    return cluster
