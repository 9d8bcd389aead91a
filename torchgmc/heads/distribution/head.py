"""De-biased distributions: a language model that gives every group the same chance of the words on each list."""

import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from torchgmc import theory
from torchgmc.audits.measure import Tally
from torchgmc.audits.tabular import Table
from torchgmc.distributed import pooled, rows_stay, total
from torchgmc.engine import checks, noise, soft
from torchgmc.engine.batches import checked_once
from torchgmc.engine.clusters import check as check_clusters
from torchgmc.engine.float64 import wide
from torchgmc.engine.folds import fresh_splits
from torchgmc.engine.scripting import is_scripting
from torchgmc.engine.solver import EXACT_STEPS, FIXED_STEPS, Log, Report, reached, run
from torchgmc.engine.values import Names, Values
from torchgmc.heads.base import Head
from torchgmc.heads.distribution import training
from torchgmc.heads.distribution.fit import Spread, fit_tilt, spread_of
from torchgmc.heads.distribution.problem import MassStatistics, SimplexProblem, TiltProblem
from torchgmc.heads.distribution.simplex import Tail, cells_of, start, step, tail_from_cells, tail_of
from torchgmc.heads.distribution.task import TASK
from torchgmc.heads.distribution.tilt import CHUNK, Dual, Projection, atoms, log_masses, project
from torchgmc.heads.levelsets.problem import check_masses

GEOMETRIES = ("kl", "euclidean")
#: A list with a smaller mean probability is hardly ever written.
NO_MASS = 1e-6


class Batch(NamedTuple):
    """Checked arguments of ``observe``: logits ``(n, vocabulary)``, membership ``(n, a)``, weights, clusters."""

    logits: Tensor
    member: Tensor
    weight: Tensor
    cluster: Tensor


