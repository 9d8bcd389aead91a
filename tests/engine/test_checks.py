"""Names as they may be shown."""

import numpy as np
import pytest
import torch

import torchgmc as gmc
from torchgmc.engine import checks

#: What somebody may put into a column of labels, and how it is shown.
TRICKS = {
    "\x1b[31mred\x1b[0m": r"\x1b[31mred\x1b[0m",
    "a\nsex=f  +0.0000  holds": r"a\nsex=f  +0.0000  holds",
    "seen\rhidden": r"seen\rhidden",
    "half \ud800": r"half \ud800",
    "\u202eturned": r"\u202eturned",
    "null\x00": r"null\x00",
    "\u2028line": r"\u2028line",
}


@pytest.mark.parametrize("text", ["Köln", "sex=f & site=3", "日本", "3\u202f000", "👩\u200d🔬", "a\xa0b", ""])
def test_ordinary_text_stays(text: str) -> None:
    assert checks.printable(text) == text


@pytest.mark.parametrize("trick", TRICKS, ids=range(len(TRICKS)))
def test_names_are_shown_and_never_obeyed(trick: str) -> None:
    groups = gmc.Groups.from_columns({"sex": ["f", trick] * 30})
    shown = TRICKS[trick]
    assert checks.printable(trick) == shown
    assert f"sex={shown}" in groups.names and str(groups).isprintable() is False  # its own line breaks
    assert f"sex={shown}  30" in str(groups).splitlines()[-1] + str(groups).splitlines()[-2]
    scores, masks = torch.rand(60, 9), torch.rand(60, 9) < 0.5
    head = gmc.ThresholdHead(0.1, 0.02, groups).fit(scores, masks, groups)
    assert torch.equal(head(scores, groups), head(scores, groups.membership))  # labels are compared as they are
    for text in (str(head.audit(scores, masks, groups)), str(head.report), repr(head)):
        assert all(line.isprintable() for line in text.splitlines()) and trick not in text
    for made in (
        gmc.ThresholdHead(0.1, 0.02, ["a", trick]).groups[1],
        next(iter(gmc.DistributionHead({trick: [1], "b": [2]}, 0.02, ["a"]).attributes)),
        gmc.TreeHead({trick: ["x", "y"], "z": ["u"]}, 0.9, 0.02).tree.names[-2],
        gmc.TreeHead([2, 2, -1], 0.9, 0.02, names=["a", "b", trick]).tree.names[2],
    ):
        assert made == shown
    assert gmc.TreeHead([2, 2, -1], 0.9, 0.02, names=["a", "b", trick], sets={trick: [trick]}).sets == {shown: [2]}


def test_names_that_look_alike_are_refused() -> None:
    with pytest.raises(ValueError, match="repeated names"):
        gmc.ThresholdHead(0.1, 0.02, ["a\n", r"a\n"])
    with pytest.raises(ValueError, match="share a name"):
        gmc.Groups.from_columns({"x": ["a\n", r"a\n"]})
    with pytest.raises(ValueError, match="two lists of the name"):
        gmc.DistributionHead({"a\n": [1], r"a\n": [2]}, 0.1, ["a"])


def test_flags() -> None:
    assert checks.flag("x", True) is True and checks.flag("x", np.bool_(False)) is False
    for wrong in (1, "no", None, 0.0):
        with pytest.raises(TypeError, match="`x` must be True or False"):
            checks.flag("x", wrong)
