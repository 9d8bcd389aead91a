r"""Derivatives through a fit: offsets at an optimum are functions of the scores they were fitted to.

A fit with static groups minimises :math:`\Phi(\theta; x) + \sum_i \lambda_i |\theta_i|`, smooth and convex in the offsets
theta, where x stands for the scores and :math:`G = \nabla_\theta \Phi` is minus the violation of every g. The optimum has

.. math:: G_i(\theta; x) + \lambda_i\,\mathrm{sign}(\theta_i) = 0 \;\text{ where } \theta_i \ne 0, \qquad
          |G_i(\theta; x)| \le \lambda_i \;\text{ where } \theta_i = 0

(with :math:`\lambda = \alpha` that is |violation| <= alpha). Near x the *active* offsets, S = {theta_i != 0}, stay the active
ones, so that the first line is a system of equations for them, and the implicit function theorem gives

.. math:: \frac{d\theta_S}{dx} = -H_{SS}^{-1}
          \Big(\frac{\partial G_S}{\partial x} + \mathrm{sign}(\theta_S) \frac{d\lambda_S}{dx}\Big), \qquad
          \frac{d\theta_i}{dx} = 0 \;\text{ elsewhere}, \qquad H = \nabla^2_\theta \Phi

A backward pass solves one symmetric system with as many unknowns as there are active offsets, in float64, and takes one
product with the derivative of G; the steps of the fit are not recorded, and their number does not matter.

*Kinks.* Where an inactive offset has |G_i| = lambda_i exactly, the active set changes with x and theta has two one-sided
derivatives; the one of the present set is returned. Such x have measure 0.

*Singular H.* Offsets of groups that add up to one another (women and men, old and young) can be exchanged without changing any
output: H is singular along such directions. There the pseudo-inverse is used: the derivative of least norm. What the head
outputs has the same derivative whichever is taken.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torchgmc.engine import orthant
from torchgmc.engine.search import MAX_ELEMENTS

#: Maximum number of Newton steps.
STEPS = 200
#: Violation by which the optimality conditions may be missed: on the way, at the end, and where rounding stops the steps.
WARM, FINE, MISSED = 1e-3, 1e-12, 1e-7
#: Length of a further Newton step at the optimum, relative to the offsets.
SETTLED = 1e-3
#: Eigenvalues below this share of the largest count as 0.
RANK = 1e-10


class CellProblem:
    r"""A smooth potential of offsets that examples see through the cell of equal membership they are in.

    .. math:: \Phi(\theta; x) = \sum_c \phi_c(\mathrm{shift}_c; x), \qquad \mathrm{shift} = \mathrm{tilt}\;\theta

    A subclass defines :meth:`measure` and :meth:`spread`, as differentiable functions of ``inputs``.

    ``tilt``: how much of each group's offset a cell sees, float64 ``(c, a)``. ``columns``: u, the number of offsets of a group.
    """

    def __init__(self, tilt: Tensor, columns: int) -> None:
        self.tilt, self.columns = tilt, columns

    def measure(self, shift: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Value of the potential, a scalar, and its derivative in ``shift``, ``(c, u)``."""
        raise NotImplementedError  # abstract

    def spread(self, shift: Tensor, *inputs: Tensor) -> Tensor:
        """Second derivative in the shift of each cell, ``(c, u, u)``."""
        raise NotImplementedError  # abstract

    def stages(self) -> Iterator["CellProblem"]:
        """Problems on the way to this one, from easy to hard; the last is this one."""
        yield self

    def gradient(self, theta: Tensor, *inputs: Tensor) -> Tensor:
        """G, ``(a, u)``: minus the violations."""
        return self.tilt.T @ self.measure(self.tilt @ theta, *inputs)[1]

    def hessian(self, theta: Tensor, *inputs: Tensor) -> Tensor:
        """H, ``(a u, a u)``."""
        return self.assemble(self.spread(self.tilt @ theta, *inputs))

    def assemble(self, spread: Tensor) -> Tensor:
        """H from the second derivatives of the cells, ``(c, u, u)``."""
        a, u = self.tilt.shape[1], self.columns
        table = torch.zeros(a * a, u * u, dtype=spread.dtype, device=spread.device)
        rows = max(1, MAX_ELEMENTS // (a * min(a, u * u)))
        for tilt, part in zip(torch.split(self.tilt, rows), torch.split(spread.flatten(1), rows), strict=True):
            if a < u * u:  # the smaller of two tables
                found = (tilt[:, :, None] * tilt[:, None, :]).flatten(1).T @ part
            else:
                found = tilt.T @ (tilt[:, :, None] * part[:, None, :]).flatten(1)
            table = table + found.view_as(table)
        return table.view(a, a, u, u).permute(0, 2, 1, 3).reshape(a * u, a * u)


def optimum(problem: CellProblem, slack: Tensor, *inputs: Tensor) -> Tensor:
    """Offsets ``(a, u)`` at the optimum, differentiable in ``slack`` and ``inputs``, twice if they are.

    ``problem``: the potential. ``slack``: lambda >= 0, ``(a, u)``; 0 for offsets that are always active. ``inputs``: what
    :meth:`CellProblem.measure` takes.
    """
    return _Optimum.apply(problem, slack, *inputs)  # type: ignore[no-any-return]


class _Optimum(torch.autograd.Function):
    """The fit forward, one linear system backward."""

    @staticmethod
    def forward(problem: CellProblem, slack: Tensor, *inputs: Tensor) -> Tensor:
        """Run the fit, without recording it."""
        return minimise(problem, slack, *inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep the optimum itself: it is all that the derivative needs."""
        ctx.problem = inputs[0]
        ctx.save_for_backward(output, *inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Minus (dG/dx)^T H^-1 grad. Made of differentiable operations, theta among them: it can be differentiated again."""
        theta, slack, *inputs = ctx.saved_tensors
        problem: CellProblem = ctx.problem
        active = (theta != 0) | (slack == 0)
        sign = theta.sign().detach()
        u = _solve(problem.hessian(theta, *inputs), active.flatten(), grad.flatten()).view_as(theta)

        def conditions(slack: Tensor, *inputs: Tensor) -> Tensor:
            return problem.gradient(theta, *inputs) + slack * sign  # type: ignore[no-any-return]

        pull: Any = torch.func.vjp(conditions, slack, *inputs)[1]
        return (None, *pull(-u))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], problem: CellProblem, *tensors: Tensor) -> tuple[Tensor, int]:
        """One fit after the other: each takes its own number of steps."""
        rows = []
        for i in range(info.batch_size):
            one = [t if d is None else t.select(d, i) for t, d in zip(tensors, in_dims[1:], strict=True)]
            rows.append(optimum(problem, *one))
        return torch.stack(rows), 0


