"""The paper's three experiments on real data: ``torchgmc.reproduce.tree`` is the module behind ``torchgmc reproduce tree``.

They are in a second package, which comes with this one; this is their public name.
"""

from torchgmc.engine.extras import find_paper

find_paper()

import torchgmc_paper  # noqa: E402

EXPERIMENTS = torchgmc_paper.EXPERIMENTS
__path__ = torchgmc_paper.__path__  # where ``torchgmc.reproduce.tree`` is looked for
