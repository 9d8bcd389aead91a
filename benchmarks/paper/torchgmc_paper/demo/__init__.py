"""Demos that need no download: data drawn on the fly, a model trained in a minute, a report at the end."""

DEMOS: dict[str, str] = {
    "fnr": "torchgmc_paper.demo.fnr",
    "text": "torchgmc_paper.demo.text",
    "probability": "torchgmc_paper.demo.probability",
    "tree": "torchgmc_paper.demo.tree",
}
"""Name of each demonstration and the module whose ``run`` does it."""
