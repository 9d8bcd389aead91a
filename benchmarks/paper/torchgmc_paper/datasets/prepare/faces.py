"""FASSEG as published (github.com/massimomauro/FASSEG-repository), turned into the compact layout."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from torchgmc.engine.extras import require
from torchgmc.engine.files import write_atomically
from torchgmc_paper.datasets._files import write_table

FOLDER = "FASSEG-repository"
#: What the published files are called below the root.
ORIGINAL = (f"{FOLDER}/V2", f"{FOLDER}/V3")
SIDE = 192
NAMES = ("background", "skin", "hair", "nose", "mouth", "eyes")
COLOURS = np.array([(255, 0, 0), (255, 255, 0), (127, 0, 0), (0, 255, 255), (0, 255, 0), (0, 0, 255)], dtype=np.uint8)
#: A pixel further than this from every colour (blur at a border) takes the class of its neighbours.
FAR = 60.0
#: Labels of another size that do not fit their photographs.
MISFITS = ("+60/personne10250+0+60", "+60/personne11250+0+60", "+60/personne12250+0+60")
#: Linear sRGB to XYZ, and the white of D65.
TO_XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]])
WHITE = np.array([0.95047, 1.0, 1.08883])
Array = np.ndarray[Any, Any]


class Pair(NamedTuple):
    """A photograph and its label map, as published."""

    set: str
    split: str
    image: Path
    label: Path


def twin(path: str) -> str:
    """The photograph of a label map.

    Example:
        >>> twin("V3/Test_labels/+30/a.bmp"), twin("V2/Train_Labels/1.bmp")
        ('V3/Test_RGB/+30/a.bmp', 'V2/Train_RGB/1.bmp')
    """
    return path.replace("_labels/", "_RGB/").replace("_Labels/", "_RGB/")


def pairs(original: Path) -> list[Pair]:
    """All photographs that have a label map, in order."""
    found = []
    for name, version in (("frontal", "V2"), ("multipose", "V3")):
        for split in ("Train", "Test"):
            folder = next((p for p in (original / version).glob(f"{split}_[Ll]abels") if p.is_dir()), None)
            labels = sorted(folder.rglob("*.bmp"), key=lambda p: (str(p.parent), len(p.stem), p.stem)) if folder else []
            for label in labels:
                image = original / twin(label.relative_to(original).as_posix())
                if image.is_file():
                    found.append(Pair(name, split.lower(), image, label))
    return found


def convert(root: Path) -> None:
    """Write ``frontal.npz``, ``multipose.npz`` and ``metadata.csv``.

    Images are scaled to a longest side of 192 (Lanczos; labels nearest) and placed top left. Columns of the
    metadata that need a judgement (alignment of the label map) are not made.
    """
    original, out = root / FOLDER, root / "fasseg"
    found = pairs(original)
    missing = [name for name in ("frontal", "multipose") if name not in {pair.set for pair in found}]
    if missing:
        raise FileNotFoundError(f"{str(original)!r} has no photographs with label maps for {missing[0]!r}; is the copy complete?")
    out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for name in ("frontal", "multipose"):
        images: list[Array] = []
        labels: list[Array] = []
        for pair in found:
            if pair.set != name:
                continue
            row, image, label = read(pair, original)
            if row["included"]:
                row["index"] = len(images)
                images.append(image)
                labels.append(label)
            rows.append(row)
        arrays = stack(images, labels) | {"class_names": np.array(NAMES), "class_rgb": COLOURS}
        write_atomically(out / f"{name}.npz", lambda part, arrays=arrays: _save(part, arrays))  # type: ignore[misc]
    terciles(rows)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    write_table(out / "metadata.csv", {key: [row.get(key, "") for row in rows] for key in columns})


def _save(path: Path, arrays: dict[str, Array]) -> None:
    with path.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def read(pair: Pair, original: Path) -> tuple[dict[str, Any], Array, Array]:
    """Metadata, photograph and classes of one pair."""
    pil = require("PIL.Image", extra="datasets")
    with pil.open(pair.image) as file:
        image = file.convert("RGB")
    with pil.open(pair.label) as file:
        painted = np.asarray(file.convert("RGB"))
    resized = painted.shape[:2] != (image.height, image.width)
    scale = SIDE / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    classes = pil.fromarray(classify(painted)).resize(size, pil.Resampling.NEAREST)
    small, label = np.asarray(image.resize(size, pil.Resampling.LANCZOS)), np.asarray(classes)
    row: dict[str, Any] = {
        "set": pair.set,
        "index": "",
        "split": pair.split,
        "included": int(not pair.image.as_posix().endswith(tuple(f"{name}.bmp" for name in MISFITS))),
    }
    angle = int(pair.image.parent.name) if pair.set == "multipose" else 0
    row["set118"] = int(row["included"] and (pair.set == "frontal" or (pair.split == "test" and abs(angle) in (0, 30))))
    row |= {"pose_angle": angle, "pose_bucket": bucket(angle), "pose_side": ("minus", "none", "plus")[1 + int(np.sign(angle))]}
    person = pair.image.stem.removeprefix("personne") if pair.set == "multipose" else ""
    row |= {"subject": int(person[:2]) if person else "", "series": int(person[2]) if person else ""}
    row |= {key: path.relative_to(original).as_posix() for key, path in (("source", pair.image), ("label_source", pair.label))}
    row |= {"label_resized": int(resized), "orig_w": image.width, "orig_h": image.height, "w": size[0], "h": size[1]}
    return row | measure(small, label), small, label


def bucket(angle: int) -> str:
    """Frontal up to 15 degrees, half to 45, profile beyond."""
    return "frontal" if abs(angle) <= 15 else "half" if abs(angle) <= 45 else "profile"


def classify(painted: Array) -> Array:
    """Classes ``(h, w)`` from the colours of a label map ``(h, w, 3)``."""
    distance = np.linalg.norm(painted[:, :, None].astype(np.float32) - COLOURS.astype(np.float32), axis=3)
    classes = distance.argmin(2).astype(np.int16)
    classes[distance.min(2) > FAR] = -1
    while (classes < 0).any() and (classes >= 0).any():  # outwards from the clean pixels, one pixel per turn
        grown = classes.copy()
        for axis, step in ((0, 1), (0, -1), (1, 1), (1, -1)):
            shifted = np.roll(classes, step, axis)
            edge = [slice(None), slice(None)]
            edge[axis] = slice(0, 1) if step == 1 else slice(-1, None)
            shifted[tuple(edge)] = -1  # nothing comes in from the other side
            grown = np.where((grown < 0) & (shifted >= 0), shifted, grown)
        classes = grown
    result: Array = classes.clip(0).astype(np.uint8)
    return result


def measure(image: Array, label: Array) -> dict[str, float]:
    """Shares of the classes, brightness and colour of the skin."""
    colour = lab(image)
    face = (label == 1) | (label >= 3)
    share = {f"{name}_frac": float((label == k).mean()) for k, name in enumerate(NAMES)}
    tone = skin_tone(colour[erode(label == 1)] if erode(label == 1).any() else colour[label == 1])
    bright = {
        "image_L": float(colour[..., 0].mean()),
        "face_L_std": float(colour[..., 0][face].std()) if face.any() else float("nan"),
    }
    return {key: round(value, 5) for key, value in (tone | share | {"face_frac": float(face.mean())} | bright).items()}


def terciles(rows: list[dict[str, Any]]) -> None:
    """Add in which third of all images, and of its own set, each image is."""
    included = [row for row in rows if row["included"]]
    for name in ("ita", "skin_L", "hair_frac", "image_L"):
        for suffix, members in (
            ("all", [included]),
            ("set", [[row for row in included if row["set"] == part] for part in ("frontal", "multipose")]),
        ):
            for group in members:
                values = np.array([row[name] for row in group], dtype=float)
                edges = np.nanquantile(values, [1 / 3, 2 / 3]) if np.isfinite(values).any() else np.zeros(2)
                for row, third in zip(group, np.searchsorted(edges, values), strict=True):
                    row[f"{name}_tercile_{suffix}"] = min(int(third), 2)  # an image without skin is put last


def stack(images: list[Array], labels: list[Array]) -> dict[str, Array]:
    """Arrays of one size, images top left, 0 and 255 outside."""
    height = max((label.shape[0] for label in labels), default=0)
    width = max((label.shape[1] for label in labels), default=0)
    image = np.zeros((len(labels), height, width, 3), dtype=np.uint8)
    label = np.full((len(labels), height, width), 255, dtype=np.uint8)
    for k, (one, its) in enumerate(zip(images, labels, strict=True)):
        image[k, : its.shape[0], : its.shape[1]] = one
        label[k, : its.shape[0], : its.shape[1]] = its
    return {"image": image, "label": label, "hw": np.array([its.shape for its in labels], dtype=np.int16).reshape(-1, 2)}


# -- colour of the skin in a photograph: uncalibrated, and not a race label ----------------------------------------------------


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