def _solve(hessian: Tensor, active: Tensor, right: Tensor) -> Tensor:
    """H_SS^+ right_S, and 0 for the offsets that are not active."""
    diagonal = hessian.diagonal().detach()
    # The inactive rows are replaced by a multiple of the identity, of a size that does not change the rank of the others.
    filler = diagonal.mean().clamp_min(torch.finfo(hessian.dtype).tiny)
    keep = active.to(hessian.dtype)
    block = keep[:, None] * hessian * keep + torch.diag((1 - keep) * filler)
    right = keep * right
    factor, failed = torch.linalg.cholesky_ex(block)
    pivots = factor.diagonal().detach().square()
    if bool((failed == 0) & (pivots.min() > RANK * pivots.max())):
        return torch.cholesky_solve(right[:, None], factor)[:, 0]
    return keep * (torch.linalg.pinv(block, rtol=RANK, hermitian=True) @ right)  # type: ignore[no-any-return]


def minimise(problem: CellProblem, slack: Tensor, *inputs: Tensor) -> Tensor:
    """The optimum by the Newton steps of :mod:`torchgmc.engine.orthant`; of offsets that can be exchanged, those of least norm.

    Raises:
        RuntimeError: there is no finite optimum, or it was not reached.
    """

    def descend(stage: CellProblem, theta: Tensor) -> orthant.Minimum:
        def look(theta: Tensor) -> orthant.Point:
            value, slope = stage.measure(stage.tilt @ theta, *inputs)
            return orthant.Point(value, stage.tilt.T @ slope, theta)

        enough = FINE if stage is problem else WARM
        return orthant.minimise(look, lambda theta: stage.hessian(theta, *inputs), slack, theta, enough, STEPS)

    theta = torch.zeros_like(slack)
    for stage in problem.stages():
        found = descend(stage, theta)
        theta = found.theta
    matrix, active = problem.hessian(theta, *inputs), ((theta != 0) | (slack == 0)).flatten()
    # On the way to infinity the gradient vanishes too, but the next Newton step does not.
    ahead = _solve(matrix, active, (found.point.gradient + slack * theta.sign()).flatten()).abs().max()
    if not (bool(found.missed <= MISSED) and bool(ahead <= SETTLED * (1.0 + theta.abs().max()))):
        raise RuntimeError(
            f"the optimum was not reached: a violation misses its condition by {float(found.missed):.2g}, an offset by "
            f"{float(ahead):.2g}. There may be no finite optimum (all outcomes of a group are equal, or a list has no "
            "probability in a group); raise `alpha` or `temperature`, or use more data."
        )
    least = _solve(matrix, active, matrix @ theta.flatten()).view_as(theta)
    same = bool(((least.sign() == theta.sign()) | (slack == 0)).all())
    again = descend(problem, least) if same else found  # takes no step where the exchange changes no output
    return again.theta if bool(again.missed <= found.missed.clamp_min(FINE)) else theta


