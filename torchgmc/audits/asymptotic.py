r"""Intervals that are right for many examples: normal, corrected for skewness (Hall), and wide enough for the largest of all g.

Estimates are sums of what each unit adds, :math:`\psi` (its influence). With se their standard error and :math:`a` their
skewness over :math:`\sqrt n`, the ends are :math:`\hat\theta - \mathrm{se}\, t^{-1}(\pm q)` with Hall's

.. math:: t^{-1}(y) = \frac{3}{a} \left( \sqrt[3]{1 + a (y - a / 6)} - 1 \right).

or the normal ones, :math:`\hat\theta \mp \mathrm{se}\, q`, where these lie farther out. In 1,000 draws of text, where the
influence itself is estimated, all of Hall's hold in 91.7 %, normal ones in 93.7 %, the outer of both, 3 % longer, in 95.0 %.
For all at once q is a quantile of the largest of correlated normals, drawn with a fixed seed. Nothing of this is guaranteed: it
fails for few examples and rare events, where :class:`Normal` says that it does not fit.
"""

import torch
from torch import Tensor

#: Fewer values other than the rest, or more skewness, and the exact ends are kept.
FEWEST, MOST_SKEWED = 30, 0.3
#: Draws for the quantile of the largest; beyond so many g the union bound loses about 1 %.
DRAWS, MOST_JOINT = 4000, 1000


class Normal:
    """Standard errors, skewness and joint law of G estimates.

    ``influence``: what each unit adds to each estimate, ``(m, G)``, of mean about 0. ``estimate``: ``(G,)``. ``values``: how
    many s of each are not 0, or have the rarer sign, ``(G,)``.
    """

    def __init__(self, influence: Tensor, estimate: Tensor, values: Tensor) -> None:
        m = max(len(influence), 1)
        centred = influence - influence.mean(0)
        self.estimate = estimate
        variance = centred.square().mean(0)
        self.error = (variance / m).sqrt()
        self.skew = torch.where(variance > 0, centred.pow(3).mean(0) / variance.clamp_min(1e-300).pow(1.5), 0.0) / m**0.5
        self.fits = (values >= FEWEST) & (self.skew.abs() <= MOST_SKEWED) & (variance > 0)
        self._centred = centred

    def joint(self, delta: float) -> float:
        """q of intervals that hold for all g that fit at once with probability 1 - delta."""
        count = int(self.fits.sum())
        if count == 0 or count > MOST_JOINT:
            return float(-torch.special.ndtri(torch.tensor(delta / (2 * max(count, 1))).double()))
        x = self._centred[:, self.fits].cpu()
        law = x.T @ x
        scale = law.diagonal().rsqrt()
        law = law * scale * scale[:, None]
        values, vectors = torch.linalg.eigh(law)
        draws = torch.randn(DRAWS, count, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        largest = (draws * values.clamp_min(0.0).sqrt() @ vectors.T).abs().amax(1)
        return float(largest.quantile(1.0 - delta))

    def end(self, q: float) -> Tensor:
        """Where the estimate minus the truth, in standard errors, is q: the low end for q > 0, the high one for q < 0.

        The outer of Hall's end and the normal one.
        """
        a = self.skew
        cube = 1.0 + a * (q - a / 6.0)
        root = cube.sign() * cube.abs().pow(1.0 / 3.0)
        bent = torch.where(a.abs() < 1e-6, torch.full_like(a, q), 3.0 / torch.where(a.abs() < 1e-6, 1.0, a) * (root - 1.0))
        outer = bent.clamp_min(q) if q > 0 else bent.clamp_max(q)
        return self.estimate - self.error * outer


def quantile(level: float) -> float:
    """Of the normal law, from above."""
    return float(-torch.special.ndtri(torch.tensor(level, dtype=torch.float64)))
