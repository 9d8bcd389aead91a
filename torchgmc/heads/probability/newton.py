"""Static offsets of all groups at once: Newton steps on a convex potential, with an l1 slack for each group."""

import torch
from torch import Tensor

from torchgmc.engine.lasso import solve_lasso
from torchgmc.heads.levelsets import steps as levelsets
from torchgmc.heads.levelsets.steps import LARGEST, ROWS

#: Halvings of a step.
HALVINGS = 8


def curvature(z: Tensor, f: Tensor, euclidean: bool) -> Tensor:
    """Derivative of f_c in z_c, ``(n, C)``; for classes it leaves out the cross terms, which line searches make up for."""
    if euclidean:
        return ((z > 0) & (z < 1)).to(f.dtype) if z.shape[1] == 1 else (f > 0).to(f.dtype)
    return f * (1.0 - f)


def loss(z: Tensor, f: Tensor, y: Tensor, euclidean: bool) -> Tensor:
    """Potential of each example, psi(z) - <y, z>, up to a constant; ``(n,)``."""
    if z.shape[1] == 1:
        if euclidean:
            return (f * (z - 0.5 * f) - y * z)[:, 0]
        return (torch.nn.functional.softplus(z) - y * z)[:, 0]
    if euclidean:  # the convex function whose gradient is the projection
        return (f * z - 0.5 * f.square() - y * z).sum(1)
    return torch.logsumexp(z, 1) - (y * z).sum(1)


class Newton:
    """The static problem: min E[psi(z) - <y, z>] + sum slack |Theta| with z = z0 - W Theta.

    Args:
        member: ``(n, 1 + a)``.
        z, y, share: ``(n, C)``, ``(n, C)``, ``(n, 1)``; share sums to 1.
        euclidean: geometry.
    """

    def __init__(self, member: Tensor, z: Tensor, y: Tensor, share: Tensor, euclidean: bool) -> None:
        self.member, self.euclidean = member, euclidean
        self.z, self.y, self.share = (t.to(member.dtype) for t in (z, y, share))

    def thin(self, rows: int) -> "Newton":
        """Every k-th example, about ``rows`` of them."""
        stride = max(1, len(self.z) // rows)
        share = self.share[::stride]
        return Newton(self.member[::stride], self.z[::stride], self.y[::stride], share / share.sum(), self.euclidean)

    def slope(self, theta: Tensor) -> tuple[Tensor, float]:
        """Violations ``(1 + a, C)`` and potential at Theta."""
        theta = theta.to(self.member.dtype)
        total, value = torch.zeros_like(theta, dtype=torch.float64), self.z.new_zeros((), dtype=torch.float64)
        for member, z, y, share in self._parts():
            z = z - member @ theta
            f = levelsets.probabilities(z, self.euclidean)
            total += member.T @ ((f - y) * share)
            value += (loss(z, f, y, self.euclidean) * share[:, 0]).sum()
        return total, float(value)

    def hessian(self, theta: Tensor) -> Tensor:
        """One block per class, ``(C, 1 + a, 1 + a)``, float64."""
        theta = theta.to(self.member.dtype)
        size, columns = theta.shape
        total = torch.zeros(columns, size, size, dtype=torch.float64, device=theta.device)
        for member, z, _, share in self._parts():
            z = z - member @ theta
            weight = curvature(z, levelsets.probabilities(z, self.euclidean), self.euclidean) * share
            for column in range(columns):
                total[column] += member.T @ (member * weight[:, column : column + 1])
        return total

    def _parts(self) -> "zip[tuple[Tensor, Tensor, Tensor, Tensor]]":
        rows = ROWS if self.z.device.type == "cpu" else len(self.z)
        return zip(*(torch.split(t, rows) for t in (self.member, self.z, self.y, self.share)), strict=True)

    def minimise(self, theta: Tensor, slack: Tensor, hessian: Tensor | None, steps: int, precision: float) -> Tensor:
        """Newton steps until the optimality conditions hold to ``precision`` of the slack.

        A Hessian that is given is kept as long as steps made with it lower the objective as they should.
        """
        slope, value = self.slope(theta)
        value += float((slack * theta.abs()).sum())
        for _ in range(steps):
            if bool((_residual(theta, slope, slack) <= precision * slack).all()):
                break
            matrix = self.hessian(theta) if hessian is None else hessian
            model = (matrix @ theta.T[..., None])[..., 0] + slope.T  # (C, 1 + a)
            goal = solve_lasso(matrix, model, slack.T, theta.T).T
            goal = goal.clamp(-LARGEST / 2, LARGEST / 2)
            for halving in range(HALVINGS + 1):
                trial = theta + (goal - theta) * 0.5**halving
                trial_slope, trial_value = self.slope(trial)
                trial_value += float((slack * trial.abs()).sum())
                if trial_value <= value + 1e-7 * abs(value) or (hessian is not None and halving == 1):
                    break
            if trial_value > value + 1e-7 * abs(value):
                if hessian is None:
                    break  # as near as this arithmetic gets
                hessian = None
                continue
            theta, slope, value = trial, trial_slope, trial_value
        return theta


def _residual(theta: Tensor, slope: Tensor, slack: Tensor) -> Tensor:
    """How far the conditions of the optimum are missed, per offset."""
    off = (slope.abs() - slack).clamp_min(0.0)
    on = (slope - slack * theta.sign()).abs()
    return torch.where(theta == 0, off, on)
