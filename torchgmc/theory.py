r"""What Theorems 1 and 2 promise: step size, number of iterations, number of samples.

Notation: :math:`s` is the gradient of a :math:`K`-smooth potential :math:`L` that the projection does not increase,
:math:`E\|g\|^2 \le B` for every test function, :math:`C_l \le L` and :math:`L(f_0) \le C_u`. One update with a
violation :math:`v = E\langle s, g \rangle` lowers the potential by at least

.. math:: \eta v - \tfrac{1}{2} \eta^2 K B.

Algorithm 1 updates when :math:`v > \alpha`, so :math:`\eta = \alpha/(KB)` is best and gains :math:`\alpha^2/(2KB)`.
Algorithm 2 updates when the *measured* violation exceeds :math:`\tfrac{3}{4}\alpha`; measured within
:math:`\alpha/4`, the true one exceeds :math:`\alpha/2`. The best step is then :math:`\alpha/(2KB)` and gains
:math:`\alpha^2/(8KB)`. Theorem 1's step would be guaranteed nothing there: its gain is
:math:`\alpha^2/(2KB) - \alpha^2/(2KB) = 0`.
"""

import math
from typing import NamedTuple

__all__ = [
    "Constants", "distribution_constants", "iteration_bound", "sample_size", "split_size", "step_size",
    "threshold_constants",
]  # fmt: skip


class Constants(NamedTuple):
    """The constants K, B and C_u - C_l of one problem, in the order `iteration_bound` takes them.

    Example:
        >>> constants = Constants(smoothness=2.0, bound=0.5, gap=1.0)
        >>> iteration_bound(0.1, *constants)
        200
    """

    smoothness: float
    bound: float
    gap: float


def step_size(alpha: float, smoothness: float, bound: float, finite_sample: bool = False) -> float:
    r"""Step size of Algorithm 1, or of Algorithm 2 with ``finite_sample``.

    .. math:: \eta = \frac{\alpha}{K B} \qquad\text{or}\qquad \eta = \frac{\alpha}{2 K B}

    Args:
        alpha: tolerance :math:`\alpha > 0`.
        smoothness: :math:`K > 0` of the potential.
        bound: :math:`B > 0`, at least :math:`E\|g\|^2` for every test function.
        finite_sample: the step of Algorithm 2, which knows violations to within :math:`\alpha/4` only.

    Example:
        >>> step_size(0.005, smoothness=5.0, bound=0.5)
        0.002
        >>> step_size(0.005, smoothness=5.0, bound=0.5, finite_sample=True)
        0.001
    """
    _positive(alpha=alpha, smoothness=smoothness, bound=bound)
    return alpha / (smoothness * bound) / (2 if finite_sample else 1)


def iteration_bound(alpha: float, smoothness: float, bound: float, gap: float, finite_sample: bool = False) -> int:
    r"""Number of iterations T within which the algorithm stops when it steps by :func:`step_size`.

    .. math:: T = \Big\lceil \frac{2 K B (C_u - C_l)}{\alpha^2} \Big\rceil
        \qquad\text{or}\qquad T = \Big\lceil \frac{8 K B (C_u - C_l)}{\alpha^2} \Big\rceil

    Every update gains strictly more than the denominator allows, so at most T - 1 updates are made when
    :math:`C_u > C_l`, and the T-th search finds nothing left to do.

    Args:
        alpha, smoothness, bound: as in :func:`step_size`.
        gap: :math:`C_u - C_l \ge 0`, how far the potential can fall from its start.
        finite_sample: the bound of Algorithm 2; at least 1, because it must measure once.

    Example:
        >>> iteration_bound(0.1, smoothness=1.0, bound=0.5, gap=0.5)
        50
        >>> iteration_bound(0.1, smoothness=1.0, bound=0.5, gap=0.5, finite_sample=True)
        200
    """
    _positive(alpha=alpha, smoothness=smoothness, bound=bound)
    if not (0 <= _number("gap", gap) <= 1e50):
        raise ValueError(f"`gap` must be C_u - C_l >= 0 and finite, got {gap}.")
    steps = (8 if finite_sample else 2) * smoothness * bound * gap / alpha**2
    # An exact quotient must not be rounded up because of its last bit; the T-th iteration is spare, so this is safe.
    return max(math.ceil(steps * (1 - 1e-12)), int(finite_sample))


