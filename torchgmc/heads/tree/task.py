"""``torchgmc calibrate tree``."""

from typing import Any

from torchgmc.heads.task import CONDITIONAL, JSON, NOISE_FLOOR, NUMBER, Option, Reader, Task, choice


def _with_tree(given: dict[str, Any], reader: Reader) -> dict[str, Any]:
    """The tree, from ``--tree`` or from the arrays ``parents`` and ``names``."""
    if "tree" in given:
        return {name: value for name, value in given.items() if name != "tree"} | {"parents": given["tree"]}
    if "parents" not in reader.names:
        raise ValueError(
            f"the task 'tree' needs the tree: an array 'parents' (parent of every node, root -1) in {str(reader.path)!r}, "
            f"which has {', '.join(map(repr, reader.names[:12]))}, or --tree FILE.json."
        )
    names = reader.texts("names") if "names" in reader.names else None
    return given | {"parents": reader.integers("parents"), "names": names}


TASK = Task(
    name="tree",
    promise="The coverage of answers on a label tree, at the target for every set of answers.",
    example="probs.npz --tree tree.json --target 0.9 --alpha 0.025 --out head.safetensors",
    scores=("probs", "scores"),
    labels=("labels", "label", "y"),
    label_kind="class",
    label_names=lambda head: head.tree.names[: head.tree.num_leaves],
    output="nodes",
    written="node ids, leaves first",
    options=(
        Option("target", NUMBER, "Target coverage.", required=True),
        Option("tree", JSON, "JSON of nested names, paths or parents; else arrays `parents` and `names` of the data."),
        Option("sets", choice("nodes"), "Make each node its own set, instead of the branches below the root."),
        CONDITIONAL,
        NOISE_FLOOR,
        Option("init", NUMBER, "Threshold to start from."),
        Option("jitter", NUMBER, "Half-width of noise that breaks ties between scores."),
    ),
    complete=_with_tree,
    result_names=lambda head: head.tree.names,
)
