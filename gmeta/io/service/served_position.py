"""The progress of training in an epoch that workers read in pieces, as variables of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.errors import ConfigError, whole_number
from gmeta.core.position import Position, int64_variable

_SCALARS = ("epoch", "turn", "within")
_VECTORS = ("taken", "ended")


class ServedPosition(Position):
    """The elements of each piece of an epoch that training has taken (`gmeta.io.distribute`).

    An element carries the position behind it, and the position is set when training takes the element. Make
    the position an attribute of the model, as with `gmeta.io.ReadingPosition`: ``BackupAndRestore`` or
    ``tf.train.Checkpoint`` then saves and restores it, after any step. Or keep `state` in JSON. Reading
    resumes with the next element, on any workers. Use a position for one dataset.

    Ranks read different parts of an epoch, so each has its own position. `gather_ranks` sends the positions
    of all to each rank, so that one rank can save them for all; ``ShardedCheckpoint`` and `fit` call it.
    Reading resumes on the same number of ranks.

    Args:
      pieces: How many pieces an epoch is cut into: several for each of the workers, but a piece should be no
        smaller than a window of ``shuffle_buffer`` groups (`gmeta.io.readers.read_options.OneEpoch`).
      epoch: The first epoch.

    Attributes:
      epoch: () int64 variable.
      taken: (pieces,) int64 variable, elements taken of each piece.
      ended: (pieces,) int64 variable, 1 for pieces that have no more.
      turn: () int64 variable, the lane that gives the next element.
      within: () int64 variable, batches taken of the block that comes next, where small batches are joined to
        large ones; the rest of the position is then that at the block's beginning.
      rank: () int64 variable, the rank whose position the others are.
      told: (ranks, 3 + 2 pieces) int64 variable, the positions of all ranks as of the last `gather_ranks`.

    Example:
      >>> model.reading = ServedPosition(pieces=128)  # doctest: +SKIP
      >>> train = distribute(dataset, "workers", position=model.reading)  # doctest: +SKIP
    """

    _in_state: ClassVar[tuple[str, ...]] = (*_SCALARS, *_VECTORS)

    def __init__(self, pieces: int = 32, epoch: int = 0) -> None:
        super().__init__(name="served_position")
        self.pieces = whole_number("ServedPosition: pieces", pieces, least=1)
        self.epoch = int64_variable("epoch", whole_number("ServedPosition: epoch", epoch))
        self.turn, self.within = int64_variable("turn", 0), int64_variable("within", 0)
        none = np.zeros([self.pieces], np.int64)
        self.taken, self.ended = int64_variable("taken", none), int64_variable("ended", none)
        self.rank = int64_variable("rank", collectives.world().rank)
        width = len(_SCALARS) + len(_VECTORS) * self.pieces
        self.told = int64_variable("told", np.zeros([0, width], np.int64), (None, width))

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the position of this rank to what `state` returned.

        Raises:
          ConfigError: It is no such state, or one of another number of pieces.
        """
        super().restore(state)
        self.rank.assign(collectives.world().rank)
        self.told.assign(self.told[:0])

    def _misfit(self, values: Mapping[str, np.ndarray[Any, Any]]) -> str:
        pieces = values["taken"].size
        return f"and this position has {self.pieces} pieces: make it with ServedPosition(pieces={pieces})"

    def gather_ranks(self) -> None:
        """Send the positions of all ranks to each rank; all must call this together, between two steps.

        Raises:
          CollectiveError: As `gmeta.core.collectives.allgather_objects`.
        """
        if collectives.world().size > 1:
            self.told.assign(collectives.allgather_objects(self._of_this_rank().tolist()))

    def begin(self) -> tf.Tensor:
        """Return the position as one vector, that of the next epoch if this one is over; for `Cursor.of`."""

        def find() -> np.ndarray[Any, Any]:
            try:
                return self._of_this_rank()
            except ConfigError as error:
                raise ValueError(f"gmeta: {error}\n") from error

        there = tf.ensure_shape(tf.numpy_function(find, [], tf.int64), [self.told.shape[1]])
        epoch, rest, ended = there[0], there[1:], there[-self.pieces :]
        goes_on = 1 - tf.reduce_min(ended)
        begun = tf.concat([[epoch + 1 - goes_on], rest * goes_on], axis=0)
        with tf.control_dependencies([begun]):  # `find` has read the variables
            rank = self.rank.assign(collectives.world().rank)
        with tf.control_dependencies([rank, *self._assign(begun)]):
            return tf.identity(begun)

    def _of_this_rank(self) -> np.ndarray[Any, Any]:
        """Find this rank's vector: in the variables, or in ``told`` if these are another rank's.

        Raises:
          ConfigError: The position is that of other ranks.
        """
        here, told = collectives.world(), self.told.numpy()
        mine = int(self.rank) == here.rank
        if len(told) not in (0, here.size) or not (mine or len(told)):
            raise ConfigError(
                f"ServedPosition: {len(told) or 'other'} ranks have read, and this is rank {here.rank} of "
                f"{here.size}: resume on as many ranks, or begin an epoch with a new position"
            )
        return np.asarray(self._vector() if mine else told[here.rank])

    def count(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Return the elements of a dataset, counting those that are taken.

        Args:
          dataset: A dataset of (cursor, batch, batches, element): the element is batch ``batch`` of a block
            of ``batches``, which ends at a cursor (`Cursor.vector`).
        """

        def take(cursor: tf.Tensor, batch: tf.Tensor, batches: tf.Tensor, element: Any) -> tuple[Any, Any]:
            kept = tf.tensor_scatter_nd_update(self._vector(), [[_SCALARS.index("within")]], [batch + 1])
            return self._assign(tf.where(tf.equal(batch + 1, batches), cursor, kept)), element

        return self._count(dataset, take)

    def _vector(self) -> tf.Tensor:
        parts = [getattr(self, name) for name in (*_SCALARS, *_VECTORS)]
        return tf.concat([tf.reshape(part, [-1]) for part in parts], axis=0)

    def _assign(self, vector: tf.Tensor) -> list[tf.Tensor]:
        own = [getattr(self, name) for name in (*_SCALARS, *_VECTORS)]
        parts = tf.split(vector, [1] * len(_SCALARS) + [self.pieces] * len(_VECTORS))
        return [
            variable.assign(tf.reshape(part, variable.shape))
            for part, variable in zip(parts, own, strict=True)
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
        """Return the vector that `ServedPosition.count` takes."""
        return np.concatenate([[self.epoch, self.turn, 0], self.taken, self.ended]).astype(np.int64)
