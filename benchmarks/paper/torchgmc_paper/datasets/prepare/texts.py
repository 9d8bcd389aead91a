"""Hierarchical texts as published, turned into the compact layout."""

import csv
import json
import random
import re
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchgmc.engine.files import write_json
from torchgmc_paper.datasets._files import write_lines

#: What the published files are called below the root.
ORIGINAL = {
    "wos": "WebOfScience.zip",
    "newsgroups": "20news-bydate.tar.gz",
    "amazon": "HierarchicalTextClassification/data/test.csv",
}
SECTIONS = ("comp", "rec", "sci", "politics", "religion", "forsale")
SMALLEST_LEAF = 6
Route = tuple[str, ...]


class Document(NamedTuple):
    """A text and the names on the way to its leaf, from below the root."""

    text: str
    path: Route


class Corpus(NamedTuple):
    """Documents, the leaves in order, and the nodes below the root in order."""

    documents: list[Document]
    leaves: list[Route]
    tops: Sequence[str]


def convert(root: Path, name: str) -> None:
    """Write ``hierarchy/<name>.jsonl.gz`` and ``hierarchy/<name>_tree.json``."""
    try:
        documents, leaves, tops = {"wos": wos, "newsgroups": newsgroups, "amazon": amazon}[name](root / ORIGINAL[name])
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, KeyError, UnicodeDecodeError) as error:
        raise ValueError(f"{str(root / ORIGINAL[name])!r} is not as published (damaged?): {error!r}") from error
    number = {path: k for k, path in enumerate(leaves)}
    labels = [number[document.path] for document in documents]
    out = root / "hierarchy"
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / f"{name}_tree.json", grow(leaves, tops))
    rows = zip(documents, labels, thirds(labels), strict=True)
    write_lines(
        out / f"{name}.jsonl.gz",
        (
            {"id": k, "text": document.text, "label": label, "split": split, "random_sample": 1}
            for k, (document, label, split) in enumerate(rows)
        ),
    )


def grow(leaves: Sequence[Route], tops: Sequence[str]) -> dict[str, Any]:
    """The tree over leaves: these first, then inner nodes from the bottom up, the root last.

    Args:
        leaves: for each the names from below the root; a leaf must not also be an inner node.
        tops: order of the nodes below the root.

    Returns:
        ``parent``, ``names``, ``n_leaves``, ``root``.

    Example:
        >>> grow([("b", "x"), ("a", "y"), ("b", "z")], ["b", "a"])
        {'parent': [3, 4, 3, 5, 5, -1], 'names': ['x', 'y', 'z', 'b', 'a', 'Root'], 'n_leaves': 3, 'root': 5}
    """
    inner = {path[:depth] for path in leaves for depth in range(1, len(path))}
    both = inner & set(leaves)
    if both:
        raise ValueError(f"{'/'.join(min(both))!r} is both a leaf and an inner node.")
    nodes = [*leaves, *sorted(inner, key=lambda path: (-len(path), tops.index(path[0]), path)), ()]
    number = {path: k for k, path in enumerate(nodes)}
    parent = [number[path[:-1]] if path else -1 for path in nodes]
    names = [path[-1] if path else "Root" for path in nodes]
    return {"parent": parent, "names": names, "n_leaves": len(leaves), "root": number[()]}


