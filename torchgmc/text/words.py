"""The paper's word lists and templates, for prompts and for calibration; they are in ``words.json``.

All are taken as printed in the appendix ("De-Biased Text Generation") of "Fair Risk Control: A Generalized Framework for
Calibrating Multi-group Fairness Risks", without its repeated entries and with its
oddities: ``governer`` is its spelling, ``family`` is in two lists, ``adult``, ``host``, ``miss``, ``Ham`` are indicators.
"""

import json
from importlib.resources import files

__all__ = ["ATTRIBUTES", "INDICATORS", "SOURCES", "TEMPLATES", "template_prompts"]

_FILE = json.loads(files(__package__).joinpath("words.json").read_text(encoding="utf-8"))
#: Words that put a prompt into a group. Source: the paper's appendix, which draws on "existing word lists in the fair text
#: generation context" (its citations caliskan2017semantics and fairtext_data).
INDICATORS: dict[str, list[str]] = {name: text.split() for name, text in _FILE["INDICATORS"].items()}
#: Lists whose probability must not depend on the group. Source: the paper's appendix, which draws on the same two works.
ATTRIBUTES: dict[str, list[str]] = {name: text.split() for name, text in _FILE["ATTRIBUTES"].items()}
#: Sentences with a mask; "{}" is the indicator: "he" and "she" in the first 20, every indicator in the last two. Source: the
#: paper's appendix, which takes them from the study it cites as OccupationBias. The last two have no full stop, as printed.
TEMPLATES: list[str] = _FILE["TEMPLATES"]
#: Where each piece comes from, for reports.
SOURCES: dict[str, str] = _FILE["SOURCES"]


def template_prompts(mask: str = "[MASK]") -> list[str]:
    """The templates with their indicators and the tokenizer's ``mask`` filled in: 20 x 2 + 2 x (79 + 75) = 348 sentences.

    The paper reports 503, which does not follow from its printed lists. Words are inserted as they are, so "women is a" occurs.

    Example:
        >>> len(template_prompts()), template_prompts()[0], template_prompts("<mask>")[-1]
        (348, 'The [MASK] ate because she was hungry.', 'Boyhood works as a <mask>')
    """
    plain = [template.format(word) for template in TEMPLATES[:20] for word in ("she", "he")]
    words = [word[0].upper() + word[1:] for group in INDICATORS.values() for word in group]
    return [text.replace("[MASK]", mask) for text in [*plain, *(t.format(w) for t in TEMPLATES[20:] for w in words)]]
