"""State of a model that each rank has its own of, such as how far it has read its data."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import tensorflow as tf


@runtime_checkable
class RankState(Protocol):
    """A part of a model that one rank can save for all, once they have told each other theirs."""

    def gather_ranks(self) -> None:
        """Tell all ranks the state of all ranks; all must call this together, between two steps."""


def gather_states(model: tf.Module) -> None:
    """Gather all such parts of a model, before one rank's variables are saved, or sent to the others."""
    for part in model.submodules:
        if isinstance(part, RankState):
            part.gather_ranks()