def cell_sums(values: Tensor, place: Tensor, shift: Tensor) -> Tensor:
    """Sums of rows ``(n, k)`` by place, ``(len(shift), k)``."""
    return torch.zeros(len(shift), values.shape[1], dtype=values.dtype, device=values.device).index_add(0, place, values)


class SoftPinball(CellProblem):
    r"""Mean over the scores that count of T softplus((lambda - h)/T) - sigma lambda, with lambda = base - shift.

    Its derivative in lambda is :math:`\sigma((\lambda - h)/T) - \sigma`. Inputs are the scores h and their bases, ``(N,)``.

    ``row``: cell * C + class of each score, ``(N,)``. ``share``: weight of each score, ``(N,)``; those of one class sum to 1.
    ``target``: of each score, ``(N,)``. ``tilt``: membership of the cells, ``(c, a)``. ``columns``: C. ``temperature``: T.
    ``widest``: temperature at which the fit begins (it cools down to T).
    """

    def __init__(
        self, row: Tensor, share: Tensor, target: Tensor, tilt: Tensor, columns: int, temperature: float, widest: float
    ) -> None:
        super().__init__(tilt, columns)
        self.row, self.share, self.target, self.temperature, self.widest = row, share, target, temperature, widest

    def _excess(self, shift: Tensor, scores: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
        """lambda and (lambda - h) / T of each score."""
        lam = base.to(torch.float64) - shift.flatten()[self.row]
        return lam, (lam - scores.to(torch.float64)) / self.temperature

    def measure(self, shift: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean smooth pinball loss, and minus the excess of the risk in each cell."""
        lam, x = self._excess(shift, *inputs)
        value = (self.share * (self.temperature * torch.nn.functional.softplus(x) - self.target * lam)).sum()
        return value, cell_sums((self.share * (self.target - torch.sigmoid(x)))[:, None], self.row, shift.flatten()).view_as(shift)

    def spread(self, shift: Tensor, *inputs: Tensor) -> Tensor:
        """Density of the smoothed scores at the thresholds; classes do not mix."""
        _, x = self._excess(shift, *inputs)
        values = self.share * torch.sigmoid(x) * torch.sigmoid(-x) / self.temperature
        return torch.diag_embed(cell_sums(values[:, None], self.row, shift.flatten()).view_as(shift))

    def stages(self) -> Iterator[CellProblem]:
        """From a temperature as wide as the scores down to T: far from its scores a sharp step has no slope to follow."""
        width = self.widest
        while width > 2 * self.temperature:
            yield SoftPinball(self.row, self.share, self.target, self.tilt, self.columns, width, width)
            width /= 4
        yield self


def slack_of(own: float, alpha: Any, like: Tensor) -> Tensor:
    """alpha, or the head's own for None, as a float64 scalar tensor; a tensor keeps its derivative."""
    if isinstance(alpha, Tensor):
        if alpha.dim() != 0 or not alpha.is_floating_point():
            raise ValueError(f"`alpha` must be a number or a floating tensor of shape (), got shape {tuple(alpha.shape)}.")
        return alpha.to(like.device, torch.float64)
    if alpha is not None and (isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 <= alpha < float("inf")):
        raise ValueError(f"`alpha` must be a finite number of at least 0, got {alpha!r}.")
    return torch.tensor(own if alpha is None else alpha, dtype=torch.float64, device=like.device)


def check_members(groups: list[str], share: Tensor) -> None:
    """Every group has examples; share is P(A), ``(a, ...)``."""
    empty = (share.detach() <= 0).flatten(1).any(1).nonzero() if share.dim() > 1 else (share.detach() <= 0).nonzero()
    if len(empty):
        raise ValueError(
            f"group {groups[int(empty[0])]!r} has no examples in this batch ({len(empty)} such groups in total), so its "
            "offset has nothing to be fitted to. Use larger (or stratified) batches, or drop the group."
        )


def check_some(name: str, tensor: Tensor) -> None:
    """There are examples."""
    if len(tensor) == 0:
        raise ValueError(f"`{name}` holds no examples: there is nothing to fit.")
