"""The search kernel: the violation of every test function g = 1_A v in G at once."""

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from torchgmc.engine import checks

#: Elements of the largest temporary the dense fallback may make (64 MB in float64).
MAX_ELEMENTS = 1 << 23


class Cells(NamedTuple):
    """Membership when many examples share one pattern: example i belongs to the sets of ``patterns[ids[i]]``.

    Attributes:
        ids: cell of each example, shape ``(n,)``, int64.
        patterns: membership of each cell in each set, shape ``(c, a)``, bool.
    """

    ids: Tensor
    patterns: Tensor


@runtime_checkable
class Structured(Protocol):
    """Sets that are known by a rule, such as :class:`torchgmc.Groups`, and add up values without a membership table."""

    @property
    def num_rows(self) -> int:
        """Number of examples n."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the rule is evaluated."""
        ...

    def __len__(self) -> int:
        """Number of sets a."""
        ...

    def sums(self, values: Tensor) -> Tensor:
        """Sum of ``values`` (n, u) over the members of each set, (a, u)."""
        ...

    def member(self, index: int | Tensor) -> Tensor:
        """Membership of every example in one set, bool (n,)."""
        ...

    def name(self, index: int) -> str:
        """Name of one set."""
        ...


def violations(
    who: Tensor | Cells | Structured,
    s: Tensor,
    what: Tensor | None = None,
    weight: Tensor | None = None,
    num_sets: int | None = None,
) -> Tensor:
    r"""Violation of every test function :math:`g = 1_A v` at once.

    .. math:: V_{ak} = \frac{\sum_i w_i 1\{x_i \in A_a\} \langle s_i, v_k \rangle}{\sum_i w_i}

    Two matrix products when membership is dense; one scatter-add over cells, whatever the number of sets, when it
    is passed by cell; a few dozen passes over the rows for all intersections of many columns. Scatter sums on a GPU are
    not bitwise reproducible.

    Args:
        who: one of

            - bool or 0/1 membership, shape ``(n, a)``; sets may overlap; or fractional, numbers m from 0 to 1: then the
              violation is :math:`E[m_a \langle s, v_k \rangle]`;
            - int64 ids, shape ``(n,)``, when the sets partition the examples (pass ``num_sets`` to avoid reading
              the largest id back from the device);
            - :class:`Cells`, when many examples share one membership pattern;
            - :class:`torchgmc.Groups`: all intersections of many columns by counting, without a membership table;
            - general test functions :math:`g_j(f(x_i), x_i)`, floating point, shape ``(n, a, l)``: the dense fallback,
              evaluated in chunks. ``what`` must then be omitted and the result has shape ``(a, 1)``.
        s: values of the mapping, shape ``(n, l)``, or ``(n,)`` for l = 1.
        what: directions :math:`v_k`, shape ``(u, l)``; the identity if omitted.
        weight: weight of each example, shape ``(n,)``, or ``(n, u)`` when each direction has its own distribution of
            examples (an image without pixels of class k has weight 0 for class k). Ones if omitted.
        num_sets: number of sets when ``who`` is ids.

    Returns:
        Shape ``(a, u)``, signed. 0 for a set without examples, and for n = 0.

    Example:
        >>> who = torch.tensor([[1, 0], [1, 1], [1, 1]])
        >>> violations(who, torch.tensor([0.3, -0.6, 0.0]))
        tensor([[-0.1000],
                [-0.2000]])
        >>> groups = gmc.Groups.from_columns({"sex": ["f", "m", "f"], "site": [3, 3, 7]}, intersections=2)
        >>> violations(groups, torch.tensor([0.3, -0.6, 0.0])).T
        tensor([[ 0.1000, -0.2000, -0.1000,  0.0000,  0.1000,  0.0000, -0.2000]])
    """
    s = _check_mapping(s)
    _check_rows(who, s)
    if isinstance(who, Tensor) and who.dim() == 3:
        if what is not None:
            raise ValueError("do not pass `what` when `who` holds general test functions of shape (n, a, l).")
        return _general(who, s, weight)
    if what is not None:
        if not isinstance(what, Tensor) or what.layout != torch.strided or what.is_complex() or what.device != s.device:
            raise TypeError(f"`what` must be a dense tensor of real numbers on {s.device}, got {_kind(what)}.")
        if what.dim() != 2 or what.shape[1] != s.shape[1]:
            raise ValueError(f"`what` must have shape (u, {s.shape[1]}) because `s` has l = {s.shape[1]}, got {what.shape}.")
        s = s @ what.to(s.dtype).T  # (n, u)
    weight = _check_weight(weight, s)
    total = weight.sum(0).clamp_min(torch.finfo(s.dtype).tiny)  # () or (u,)
    return sums(who, s * (weight if weight.dim() == 2 else weight[:, None]), num_sets) / total


def masses(who: Tensor | Cells | Structured, weight: Tensor | None = None, num_sets: int | None = None) -> Tensor:
    r"""Share of each set, :math:`P(A) = \sum_i w_i 1\{x_i \in A\} / \sum_i w_i`.

    ``who``: as in :func:`violations` (not the general form). ``weight``: shape ``(n,)`` or ``(n, u)``. ``num_sets``: number of
    sets when ``who`` is ids. Returns: Shape ``(a,)``, or ``(a, u)`` for weights per direction.

    Example:
        >>> masses(torch.tensor([[True, False], [True, True]]))
        tensor([1.0000, 0.5000], dtype=torch.float64)
    """
    if weight is None:
        n, device = _rows(who)
        weight = torch.ones(n, dtype=torch.float64, device=device)
    flat = weight.dim() == 1
    table = sums(who, weight[:, None] if flat else weight, num_sets)  # (a, u)
    share = table / weight.sum(0).clamp_min(torch.finfo(weight.dtype).tiny)
    return share[:, 0] if flat else share


