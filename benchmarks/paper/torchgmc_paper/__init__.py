"""The paper's three experiments on real data, in one command; their data sets; and demos on made-up data.

    $ torchgmc reproduce tree --data DIR --seeds 50 --out results

An experiment is a module that satisfies :class:`torchgmc_paper.frame.Experiment`; :mod:`~torchgmc_paper.frame` runs
its seeds, :mod:`~torchgmc_paper.measures` measures one of them, :mod:`~torchgmc_paper.tables` summarises all, and
:mod:`~torchgmc_paper.figures` draws them beside the paper's own figures.
"""

EXPERIMENTS: dict[str, str] = {
    "fnr": "torchgmc_paper.fnr",
    "tree": "torchgmc_paper.tree",
    "text": "torchgmc_paper.text",
}
"""Name of each experiment and its module, in the order of ``torchgmc reproduce all``."""
