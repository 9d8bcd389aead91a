"""Face-like pictures with overlapping groups, drawn on the fly.

No photograph and no person is involved: a picture is a stack of soft ellipses whose sizes, colours and light are random.
The groups describe the *picture* (light, glasses, pose), overlap, differ in size, and make the face harder to see where
they meet: a profile in dim light is harder than either alone. So a segmentation model's miss rate truly differs by group.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchgmc.engine.modes import calm

GROUPS: tuple[str, ...] = ("everyone", "dim light", "glasses", "profile", "low contrast", "headwear")
"""Names of the columns of :attr:`Faces.groups`."""

CHUNK = 64  # pictures drawn at once: bounds the memory, and keeps one layer of a chunk in the cache

SKIN = ((0.97, 0.82, 0.72), (0.90, 0.70, 0.56), (0.76, 0.55, 0.41), (0.58, 0.39, 0.28), (0.40, 0.26, 0.19))
HAIR = ((0.10, 0.08, 0.08), (0.26, 0.16, 0.10), (0.45, 0.28, 0.14), (0.74, 0.57, 0.31), (0.62, 0.61, 0.60))
BACKDROP = ((0.36, 0.52, 0.66), (0.45, 0.60, 0.44), (0.62, 0.58, 0.70), (0.30, 0.36, 0.44), (0.78, 0.78, 0.74))
CLOTH = ((0.18, 0.28, 0.46), (0.52, 0.18, 0.22), (0.20, 0.42, 0.38), (0.30, 0.30, 0.34), (0.70, 0.66, 0.52))


class Faces(NamedTuple):
    """Pictures, the pixels of the face, and who belongs to which group.

    Attributes:
        images: shape ``(n, 3, size, size)``, float32 in [0, 1].
        masks: shape ``(n, size, size)``, bool; skin of the face with eyes, mouth and glasses, without hair, hat and neck.
        groups: shape ``(n, 6)``, bool; columns as in :data:`GROUPS`, they overlap.
    """

    images: Tensor
    masks: Tensor
    groups: Tensor


def draw(num: int, size: int = 64, *, seed: int = 0, prevalence: float = 1.0) -> Faces:
    """Draws pictures of faces; the same arguments always give the same pictures.

    Args:
        num: number of pictures :math:`n`, 0 allowed.
        size: height and width in pixels.
        seed: of the :class:`torch.Generator`; torch's global generator is neither read nor moved.
        prevalence: scales the chance of every group but "everyone"; below 1 as in an archive that has few of them.

    Example:
        >>> faces = draw(4, size=16)
        >>> faces.images.shape, faces.masks.dtype, faces.groups.shape
        (torch.Size([4, 3, 16, 16]), torch.bool, torch.Size([4, 6]))
    """
    if num < 0 or size < 8:
        raise ValueError(f"`num` must be >= 0 and `size` >= 8, got {num} and {size}.")
    generator = torch.Generator().manual_seed(seed)
    images, masks = torch.empty(num, 3, size, size), torch.empty(num, size, size, dtype=torch.bool)
    groups = _groups(num, prevalence, generator)
    with calm():
        for start in range(0, num, CHUNK):
            part = slice(start, start + CHUNK)
            images[part], masks[part] = _paint(groups[part], size, generator)
    return Faces(images, masks, groups)


def _groups(num: int, prevalence: float, generator: torch.Generator) -> Tensor:
    """Membership, shape ``(n, 6)``: low contrast is commoner in dim light, headwear rarer with glasses."""
    chance = torch.rand(num, 5, generator=generator) / max(prevalence, 1e-9)
    dim, glasses, profile = chance[:, 0] < 0.24, chance[:, 1] < 0.32, chance[:, 2] < 0.17
    faint = chance[:, 3] < torch.where(dim, 0.20, 0.10)
    hat = chance[:, 4] < torch.where(glasses, 0.06, 0.16)
    return torch.stack([torch.ones_like(dim), dim, glasses, profile, faint, hat], dim=1)


class _Dice:
    """Random numbers of one chunk, shaped ``(n, 1, 1)`` to meet a picture's pixels."""

    def __init__(self, num: int, generator: torch.Generator) -> None:
        self.num, self.generator = num, generator

    def between(self, low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(self.num, 1, 1, generator=self.generator)

    def colour(self, palette: tuple[tuple[float, ...], ...], spread: float = 0.04) -> Tensor:
        """A palette colour with some variation, shape ``(n, 3, 1, 1)``."""
        pick = torch.randint(len(palette), (self.num,), generator=self.generator)
        jitter = spread * torch.randn(self.num, 3, generator=self.generator)
        return (torch.tensor(palette)[pick] + jitter).clamp(0.02, 1)[:, :, None, None]

    def texture(self, cells: int, size: int, channels: int = 1) -> Tensor:
        """Smooth noise of unit size, shape ``(n, channels, size, size)``: a coarse grid of noise, enlarged."""
        coarse = torch.randn(self.num, channels, cells, cells, generator=self.generator)
        return F.interpolate(coarse, (size, size), mode="bicubic", align_corners=False)


class _Frame(NamedTuple):
    """Coordinates of every pixel in the head's own frame: the head is the unit disc, ``v`` grows downwards."""

    u: Tensor  # (n, S, S)
    v: Tensor  # (n, S, S)
    sharp: Tensor  # (n, 1, 1): pixels per unit, sets how soft an edge is

    def ellipse(self, cu: Tensor | float, cv: Tensor | float, ru: Tensor | float, rv: Tensor | float) -> Tensor:
        """Coverage in [0, 1] of each pixel by an ellipse, edges one pixel soft."""
        radius = torch.hypot((self.u - cu) / ru, (self.v - cv) / rv)
        scale = torch.as_tensor(rv if isinstance(rv, Tensor) or isinstance(ru, Tensor) else min(ru, rv))
        return self._edge((1 - radius) * scale)

    def above(self, level: Tensor) -> Tensor:
        """Coverage of the half plane over a curve ``v = level``."""
        return self._edge(level - self.v)

    def _edge(self, depth: Tensor) -> Tensor:
        return (depth * self.sharp + 0.5).clamp(0, 1)


def _frame(dice: _Dice, size: int) -> _Frame:
    axis = (torch.arange(size) + 0.5) / size * 2 - 1
    y, x = axis[:, None], axis[None, :]
    width, height = dice.between(0.36, 0.48), dice.between(0.50, 0.62)
    dx, dy = x - dice.between(-0.16, 0.16), y - dice.between(-0.12, 0.10)
    tilt = dice.between(-0.24, 0.24)
    u = (dx * tilt.cos() + dy * tilt.sin()) / width
    v = (dy * tilt.cos() - dx * tilt.sin()) / height
    return _Frame(u, v, height * size / 2)


def _over(canvas: Tensor, colour: Tensor, coverage: Tensor) -> None:
    """Paints a colour ``(n, 3, 1, 1)`` or ``(n, 3, S, S)`` over the canvas where the coverage ``(n, S, S)`` says."""
    canvas.lerp_(colour.expand_as(canvas), coverage.unsqueeze(1).expand_as(canvas))


def _paint(groups: Tensor, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draws one chunk, back to front: backdrop, clothes, hair, face, features, hat, then light and noise."""
    _, dim, glasses, profile, faint, hat = groups.float()[:, :, None, None].unbind(1)  # each (n, 1, 1)
    dice = _Dice(len(groups), generator)
    frame = _frame(dice, size)
    side = dice.between(-1, 1).sign()  # where a profile looks
    turn = side * (0.52 * profile + dice.between(0, 0.10))  # shift of the features
    skin, hair, cloth = dice.colour(SKIN), dice.colour(HAIR), dice.colour(CLOTH)
    hair = torch.lerp(hair, skin, 0.60 * faint.unsqueeze(1))

    canvas = _backdrop(dice, size, skin, faint.unsqueeze(1))
    length = dice.between(0.1, 1.1)
    _over(canvas, hair * 0.85, frame.ellipse(-0.25 * side * profile, -0.10 + 0.45 * length, 1.16, 1.06 + 0.30 * length))
    _over(canvas, skin * 0.66, frame.ellipse(-0.15 * side * profile, 1.05, 0.46, 0.55))  # neck, in the chin's shadow
    _over(canvas, cloth, frame.ellipse(0.0, 2.05, 1.65, 0.95))

    face = frame.ellipse(0.0, 0.0, 1.0, 1.0)
    nose_tip = frame.ellipse(0.98 * side, 0.12, 0.20, 0.16) * profile
    face = torch.maximum(face, nose_tip)
    _over(canvas, skin, face)
    _features(canvas, frame, dice, skin, hair, turn, profile, side)

    fringe = _fringe(frame, dice, side, profile)
    _over(canvas, hair, fringe)
    _glasses(canvas, frame, dice, turn, profile, glasses)
    brim = -0.42 + 0.06 * dice.between(-1, 1)
    crown = torch.maximum(frame.ellipse(0.0, -0.62, 1.12, 0.62) * frame.above(brim), frame.ellipse(0.2 * side, brim, 1.30, 0.11))
    _over(canvas, dice.colour(CLOTH) * 0.9, crown * hat)
    shade = 1 - 0.40 * hat * (1 - crown) * (1.6 - 2 * (frame.v - brim)).clamp(0, 1)  # a brim throws a soft shadow

    _light(canvas, frame, dice, face, shade, dim, profile, side, faint)
    visible = face * (1 - fringe) * (1 - crown * hat)
    return canvas, visible > 0.5


def _backdrop(dice: _Dice, size: int, skin: Tensor, faint: Tensor) -> Tensor:
    """A textured wall; where the contrast is low it takes the colour of the skin."""
    wall = dice.colour(BACKDROP, 0.06)
    near = dice.between(0.80, 1.0).unsqueeze(1)
    wall = torch.lerp(wall, skin, faint * near)
    texture = 0.025 * dice.texture(4, size, 3) + 0.05 * dice.texture(6, size) + 0.03 * dice.texture(16, size)
    return wall + texture


def _features(
    canvas: Tensor,
    frame: _Frame,
    dice: _Dice,
    skin: Tensor,
    hair: Tensor,
    turn: Tensor,
    profile: Tensor,
    side: Tensor,
) -> None:
    """Eyes, brows, nose and mouth; in profile the far eye is hidden."""
    white, dark = torch.full_like(skin, 0.93), dice.colour(((0.20, 0.13, 0.08), (0.18, 0.30, 0.42), (0.20, 0.32, 0.20)))
    lips = skin * torch.tensor([0.86, 0.56, 0.56])[:, None, None]
    gap, level = dice.between(0.36, 0.44) * (1 - 0.25 * profile), dice.between(-0.16, -0.06)
    for eye in (-1.0, 1.0):
        seen = 1 - profile * (eye * side > 0)  # the far eye lies beyond the bridge of the nose
        at = turn + eye * gap
        _over(canvas, white, frame.ellipse(at, level, 0.17, 0.085) * seen)
        _over(canvas, dark, frame.ellipse(at + 0.12 * turn, level, 0.075, 0.075) * seen)
        _over(canvas, hair * 0.8, frame.ellipse(at, level - 0.20, 0.21, 0.045) * seen)
    _over(canvas, skin * 0.80, frame.ellipse(turn * 1.25, 0.22, 0.10, 0.15) * 0.7)
    smile = dice.between(0.04, 0.11)
    _over(canvas, lips, frame.ellipse(turn * 1.1, 0.54, dice.between(0.22, 0.34), smile))


def _fringe(frame: _Frame, dice: _Dice, side: Tensor, profile: Tensor) -> Tensor:
    """Hair in front of the face: a curved hairline, and the back of the head in profile."""
    level = dice.between(-0.72, -0.42) + dice.between(-0.25, 0.25) * frame.u + 0.16 * frame.u.square()
    cap = frame.ellipse(0.0, -0.06, 1.13, 1.10) * frame.above(level)
    back = frame.ellipse(-0.82 * side, -0.20, 0.62, 0.92) * profile
    return torch.maximum(cap, back)


def _glasses(canvas: Tensor, frame: _Frame, dice: _Dice, turn: Tensor, profile: Tensor, glasses: Tensor) -> None:
    """Two tinted lenses with a rim, and a bridge."""
    rim, tint = dice.colour(((0.06, 0.06, 0.07), (0.30, 0.20, 0.12), (0.45, 0.45, 0.48))), dice.between(0.25, 0.85)
    lens = dice.colour(((0.08, 0.09, 0.12), (0.22, 0.17, 0.12), (0.60, 0.68, 0.74)))
    for eye in (-1.0, 1.0):
        at = turn + eye * 0.42 * (1 - 0.25 * profile)
        outer, inner = frame.ellipse(at, -0.10, 0.35, 0.25), frame.ellipse(at, -0.10, 0.28, 0.19)
        _over(canvas, rim, (outer - inner).clamp(0, 1) * glasses)
        _over(canvas, lens, inner * tint * glasses)
    _over(canvas, rim, frame.ellipse(turn, -0.13, 0.16, 0.045) * glasses)


def _light(
    canvas: Tensor,
    frame: _Frame,
    dice: _Dice,
    face: Tensor,
    shade: Tensor,
    dim: Tensor,
    profile: Tensor,
    side: Tensor,
    faint: Tensor,
) -> None:
    """Shades the head as a ball, dims the scene, and adds the noise of the sensor, stronger in the dark."""
    lamp = dice.between(-0.8, 0.8)
    depth = (1 - frame.u.square() - frame.v.square()).clamp(min=0).sqrt()
    ball = 0.80 + 0.22 * depth + 0.20 * lamp * frame.u.clamp(-1, 1) - 0.10 * frame.v.clamp(-1, 1)
    ball = ball - profile * (1 - 0.5 * dim) * 0.12 * (1 - side * lamp)  # a profile turned from the lamp loses light
    ball = ball + (1 - ball) * 0.6 * faint  # flat light
    gain = (1 - dim) + dim * dice.between(0.36, 0.58)
    light = torch.lerp(1 + 0.18 * lamp * frame.u.clamp(-2, 2) * 0.5, ball * shade, face) * gain
    canvas.mul_(light.unsqueeze(1))
    sigma = 0.03 + 0.04 * dim + dice.between(0, 0.02)
    canvas.add_(sigma.unsqueeze(1) * torch.randn(canvas.shape, generator=dice.generator)).clamp_(0, 1)
