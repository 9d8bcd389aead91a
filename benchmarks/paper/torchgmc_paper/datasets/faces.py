"""FASSEG: face photographs with six-class label maps (Khan, Mauro, Leonardi 2015; Khan, Mauro, Migliorati, Leonardi 2017)."""

import os
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from torchgmc.engine import checks
from torchgmc_paper.datasets._files import data_root, locate, place, read_npz, read_table, typed
from torchgmc_paper.datasets.prepare import faces as prepare

#: Label of what lies outside the image (images are placed top left).
OUTSIDE = 255
SUBSETS = ("set118", "frontal", "multipose", "all")


class FASSEG(Dataset[tuple[Any, Any]]):
    """Face photographs with label maps, the segmentation data of the paper.

    Images are scaled to a longest side of 192 and placed top left in a square, so that they can be stacked.
    The face (what the miss rate of the paper counts) is skin, nose, mouth and eyes. The paper's annotations of gender and
    race are not public and are not guessed here: groups come from the pose and from what is measured in the pixels.

    Args:
        root: the folder of this data set, or of all data; the environment variable ``TORCHGMC_DATA`` if omitted.
        subset: ``"set118"`` (118 images as in the paper, which does not say which ones, so this choice is a guess),
            ``"frontal"`` (70), ``"multipose"`` (275, 15 subjects) or ``"all"``.
        download: fetch the published files (some hundred MB) from github.com/massimomauro/FASSEG-repository and convert
            them, unless they are already there. The repository has no licence and asks to be cited.
        transform: applied to an image, a uint8 tensor ``(3, 192, 192)``, when it is indexed.
        target_transform: the same for a label map, ``(192, 192)``.

    Attributes:
        images: uint8, ``(n, 3, 192, 192)``; 0 outside the image.
        labels: uint8, ``(n, 192, 192)``; 255 outside the image.
        hw: height and width of each image, ``(n, 2)``.
        metadata: one list per column, see :meth:`groups`.
        class_names: of the labels 0 to 5.

    Example:
        >>> faces = gmc.datasets.FASSEG("data", subset="frontal", download=True)  # doctest: +SKIP
        >>> image, label = faces[0]  # doctest: +SKIP
        >>> who = gmc.Groups.from_columns(faces.groups(["pose_bucket", "ita_tercile_set"]))  # doctest: +SKIP
    """

    class_names = ("background", "skin", "hair", "nose", "mouth", "eyes")

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        subset: str = "set118",
        download: bool = False,
        transform: Callable[[Tensor], Any] | None = None,
        target_transform: Callable[[Tensor], Any] | None = None,
    ) -> None:
        self.subset = checks.option("subset", subset, SUBSETS)
        self.transform, self.target_transform = transform, target_transform
        top = data_root(root)
        self.root = locate(
            top,
            "fasseg",
            ("frontal.npz", "multipose.npz", "metadata.csv"),
            prepare.ORIGINAL,
            lambda: prepare.convert(top),
            "FASSEG faces",
            download,
            packages=["PIL.Image"],
        )
        self._read()

    def _read(self) -> None:
        table = read_table(self.root / "metadata.csv")
        rows = [k for k, included in enumerate(table["included"]) if included == "1" and self._wanted(table, k)]
        kept = {name: [column[k] for k in rows] for name, column in table.items()}
        self.metadata = {name: column if name in ("subject", "series") else typed(column) for name, column in kept.items()}
        sets = {name: read_npz(self.root / f"{name}.npz") for name in dict.fromkeys(self.metadata["set"])}
        side = max((max(part["label"].shape[1:]) for part in sets.values()), default=0)
        images = np.zeros((len(rows), 3, side, side), dtype=np.uint8)
        labels = np.full((len(rows), side, side), OUTSIDE, dtype=np.uint8)
        self.hw = torch.zeros(len(rows), 2, dtype=torch.int64)
        index, member = np.array(self.metadata["index"], dtype=int), np.array(self.metadata["set"])
        for name, part in sets.items():
            here = np.flatnonzero(member == name)
            height, width = part["label"].shape[1:]
            if len(here) and index[here].max() >= len(part["label"]):
                raise ValueError(f"metadata.csv names image {index[here].max()} of {name}.npz, which has {len(part['label'])}.")
            images[here, :, :height, :width] = part["image"][index[here]].transpose(0, 3, 1, 2)
            labels[here, :height, :width] = part["label"][index[here]]
            self.hw[torch.from_numpy(here)] = torch.from_numpy(part["hw"][index[here]].astype(np.int64))
        self.images, self.labels = torch.from_numpy(images), torch.from_numpy(labels)

    def _wanted(self, table: dict[str, list[str]], row: int) -> bool:
        if self.subset == "set118":
            return table["set118"][row] == "1"
        return self.subset in ("all", table["set"][row])

    @cached_property
    def face(self) -> Tensor:
        """Skin, nose, mouth and eyes: bool, ``(n, 192, 192)``."""
        return (self.labels == 1) | ((self.labels >= 3) & (self.labels <= 5))

    @cached_property
    def valid(self) -> Tensor:
        """Pixels inside the image: bool, ``(n, 192, 192)``."""
        height, width = self.labels.shape[1:]
        rows = torch.arange(height)[:, None] < self.hw[:, 0, None, None]
        return rows & (torch.arange(width) < self.hw[:, 1, None, None])

    @cached_property
    def subjects(self) -> Tensor:
        """Who is in the picture, numbered from 0: split by this, not by image.

        Subjects are known for the multipose images; a frontal image counts as a separate person (at least
        one person is in two of them).
        """
        known = [s or f"image {k}" for k, s in enumerate(self.metadata["subject"])]
        order = {name: k for k, name in enumerate(dict.fromkeys(known))}
        return torch.tensor([order[name] for name in known], dtype=torch.int64)

    def groups(self, columns: Sequence[str] = ("pose_bucket", "ita_tercile_set")) -> dict[str, list[Any]]:
        """Columns of the metadata, as :meth:`torchgmc.Groups.from_columns` takes them.

        Among them: ``pose_bucket`` (frontal, half, profile), ``pose_side``, ``set``, ``split`` and, in thirds of this set,
        ``ita_tercile_set`` (skin colour in an uncalibrated photograph, not race), ``hair_frac_tercile_set``,
        ``image_L_tercile_set`` (brightness).
        """
        if isinstance(columns, str):
            columns = [columns]
        if not isinstance(columns, Sequence) or not all(isinstance(name, str) for name in columns):
            raise TypeError(f"`columns` must be a list of names, got {columns!r:.80}.")
        unknown = [name for name in columns if name not in self.metadata]
        if unknown:
            raise ValueError(
                f"`columns` names {unknown[0]!r}, which metadata.csv does not have; it has {', '.join(self.metadata)}."
            )
        return {name: self.metadata[name] for name in columns}

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        index = place(index, len(self))
        image, label = self.images[index], self.labels[index]
        return (
            image if self.transform is None else self.transform(image),
            label if self.target_transform is None else self.target_transform(label),
        )

    def __repr__(self) -> str:
        return f"FASSEG({self.subset!r}: {len(self)} images of {tuple(self.images.shape[2:])}, in {str(self.root)!r})"
