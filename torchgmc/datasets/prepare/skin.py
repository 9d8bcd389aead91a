"""Colour of the skin in a photograph: CIELAB and the individual typology angle. Uncalibrated, and not a race label."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
#: Linear sRGB to XYZ, and the white of D65.
TO_XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]])
WHITE = np.array([0.95047, 1.0, 1.08883])


def lab(image: Array) -> Array:
    """CIELAB of a uint8 sRGB image ``(..., 3)``.

    Example:
        >>> [float(v) + 0.0 for v in lab(np.array([255, 255, 255], dtype=np.uint8)).round(2)]
        [100.0, 0.0, 0.0]
    """
    srgb = image / 255.0
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    xyz = linear @ TO_XYZ.T / WHITE
    root = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    x, y, z = np.moveaxis(root, -1, 0)
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], -1)


def erode(mask: Array, times: int = 2) -> Array:
    """A mask without the pixels at its border."""
    for _ in range(times):
        padded = np.pad(mask, 1)
        mask = padded[1:-1, 1:-1] & padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
    return mask


def skin_tone(pixels: Array) -> dict[str, float]:
    """Median L*, a*, b* between the 10th and 90th percentile of L*, and atan2(L* - 50, b*) in degrees, of pixels ``(n, 3)``."""
    if not len(pixels):
        return dict.fromkeys(("ita", "skin_L", "skin_a", "skin_b"), float("nan"))
    low, high = np.percentile(pixels[:, 0], [10, 90])
    light, a, b = np.median(pixels[(pixels[:, 0] >= low) & (pixels[:, 0] <= high)], 0)
    return {
        "ita": float(np.degrees(np.arctan2(light - 50, b))),
        "skin_L": float(light),
        "skin_a": float(a),
        "skin_b": float(b),
    }
