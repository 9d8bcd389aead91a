"""``torchgmc calibrate probability``."""

from torchgmc.heads.task import CONDITIONAL, FEATURES, LEARN, NOISE_FLOOR, PAIR, SWITCH, Option, Task, choice, whole

TASK = Task(
    name="probability",
    promise="Probabilities that are right on average for every group, at every level of the prediction.",
    example="probs.csv --alpha 0.01 --groups sex,age --cut age=30,50 --out head.safetensors",
    scores=("probs", "scores", "p"),
    labels=("y", "labels"),
    label_kind="class",
    output="probs",
    written="probabilities, in the shape of the input",
    options=(
        Option("bins", whole(0, none=0), "Level sets of the probability, 10 by default; 0: none."),
        Option("geometry", choice("kl", "euclidean"), "Steps in logits (kl, the default) or in probabilities."),
        CONDITIONAL,
        Option("range", PAIR, "Range of a bounded outcome; the scores then predict its mean."),
        NOISE_FLOOR,
        Option("multilabel", SWITCH, "The columns are labels of which several may hold; y is a matrix of 0 and 1."),
        LEARN,
    ),
    arrays=FEATURES,
    in_use=("features",),
    complete=lambda given, reader: given | ({"num_classes": reader.row[0]} if len(reader.row) == 1 else {}),  # scores (n, C)
)
