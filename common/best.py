"""The best evaluation of a run, see `--keep_best`."""

import dataclasses
import math

FOLDER = "actor_best"
FILE = "best.json"


@dataclasses.dataclass
class Best:
    """The best evaluation so far. A checkpoint holds it.

    Attributes:
        global_step: when it was; None as long as there is none.
        value: of the metric.
        since: how many evaluations came after it.
    """

    global_step: int | None = None
    value: float | None = None
    since: int = 0

    def is_beaten_by(self, value: float, lower: bool) -> bool:
        """Whether a value is better. Equal is not, and NaN never is."""
        if self.value is None:
            return not math.isnan(value)
        return value < self.value if lower else value > self.value


def metric_of(keep_best: str) -> tuple[str, bool]:
    """Returns the metric that `--keep_best` names, and whether less of it is better."""
    metric = keep_best.removesuffix(":min").removesuffix(":max")
    return metric, keep_best.endswith((":min", "loss", "kl"))
