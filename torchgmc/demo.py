"""Demos that need no download: data drawn on the fly, a model trained in a minute, a report at the end.

They are in a second package, which comes with this one; this is their name in notebooks: ``torchgmc.demo.faces``.
"""

from torchgmc.engine.extras import find_paper

find_paper()

from torchgmc_paper import demo  # noqa: E402

DEMOS = demo.DEMOS
__path__ = demo.__path__  # where ``torchgmc.demo.faces`` is looked for