class DistributionHead(Head):
    r"""Makes the probability of each word list independent of the group, up to alpha.

    .. math:: \left| P(A) \big(P(o \in U \mid A) - P(o \in U)\big) \right| \le \alpha \quad \text{for every group } A
              \text{ and list } U, \qquad o(x) \sim p(x)

    - ``geometry="kl"`` (default): the p nearest to the model's h in E KL(p || h), which shifts the logits of lists by group,
      :math:`\log p = \log h - (W(x) - EW)\,\Theta V + \text{const}`. No token reaches 0 and ratios inside a list are kept;
      see :mod:`torchgmc.heads.distribution.tilt`. A prompt in no group is shifted too (by :math:`EW\,\Theta V`): the
      promise is about all prompts together.
    - ``geometry="euclidean"``: the paper's projection onto the simplex after every step, replayed on new inputs from the log of
      steps. It adds the same amount to every word of a list and takes it from the tail, where tokens reach 0.

    Args:
        attributes: name of each list and its token ids (see :func:`torchgmc.text.attributes_from_words`); lists may overlap.
        alpha: largest violation allowed.
        groups: names of the groups; they may overlap and need not cover all prompts.
        geometry: ``"kl"`` or ``"euclidean"``.
        conditional: alpha bounds P(o in U \| A) - P(o in U) itself.
        temperature: divides the logits first.
        cells: for ``euclidean``, how many numbers per prompt represent the tokens outside all lists: tokens of nearly equal
            probability (6 % with 512 cells) share one. A vocabulary with no more such tokens is kept exactly; None keeps every
            token of any vocabulary, which takes n x vocabulary numbers. It only matters for the fit: the head applies
            the steps exactly.

    Shapes: ``fit(logits (n, vocabulary), groups (n, a))``; ``head(logits (n, ..., vocabulary), groups (n, a))`` ->
    log-probabilities like logits.

    Example:
        >>> female = torch.arange(400) % 2 == 0
        >>> logits = torch.randn(400, 50)
        >>> logits[female, 7] += 2.0
        >>> groups = torch.stack([female, ~female], dim=1)
        >>> head = gmc.DistributionHead({"jobs": [7, 8]}, alpha=0.005, groups=["female", "male"]).fit(logits, groups)
        >>> p = head(logits, groups).exp()[:, [7, 8]].sum(1)
        >>> head.report.reached, bool((0.5 * (p[female].mean() - p.mean())).abs() <= 0.005)
        ('alpha', True)
        >>> round(head.report.details["kl"] - head.report.details["kl_bound"], 6)
        0.0
    """

    ids: Tensor
    atom: Tensor
    atom_lists: Tensor
    directions: Tensor
    offsets: Tensor
    mean_membership: Tensor
    log_who: Tensor
    log_what: Tensor
    log_step: Tensor
    zeroed: ClassVar[tuple[str, ...]] = ("offsets", "mean_membership")
    growing: ClassVar[tuple[str, ...]] = ("log_who", "log_what", "log_step")
    settings: ClassVar[tuple[str, ...]] = (
        *("attributes", "alpha", "groups", "geometry", "conditional", "temperature", "cells", "noise_floor"),
    )
    fit_only: ClassVar[tuple[str, ...]] = ("alpha", "conditional", "cells", "noise_floor")
    keeps: ClassVar[tuple[type, ...]] = (MassStatistics,)
    arguments: ClassVar[tuple[str, ...]] = ("logits", "groups", "weight", "clusters")
    audit_only: ClassVar[tuple[str, ...]] = ("labels",)
    takes = "logits"
    relative: ClassVar[bool] = True
    largest_number: ClassVar[float] = 1e15
    task = TASK

    def __init__(
        self,
        attributes: Mapping[str, Sequence[int]],
        alpha: float | None,
        groups: Any,
        geometry: str = "kl",
        conditional: bool = False,
        temperature: float = 1.0,
        cells: int | None = 512,
        noise_floor: bool = True,
    ) -> None:
        if groups is None:
            raise ValueError("`groups` is missing: a single group of all prompts has no bias to remove; name the groups.")
        super().__init__(alpha, groups, conditional, noise_floor=noise_floor)
        self.attributes = _check_attributes(attributes)
        self.geometry = checks.option("geometry", geometry, GEOMETRIES)
        self.euclidean = geometry == "euclidean"
        self.temperature = checks.positive("temperature", temperature, "It divides the logits.")
        self.cells = None if cells is None else checks.count("cells", cells, 1)
        found = atoms(list(self.attributes.values()))
        self.largest = int(found.ids[-1])
        self.register_buffer("ids", found.ids, persistent=False)
        self.register_buffer("atom", found.atom, persistent=False)
        self.register_buffer("atom_lists", found.lists, persistent=False)
        self.register_buffer("directions", found.lists[found.atom].T.double(), persistent=False)  # (u, J)
        self.hold(offsets=(self.num_groups, len(self.attributes)), mean_membership=(self.num_groups,), log_step=(0,))
        self.hold(torch.int64, log_who=(0,), log_what=(0,))
        self.reset()

    # -- statistics --------------------------------------------------------------------------------------------------

    def observe(self, logits: Tensor, groups: Any = None, weight: Any = None, clusters: Any = None) -> None:
        """Add a batch of prompts; of the logits only the mass of each atom is kept (``euclidean``: see ``cells``).

        Args:
            logits: of the next (or masked) token, ``(n, vocabulary)``; -inf for a token that cannot occur.
            groups: membership ``(n, a)``, bool, or a :class:`~torchgmc.Groups`.
            weight: weight of each prompt, ``(n,)``.
            clusters: which prompts belong together, e.g. the author of each: integers or strings, ``(n,)``.
        """
        logits, member, weights, cluster = self.check_batch(logits, groups, weight, clusters)
        if len(logits) == 0:
            return
        log_mass = log_masses(logits, self.ids, self.atom, len(self.atom_lists), self.temperature)
        _check_rows(logits, log_mass)
        none = log_mass[:, :0]
        words, counts, masses = self._tail(logits) if self.euclidean else (none, none, none)
        if any(part.counts.shape[1] != counts.shape[1] for part in self._parts[:1]):
            raise ValueError(f"`logits` have {logits.shape[1]} tokens, but earlier batches had another vocabulary.")
        self.keep(MassStatistics(log_mass, member.clone(), weights.clone(), cluster.clone(), words, counts, masses), logits)

    def _tail(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens in lists, and all others in cells: (n, J), (n, K), (n, K)."""
        rest = logits.shape[1] - len(self.ids)
        parts = []
        for part in torch.split(logits, max(1, 8 * CHUNK // logits.shape[1])):
            p = self.start(part)
            words = p[:, self.ids].double()
            if self.cells is None or rest <= self.cells:
                values = tail_of(p.index_fill(1, self.ids, -1.0)).values[:, :rest]
                parts.append((words, torch.ones_like(values, dtype=torch.float32), values))
            else:
                parts.append((words, *cells_of(p.index_fill(1, self.ids, -1.0), self.cells)))
        words, counts, masses = (torch.cat(column) for column in zip(*parts, strict=True))
        return words, counts, masses

    def sizes(self) -> dict[str, int]:
        """Of the atoms and the tokens in lists too."""
        return super().sizes() | {"atoms": len(self.atom_lists), "words": len(self.ids) if self.euclidean else 0}

    def _start(self, log_probs: Tensor) -> Tensor:
        """f0 as log-probabilities."""
        return log_probs if self.temperature == 1.0 else torch.log_softmax(log_probs / self.temperature, -1)

    def start(self, logits: Tensor) -> Tensor:
        """f0: probabilities before the fit."""
        x = logits if logits.dtype == torch.float64 else logits.float()
        return torch.softmax(x / self.temperature, -1)

    @checked_once
    def check_batch(self, logits: Any, groups: Any = None, weight: Any = None, clusters: Any = None) -> Batch:
        """The checked batch, or an error that says what is wrong with it."""
        logits = checks.ordinary("logits", logits)
        if not logits.is_floating_point():
            raise TypeError(f"`logits` must be floating point, got {logits.dtype}; convert it with `.float()`.")
        if logits.dim() != 2:
            raise ValueError(
                f"`logits` must have shape (n, vocabulary), one row per prompt, got {tuple(logits.shape)}; from a sequence "
                "take the mask position, or the last one: logits[:, -1]."
            )
        if logits.shape[1] <= self.largest:
            raise ValueError(
                f"`logits` have {logits.shape[1]} tokens, but `attributes` name token {self.largest}; make the lists with the "
                "tokenizer of this model (torchgmc.text.attributes_from_words)."
            )
        logits = logits.detach()
        if _sum_to_one(logits):
            raise ValueError("`logits` look like probabilities (non-negative, rows sum to 1); pass `probs.log()` instead.")
        member = self.check_groups(groups, len(logits), logits.device)
        cluster = check_clusters(clusters, len(logits), logits.device)
        return Batch(logits, member, checks.weights(weight, len(logits), logits).detach(), cluster)

    # -- fit ---------------------------------------------------------------------------------------------------------

    @pooled
    @rows_stay(lambda head, rows, solver="exact", *_, **__: solver == "exact" and not (head.euclidean or rows.cluster.shape[1]))
    def calibrate(self, solver: str = "exact", eta: float | None = None, max_iter: int | None = None) -> "DistributionHead":
        """Find the offsets (``kl``) or the steps (``euclidean``).

        Args:
            solver: ``"exact"``: for ``kl`` Newton steps on all offsets at once, for ``euclidean`` the step that removes the
                worst violation. ``"paper"`` (Algorithm 1) and ``"fresh"`` (Algorithm 2) take fixed steps: on p followed
                by the projection for ``euclidean``, on one offset for ``kl`` (the same steps in the geometry of KL).
            eta: fixed step; alpha / (K B) by default, with K = 1 and B = max P(A) \\|U\\| for ``euclidean`` and
                K B = max P(A)(1 - P(A)) / 4 for ``kl``.
            max_iter: maximum number of steps: 100 Newton steps, 1000 exact ones, 10,000 fixed ones.
        """
        self.check_solver(solver, eta, max_iter)
        began = time.perf_counter()
        statistics: MassStatistics | None = self.statistics
        if statistics is None:
            raise ValueError("no prompts observed: call `observe` (or `fit`) with at least one prompt first.")
        device = statistics.weight.device
        member, weight = statistics.member, statistics.weight
        dual = Dual(statistics.log_mass, self.atom_lists.to(device), member, weight, self.conditional)
        check_masses(dual.mean, self.groups, "prompts")
        self._look_at_mass(statistics)
        spread = spread_of(dual, statistics)
        if not self.euclidean and solver == "exact":
            if self.noise_floor:
                lists = self.atom_lists.to(device)
                found, k = fit_tilt(dual, statistics, lists, spread, max_iter or 100)
            else:
                found, k = project(dual, self.goal(), max_iter or 100), 0.0
            return self._finish(dual, spread, found.theta, None, self._newton_report(dual, found, k, spread, began))
        common = (member, weight, self.conditional, self.test_functions())
        problem: TiltProblem | SimplexProblem
        if self.euclidean:
            tail = tail_from_cells(statistics.counts, statistics.masses)
            problem = SimplexProblem(statistics.words, tail, self.directions.to(device), *common)
        else:
            problem = TiltProblem(dual, *common)
        if solver != "exact":
            smoothness, bound = (1.0, problem.bound()) if isinstance(problem, SimplexProblem) else (problem.smoothness(), 1.0)
            eta = eta or theory.step_size(self.goal(), smoothness, bound, finite_sample=solver == "fresh")
        steps = max_iter or (EXACT_STEPS if solver == "exact" else FIXED_STEPS)
        splits = fresh_splits(max_iter, *statistics.content()) if solver == "fresh" else None
        floor = noise.slacks(noise.among(spread.error.numel()), spread.error, spread.sizes)
        tolerance = floor if solver == "exact" and self.noise_floor else None
        report, log = run(problem, self.alpha or 0.0, solver, eta, steps, tolerance, splits=splits)
        if tolerance is not None:
            report = replace(report, reached=reached(report.violations_after, self.alpha, tolerance))
        theta = problem.theta if isinstance(problem, TiltProblem) else None
        return self._finish(dual, spread, theta, log, report)

    def _look_at_mass(self, statistics: MassStatistics) -> None:
        """Warn of lists that the model hardly ever predicts: about these any promise holds."""
        share = total((statistics.weight / total(statistics.weight.sum())) @ statistics.log_mass.exp())
        mass = (share @ self.atom_lists.to(share)).tolist()
        rare = [f"{name!r} ({value:.1g})" for name, value in zip(self.attributes, mass, strict=True) if value < NO_MASS]
        if rare:
            warnings.warn(
                f"the model gives next to no probability to {checks.listing(rare, 4)}, so a promise about it says nothing: "
                "are these the tokens the model would write here (with a space before, in the right case)?",
                stacklevel=4,
            )

    def _newton_report(self, dual: Dual, found: Projection, k: float, spread: Spread, began: float) -> Report:
        before = -dual.at(torch.zeros_like(found.theta)).gradient
        bound = noise.bound(k, spread.error, spread.sizes)
        state = reached(found.violation, self.alpha, bound)
        allowed = bound.clamp_min(self.alpha or 0.0) if self.noise_floor else torch.full_like(bound, self.goal())
        size = found.violation.abs()
        missed = bool((size > allowed * (1 + 1e-9)).any())
        place = divmod(int((size / allowed if missed else size).argmax()), size.shape[1])
        worst = f"{float(size[place]):.4g}" + (f" > {float(allowed[place]):.4g}" if missed else "")
        message = f"the worst |violation| is {worst} in {self.test_functions().label(*place)}."
        small = noise.small_groups(self.groups, spread.sizes[:, 0], 0.5)
        message += f" {noise.explain(k, self.noise_floor, small)}"
        if missed:
            why = "The list may have no probability in one of the groups." if found.stalled else "Raise `max_iter`."
            message += f" {why} Or try a larger `alpha` or more prompts."
        details = {"kl": found.kl, "kl_bound": found.bound, "duality_gap": found.kl - found.bound, "slack": k, "noise": bound}
        details["small"] = small
        seconds = time.perf_counter() - began
        steps = len(found.history) - 1
        history = found.history.cpu()
        return Report(state == "alpha", steps, before, found.violation, history, seconds, message, details, state)

    def _finish(self, dual: Dual, spread: Spread, theta: Tensor | None, log: Log | None, report: Report) -> "DistributionHead":
        assert self.statistics is not None
        rows = int(total(torch.tensor(self.statistics.rows)))
        details = {"examples": rows, "atoms": len(self.atom_lists), **report.details}
        details["variance"] = rows * (spread.error * dual.scale[:, None]).square()
        self.mean_membership.copy_(dual.mean)
        if theta is not None:
            self.offsets.copy_(theta / dual.scale[:, None])  # forward multiplies only by W - EW
        elif log is not None:
            for name, value in zip(self.growing, (log.who, log.what, log.step / dual.scale[log.who]), strict=True):
                self.register_buffer(name, value.detach().to(self.fitted.device).clone())
        self.mark_fitted(replace(report, details=details))
        return self

    # -- use ---------------------------------------------------------------------------------------------------------

    def shift(self, groups: Tensor) -> Tensor:
        """What ``kl`` takes off the logits of each list, (W - EW) Theta: ``(n, u)``, float64. 0 for ``euclidean``."""
        return (self.membership(groups, -1, self.offsets) - self.mean_membership) @ self.offsets

    def forward(self, logits: Tensor, groups: Tensor, mode: str = "hard", temperature: float = 0.1) -> Tensor:
        """Calibrated log-probabilities, of the shape and type of ``logits``; -inf for a token with probability 0.

        The map makes no decisions, so every ``mode`` returns the same result with its exact derivative (``euclidean``:
        wherever it exists, through each projection; a token with probability 0 has the derivative 0). ``mode`` and
        ``temperature`` are checked and otherwise unused: they exist so that all heads are called the same way. The temperature
        that divides the logits is an option of the head.
        """
        soft.check(mode, temperature)
        if not is_scripting():
            self.check_input("logits", logits, groups)
        shift = self.shift(groups)
        n = groups.shape[0]
        if logits.dim() < 2 or logits.shape[0] != n or logits.shape[-1] <= self.largest:
            raise ValueError(f"`logits` must be ({n}, ..., vocabulary), and lists name token {self.largest}, got {logits.shape}")
        x = logits if self.temperature == 1.0 else logits / self.temperature
        if self.euclidean:
            return self._replay(x, groups).to(logits.dtype)
        change = (shift @ self.directions).to(x.dtype)  # (n, J)
        for _ in range(logits.dim() - 2):
            change = change.unsqueeze(1)
        change = change.expand(logits.shape[:-1] + change.shape[-1:])
        return torch.log_softmax(x.index_add(-1, self.ids, change, alpha=-1), -1)

    def adjust(self, scores: Tensor, groups: Tensor) -> Tensor:
        """Scores ``(n, vocabulary)`` whose softmax is the calibrated distribution, with the log-sum-exp they came with.

        Where the head changes nothing, the scores come back unchanged. For decoding, where later processors expect logits
        (greedy, sampling) or sums of log-probabilities (beams).
        """
        if not is_scripting():
            groups = self.check_member(groups)
            self.check_input("scores", scores, groups)
        return self.adjusted(scores, groups)

    def adjusted(self, scores: Tensor, groups: Tensor) -> Tensor:
        """:meth:`adjust` of scores that are known to be numbers: none is looked at, for which a GPU would wait."""
        if scores.dim() != 2 or scores.shape[1] <= self.largest or len(scores) != len(groups):
            raise ValueError(f"`scores` must have shape ({len(groups)}, vocabulary) with token {self.largest}, got {scores.shape}")
        plain = self.temperature == 1.0
        x = scores if plain else scores / self.temperature
        if self.euclidean:
            same = plain and self.log_step.shape[0] == 0
            return scores if same else (self._replay(x, groups) + scores.logsumexp(1, keepdim=True)).to(scores.dtype)
        change = (self.shift(groups) @ self.directions).to(x.dtype)  # (n, J)
        # Only the listed tokens move: one sum over the others serves before and after. All by logarithms: a change of more than
        # 700, after a model that is very sure, has no exponential.
        listed = x.index_select(1, self.ids)
        others = torch.logsumexp(x.index_fill(1, self.ids, -float("inf")), 1)
        before = torch.logaddexp(others, torch.logsumexp(listed, 1)) if plain else scores.logsumexp(1)
        after = torch.logaddexp(others, torch.logsumexp(listed - change, 1))
        return (x - (after - before)[:, None]).index_add(1, self.ids, change, alpha=-1)

    def adjust_(self, logits: Tensor, groups: Tensor) -> Tensor:
        """Logits ``(n, ..., vocabulary)`` of every position, changed in place: their softmax is the calibrated distribution.

        Nothing is normalised, which softmax, sampling and cross-entropy do not need, and no number but those of listed tokens
        is touched (for ``kl`` at temperature 1): a small part of the work of ``forward``. NaN stays NaN. For beams, which add
        up log-probabilities, use :meth:`adjust`.

        Args:
            logits: floating, of any number of positions for each of the n texts.
            groups: membership ``(n, a)``.

        Example:
            >>> member, logits = torch.arange(200)[:, None] % 2 == torch.arange(2), torch.randn(200, 20)
            >>> head = gmc.DistributionHead({"jobs": [7, 8]}, alpha=0.001, groups=["female", "male"]).fit(logits, member)
            >>> want = head(logits, member)
            >>> torch.allclose(head.adjust_(logits, member).log_softmax(-1), want, atol=1e-5)
            True
        """
        checks.kind("logits", logits, Tensor, "a tensor, which is changed in place")
        self._check_place("logits", logits)
        member = self.check_member(groups)
        if not logits.is_floating_point() or logits.dim() < 2 or logits.shape[-1] <= self.largest:
            raise ValueError(
                f"`logits` must be floating point (n, ..., vocabulary) with token {self.largest}, got {logits.dtype} {logits.shape}"
            )
        if len(logits) != len(member):
            raise ValueError(f"`groups` must have {len(logits)} rows, one per text, got shape {tuple(member.shape)}.")
        if self.euclidean:
            return logits.copy_(self.forward(logits, member))
        change = (self.shift(member) @ self.directions).to(logits.dtype)  # (n, J); raises before anything is changed
        change = change.view(len(member), *[1] * (logits.dim() - 2), -1).expand(*logits.shape[:-1], -1)
        if self.temperature != 1.0:
            logits.div_(self.temperature)
        return logits.index_add_(-1, self.ids, change, alpha=-1)

    def _replay(self, logits: Tensor, groups: Tensor) -> Tensor:
        """Every step of the log with its projection, on h of these inputs."""
        shape = logits.shape
        x = (logits if logits.dtype == torch.float64 else logits.float()).reshape(-1, shape[-1])
        member = wide(groups).repeat_interleave(x.shape[0] // max(groups.shape[0], 1), dim=0)
        probs = torch.softmax(x, -1)
        tail = tail_of(probs.index_fill(1, self.ids, -1.0))
        p = wide(probs)
        rest = shape[-1] - self.ids.shape[0]  # the tokens in lists, at -1, are the last of the order
        tail = Tail(tail.values[:, :rest], tail.counts[:, : rest + 1], tail.sums[:, : rest + 1])
        point = start(p.index_select(1, self.ids), tail)
        for t in range(self.log_step.shape[0]):
            amount = member.index_select(1, self.log_who[t : t + 1])[:, 0] * self.log_step[t]
            point = step(point, tail, self.directions.index_select(0, self.log_what[t : t + 1])[0], amount)
        rest_p = torch.maximum(p - point.shift[:, None], point.floor[:, None])
        words = point.words
        out = rest_p.scatter(1, self.ids.expand(words.shape), words)
        gone = out == 0.0  # set to -inf apart, as the derivative of log 0 would turn a loss that leaves it out into NaN
        return torch.where(gone, torch.ones_like(out), out).log().masked_fill(gone, -float("inf")).reshape(shape)

    def solve_differentiably(
        self, logits: Tensor, groups: Any = None, weight: Any = None, alpha: float | Tensor | None = None
    ) -> dict[str, Tensor]:
        """Fitted offsets as a differentiable function of the logits; the head does not change.

        The same optimum as ``fit`` (``geometry="kl"``), with the derivative of :mod:`torchgmc.engine.implicit`: one linear
        system with as many unknowns as there are offsets other than 0. Each process uses only its own data.

        Args:
            logits, groups, weight: as in ``observe``.
            alpha: replaces the head's. A tensor may have a derivative.

        Returns:
            The state for :meth:`apply_state`: ``"offsets"`` ``(a, u)`` with their derivative, and ``"mean_membership"``.

        Example:
            >>> logits = torch.randn(200, 20, requires_grad=True)
            >>> groups = torch.arange(200)[:, None] % 2 == torch.arange(2)
            >>> head = gmc.DistributionHead({"jobs": [7, 8]}, alpha=0.001, groups=["female", "male"])
            >>> state = head.solve_differentiably(logits, groups)
            >>> log_p = head.apply_state(state, logits, groups)
            >>> torch.nn.functional.nll_loss(log_p, torch.randint(20, (200,))).backward()
            >>> logits.grad.shape
            torch.Size([200, 20])
        """
        return training.solve(self, logits, groups, weight, alpha)

    # -- the promise -------------------------------------------------------------------------------------------------

    def test_functions(self) -> Names:
        """Groups and lists."""
        return Names(self.groups, list(self.attributes))

    def s_range(self) -> tuple[float, float]:
        """A probability; everybody's mean is taken off."""
        return 0.0, 1.0

    def values(self, logits: Tensor, groups: Any = None, softness: float | None = None) -> Values:
        """Probability of each list, minus its mean over the batch. Nothing needs softening: it is already differentiable."""
        checks.softness(softness)
        batch = self.check_batch(logits, groups)
        _check_rows(batch.logits, torch.logsumexp(batch.logits, 1, keepdim=True))
        if softness is None:
            masses = self.measure(batch.logits, batch.member)[0]
        else:
            x = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
            probs = self(x, batch.member).exp() if self.is_fitted else self.start(x)
            masses = probs.index_select(1, self.ids.to(x.device)).double() @ self.directions.T.to(x.device)
        mean = masses.mean(0) if len(masses) else masses.new_zeros(masses.shape[1])
        return Values(masses - mean, batch.member, mean=mean)

    def audit_sums(self, weight: Tensor, **batch: Any) -> dict[str, Tensor]:
        """Weighted sums of KL from the model's own distribution, and of the negative log-likelihood of ``labels``."""
        labels = batch.pop("labels", None)
        found = self.check_batch(**batch)
        _, kl, nll = self.measure(found.logits, found.member, labels)
        sums = {"weight": weight.sum(), "mean KL": weight @ kl}
        return sums if nll is None else sums | {"NLL before": weight @ nll[:, 0], "NLL after": weight @ nll[:, 1]}

    def audit_summary(self, tally: Tally) -> dict[str, Any]:
        """Mean KL from the model's own distribution, and NLL before and after."""
        total = tally.sums["weight"]
        return {"cost": {key: float(value / total) for key, value in tally.sums.items() if key != "weight"}}

    def tables(self, audit: Any) -> list[Table]:
        """What is taken off the logits of each list, by group."""
        if self.euclidean:
            return []
        rows = [[name, *(f"{v:+.4f}" for v in row)] for name, row in zip(self.groups, self.offsets.tolist(), strict=True)]
        text = "Subtracted from the logits of each list, by group (natural logarithms; 0: left unchanged):"
        return [Table(["group", *self.attributes], rows, list(self.attributes), caption=text)]

    def measure(self, logits: Tensor, member: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Probability of each list (n, u), KL (n,) and NLL before and after (n, 2) of the head's own output, in blocks."""
        if labels is not None and (labels.shape != logits.shape[:1] or labels.dtype != torch.int64):
            raise ValueError(f"`labels` must be int64 token ids of shape ({len(logits)},), got {tuple(labels.shape)}.")
        lists, divergence, losses = [], [], []
        rows = max(1, 32 * CHUNK // logits.shape[1])
        for first in range(0, max(len(logits), 1), rows):
            part = logits[first : first + rows]
            before = torch.log_softmax(part.float() if part.dtype != torch.float64 else part, -1)
            after = self(before, member[first : first + rows]) if self.is_fitted else self._start(before)
            p = after.exp()
            lists.append(p[:, self.ids].double() @ self.directions.T)
            divergence.append(torch.where(p > 0, p * (after - before), torch.zeros_like(p)).sum(1).double())
            if labels is not None:
                at = labels[first : first + rows, None]
                losses.append(-torch.cat([before.gather(1, at), after.gather(1, at)], 1).double())
        return torch.cat(lists), torch.cat(divergence), torch.cat(losses) if losses else None

    def index_limits(self) -> dict[str, int]:
        """Sets and directions of the log."""
        return {"log_who": self.num_groups, "log_what": len(self.directions)}

    def extra_repr(self) -> str:
        """Options and state."""
        lists = checks.listing(self.attributes, 4)
        return f"lists=[{lists}] ({len(self.attributes)}), geometry={self.geometry}, {super().extra_repr()}"


def _sum_to_one(logits: Tensor) -> bool:
    """Is every row a distribution? For logits this means that a softmax was taken by mistake; the first row usually tells."""
    for rows in (logits[:1], logits):
        if not rows.numel() or not (rows.min() >= 0.0 and (rows.float().sum(1) - 1.0).abs().max() <= 0.01):  # NaN: not so
            return False
    return True


def _check_attributes(attributes: Any) -> dict[str, list[int]]:
    if not isinstance(attributes, Mapping) or not attributes:
        raise TypeError(
            f"`attributes` must map the name of each list to its token ids, got {type(attributes).__name__}; "
            "torchgmc.text.attributes_from_words makes it from words."
        )
    found: dict[str, list[int]] = {}
    for name, tokens in attributes.items():
        if isinstance(tokens, str) or not isinstance(tokens, Iterable):
            raise TypeError(f"`attributes`[{name!r}] must be a list of token ids, got {tokens!r:.80}.")
        values = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
        if not isinstance(name, str) or not values:
            raise ValueError(f"`attributes` must have a name and at least one token id for every list, got {name!r}: {values!r}.")
        wrong = [v for v in values if isinstance(v, bool) or not isinstance(v, int) or v < 0]
        if wrong:
            raise TypeError(f"`attributes`[{name!r}] must hold token ids, got {wrong[0]!r}; see gmc.text.attributes_from_words.")
        if checks.printable(name) in found:
            raise ValueError(f"`attributes` has two lists of the name {checks.printable(name)!r}; each needs its own.")
        found[checks.printable(name)] = sorted(set(values))
    return found


def _check_rows(logits: Tensor, log_mass: Tensor) -> None:
    bad = log_mass.isnan().any(1)
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        value = logits[row][~logits[row].isfinite()]
        raise ValueError(
            f"`logits` must define a distribution in every row, but logits[{row}] has {float(value[0])}; "
            "check the model for overflow (only -inf is allowed, for tokens that cannot occur)."
        )
