"""Coverage on a label tree that holds for every set of answers: "when we answer Medical, we are right 95 % of the time"."""

import copy
import math
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Optional

import torch
from torch import Tensor

from torchgmc import theory
from torchgmc.audits.measure import Tally
from torchgmc.audits.overlap import columns
from torchgmc.distributed import pooled, rows_stay, total
from torchgmc.engine import checks, soft
from torchgmc.engine.batches import checked_once
from torchgmc.engine.clusters import check as check_clusters
from torchgmc.engine.float64 import wide
from torchgmc.engine.folds import EXACT, fresh_splits
from torchgmc.engine.scripting import is_scripting
from torchgmc.engine.solver import EXACT_STEPS, FIXED_STEPS, Report, reached, run
from torchgmc.engine.values import Names, Values
from torchgmc.heads.base import Head
from torchgmc.heads.tree import soft as soft_answers
from torchgmc.heads.tree.solver import TreeProblem, TreeStatistics, descend
from torchgmc.heads.tree.task import TASK
from torchgmc.heads.tree.tree import Tree, answers, path_levels, path_levels_in_blocks, replay, rounds

#: Scores observed at a time (64 MB in float64).
CHUNK = 1 << 23


class Batch(NamedTuple):
    """Checked arguments of ``observe``: scores of the leaves ``(n, K)``, labels, membership ``(n, a)``, weights."""

    probs: Tensor
    labels: Tensor
    member: Tensor
    weight: Tensor
    cluster: Tensor


