"""How far training has got in an epoch that workers read in pieces, as variables of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from gmeta.core.arguments import whole_number
from gmeta.core.data.position import Position
from gmeta.core.errors import ConfigError

_SCALARS = ("epoch", "turn", "within")
_VECTORS = ("taken", "ended")


class ServedPosition(Position):
    """The elements of each piece of an epoch that training has taken (`gmeta.io.distribute`).

    An element carries the position behind it, and the position is set when training takes the element. Make
    the position an attribute of the model, as with `gmeta.io.ReadingPosition`: ``BackupAndRestore`` or
    ``tf.train.Checkpoint`` then saves and restores it, after any step. Or keep `state` in JSON. Reading goes
    on with the next element, whichever workers there are by then. Use a position for one dataset.

    Args:
      pieces: How many pieces an epoch is cut into: several for each of the workers, but a piece should be no
        smaller than a window of ``shuffle_buffer`` groups (`gmeta.io.EpochPiece`).
      epoch: The first epoch.

    Attributes:
      epoch: () int64 variable.
      taken: (pieces,) int64 variable, elements taken of each piece.
      ended: (pieces,) int64 variable, 1 for pieces that have no more.
      turn: () int64 variable, the lane that gives the next element.
      within: () int64 variable, batches taken of the block that comes next, where small batches are joined to
        large ones; the rest of the position is then that at the block's beginning.

    Example:
      >>> model.reading = ServedPosition(pieces=128)  # doctest: +SKIP
      >>> train = distribute(dataset, "workers", position=model.reading)  # doctest: +SKIP
    """

    def __init__(self, pieces: int = 32, epoch: int = 0) -> None:
        super().__init__(name="served_position")
        self.pieces = whole_number("ServedPosition: pieces", pieces, least=1)
        whole_number("ServedPosition: epoch", epoch)

        def variable(name: str, value: Any) -> tf.Variable:
            return tf.Variable(value, dtype=tf.int64, trainable=False, name=name)

        with tf.init_scope(), tf.device("CPU:0"):
            self.epoch = variable("epoch", epoch)
            self.turn, self.within = variable("turn", 0), variable("within", 0)
            self.taken = variable("taken", tf.zeros([self.pieces], tf.int64))
            self.ended = variable("ended", tf.zeros([self.pieces], tf.int64))

    def state(self) -> dict[str, Any]:
        """Return the position as JSON values."""
        return {name: getattr(self, name).numpy().tolist() for name in (*_SCALARS, *_VECTORS)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the position to what `state` returned.

        Raises:
          ConfigError: It is no such state, or one of another number of pieces.
        """
        try:
            values = {name: np.asarray(state[name], np.int64) for name in (*_SCALARS, *_VECTORS)}
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"ServedPosition: {state!r} isn't what state() returned: {error!r}") from error
        for name, value in values.items():
            if value.shape != tuple(getattr(self, name).shape) or (value < 0).any():
                raise ConfigError(
                    f"ServedPosition: {name} of the state is {value.tolist()}, and this position has "
                    f"{self.pieces} pieces: make it with ServedPosition(pieces={values['taken'].size})"
                )
        for name, value in values.items():
            getattr(self, name).assign(value)

    def begin(self) -> tf.Tensor:
        """Return the position as one vector, that of the next epoch if this one is over; for `Cursor.of`."""
        goes_on = 1 - tf.reduce_min(self.ended)
        epoch = self.epoch.assign_add(1 - goes_on, read_value=True)
        own = [self.turn, self.within, self.taken, self.ended]
        rest = [variable.assign(variable * goes_on, read_value=True) for variable in own]
        return tf.concat([[epoch], rest[0][None], rest[1][None], *rest[2:]], axis=0)

    def set_to(self, cursor: tf.Tensor, batch: tf.Tensor, batches: tf.Tensor) -> list[tf.Tensor]:
        """Set the position behind batch ``batch`` of a block of ``batches``, which ends at a cursor."""
        over = tf.equal(batch + 1, batches)
        own = [self.epoch, self.turn, self.within, self.taken, self.ended]
        parts = tf.split(cursor, [1, 1, 1, self.pieces, self.pieces])
        there = [tf.reshape(part, variable.shape) for part, variable in zip(parts, own, strict=True)]
        kept = [tf.identity(variable) for variable in own]
        kept[2] = batch + 1
        return [
            variable.assign(tf.where(over, new, old))
            for variable, new, old in zip(own, there, kept, strict=True)
        ]


class Cursor:
    """The position of an element, in the process that merges pieces.

    Attributes:
      epoch: The epoch's number.
      turn: The lane that gives the next element.
      taken: (pieces,) elements taken of each piece.
      ended: (pieces,) 1 for pieces that have no more.
    """

    def __init__(self, vector: np.ndarray[Any, Any]) -> None:
        """Take a vector of `ServedPosition.begin`."""
        pieces = (len(vector) - len(_SCALARS)) // 2
        self.epoch, self.turn = int(vector[0]), int(vector[1])
        self.taken = np.array(vector[len(_SCALARS) : len(_SCALARS) + pieces])
        self.ended = np.array(vector[len(_SCALARS) + pieces :])

    def vector(self) -> np.ndarray[Any, Any]:
        """Return the vector that `ServedPosition.set_to` takes."""
        return np.concatenate([[self.epoch, self.turn, 0], self.taken, self.ended]).astype(np.int64)
