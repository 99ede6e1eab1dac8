"""The Keras callbacks of gmeta: each is loaded when it is first used.

`AdaptationCurve` measures how the error falls with inner steps, `StepTimes` where a step's time goes, and
`ProgressiveEvaluation` how well batches are predicted before they are trained on.
`gmeta.checkpoint.ShardedCheckpoint` saves and restores models with their tables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gmeta.core.imports import load_lazily

if TYPE_CHECKING:
    from gmeta.callbacks.adaptation_curve import AdaptationCurve as AdaptationCurve
    from gmeta.callbacks.step_times import StepTimes as StepTimes
    from gmeta.training.progressive_evaluation import ProgressiveEvaluation as ProgressiveEvaluation

_WHERE = {
    "AdaptationCurve": "gmeta.callbacks.adaptation_curve",
    "ProgressiveEvaluation": "gmeta.training.progressive_evaluation",
    "StepTimes": "gmeta.callbacks.step_times",
}

_MOVED = {
    "LearningRateWarmup": "gmeta.training.joint_optimizer:warmup_callback",
    "OneCycle": "gmeta.training.joint_optimizer:one_cycle_callback",
    "ShardedCheckpoint": "gmeta.checkpoint",
}
"""Old name -> the module that has it now, for one release."""

__all__ = ["AdaptationCurve", "ProgressiveEvaluation", "StepTimes"]

__getattr__, __dir__ = load_lazily(__name__, _WHERE, _MOVED)
