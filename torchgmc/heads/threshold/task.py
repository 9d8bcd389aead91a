"""``torchgmc calibrate fnr``."""

from torchgmc.heads.task import CONDITIONAL, NOISE_FLOOR, NUMBER, NUMBERS, PAIR, SWITCH, Option, Task, choice, number_or, whole
from torchgmc.heads.threshold.risks import RISKS

TASK = Task(
    name="fnr",
    promise="The miss rate (or false alarm rate) of masks, at the target for every group.",
    example="scores.npz --target 0.075 --alpha 0.005 --groups sex,site --out head.safetensors",
    scores=("scores", "probs", "logits"),
    labels=("masks", "mask", "labels", "y"),
    label_kind="mask",
    output="masks",
    written="bool, in the shape of the scores",
    options=(
        Option("target", NUMBERS, "Target rate; with --classes also one per class.", required=True),
        Option("risk", choice(*RISKS), "Rate of misses (the default) or of false alarms."),
        CONDITIONAL,
        NOISE_FLOOR,
        Option("num_classes", whole(1), "Scores are (n, CLASSES, ...), one threshold per class.", named="--classes"),
        Option("logits", SWITCH, "Scores are logits."),
        Option("range", PAIR, "Thresholds to search; scores may then be any numbers."),
        Option("resolution", number_or("exact"), "Step between thresholds, or exact."),
        Option("init", NUMBER, "Threshold to start from."),
        Option("jitter", NUMBER, "Half-width of noise that breaks ties between scores."),
    ),
    arrays={"pixel_weight": "Array of weights of pixels, in the shape of the masks."},
)