class TreeHead(Head):
    r"""Answers on a label tree whose coverage is at the target for every set of answers.

    .. math:: \left| E[1\{o(x) \in U\} (1\{o(x) \text{ covers } y\} - \sigma)] \right| \le \alpha \quad \text{for every } U

    With u the best-scored leaf and r_v the summed score of the leaves below v, the answer o(x) is the highest node on the path
    from the root to u with r_v < lambda(x), and u itself if there is none; it covers y if y lies below it. Coverage grows with
    lambda. (The paper prints s with the opposite sign; run that way it diverges.) Lambda starts at ``init`` and every step of
    the fit takes a shift off it for the inputs whose answer so far lies in a set; a new input replays these steps.

    Args:
        parents: the tree: parent of every node (root -1, leaves first), nested dicts of class names, or a list of paths; see
            :class:`~torchgmc.heads.tree.tree.Tree`.
        target: the target coverage sigma.
        alpha: largest violation allowed.
        sets: sets U of nodes. None: every child of the root with all below it, and all nodes. ``"nodes"``: every node by
            itself, leaves and root too (with ``conditional`` mind that the root always covers, so that its own deviation is
            1 - target wherever it is used). Or a mapping from a name to nodes.
        groups: names of static groups A; the promises are then for every A and U (add a group of everyone if you want one).
        names: names of the nodes when ``parents`` is an array.
        conditional: the violation of U is divided by P(o in U): alpha bounds the set's own deviation. P is taken at the current
            lambda; a set that nobody answers with has violation 0, and the tolerance of a set is at least one standard
            error of its coverage, :math:`\sqrt{\sigma(1-\sigma)/n_U}`, so that the fit does not chase a handful of examples
            (n_U counts its answers, or a quarter of the inputs that could answer with it, if that is more).
        init: the starting lambda.
        jitter: half-width of the noise on the summed scores, drawn from the input itself. With probabilities every root has the
            score 1, an atom: without noise a lambda sends everyone to the root or nobody.

    Shapes: ``fit(probs (n, K), labels (n,), groups (n, a))``; ``head(probs, groups)`` -> node ids ``(n,)``;
    ``head.leaves(nodes)`` -> bool ``(n, K)``; ``head.names(nodes)`` -> names; ``head.threshold(probs, groups)`` -> lambda,
    ``(n,)``.

    Example:
        The paper's toy tree. The document is about cancer, the best leaf is wrong, and a threshold of 1.2 answers "Medical".

        >>> tree = {"Civil": ["Green Building", "Water Pollution"], "Medical": ["Cancer", "Alzheimer's Disease"]}
        >>> head = gmc.TreeHead(tree, target=0.9, alpha=0.025, jitter=0.0, init=1.2)
        >>> node = head.answer(torch.tensor([[0.1, 0.1, 0.5, 0.6]]), torch.tensor([1.2]))
        >>> head.names(node), head.leaves(node)
        (['Medical'], tensor([[False, False,  True,  True]]))
        >>> list(head.sets)
        ['Civil', 'Medical', 'all']

        Fitted on 2,000 documents of a model that is right two times in three:

        >>> labels = torch.randint(4, (2000,))
        >>> logits = torch.randn(2000, 4) + 1.5 * torch.nn.functional.one_hot(labels, 4)
        >>> head = gmc.TreeHead(tree, target=0.9, alpha=0.025).fit(logits.softmax(1), labels)
        >>> head.report.converged, bool(head.report.violations_after.abs().max() <= 0.025)
        (True, True)
        >>> head(logits.softmax(1)).shape
        torch.Size([2000])
    """

    base: Tensor
    shifts: Tensor
    paths: Tensor
    depths: Tensor
    order: Tensor
    spans: Tensor
    place: Tensor
    __jit_unused_properties__: ClassVar[list[str]] = ["promises", *Head.__jit_unused_properties__]
    growing: ClassVar[tuple[str, ...]] = ("shifts",)
    unbounded: ClassVar[tuple[str, ...]] = ("base",)  # of baselines
    settings: ClassVar[tuple[str, ...]] = ("target", "alpha", "conditional", "init", "jitter", "noise_floor")
    fit_only: ClassVar[tuple[str, ...]] = ("alpha", "target", "conditional", "init", "sets", "noise_floor")
    two_valued: ClassVar[bool] = True
    keeps: ClassVar[tuple[type, ...]] = (TreeStatistics,)
    arguments: ClassVar[tuple[str, ...]] = ("probs", "labels", "groups", "weight", "clusters")
    truth: ClassVar[str] = "labels"
    task = TASK
    takes = "probs"
    static = False  # who is in a set depends on the answer

    def __init__(
        self,
        parents: Any,
        target: float,
        alpha: float | None,
        sets: Any = None,
        groups: Any = None,
        names: Any = None,
        conditional: bool = False,
        init: float = 0.5,
        jitter: float = 0.005,
        noise_floor: bool = True,
    ) -> None:
        super().__init__(alpha, groups, conditional, jitter, noise_floor)
        self.target = checks.fraction("target", target)
        if isinstance(init, bool) or not isinstance(init, int | float) or not math.isfinite(init):
            raise ValueError(f"`init` must be a finite threshold, got {init!r}.")
        self.init = float(init)
        self.tree = Tree(parents, names)
        self.sets = self.tree.node_sets(sets)
        self.num_leaves, self.num_nodes = self.tree.num_leaves, self.tree.num_nodes
        for name in ("paths", "depths", "order", "spans", "place"):  # rebuilt from `parents`, so no file needs them
            self.register_buffer(name, getattr(self.tree, name).clone(), persistent=False)
        self.register_buffer("base", torch.tensor(self.init, dtype=torch.float64))
        self.register_buffer("shifts", torch.zeros(0, self.num_nodes, self.num_groups, dtype=torch.float64))
        self.reset()

    @property
    def promises(self) -> list[str]:
        """Name of every g: the set, or "group & set"."""
        return list(self.sets) if not self.grouped else [f"{group} & {name}" for group in self.groups for name in self.sets]

    # -- statistics --------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget statistics, update log and report."""
        self.base.fill_(self.init)
        self.mark_unfitted()

    def observe(self, probs: Tensor, labels: Any, groups: Any = None, weight: Any = None, clusters: Any = None) -> None:
        """Add a batch to the statistics: per example the levels along one path, whatever the number of leaves.

        Args:
            probs: scores of the leaves, ``(n, K)``, in [0, 1], any floating type.
            labels: true leaves, integers ``(n,)``.
            groups: membership ``(n, a)`` if the head has groups.
            weight: weight of each example, ``(n,)``.
            clusters: which examples belong together, e.g. the author of each text: integers or strings, ``(n,)``.
        """
        batch = self.check_batch(probs, labels, groups, weight, clusters)
        rows = max(1, CHUNK // self.num_leaves)
        for start in range(0, len(batch.probs), rows):
            part = Batch(*(t[start : start + rows] for t in batch))
            self.keep(*self._summarize(part), part.labels)

    def _summarize(self, batch: Batch) -> tuple[TreeStatistics, Tensor]:
        """Its statistics, and the scores that tell the examples apart."""
        device, seen = batch.probs.device, columns(batch.probs)
        options = (batch.probs, *self._structure(device), self.jitter, self.noise_version)
        if device.type == "cpu" and len(seen):
            leaves, levels, seen = path_levels_in_blocks(*options, seen)
        else:
            leaves, levels = path_levels(*options)
        paths = self.paths.to(device)
        common = (paths.index_select(0, leaves) == paths.index_select(0, batch.labels)).sum(1) - 1
        kept = (batch.labels, batch.member, batch.weight, batch.cluster)
        return TreeStatistics(levels, leaves, common, *(t.clone() for t in kept)), seen

    def sizes(self) -> dict[str, int]:
        """Of the tree too."""
        return super().sizes() | {"leaves": self.num_leaves, "height": self.tree.height, "depths": self.tree.height + 1}

    def _structure(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.paths.to(device), self.depths.to(device), self.order.to(device), self.spans.to(device)

    @checked_once
    def check_batch(self, probs: Any, labels: Any, groups: Any = None, weight: Any = None, clusters: Any = None) -> Batch:
        """The checked batch, or an error that says what is wrong with it."""
        probs, low, high = checks.bounded("probs", probs, detach=True)
        if probs.dim() != 2 or probs.shape[1] != self.num_leaves:
            raise ValueError(f"`probs` must have shape (n, {self.num_leaves}), one column per leaf, got {tuple(probs.shape)}.")
        if low < 0.0:
            raise ValueError(f"`probs` must not be negative, got {low:.4g}; apply `softmax(1)` to logits.")
        if high > 1.001:  # an attached model raises too
            raise ValueError(f"`probs` must be at most 1, got {high:.4g}; apply `softmax(1)` to logits.")
        labels = checks.numbers("labels", labels)
        if labels.is_floating_point() or labels.dtype == torch.bool:
            raise TypeError(f"`labels` must hold leaf ids as integers, got {labels.dtype}.")
        if labels.shape != (len(probs),):
            raise ValueError(f"`labels` must have shape ({len(probs)},), one leaf per example, got {tuple(labels.shape)}.")
        if labels.device != probs.device:
            raise ValueError(f"`labels` is on {labels.device} but `probs` is on {probs.device}; move them to one device.")
        labels = labels.long()
        if labels.numel() and (int(labels.min()) < 0 or int(labels.max()) >= self.num_leaves):
            wrong = labels[(labels < 0) | (labels >= self.num_leaves)][0]
            raise ValueError(f"`labels` must be leaves, counted from 0 to {self.num_leaves - 1}, got {int(wrong)}.")
        member = self.check_groups(groups, len(probs), probs.device)
        cluster = check_clusters(clusters, len(probs), probs.device)
        return Batch(probs, labels, member, checks.weights(weight, len(probs), probs).detach(), cluster)

    # -- fit ---------------------------------------------------------------------------------------------------------

    @pooled
    @rows_stay(lambda head, rows, solver="exact", *_, **__: solver == "exact" and not rows.cluster.shape[1], above=EXACT)
    def calibrate(self, solver: str = "exact", eta: float | None = None, max_iter: int | None = None) -> "TreeHead":
        """Find the update log.

        Args:
            solver: ``"exact"`` (damped steps, :func:`torchgmc.heads.tree.solver.descend`), ``"paper"`` (Algorithm 1) or
                ``"fresh"`` (Algorithm 2), see :func:`torchgmc.engine.solver.run`.
            eta: fixed step; by default alpha / (K B) with K the steepest slope of coverage seen in the data.
            max_iter: maximum number of steps; 1000 for ``"exact"``, 10,000 for ``"paper"``.
        """
        self.check_solver(solver, eta, max_iter)
        problem = self._problem(solver != "exact")
        if solver == "exact":
            report = descend(problem, max_iter or EXACT_STEPS)
            if self.noise_floor and self.alpha is not None and self._reached(problem) == "no":
                other = copy.copy(problem)  # sets that pull against each other below alpha need not do so at alpha
                other.alpha, other.lam, other.who, other.shift = self.goal(), torch.full_like(problem.lam, self.init), [], []
                again = descend(other, max_iter or EXACT_STEPS)
                if self._reached(other) != "no":
                    problem, report = other, again
        else:
            splits = fresh_splits(max_iter, *problem.stats.content()) if solver == "fresh" else None
            step, steps = eta or self._fixed_step(problem), max_iter or FIXED_STEPS
            report = run(problem, self.goal(), solver, step, steps, splits=splits).report
        self.write(problem, report)
        return self

    def _reached(self, problem: TreeProblem) -> str:
        return reached(problem.violations(), self.alpha, problem.noise())

    def _problem(self, fixed: bool = False) -> TreeProblem:
        statistics: TreeStatistics = self.seen()
        empty = (total((statistics.member & (statistics.weight > 0)[:, None]).sum(0)) == 0).nonzero()
        if len(empty):
            raise ValueError(
                f"group {self.groups[int(empty[0])]!r} has no examples; drop it, or calibrate on data that includes it."
            )
        sets = self._sets(statistics.levels.device)
        allowed = self.goal() if fixed or not self.noise_floor else None  # where the noise of each promise decides
        options = (self.target, self.conditional, allowed, self.test_functions(), self.init, self.jitter)
        return TreeProblem(statistics, self.tree, sets, *options)

    def _sets(self, device: torch.device) -> Tensor:
        """Nodes of each set, bool (V, q)."""
        table = torch.zeros(self.num_nodes, len(self.sets), dtype=torch.bool)
        for column, nodes in enumerate(self.sets.values()):
            table[nodes, column] = True
        return table.to(device)

    def _fixed_step(self, problem: TreeProblem) -> float:
        """The step of Theorem 1: K from windows of a 64th of the levels' range, B = max P(A) (1 / P(A) if conditional)."""
        levels = problem.stats.levels
        known = problem.stats.common < self.depths.to(levels.device)[problem.stats.leaves]  # else covered whatever lambda
        critical = levels[known].gather(1, problem.stats.common[known, None])[:, 0]
        if len(critical) == 0:
            return self.goal()
        low, high = (float(v) for v in critical.aminmax())
        width = max(high - low, 1e-6) / 64
        bins = ((critical - low) / width).long().clamp(0, 63)
        counts = torch.zeros(64, dtype=torch.float64, device=levels.device).index_add_(0, bins, problem.weight[known])
        slope = float(counts.max() / problem.total) / width
        share = problem.mass() / problem.total
        bound = float((1 / share[share > 0]).max()) if self.conditional and bool((share > 0).any()) else 1.0
        return theory.step_size(self.goal(), max(slope, 1e-6), bound)

    def write(self, problem: TreeProblem, report: Report, base: float | None = None, shifts: Tensor | None = None) -> None:
        """Store f0 and the log as rounds (or these ``shifts``), and report the result of replaying them."""
        steps = report.iterations
        before = self.answer_levels(problem.stats.levels, problem.stats.leaves, torch.full_like(problem.lam, self.init))
        if shifts is None:
            shifts = rounds(self.tree, problem.sets, problem.who[:steps], problem.shift[:steps], self.num_groups)
        self.shifts = shifts.to(self.shifts.device)
        self.base.fill_(self.init if base is None else base)
        member, start = problem.stats.member.double(), self.base.to(problem.lam.device)
        problem.restore(replay(problem.stats.levels, problem.routes, member, shifts.to(member.device), start))
        variance = self.target * (1.0 - self.target) * problem.mass() / problem.total
        details: dict[str, Any] = {"examples": problem.count, "steps": steps, "rounds": len(shifts), "variance": variance}
        details |= {"tolerance": problem.tolerance(), "small": problem.small()}
        details |= {f"before: {k}": v for k, v in self._describe(before, problem.weight).items()}
        details |= self._describe(problem.nodes(), problem.weight)
        message, state = report.message + _warning(details["answers: root"]), self._reached(problem)
        report = replace(report, violations_after=problem.violations(), message=message, details=details, reached=state)
        self.mark_fitted(report)

    def _describe(self, nodes: Tensor, weight: Tensor) -> dict[str, float]:
        """Mean set size, and the share of answers at each depth, at the root and at a leaf."""
        device = nodes.device
        depth = self.depths.to(device)[nodes]
        share = torch.zeros(self.tree.height + 1, dtype=torch.float64, device=device).index_add_(0, depth, weight)
        size, leaf = weight @ self.tree.sizes.to(device)[nodes].double(), weight @ (nodes < self.num_leaves).double()
        sums = total(torch.cat([share, torch.stack([size, leaf, weight.sum()])]))
        share, (size, leaf) = sums[:-3] / sums[-1], sums[-3:-1] / sums[-1]
        found = {"mean set size": float(size), "answers: root": float(share[0])}
        found |= {f"answers: depth {k}": v for k, v in enumerate(share.tolist()) if k}
        return found | {"answers: leaf": float(leaf)}

    # -- use ---------------------------------------------------------------------------------------------------------

    def answer_levels(self, levels: Tensor, leaves: Tensor, lam: Tensor) -> Tensor:
        """Answers for given levels and thresholds."""
        return answers(levels, self.paths.to(leaves.device)[leaves], wide(lam))

    def answer(self, probs: Tensor, lam: Tensor) -> Tensor:
        """Node that a threshold ``lam`` (n,) answers with, ``(n,)``; needs no fit."""
        if not is_scripting():
            self.check_input("probs", probs, checks.ordinary("lam", lam), "apply `softmax(1)` to logits")
        if probs.dim() != 2 or probs.shape[1] != self.num_leaves or lam.dim() != 1:
            raise ValueError(f"`probs` must have shape (n, {self.num_leaves}) and `lam` (n,), got {probs.shape} and {lam.shape}")
        leaves, levels = path_levels(probs, self.paths, self.depths, self.order, self.spans, self.jitter, self.noise_version)
        return answers(levels, self.paths[leaves], wide(lam))

    def _routes(self, probs: Tensor, groups: Optional[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Levels and nodes of the path to the best leaf, ``(n, height)`` each, and membership ``(n, a)``."""
        if not is_scripting():
            self.check_input("probs", probs, groups, "apply `softmax(1)` to logits")
        member = self.membership(groups, probs.shape[0], probs)
        if probs.dim() != 2 or probs.shape[1] != self.num_leaves:
            raise ValueError(f"`probs` must have shape (n, {self.num_leaves}), got {probs.shape}")
        leaves, levels = path_levels(probs, self.paths, self.depths, self.order, self.spans, self.jitter, self.noise_version)
        return levels, self.paths[leaves], member

    def threshold(self, probs: Tensor, groups: Optional[Tensor] = None) -> Tensor:
        """Lambda of each input, float64, ``(n,)``."""
        levels, routes, member = self._routes(probs, groups)
        return replay(levels, routes, member, self.shifts, self.base)

    def forward(self, probs: Tensor, groups: Optional[Tensor] = None, mode: str = "hard", temperature: float = 0.1) -> Tensor:
        r"""Answer of each input: node ids, int64, ``(n,)``; or the probability of every node to be the answer, ``(n, V)``.

        With r_k the summed score at depth k of the path to the best leaf, and the leaf always good enough, the soft answer is

        .. math:: P(o = v_k) = a_k - a_{k-1}, \qquad a_k = \sigma\big((\lambda(x) - r_k) / T\big), \quad a_{leaf} = 1

        and lambda(x) replays the steps of the fit, each with the mean shift of the soft answer so far. As T -> 0 all mass goes
        to the hard answer. The path itself, to the best leaf, is not softened.

        Args:
            probs: shape ``(n, K)``.
            groups: membership ``(n, a)`` if the head has groups.
            mode: ``"hard"``: ids, no derivative. ``"soft"``: probabilities of the type of ``probs``, rows sum to 1.
                ``"straight_through"``: 1 at the hard answer, else 0, with the derivative of ``"soft"``.
                :meth:`leaves` turns both into coverage of the leaves.
            temperature: T, in the units of ``probs``.
        """
        soft.check(mode, temperature)
        levels, routes, member = self._routes(probs, groups)
        if mode == "soft":
            return self._soft(levels, routes, member, temperature).to(probs.dtype)
        found = answers(levels, routes, replay(levels, routes, member, self.shifts, self.base))
        if mode == "hard":
            return found
        chosen = torch.arange(self.num_nodes, device=probs.device) == found[:, None]
        return soft.straight_through(chosen, self._soft(levels, routes, member, temperature).to(probs.dtype))

    def _soft(self, levels: Tensor, routes: Tensor, member: Tensor, temperature: float) -> Tensor:
        """Probability of every node to be the answer, float64, ``(n, V)``."""
        lam = soft_answers.replay_tree(levels, routes, member, self.shifts, self.base, temperature)
        found = soft_answers.path(levels, lam, temperature)  # (n, height + 1)
        return torch.zeros_like(levels[:, :1]).expand([-1, self.num_nodes]).scatter_add(1, routes, found)

    def leaves(self, nodes: Tensor) -> Tensor:
        """Leaves that each answer stands for, bool, ``(n, K)``; of soft answers ``(n, V)``: coverage of each leaf in [0, 1]."""
        nodes = checks.numbers("nodes", nodes)
        if nodes.is_floating_point():
            if nodes.dim() != 2 or nodes.shape[1] != self.num_nodes:
                raise ValueError(f"soft answers must have shape (n, {self.num_nodes}), got {tuple(nodes.shape)}.")
            return soft_answers.covered_leaves(nodes, self.spans, self.place)
        spans, place = self._of_nodes(nodes, self.spans), self.place
        return (place >= spans[..., :1]) & (place < spans[..., 1:])

    def names(self, nodes: Tensor) -> list[str]:
        """Name of each answer."""
        every = torch.arange(self.num_nodes, device=self.spans.device)
        return [self.tree.names[node] for node in self._of_nodes(checks.numbers("nodes", nodes), every).flatten().tolist()]

    def _of_nodes(self, nodes: Tensor, table: Tensor) -> Tensor:
        """Rows ``(..., k)`` of a table ``(V, k)``; a negative id is none, rather than counted from the end."""
        if nodes.is_floating_point() or nodes.dtype == torch.bool or nodes.device != self.spans.device:
            raise TypeError(f"`nodes` must be node ids, int64 on {self.spans.device}, got {nodes.dtype} on {nodes.device}.")
        try:
            return table[torch.where(nodes < 0, self.num_nodes, nodes.long())]
        except IndexError:
            raise ValueError(f"`nodes` must be from 0 to {self.num_nodes - 1}, got others.") from None

    # -- the promise -------------------------------------------------------------------------------------------------

    def input_range(self) -> tuple[float, float]:
        """Probabilities."""
        return 0.0, 1.0

    def test_functions(self) -> Names:
        """Every set of answers, within each static group."""
        return Names(self.promises, [""])

    def s_range(self) -> tuple[float, float]:
        """Covered or not, minus the target."""
        return -self.target, 1.0 - self.target

    def s_target(self) -> float:
        """The target coverage."""
        return self.target

    def _answered(self, batch: Batch) -> Tensor:
        """The answers, at f0 before the fit."""
        if self.is_fitted:
            return self.forward(batch.probs, batch.member if self.grouped else None)
        return self.answer(batch.probs, self.base.to(batch.probs.device).expand(len(batch.probs)))

    def values(self, probs: Tensor, labels: Any, groups: Any = None, softness: float | None = None) -> Values:
        r"""1{answer covers the label} - target of each example, and which promised sets its answer lies in.

        Soft, the answer is a distribution over the path to the best leaf and the columns are the sets:
        :math:`\sum_k P(o = v_k) 1\{v_k \in U\} (1\{v_k \ge y\} - \sigma)`. An answer covers y if it lies at or above the node
        where both paths part.
        """
        checks.softness(softness)
        batch = self.check_batch(probs, labels, groups)
        if softness is not None:
            return self._soft_values(probs, batch, softness)
        nodes = self._answered(batch)
        covered = self.leaves(nodes).gather(1, batch.labels[:, None]).double()  # (n, 1)
        inside = self._sets(nodes.device)[nodes]  # (n, q)
        return Values(covered - self.target, (batch.member[:, :, None] & inside[:, None, :]).flatten(1))

    def _soft_values(self, probs: Tensor, batch: Batch, softness: float) -> Values:
        probs = probs if probs.dtype in (torch.float32, torch.float64) else probs.float()
        paths, depths, order, spans = self._structure(probs.device)
        leaves, levels = path_levels(probs, paths, depths, order, spans, 0.0)  # noise breaks ties; soft answers have none
        routes = paths[leaves]
        lam = torch.full_like(levels[:, 0], self.init)
        if self.is_fitted:
            shifts, base = self.shifts.to(probs.device), self.base.to(probs.device)
            lam = soft_answers.replay_tree(levels, routes, batch.member.double(), shifts, base, softness)
        chance = soft_answers.path(levels, lam, softness)  # (n, height + 1)
        common = (routes == paths[batch.labels]).sum(1) - 1  # depth at which the paths part
        covers = torch.arange(routes.shape[1], device=probs.device) <= common[:, None]
        sets = self._sets(probs.device)[routes].to(chance.dtype)  # (n, height + 1, q)
        s = ((chance * (covers.to(chance.dtype) - self.target))[:, :, None] * sets).sum(1)  # (n, q)
        inside = (chance[:, :, None] * sets).sum(1)
        member = batch.member.to(chance.dtype)[:, :, None]
        everyone = torch.ones(len(s), 1, dtype=torch.bool, device=s.device)
        return Values((member * s[:, None]).flatten(1), everyone, inside=(member * inside[:, None]).flatten(1))

    def audit_rows(self, **batch: Any) -> dict[str, Tensor]:
        """Each example's answer, and whether it covers the label."""
        found = self.check_batch(**batch)
        nodes = self._answered(found)
        return {"node": nodes, "covered": self.leaves(nodes).gather(1, found.labels[:, None])[:, 0].double()}

    def audit_measures(self, tally: Tally) -> dict[str, tuple[Tensor, tuple[float, float] | None]]:
        """Coverage, and the number of leaves in an answer."""
        size = self.tree.sizes.to(tally.s.device)[tally.rows["node"]].double()
        return {"coverage": (tally.rows["covered"], (0.0, 1.0)), "set size": (size, (1.0, float(self.num_leaves)))}

    def audit_summary(self, tally: Tally) -> dict[str, Any]:
        """How precise the answers are: mean set size (from 1, a leaf, to K, the root), and the share at each depth."""
        weight, nodes, covered = tally.weight.double(), tally.rows["node"], tally.rows["covered"]
        zeros = weight.new_zeros(self.num_nodes)
        details = {"answered": zeros.index_add(0, nodes, weight), "covered": zeros.index_add(0, nodes, weight * covered)}
        answered = details["answered"]
        cost = {"coverage": float(details["covered"].sum() / answered.sum())}
        cost |= self._describe(torch.arange(self.num_nodes, device=answered.device), answered)
        return {"cost": cost, "note": _warning(cost["answers: root"]).strip(), "details": details}

    def figures(self, audit: Any) -> dict[str, Any]:
        """Coverage at each node of the tree."""
        if audit is None or "answered" not in audit.details:
            return {}
        from torchgmc import plots

        text = "Coverage of the answers at each node and below it: colour shows the deviation, size how often it is answered"
        return {text: lambda dark: plots.tree(self, audit, dark=dark)}

    # -- files -------------------------------------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """Arguments that rebuild this head; the tree as its parents and names."""
        return super().config() | {
            "parents": self.tree.parents,
            "names": self.tree.names,
            "sets": self.sets,
            "groups": self.groups if self.grouped else None,
        }

    def extra_repr(self) -> str:
        """Options and state."""
        kind = ", conditional" if self.conditional else ""
        groups = f", groups={self.num_groups}" if self.grouped else ""
        alpha = "None" if self.alpha is None else f"{self.alpha:g}"
        return (
            f"target={self.target:g}, alpha={alpha}{kind}, leaves={self.num_leaves}, nodes={self.num_nodes}, "
            f"sets={len(self.sets)}{groups}, log={len(self.shifts)} rounds, fitted={self.is_fitted}"
        )


def _warning(root: float) -> str:
    if root <= 0.5:
        return ""
    return f" Warning: {100 * root:.0f} % of the answers are the root, which says nothing; the scores are too weak for the target."
