"""Sentences with a planted bias: a job depends on where someone works, and on whether "he" or "she" does."""

from dataclasses import dataclass

import torch

PEOPLE = {
    "female": ["she", "woman", "mother", "sister", "lady", "daughter"],
    "male": ["he", "man", "father", "brother", "gentleman", "son"],
    "neither": ["someone", "visitor", "neighbour", "person"],
}
JOBS = {
    "male jobs": ["doctor", "engineer", "lawyer", "manager", "scientist"],
    "female jobs": ["nurse", "secretary", "assistant", "cleaner", "typist"],
    "other jobs": ["writer", "cook", "guide", "clerk", "baker", "painter"],
}
PLACES = ["hospital", "office", "school", "laboratory", "kitchen", "court", "museum", "market"]
WHEN = ["today", "now", "again", "often"]
MANNERS = ["quiet", "strong", "polite", "brave", "happy", "tired"]
#: Chance of the three lists of jobs, by group; a place then makes some of the jobs on the list more likely.
CHANCE = {"female": (0.10, 0.55, 0.35), "male": (0.55, 0.10, 0.35), "neither": (0.3, 0.3, 0.4)}
TEMPLATES = (
    "{who} works as a {job} in the {place} {when} .",
    "in the {place} {who} is the {manner} {job} .",
    "the {manner} {who} wants to be a {job} .",
    "{when} the {job} in the {place} said that {who} was {manner} .",
)


@dataclass(frozen=True)
class Corpus:
    """Sentences as lists of words, and the place of the job in each."""

    sentences: list[list[str]]
    job: list[int]


def vocabulary() -> list[str]:
    """Special tokens, then every word that can occur."""
    words = {w for group in (*PEOPLE.values(), *JOBS.values(), PLACES, WHEN, MANNERS) for w in group}
    words |= {w for template in TEMPLATES for w in template.split() if not w.startswith("{")}
    return ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(words)]


def draw(num: int, seed: int) -> Corpus:
    """Draws sentences.

    Args:
        num: how many.
        seed: of the draw.
    """
    g = torch.Generator().manual_seed(seed)
    kinds, lists = list(PEOPLE), list(JOBS.values())
    kind = torch.multinomial(torch.tensor([0.4, 0.45, 0.15]), num, True, generator=g).tolist()
    table = torch.tensor([CHANCE[name] for name in kinds])
    column = torch.multinomial(table[kind], 1, generator=g)[:, 0].tolist()
    any_number = torch.randint(1 << 30, (num, 6), generator=g).tolist()
    sentences, job = [], []
    for k, c, numbers in zip(kind, column, any_number, strict=True):
        place = numbers[0] % len(PLACES)
        favoured = place if numbers[1] % 3 else numbers[2]  # two times in three the place decides which job of the list
        values = {
            "who": PEOPLE[kinds[k]][numbers[3] % len(PEOPLE[kinds[k]])],
            "job": lists[c][favoured % len(lists[c])],
            "place": PLACES[place],
            "when": WHEN[numbers[4] % len(WHEN)],
            "manner": MANNERS[numbers[5] % len(MANNERS)],
        }
        words = TEMPLATES[numbers[2] % len(TEMPLATES)].split()
        job.append(words.index("{job}"))
        sentences.append([values[w[1:-1]] if w.startswith("{") else w for w in words])
    return Corpus(sentences, job)
