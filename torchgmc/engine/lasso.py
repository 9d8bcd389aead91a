"""Small quadratic problems with an l1 term, many at once: the heart of a Newton step with slack."""

import torch
from torch import Tensor

#: Changes of the active set tried before the slower, surer splitting.
MAX_SETS = 25
#: Steps of the splitting.
MAX_SPLITS = 2000


def solve_lasso(hessian: Tensor, gradient: Tensor, slack: Tensor, start: Tensor | None = None) -> Tensor:
    r"""Minimise :math:`\frac12 x^T H x - g^T x + \sum_i \lambda_i |x_i|` for a batch of H, g, lambda.

    The optimality conditions are :math:`|g - Hx|_i \le \lambda_i`, with equality and the sign of x where x is not 0. A guess
    of the active set and its signs turns them into linear equations; the guess is corrected from their solution until it
    stands (a primal-dual active set method). Where it does not settle, ADMM takes over.

    ``hessian``: H, positive semi-definite, ``(..., a, a)``; a small ridge makes it definite. ``gradient``: g, ``(..., a)``.
    ``slack``: lambda >= 0, ``(..., a)``. ``start``: a guess of x.

    Example:
        >>> solve_lasso(torch.eye(3), torch.tensor([2.0, -0.5, -3.0]), torch.ones(3))
        tensor([ 1.,  0., -2.])
    """
    size = hessian.diagonal(dim1=-2, dim2=-1)  # (..., a)
    largest = size.amax(-1, keepdim=True).clamp_min(torch.finfo(hessian.dtype).tiny)
    ridge = 1e-10 * largest
    hessian = hessian + torch.diag_embed(ridge.expand_as(size))
    curve = size.clamp_min(1e-4 * largest)
    x = torch.zeros_like(gradient) if start is None else start
    # Signs of the active set that x was solved for; x = 0 belongs to the empty one, a guess to none.
    solved_for = torch.full_like(x, 0.0 if start is None else torch.nan)
    for _ in range(MAX_SETS):
        ahead = x + (gradient - (hessian @ x[..., None])[..., 0]) / curve
        sign = torch.where(ahead.abs() > slack / curve, ahead.sign(), 0.0)
        if torch.equal(sign, solved_for):
            return x
        solved_for = sign
        x = _solve_active(hessian, gradient - slack * sign, sign != 0)
    return _split(hessian, gradient, slack, torch.zeros_like(gradient) if start is None else start)


def _solve_active(hessian: Tensor, right: Tensor, active: Tensor) -> Tensor:
    """H_SS^-1 right_S, and 0 elsewhere: of one problem with the active rows only, of many with all at once."""
    if hessian.shape[:-2].numel() == 1:
        place = active.flatten().nonzero()[:, 0]
        x = torch.zeros_like(right)
        if len(place):
            flat = hessian.reshape(hessian.shape[-2:])
            x.view(-1)[place] = torch.linalg.solve(flat[place][:, place], right.flatten()[place])
        return x
    keep = active.to(hessian.dtype)
    matrix = keep[..., :, None] * hessian * keep[..., None, :] + torch.diag_embed(1.0 - keep)
    return torch.linalg.solve(matrix, keep * right)  # type: ignore[no-any-return]


def _split(hessian: Tensor, gradient: Tensor, slack: Tensor, x: Tensor) -> Tensor:
    """ADMM: a linear solve and a soft threshold in turn."""
    weight = hessian.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)  # (..., 1)
    inverse = torch.linalg.inv(hessian + torch.diag_embed(weight.expand_as(gradient)))
    dual = (gradient - (hessian @ x[..., None])[..., 0]).clamp(-slack, slack) / weight
    for step in range(MAX_SPLITS):
        smooth = (inverse @ (gradient + weight * (x - dual))[..., None])[..., 0]
        target = smooth + dual
        x = target.sign() * (target.abs() - slack / weight).clamp_min(0.0)
        dual = target - x
        if step % 50 == 49:
            rest = gradient - (hessian @ x[..., None])[..., 0]
            missed = torch.where(x == 0, (rest.abs() - slack).clamp_min(0.0), (rest - slack * x.sign()).abs())
            if bool((missed <= 1e-7 * (gradient.abs() + slack).amax(-1, keepdim=True)).all()):
                break
    return x
