"""Texts whose labels are the leaves of a tree: Web of Science, 20 Newsgroups, Amazon reviews."""

import json
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgmc.engine import checks
from torchgmc_paper.datasets._files import Texts, data_root, locate, read_npz
from torchgmc_paper.datasets.prepare import texts as prepare

NAMES = ("wos", "newsgroups", "amazon")
KINDS = ("scores", "crossfit")


class Scores(NamedTuple):
    """Ready leaf scores.

    Attributes:
        probs: float32, ``(n, K)``.
        labels: leaf ids, ``(n,)``.
        random_sample: bool, ``(n,)``: documents of a random sample of the whole corpus (the others over-represent some
            leaves); all of them where the data does not say.
    """

    probs: Tensor
    labels: Tensor
    random_sample: Tensor


class HierarchicalText(Texts):
    """Documents with labels in a tree.

    Args:
        root: the folder of this data set, or of all data; the environment variable ``TORCHGMC_DATA`` if omitted.
        name: ``"wos"`` (Web of Science, 134 leaves, 7 parents), ``"newsgroups"`` (20 leaves, 6 parents) or ``"amazon"``
            (three levels).
        download: fetch the published files and convert them, unless they are already there. They do not include a model's
            scores.
        transform: applied to a text when it is indexed.

    Attributes:
        texts, labels: per document; leaf ids, int64.
        parents: the parent of every node, root -1, leaves first, as :class:`torchgmc.TreeHead` takes it.
        node_names: per node.
        metadata: the other columns (``id``, ``split``, ...).

    Example:
        >>> texts = gmc.datasets.HierarchicalText("data", "wos")  # doctest: +SKIP
        >>> probs, labels, random_sample = texts.scores()  # doctest: +SKIP
        >>> head = gmc.TreeHead(texts.parents, target=0.95, alpha=0.025, names=texts.node_names)  # doctest: +SKIP
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        name: str = "wos",
        download: bool = False,
        transform: Callable[[str], Any] | None = None,
    ) -> None:
        self.name = checks.option("name", name, NAMES)
        self.transform = transform
        top = data_root(root)
        self.root = locate(
            top,
            "hierarchy",
            (f"{name}.jsonl.gz", f"{name}_tree.json"),
            (prepare.ORIGINAL[name],),
            lambda: prepare.convert(top, name),
            f"texts {name!r}",
            download,
        )
        tree = json.loads((self.root / f"{name}_tree.json").read_text(encoding="utf-8"))
        self.parents: list[int] = [int(v) for v in tree["parent"]]
        self.node_names: list[str] = [str(v) for v in tree["names"]]
        self._read(name)
        self.labels = torch.tensor(self.metadata.pop("label"), dtype=torch.int64)

    @property
    def num_leaves(self) -> int:
        """Number of leaves; they are the nodes 0, 1, ..."""
        return len(self.parents) - len({p for p in self.parents if p >= 0})

    @property
    def random_sample(self) -> Tensor:
        """Documents of a random sample of the whole corpus, bool ``(n,)``; all where the data does not say."""
        return torch.tensor(self.metadata.get("random_sample", [1] * len(self))).bool()

    def scores(self, kind: str = "scores") -> Scores:
        """Leaf scores of a linear classifier that comes with the compact layout.

        Args:
            kind: ``"scores"``: of the documents the classifier was not trained on. ``"crossfit"`` (Web of Science): of all
                documents, each by one of five classifiers that did not see it.
        """
        file = read_npz(self._score_file(kind))
        labels = torch.from_numpy(file["label"]).long()
        sample = torch.from_numpy(file["random_sample"]).bool() if "random_sample" in file else torch.ones(len(labels)).bool()
        return Scores(torch.from_numpy(file["probs"]).float(), labels, sample)

    def scored(self, kind: str = "scores") -> Tensor:
        """Which documents the rows of :meth:`scores` are: positions in ``texts``, int64."""
        place = {identity: k for k, identity in enumerate(self.metadata["id"])}
        return torch.tensor([place[int(v)] for v in read_npz(self._score_file(kind))["doc_id"]], dtype=torch.int64)

    def _score_file(self, kind: str) -> Any:
        checks.option("kind", kind, KINDS)
        prefix = "" if self.name == "wos" else f"{self.name}_"
        path = self.root / (f"{prefix}scores.npz" if kind == "scores" else f"{prefix}scores_crossfit.npz")
        if not path.is_file():
            raise FileNotFoundError(
                f"no {path.name!r} in {str(self.root)!r}: scores come with the compact layout only (crossfit "
                "for 'wos' only); train a classifier on `.texts` and `.labels` to get your own scores."
            )
        return path

    def __getitem__(self, index: int) -> tuple[Any, int]:
        text, index = self._text(index)
        return text, int(self.labels[index])

    def __repr__(self) -> str:
        return f"HierarchicalText({self.name!r}: {len(self)} texts, {self.num_leaves} leaves, in {str(self.root)!r})"
