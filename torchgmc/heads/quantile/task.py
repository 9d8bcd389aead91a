"""``torchgmc calibrate quantile``."""

from torchgmc.heads.task import CONDITIONAL, FEATURES, LEARN, NOISE_FLOOR, NUMBER, PAIR, Option, Task, whole

TASK = Task(
    name="quantile",
    promise="Thresholds on conformity scores that cover every group at the target rate.",
    example="residuals.csv --target 0.9 --alpha 0.01 --groups city --out head.safetensors",
    scores=("scores",),
    output="thresholds",
    written="a threshold for each row",
    options=(
        Option("target", NUMBER, "Target coverage.", required=True),
        Option("bins", whole(0, none=0), "Level sets of the threshold; 0, the default: none."),
        CONDITIONAL,
        NOISE_FLOOR,
        Option("init", NUMBER, "Threshold to start from; by default a quantile of all scores."),
        Option("range", PAIR, "Range that the level sets divide; by default that of the scores."),
        Option("resolution", NUMBER, "Count scores rounded up by this part of their size, e.g. 0.001, and keep no rows."),
        LEARN,
    ),
    arrays={"base": "Array of thresholds to start from."} | FEATURES,
    in_use=("base", "features"),
)
