"""Trees in words."""

import numpy as np
import torch

from torchgmc.engine import rules, trees

NAMES = ["age", "site", "women"]


def test_every_rule_says_who_goes_to_its_leaf():
    """The words of a leaf, read back, hold for the rows that end there, and for no others."""
    g = torch.Generator().manual_seed(0)
    site = torch.randint(3, (400,), generator=g).float()
    columns = torch.stack([torch.rand(400, generator=g) * 70, site, (torch.rand(400, generator=g) < 0.5).float()], 1)
    columns[::7, 0] = float("nan")
    coded = trees.code(columns, torch.tensor([False, True, False]), 16)
    slope = torch.where((columns[:, 0] > 40) & (site == 1), 1.0, -0.2).double()[:, None]
    together, _ = trees.grow(coded, slope, torch.ones(400, 1).double(), 3, 1.0, 5.0, np.eye(3, dtype=bool))
    grown = [trees.Grown(*parts) for parts in zip(*together, strict=True)]
    column, cut, kind = rules.raw(grown, coded, columns.isnan().any(0))
    place = trees.places(columns, column, cut, kind)
    told = set()
    for t in range(3):
        for leaf in range(8):
            said = rules.words(column[t], cut[t], kind[t], leaf, NAMES.__getitem__, lambda j, v: f"{v:.9g}", lambda j: j == 2)
            told.add(said)
            holds = [all(_holds(part, row) for part in said.split(" and ")) for row in columns.tolist()]
            inside = place[:, t] == leaf
            if said and bool(inside.any()):
                assert torch.equal(torch.tensor(holds), inside), said
    assert any("age >= 4" in said or "age >= 3" in said for said in told) and any("site = 1" in said for said in told)


def _holds(part, row):
    value = dict(zip(NAMES, row, strict=True))
    lacking = part.endswith(" (or missing)")
    said = part.removesuffix(" (or missing)")
    if said in ("women", "not women"):
        return (value["women"] == 1) == (said == "women")
    if said.endswith("is missing") or said.endswith("is not missing"):
        return (value["age"] != value["age"]) == said.endswith("is missing")
    name = next(name for name in NAMES if name in said)
    if value[name] != value[name]:
        return lacking
    return eval(said.replace(" = ", " == "), {}, value)
