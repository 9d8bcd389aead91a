"""The paper's three experiments on real data, in one command.

    $ torchgmc reproduce tree --data DIR --seeds 50 --out results

An experiment is a module that satisfies :class:`torchgmc.reproduce.frame.Experiment`; :mod:`~torchgmc.reproduce.frame` runs
its seeds, :mod:`~torchgmc.reproduce.measures` measures one of them, :mod:`~torchgmc.reproduce.tables` summarises all, and
:mod:`~torchgmc.reproduce.figures` draws them beside the paper's own figures.
"""

EXPERIMENTS: dict[str, str] = {
    "fnr": "torchgmc.reproduce.fnr",
    "tree": "torchgmc.reproduce.tree",
    "text": "torchgmc.reproduce.text",
}
"""Name of each experiment and its module, in the order of ``torchgmc reproduce all``."""
