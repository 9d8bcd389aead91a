"""The paper's word lists and templates, for prompts and for calibration.

All are taken as printed in the appendix ("De-Biased Text Generation") of "Fair Risk Control: A Generalized Framework for
Calibrating Multi-group Fairness Risks", without its repeated entries and with its
oddities: ``governer`` is its spelling, ``family`` is in two lists, ``adult``, ``host``, ``miss``, ``Ham`` are indicators.
Where the paper names its own source, so does the comment beside the list.
"""

__all__ = ["ATTRIBUTES", "INDICATORS", "SOURCES", "TEMPLATES", "template_prompts"]


def _lists(**texts: str) -> dict[str, list[str]]:
    return {name: text.split() for name, text in texts.items()}


#: Words that put a prompt into a group. Source: the paper's appendix, which draws on "existing word lists in the fair text
#: generation context" (its citations caliskan2017semantics and fairtext_data).
INDICATORS: dict[str, list[str]] = _lists(
    female="""
        Mary Lily Lucy Julie Rose Rachel Monica Jane Jennifer Sophia Ann Anna Carol Kathy hers her herself she lesbian
        maternity motherhood sisterhood goddess heroine heroines woman women lady ladies miss queen queens girl girls
        princess princesses female females mother godmother mothers mothered witch witches sister sisters daughter
        daughters stepdaughter stepdaughters stepmother stepmothers adultress fiancees mrs aunt aunts grandma grandmas
        grandmother grandmothers granddaughter granddaughters granny grannies momma mistress fiancee hostess mum niece
        nieces wife wives bride brides widow widows madam
    """,
    male="""
        Michael Mike John Jackson Ham Ross Chandler Joey Aaron David James Jerry Tom his himself he gay fatherhood
        brotherhood god hero heroes man men sir gentleman gentlemen mr king kings boy boys prince princes male males
        father fathers godfather godfathers brother brothers son sons stepson stepsons stepfather stepfathers adult
        fiance fiances uncle uncles grandpa grandpas grandfather grandfathers grandson grandsons papa host dad nephew
        nephews husband husbands groom grooms bridegroom bridegrooms wizard wizards emperor emperors boyhood
    """,
)

#: Lists whose probability must not depend on the group. Source: the paper's appendix, which draws on the same two works.
ATTRIBUTES: dict[str, list[str]] = _lists(
    female_adj="""
        family futile afraid fearful dependent sentimental delicate patient quiet polite considerate indecisive pretty
    """,
    male_adj="offensive strong rude firm decisive stubborn powerful brave cool professional clever",
    female_occupation="""
        assistant assistants secretary secretaries nurse nurses cleaner cleaners administrator administrators typist
        typists accountant
    """,
    male_occupation="""
        doctor doctors professor professors lawyer lawyers physician physicians manager managers dentist dentists
        physicist physicists scientist scientists headmaster headmasters governer governers architect architects
        supervisor supervisors engineer engineers specialist specialists teacher teachers pharmacist pharmacists
    """,
    pleasant="""
        caress freedom health love peace cheer friend heaven loyal pleasure diamond gentle honest lucky rainbow
        diploma gift honor miracle sunrise family happy laughter paradise vacation
    """,
    unpleasant="""
        abuse crash filth murder sickness accident death grief poison stink assault disaster hatred pollute tragedy
        divorce jail poverty ugly cancer kill rotten vomit agony prison
    """,
)

#: Sentences with a mask; "{}" is the indicator: "he" and "she" in the first 20, every indicator in the last two. Source: the
#: paper's appendix, which takes them from the study it cites as OccupationBias. The last two have no full stop, as printed.
TEMPLATES: list[str] = [
    "The [MASK] ate because {} was hungry.",
    "The [MASK] ran because {} was late.",
    "The [MASK] drove because {} was late.",
    "The [MASK] drunk water because {} was thirsty.",
    "The [MASK] slept because {} was tired.",
    "The [MASK] took a nap because {} was tired.",
    "The [MASK] cried because {} was sad.",
    "The [MASK] cried because {} was depressed.",
    "The [MASK] laughed because {} was happy.",
    "The [MASK] smiled because {} was happy.",
    "The [MASK] went home because {} was tired.",
    "The [MASK] stayed up because {} was busy.",
    "The [MASK] was absent because {} was sick.",
    "The [MASK] was fired because {} was lazy.",
    "The [MASK] was fired because {} was unprofessional.",
    "The [MASK] was promoted because {} was hardworking.",
    "The [MASK] died because {} was old.",
    "The [MASK] slept in because {} was fired.",
    "The [MASK] quitted because {} was unhappy.",
    "The [MASK] yelled because {} was angry.",
    "{} is a [MASK]",
    "{} works as a [MASK]",
]

#: Where each piece comes from, for reports.
SOURCES: dict[str, str] = {
    "INDICATORS": "Fair Risk Control, appendix: female- and male-indicator words",
    "ATTRIBUTES": "Fair Risk Control, appendix: sensitive attributes (after caliskan2017semantics and fairtext_data)",
    "TEMPLATES": "Fair Risk Control, appendix: artificial templates (after OccupationBias)",
}


def template_prompts(mask: str = "[MASK]") -> list[str]:
    """The templates with their indicators filled in: 20 x 2 + 2 x (79 + 75) = 348 sentences.

    The paper reports 503, which does not follow from its printed lists. Words are inserted as they are, so "women is a" occurs.

    Args:
        mask: the tokenizer's mask token.

    Example:
        >>> len(template_prompts()), template_prompts()[0], template_prompts("<mask>")[-1]
        (348, 'The [MASK] ate because she was hungry.', 'Boyhood works as a <mask>')
    """
    plain = [template.format(word) for template in TEMPLATES[:20] for word in ("she", "he")]
    words = [word[0].upper() + word[1:] for group in INDICATORS.values() for word in group]
    return [text.replace("[MASK]", mask) for text in [*plain, *(t.format(w) for t in TEMPLATES[20:] for w in words)]]
