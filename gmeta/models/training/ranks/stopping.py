"""Lets all ranks decide together when to stop."""

from __future__ import annotations

from typing import Any

from gmeta.core import collectives
from gmeta.core.step_callback import StepCallback
from gmeta.models.training.optimizer.rank_notes import RankNotes


class StopTogether(StepCallback):
    """A callback that sets ``model.stop_training`` on all ranks, in the same step, if any rank sets it.

    Within an epoch, a rank that wants to stop says so in the all-reduce of its next optimizer step, and every
    rank stops after that step. A rank that stopped at once would leave the others waiting. At the end of an
    epoch ranks agree immediately; callbacks see the same logs there on all ranks.

    Args:
      notes: The rank's notes. The all-reduce sends ``stop_asked`` and writes ``stop_agreed``.
    """

    def __init__(self, notes: RankNotes) -> None:
        super().__init__()
        self._asked, self._agreed = notes.stop_asked, notes.stop_agreed

    def on_train_begin(self, logs: Any = None) -> None:
        """Reset the request and the agreement to stop."""
        self._asked.assign(False)
        self._agreed.assign(False)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Request a stop instead of stopping at once; stop if all ranks have agreed."""
        if self.model.stop_training:
            self._asked.assign(True)
        self.model.stop_training = bool(self._agreed.numpy())

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Agree with all ranks on whether to stop."""
        wanted = self.model.stop_training or bool(self._asked.numpy())
        self.model.stop_training = any(collectives.allgather_objects(bool(wanted)))
