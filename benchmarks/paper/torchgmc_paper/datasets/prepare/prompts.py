"""The corpora of the prompts as published, and the prompts found in them."""

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchgmc.engine.files import write_json
from torchgmc.text import words
from torchgmc_paper.datasets._files import write_lines

#: What the published files are called below the root.
ORIGINAL = ("sent_debias/debias-BERT/text_corpus", "examples/word_language_model/data/wikitext-2")
#: Longest sentence, in words; about the 128 word pieces of the compact layout.
LONGEST = 100
NUM_RANDOM = 6000
_WORD = re.compile(r"[A-Za-z]+")


def convert(root: Path) -> None:
    """Write the three parts and ``word_lists.json`` to ``text/``. Token ids depend on a tokenizer and are not made."""
    out = root / "text"
    out.mkdir(parents=True, exist_ok=True)
    kept = list(gendered(root))
    if not kept:
        raise FileNotFoundError(f"no gendered sentence in {' and '.join(ORIGINAL)} of {str(root)!r}; is the copy complete?")
    write_lines(out / "prompts.jsonl.gz", (row for sentence in kept for row in prompts_of(sentence)))
    write_lines(out / "random_mask.jsonl.gz", random_masks(kept))
    write_lines(out / "templates.jsonl.gz", templates())
    lists = {f"{name}_indicator": found for name, found in words.INDICATORS.items()} | {"attributes": words.ATTRIBUTES}
    write_json(out / "word_lists.json", lists)


def sentences(root: Path) -> Iterator[tuple[str, str]]:
    """Corpus and sentence, one after the other; missing files are passed over."""
    folder = root / ORIGINAL[0]
    for name in ("sst", "reddit", "meld"):
        for line in _lines(folder / f"{name}.txt"):
            number, tab, rest = line.partition("\t")  # sst numbers its lines
            yield name, rest if tab and number.strip().isdigit() else line
    for file in sorted((folder / "POM").glob("*.txt")):
        for line in _lines(file):
            yield from (("pom", part) for part in split(line))
    for name in ("valid", "test"):
        for line in _lines(root / ORIGINAL[1] / f"{name}.txt"):
            if not line.startswith("="):  # headings
                plain = re.sub(r" @([-,.])@ ", r"\1", line).replace("<unk>", "[UNK]")
                yield from (("wikitext2", part) for part in split(plain))


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        return []
    return [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]


def split(paragraph: str) -> list[str]:
    """Sentences by rule: after . ! or ? and white space, before a capital.

    Example:
        >>> split("She left . He stayed . It was 5 p.m. then.")
        ['She left .', 'He stayed .', 'It was 5 p.m. then.']
    """
    return [part.strip() for part in re.split(r"(?<=[.!?])\s+(?=[A-Z\[\"'])", paragraph) if part.strip()]


def indicators(text: str) -> dict[str, list[str]]:
    """The gendered words of a sentence by group; names must be capitalised, other words match in any case.

    Example:
        >>> indicators("Rose told him that his aunt rose.")
        {'female': ['rose', 'aunt'], 'male': ['his']}
    """
    found: dict[str, list[str]] = {}
    for group, known in words.INDICATORS.items():
        names = {word for word in known if word[0].isupper()}
        plain = {word for word in known if word not in names}
        hits = [w.lower() for w in _WORD.findall(text) if w in names or w.lower() in plain]
        if hits:
            found[group] = hits
    return found


def gendered(root: Path) -> Iterator[dict[str, Any]]:
    """Every different sentence that mentions women, men or both."""
    seen: set[str] = set()
    count: dict[str, int] = {}
    for corpus, text in sentences(root):
        count[corpus] = count.get(corpus, 0) + 1
        if text in seen or "[MASK]" in text or len(text.split()) > LONGEST:
            continue
        found = indicators(text)
        if found:
            seen.add(text)
            hits = [word for group in found.values() for word in group]
            group = next(iter(found)) if len(found) == 1 else "both"
            yield {"id": f"{corpus}-{count[corpus]}", "text": text, "group": group, "corpus": corpus, "indicators": hits}


def prompts_of(sentence: dict[str, Any]) -> list[dict[str, Any]]:
    """One prompt per occurrence of an attribute word."""
    rows = []
    for match in _WORD.finditer(sentence["text"]):
        word = match.group().lower()
        lists = [name for name, known in words.ATTRIBUTES.items() if word in known]
        if lists:
            own = {"id": f"{sentence['id']}-{match.start()}", "text": masked(sentence["text"], match)}
            rows.append(sentence | own | {"word": word, "lists": lists})
    return rows


def masked(text: str, match: "re.Match[str]") -> str:
    """The text with a mask in place of the match."""
    return f"{text[: match.start()]}[MASK]{text[match.end() :]}"


def random_masks(kept: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Up to 6,000 of the sentences with any word but an indicator masked, drawn with a fixed seed."""
    chosen = random.Random(0)
    attributes = {word for known in words.ATTRIBUTES.values() for word in known}
    rows = []
    for sentence in sorted(chosen.sample(kept, min(NUM_RANDOM, len(kept))), key=lambda row: row["id"]):
        hidden = {"unk", *sentence["indicators"]}
        options = [m for m in _WORD.finditer(sentence["text"]) if m.group().lower() not in hidden]
        if options:
            match = chosen.choice(options)
            word = match.group().lower()
            own = {"id": f"{sentence['id']}-r{match.start()}", "text": masked(sentence["text"], match), "word": word}
            same = {key: sentence[key] for key in ("group", "corpus")}
            rows.append(own | same | {"has_attribute": word in attributes})
    return rows


def templates() -> list[dict[str, Any]]:
    """The paper's templates, filled in."""
    same = {"word": None, "lists": ["female_occupation", "male_occupation"], "corpus": "template"}
    rows = []
    for k, template in enumerate(words.TEMPLATES):
        for group, known in words.INDICATORS.items():
            for word in known if k >= 20 else [{"female": "she", "male": "he"}[group]]:
                shown = word[0].upper() + word[1:] if k >= 20 else word
                own = {"id": f"template-{k}-{word}", "text": template.format(shown), "group": group, "template": k}
                rows.append(own | same | {"indicators": [word.lower()]})
    return rows
