"""``torchgmc calibrate text``."""

from typing import Any

from torchgmc.heads.task import CONDITIONAL, JSON, NOISE_FLOOR, NUMBER, TEXT, Option, Reader, Task, choice


def _with_ids(given: dict[str, Any], reader: Reader) -> dict[str, Any]:
    """Lists of token ids; words become ids with a tokenizer."""
    lists, tokenizer = given["attributes"], given.get("tokenizer")
    if not isinstance(lists, dict) or not lists or not all(isinstance(v, list) and v for v in lists.values()):
        raise ValueError("--attributes must map the name of each list to a list of token ids (or words).")
    if tokenizer is None and any(isinstance(v, str) for values in lists.values() for v in values):
        raise ValueError("--attributes holds words; name the tokenizer with --tokenizer, or use token ids.")
    if tokenizer is not None:
        lists = reader.token_ids(tokenizer, lists)
    return {name: value for name, value in given.items() if name != "tokenizer"} | {"attributes": lists}


TASK = Task(
    name="text",
    promise="The probability of each word list, the same for every group.",
    example="logits.npz --attributes words.json --groups gender --alpha 0.002 --out head.safetensors",
    scores=("logits", "scores"),
    labels=("labels",),
    label_kind="tokens",
    output="log_probs",
    written="log-probabilities, in the shape of the logits",
    options=(
        Option("attributes", JSON, "JSON: the name of each list and its token ids (or words).", required=True),
        Option("tokenizer", TEXT, "Folder of the tokenizer that turns words into token ids."),
        Option("geometry", choice("kl", "euclidean"), "How changes are measured; kl by default."),
        CONDITIONAL,
        NOISE_FLOOR,
        Option("temperature", NUMBER, "Temperature that divides the logits first."),
    ),
    groups_required=True,
    complete=_with_ids,
)