def thirds(labels: Sequence[int]) -> list[str]:
    """A third of every leaf to train on, drawn with a fixed seed; the rest to be scored."""
    by_leaf: dict[int, list[int]] = {}
    for k, label in enumerate(labels):
        by_leaf.setdefault(label, []).append(k)
    chosen = random.Random(0)
    train = {k for leaf in sorted(by_leaf) for k in chosen.sample(by_leaf[leaf], max(1, len(by_leaf[leaf]) // 3))}
    return ["train" if k in train else "score" for k in range(len(labels))]


def wos(path: Path) -> Corpus:
    """WOS-46985: ``X.txt`` (texts) and ``Y.txt`` (leaf). Domain and name of leaf 0, 1, ... are in ``web_of_science.json``."""
    domains = json.loads(Path(__file__).with_name("web_of_science.json").read_text(encoding="utf-8"))
    known = dict(enumerate((domain, name) for domain, names in domains.items() for name in names))
    with zipfile.ZipFile(path) as archive:

        def lines(name: str) -> list[str]:
            found = [entry for entry in archive.namelist() if entry.endswith(f"WOS46985/{name}")]
            if not found:
                raise KeyError(f"no WOS46985/{name} in the archive")
            return archive.read(found[0]).decode("utf-8").rstrip("\r\n").split("\n")

        texts = [" ".join(line.split()) for line in lines("X.txt")]
        leaf = [int(line) for line in lines("Y.txt")]
    if len(texts) != len(leaf):
        raise ValueError(f"WOS46985 has {len(texts)} texts and {len(leaf)} leaves; the two numbers must agree.")
    documents = [Document(text, known[y]) for text, y in zip(texts, leaf, strict=True)]
    return Corpus(documents, [known[y] for y in sorted(set(leaf))], list(domains))


def newsgroups(path: Path) -> Corpus:
    """20 Newsgroups by date: cleaned posts without repeats; the grouping into six is ours."""
    seen: set[str] = set()
    documents = []
    for name, content in posts(path):
        text = clean(content.decode("latin-1"))
        if len(text) >= 40 and text not in seen:
            seen.add(text)
            documents.append(Document(text, (section(name), name)))
    leaves = sorted({document.path for document in documents}, key=lambda path: path[1])
    return Corpus(documents, leaves, SECTIONS)


def posts(path: Path) -> Iterator[tuple[str, bytes]]:
    """Group and content of every file ``20news-bydate-{train,test}/<group>/<number>``, in order."""
    with tarfile.open(path) as archive:
        for member in sorted((m for m in archive.getmembers() if m.isfile()), key=lambda m: m.name):
            parts = member.name.strip("./").split("/")
            file = archive.extractfile(member)
            if len(parts) == 3 and parts[0].startswith("20news-bydate-") and file is not None:
                yield parts[1], file.read()


def section(group: str) -> str:
    """The parent of a newsgroup.

    Example:
        >>> [section(name) for name in ("talk.politics.guns", "alt.atheism", "misc.forsale", "sci.med")]
        ['politics', 'religion', 'forsale', 'sci']
    """
    for word in ("politics", "religion", "forsale"):
        if word in group:
            return word
    return "religion" if group == "alt.atheism" else group.partition(".")[0]


def clean(post: str) -> str:
    """A post without header, quotes, signature and addresses; at most 1,500 characters.

    Example:
        >>> clean("From: a@b.c\\n\\nIn article <1> x writes:\\n> old\\nNew, see y@z.org .\\n-- \\nMy name")
        'New, see .'
    """
    body = re.split(r"\n--\s*\n", post.partition("\n\n")[2])[0]
    lines = [line for line in body.split("\n") if not re.match(r"\s*[>|:]|.*(writes|wrote):?\s*$|\s*In article ", line)]
    return " ".join(re.sub(r"\S+@\S+", "", " ".join(lines)).split())[:1500]


def amazon(path: Path) -> Corpus:
    """Reviews under three levels of categories; leaves with fewer than six reviews are left out."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    found = [Document(row["text"], _path(row)) for row in rows if row["text"].strip()]
    size = Counter(document.path for document in found)
    leaves = sorted(path for path in size if size[path] >= SMALLEST_LEAF)
    return Corpus([d for d in found if size[d.path] >= SMALLEST_LEAF], leaves, sorted({path[0] for path in leaves}))


def _path(row: dict[str, str]) -> tuple[str, ...]:
    """Names that hold the whole way: ``games`` occurs under several parents."""
    levels = [row[key].strip() or "unknown" for key in ("cat1", "cat2", "cat3")]
    return tuple("/".join(levels[: k + 1]) for k in range(3))