def split_size(
    alpha: float, delta: float, num_functions: int, iterations: int = 1, magnitude: float = 1.0, functional: bool = False
) -> int:
    r"""Samples in each split of Algorithm 2, so that every violation is measured within :math:`\alpha/4`.

    With :math:`|\langle s, g \rangle| \le M`, Hoeffding's inequality for one g at one iteration gives
    :math:`P(\text{error} > \epsilon) \le 2 \exp(-m \epsilon^2 / (2 M^2))`. At :math:`\epsilon = \alpha/4`, over
    :math:`|G|` functions and T iterations (each uses fresh samples, so f is fixed when they are drawn),

    .. math:: m = \Big\lceil \frac{2 M^2}{(\alpha/4)^2} \log \frac{2 |G| T}{\delta} \Big\rceil.

    That is the paper's :math:`C_1 (d(G) + \log(T/\delta))/(\alpha/4)^2` with :math:`C_1 = 2 M^2` and
    :math:`d(G) = \log(2|G|)` (its appendix prints :math:`2|G|`).

    If s is a functional, that is, it holds an expectation that is taken over the second split (as in
    :math:`s = p - E p`), that split errs too. For s affine in the expectation the measured violation is unbiased, and
    each of the 2m samples can change it by at most :math:`2M/m`; McDiarmid's inequality then doubles m:

    .. math:: m = \Big\lceil \frac{4 M^2}{(\alpha/4)^2} \log \frac{2 |G| T}{\delta} \Big\rceil.

    Args:
        alpha: tolerance :math:`\alpha > 0`.
        delta: allowed probability of failure, in (0, 1).
        num_functions: :math:`|G|`, counted up to sign: groups times directions. The 2 in the logarithm is for the sign.
        iterations: T, for example from :func:`iteration_bound` with ``finite_sample=True``.
        magnitude: M, a bound on :math:`|\langle s, g \rangle|`; the paper's :math:`A C_2`. For a functional,
            :math:`\langle b, g \rangle` of the averaged term b must lie within it too.
        functional: whether s holds an expectation over the data.

    Example:
        >>> split_size(0.1, delta=0.05, num_functions=4)
        16241
    """
    _positive(alpha=alpha, magnitude=magnitude)
    if not 0 < _number("delta", delta) < 1:
        raise ValueError(f"`delta` must be a probability in (0, 1), got {delta}.")
    for name, value in {"num_functions": num_functions, "iterations": iterations}.items():
        if not 1 <= _number(name, value) <= 1e50 or value != int(value):
            raise ValueError(f"`{name}` must be a whole number >= 1, got {value}.")
    variance = (4 if functional else 2) * magnitude**2
    return math.ceil(variance / (alpha / 4) ** 2 * math.log(2 * num_functions * iterations / delta))


def sample_size(
    alpha: float, delta: float, num_functions: int, iterations: int = 1, magnitude: float = 1.0, functional: bool = False
) -> int:
    r"""Total number of samples that Algorithm 2 needs: 2T splits of :func:`split_size` each.

    .. math:: 2T \Big\lceil \frac{2 M^2}{(\alpha/4)^2} \log \frac{2 |G| T}{\delta} \Big\rceil

    (4 in place of the second 2 for a functional.) With that many, every g has a violation of at most
    :math:`\alpha` in the population, with probability at least :math:`1 - \delta`. Algorithm 2 draws 2T splits whether
    or not s uses the second of each pair; if it does not, T splits of :func:`split_size` carry the same guarantee.

    Args:
        alpha, delta, num_functions, iterations, magnitude, functional: as in :func:`split_size`.

    Example:
        >>> sample_size(0.1, delta=0.05, num_functions=4, iterations=50)
        2876000
    """
    return 2 * split_size(alpha, delta, num_functions, iterations, magnitude, functional) * int(iterations)


def threshold_constants(target: float, density: float, span: float, mass: float = 1.0) -> Constants:
    r"""Constants for the miss rate of a threshold (:math:`s = FN(\lambda) - \sigma`, section 3.3 of the paper).

    The potential is the pinball loss. Its second derivative is the density of the scores of positives, so K bounds that
    density; :math:`g = \pm 1_A`, so :math:`B = \max_A P(A)`; its slope is within :math:`\max(\sigma, 1 - \sigma)`,
    so it falls by at most that times the distance from start to optimum. The theorem is printed with
    :math:`T \sim 1/\alpha`; with these constants Theorem 1 gives :math:`1/\alpha^2`.

    Args:
        target: the rate :math:`\sigma`, in (0, 1).
        density: bound on the density of positive scores given x. Uniform noise of half-width j makes it at most
            :math:`1/(2j)`.
        span: bound on the distance from the first threshold to the best ones.
        mass: probability of the largest group, in (0, 1].

    Example:
        >>> threshold_constants(0.25, density=5.0, span=2.0)
        Constants(smoothness=5.0, bound=1.0, gap=1.5)
    """
    _positive(density=density, span=span)
    if not 0 < _number("target", target) < 1:
        raise ValueError(f"`target` must be a rate in (0, 1), got {target}.")
    return Constants(density, _mass(mass), max(target, 1 - target) * span)


def distribution_constants(list_size: int, mass: float = 1.0) -> Constants:
    r"""Constants for de-biased distributions (:math:`s = p - E p`, section 3.1 of the paper, Euclidean geometry).

    The potential :math:`\tfrac12 E\|p - Ep\|^2` is 1-smooth and lies in :math:`[0, \tfrac12]`;
    :math:`g = \pm 1_A 1_U`, so :math:`B = \max P(A) |U|` (the paper's proof prints 1).

    Args:
        list_size: :math:`|U|` of the longest attribute list.
        mass: probability of the largest group, in (0, 1].

    Example:
        >>> distribution_constants(list_size=20, mass=0.5)
        Constants(smoothness=1.0, bound=10.0, gap=0.5)
    """
    _positive(list_size=list_size)
    return Constants(1.0, _mass(mass) * list_size, 0.5)


def _number(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"`{name}` must be a number, got {type(value).__name__}.")
    return value


def _mass(mass: float) -> float:
    if not 0 < _number("mass", mass) <= 1:
        raise ValueError(f"`mass` must be the probability of the largest group, in (0, 1], got {mass}.")
    return mass


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < _number(name, value) < math.inf:
            raise ValueError(f"`{name}` must be positive and finite, got {value}.")
        if not 1e-50 <= value <= 1e50:  # the formulas square and divide
            raise ValueError(f"`{name}` must lie between 1e-50 and 1e50, got {value}.")
