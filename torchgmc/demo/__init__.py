"""Demos that need no download: data drawn on the fly, a model trained in a minute, a report at the end."""

DEMOS: dict[str, str] = {
    "fnr": "torchgmc.demo.fnr",
    "text": "torchgmc.demo.text",
    "probability": "torchgmc.demo.probability",
    "tree": "torchgmc.demo.tree",
}
"""Name of each demonstration and the module whose ``run`` does it."""