def sums(who: Tensor | Cells | Structured, values: Tensor, num_sets: int | None = None) -> Tensor:
    """Sum of ``values`` (n, u) over the members of each set: (a, u)."""
    if isinstance(who, Cells):
        by_cell = values.new_zeros(who.patterns.shape[0], values.shape[1]).index_add_(0, who.ids, values)
        return who.patterns.to(values.dtype).T @ by_cell
    if not isinstance(who, Tensor):
        return who.sums(values)
    if who.dim() == 1:
        if num_sets is None:
            num_sets = int(who.max()) + 1 if who.numel() else 0
        flat = values.T
        if flat.device.type == "cpu" and flat.is_contiguous():  # half the time
            return values.new_zeros(len(flat), num_sets).scatter_add_(1, who.long().expand_as(flat), flat).T
        return values.new_zeros(num_sets, values.shape[1]).index_add_(0, who, values)
    return who.to(values.dtype).T @ values


def _general(g: Tensor, s: Tensor, weight: Tensor | None) -> Tensor:
    """E<s, g_j> for general vector-valued g of shape (n, a, l), in chunks of bounded size."""
    if g.shape[2] != s.shape[1]:
        raise ValueError(f"`who` of shape (n, a, l) must have l = {s.shape[1]} as in `s`, got {tuple(g.shape)}.")
    weight = _check_weight(weight, s)
    if weight.dim() == 2:
        raise ValueError("`weight` must have shape (n,) when `who` holds general test functions.")
    total = s.new_zeros(g.shape[1])
    rows = max(1, MAX_ELEMENTS // max(1, g.shape[1] * g.shape[2]))
    for start in range(0, s.shape[0], rows):
        part = slice(start, start + rows)
        total = total + torch.einsum("nal,nl->a", g[part].to(s.dtype), s[part] * weight[part, None])
    return (total / weight.sum().clamp_min(torch.finfo(s.dtype).tiny))[:, None]


def _kind(value: object) -> str:
    return f"{value.dtype}, {value.layout} on {value.device}" if isinstance(value, Tensor) else type(value).__name__


def _check_mapping(s: Tensor) -> Tensor:
    s = checks.tensor_of(s)
    if not isinstance(s, Tensor):
        raise TypeError(f"`s` must be a tensor of values of the mapping, got {type(s).__name__}.")
    if s.layout != torch.strided:
        raise TypeError(f"`s` must be a dense tensor, got {s.layout}; use `.to_dense()`.")
    if not s.is_floating_point():
        raise TypeError(f"`s` must be floating point, got {s.dtype}; convert it with `s.float()`.")
    if s.dim() == 1:
        s = s[:, None]
    if s.dim() != 2:
        raise ValueError(f"`s` must have shape (n, l) or (n,), got {tuple(s.shape)}.")
    return s


def _rows(who: Tensor | Cells | Structured) -> tuple[int, torch.device]:
    """Number of examples, and their device."""
    if isinstance(who, Cells):
        return who.ids.shape[0], who.ids.device
    return (who.shape[0] if isinstance(who, Tensor) else who.num_rows), who.device


def _check_rows(who: Tensor | Cells | Structured, s: Tensor) -> None:
    if isinstance(who, Cells):
        if who.ids.dim() != 1 or who.patterns.dim() != 2:
            raise ValueError(f"`who` as Cells must be (n,) and (c, a), got {tuple(who.ids.shape)} and {tuple(who.patterns.shape)}.")
    elif isinstance(who, Tensor):
        if who.is_complex() or who.layout != torch.strided:
            raise TypeError(f"`who` must be a dense table of memberships, got {who.dtype}, {who.layout}.")
        if who.dim() == 1 and (who.is_floating_point() or who.dtype == torch.bool):
            raise TypeError(f"`who` of shape (n,) must hold integer cell ids, got {who.dtype}; one set is a column: who[:, None].")
        if who.dim() not in (1, 2, 3):
            raise ValueError(f"`who` must have shape (n, a), (n,) or (n, a, l), got {tuple(who.shape)}.")
    elif not isinstance(who, Structured):
        raise TypeError(f"`who` must be a tensor, Cells or Groups, got {type(who).__name__}.")
    n, device = _rows(who)
    if n != s.shape[0]:
        raise ValueError(f"`who` has {n} rows but `s` has {s.shape[0]}; both need one row per example.")
    if device != s.device:
        raise ValueError(f"`who` is on {device} but `s` is on {s.device}; move them to one device.")


def _check_weight(weight: Tensor | None, s: Tensor) -> Tensor:
    if weight is None:
        return s.new_ones(s.shape[0])
    if not isinstance(weight, Tensor) or weight.layout != torch.strided or weight.is_complex() or weight.device != s.device:
        raise TypeError(f"`weight` must be a dense tensor of real numbers on {s.device}, got {_kind(weight)}.")
    if weight.shape not in (s.shape[:1], s.shape):
        raise ValueError(f"`weight` must have shape ({s.shape[0]},) or {tuple(s.shape)}, got {tuple(weight.shape)}.")
    return weight.to(s.dtype)
