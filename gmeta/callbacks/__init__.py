"""The Keras callbacks of gmeta; each is imported when it is first used.

`AdaptationCurve` measures how the error falls with inner steps, `StepTimes` the time of each part of a step,
`ShardedCheckpoint` saves and restores models with their tables, `LearningRateWarmup` raises the rate of
several ranks from that of one, `OneCycle` raises and lowers the rate over a whole training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gmeta.core.lazy import load_lazily

if TYPE_CHECKING:
    from gmeta.callbacks.adaptation_curve import AdaptationCurve as AdaptationCurve
    from gmeta.callbacks.step_times import StepTimes as StepTimes
    from gmeta.checkpoint.callback import ShardedCheckpoint as ShardedCheckpoint
    from gmeta.training.learning_rates import LearningRateWarmup as LearningRateWarmup
    from gmeta.training.learning_rates import OneCycle as OneCycle

_WHERE = {
    "AdaptationCurve": "gmeta.callbacks.adaptation_curve",
    "LearningRateWarmup": "gmeta.training.learning_rates",
    "OneCycle": "gmeta.training.learning_rates",
    "ShardedCheckpoint": "gmeta.checkpoint.callback",
    "StepTimes": "gmeta.callbacks.step_times",
}

__all__ = ["AdaptationCurve", "LearningRateWarmup", "OneCycle", "ShardedCheckpoint", "StepTimes"]

__getattr__, __dir__ = load_lazily(__name__, _WHERE)
