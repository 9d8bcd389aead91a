"""``torchgmc calibrate fnr``."""

from torchgmc.heads import task
from torchgmc.heads.threshold.risks import RISKS

TASK = task.Task(
    name="fnr",
    promise="The miss rate (or false alarm rate) of masks, at the target for every group.",
    example="scores.npz --target 0.075 --alpha 0.005 --groups sex,site --out head.safetensors",
    scores=("scores", "probs", "logits"),
    labels=("masks", "mask", "labels", "y"),
    label_kind="mask",
    output="masks",
    written="bool, in the shape of the scores",
    options=(
        task.Option("target", task.NUMBERS, "Target rate; with --classes also one per class.", required=True),
        task.Option("risk", task.choice(*RISKS), "Rate of misses (the default) or of false alarms."),
        task.CONDITIONAL,
        task.NOISE_FLOOR,
        task.Option("num_classes", task.whole(1), "Scores are (n, CLASSES, ...), one threshold per class.", named="--classes"),
        task.Option("logits", task.SWITCH, "Scores are logits."),
        task.Option("range", task.PAIR, "Thresholds to search; scores may then be any numbers."),
        task.Option("resolution", task.number_or("exact"), "Step between thresholds, or exact."),
        task.Option("init", task.NUMBER, "Threshold to start from."),
        task.Option("jitter", task.NUMBER, "Half-width of noise that breaks ties between scores."),
        task.LEARN,
    ),
    arrays={"pixel_weight": "Array of weights of pixels, in the shape of the masks."} | task.FEATURES,
    in_use=("features",),
)
