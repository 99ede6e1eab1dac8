"""The pieces of an epoch that workers read: lanes request them, and training counts consumed elements.

Piece p belongs to lane p mod L, and a lane reads its pieces one after another, from any worker. A lane counts
the elements of its piece that arrived. If a worker is lost, or another one has less work, the lane requests
the rest of the piece, from that count on, from another worker. Each element therefore arrives exactly once,
and the elements of a lane depend on neither workers nor time.

`ServedPosition` stores the progress of training in the pieces, as variables of a checkpoint.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.errors import ConfigError, whole_number
from gmeta.core.position import Position, int64_variable
from gmeta.core.version import __version__
from gmeta.io.readers.read_options import OneEpoch
from gmeta.io.service.worker import Channel, decode, digest_of
from gmeta.io.service.worker_pool import WorkerPool

_SCALARS = ("epoch", "turn", "within")
_VECTORS = ("taken", "ended")


class ServedPosition(Position):
    """The number of elements of each piece of an epoch that training has consumed (`gmeta.io.distribute`).

    An element contains the position after it, to which this position is set when training consumes the
    element. Make the position an attribute of the model, as with `gmeta.io.ReadingPosition`:
    ``BackupAndRestore`` or ``tf.train.Checkpoint`` then saves and restores it, after any step. Or keep
    `state` in JSON. Reading resumes with the next element, on any workers. Use a position for only one
    dataset.

    Ranks read different parts of an epoch, so each has its own position. `gather_ranks` sends the positions
    of all to each rank, so that one rank can save them for all; ``ShardedCheckpoint`` and `fit` call it.
    Reading resumes on the same number of ranks.

    Args:
      pieces: Number of pieces of an epoch: several per worker, but a piece should be no smaller than a window
        of ``shuffle_buffer`` groups (`gmeta.io.readers.read_options.OneEpoch`).
      epoch: The first epoch.

    Attributes:
      epoch: () int64 variable.
      taken: (pieces,) int64 variable, consumed elements of each piece.
      ended: (pieces,) int64 variable, 1 for exhausted pieces.
      turn: () int64 variable, the lane that yields the next element.
      within: () int64 variable, consumed batches of the next block, if small batches are joined to large
        ones; the other variables then refer to the block's beginning.
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
        """Set the position of this rank to a value that `state` returned.

        Raises:
          ConfigError: The value isn't such a state, or has another number of pieces.
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
        """Return the position as one vector for `Cursor.of`; at an epoch's end, that of the next epoch."""

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
        """Find this rank's vector: in the variables, or in ``told`` if they belong to another rank.

        Raises:
          ConfigError: The position belongs to other ranks.
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
        """Return the elements of a dataset, counting consumed ones.

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
      turn: The lane that yields the next element.
      taken: (pieces,) elements taken of each piece.
      ended: (pieces,) 1 for pieces that have no more.
    """

    def __init__(self, vector: np.ndarray[Any, Any]) -> None:
        """Create a cursor from a vector of `ServedPosition.begin`."""
        pieces = (len(vector) - len(_SCALARS)) // 2
        self.epoch, self.turn = int(vector[0]), int(vector[1])
        self.taken = np.array(vector[len(_SCALARS) : len(_SCALARS) + pieces])
        self.ended = np.array(vector[len(_SCALARS) + pieces :])

    def vector(self) -> np.ndarray[Any, Any]:
        """Return the vector that `ServedPosition.count` expects."""
        return np.concatenate([[self.epoch, self.turn, 0], self.taken, self.ended]).astype(np.int64)


_LOSSES = 3
"""How many workers in a row may be lost at one element; then it is the element that ends them."""


class Lanes:
    """The lanes of one iteration over an epoch.

    Args:
      pool: The workers.
      function: The pickled function from a piece to a dataset.
      lanes: For each lane, the pieces that it reads, each with its first element.
      ahead: The maximum number of buffered elements per lane.
      patience: Seconds after which a worker that sends nothing counts as lost.

    Attributes:
      news: Notified when a lane has an element, or ends.
    """

    def __init__(
        self,
        pool: WorkerPool,
        function: bytes,
        lanes: Sequence[Sequence[OneEpoch]],
        *,
        ahead: int,
        patience: float,
    ) -> None:
        self.news = threading.Condition()
        self._pool, self._function, self._digest = pool, function, digest_of(function)
        self._ahead, self._patience = ahead, patience
        self._waiting: list[deque[Any]] = [deque() for _ in lanes]
        self._channels: dict[int, Channel] = {}
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._made = 0.0
        for number, pieces in enumerate(lanes):
            threading.Thread(target=self._run, args=(number, pieces), daemon=True).start()

    def look(self, lane: int) -> tuple[int, list[Any] | None] | None:
        """Return the next element of a lane, if it has arrived; `news` must be held.

        Returns:
          (piece, arrays of an element); (piece, None) at the piece's end; (-1, None) at the lane's end, also
          in later calls; None: no element yet.

        Raises:
          RuntimeError: No worker can be reached, or reading failed.
        """
        waiting = self._waiting[lane]
        if not waiting:
            if self._failure is not None:
                raise self._failure
            return None
        if waiting[0][0] == -1:
            return waiting[0]
        self.news.notify_all()
        return waiting.popleft()

    def made(self) -> float:
        """Return the seconds that workers spent on elements since the last call."""
        with self.news:
            made, self._made = self._made, 0.0
            return made

    def close(self) -> None:
        """Stop reading."""
        self._ended.set()
        with self.news:
            self.news.notify_all()
            channels = list(self._channels.values())
        for channel in channels:
            channel.hang_up()

    def _run(self, lane: int, pieces: Sequence[OneEpoch]) -> None:
        left, losses = deque(pieces), 0
        try:
            address: str | None = None
            while left:
                begin = left[0]
                here = address or self._pool.take(self._ended)
                address, lost = self._read(lane, here, left)
                if address is None:
                    self._pool.give_back(here, lost)
                if self._ended.is_set():
                    return
                losses = losses + 1 if left and left[0] == begin and isinstance(lost, _LostError) else 0
                if losses >= _LOSSES:
                    raise RuntimeError(
                        f"gmeta: distribute: {losses} workers in a row were lost at {_place(begin)}, the "
                        f"last one {here} ({lost}); see its output: out of memory, or a crash there? "
                        "A slow one needs more `patience`"
                    )
            self._put(lane, (-1, None))
        except BaseException as error:
            with self.news:
                self._failure = error
                self.news.notify_all()

    def _read(self, lane: int, address: str, left: deque[OneEpoch]) -> tuple[str | None, OSError | None]:
        """Read pieces from one worker; ``left`` are the remaining ones.

        Returns:
          The worker that should continue, if any; and the reason why this one was lost, if it was.
        """
        reached = False
        try:
            channel = self._pool.call(address)
            reached = True
            with self.news:
                self._channels[lane] = channel
            try:
                moved: str | None = None
                while left and not self._ended.is_set() and moved is None:
                    channel.send((__version__, "read", self._digest, asdict(left[0])))
                    moved = self._read_piece(lane, address, channel, left)
                return moved, None
            finally:
                with self.news:
                    self._channels.pop(lane, None)
                channel.close()
        except (OSError, EOFError) as error:
            lost = _LostError(str(error) or "its connection ended")
            return None, lost if reached else ConnectionError(str(error))

    def _read_piece(self, lane: int, address: str, channel: Channel, left: deque[OneEpoch]) -> str | None:
        """Read a piece to its end, or return the worker that should continue."""
        while not self._ended.is_set():
            kind, *given = channel.receive(self._patience)
            if kind == "end":
                self._put(lane, (left.popleft().number, None))
                return self._pool.move(address) if left else None
            if kind == "error":
                text = given[0] if "gmeta: " in given[0] else f"gmeta: distribute: {given[0]}"
                raise RuntimeError(f"{text} (the worker {address}, at {_place(left[0])})")
            if kind == "function":
                channel.send(self._function)
                continue
            made, parts = given
            left[0] = replace(left[0], taken=left[0].taken + 1)
            self._put(lane, (left[0].number, [decode(part) for part in parts]), made)
            if (moved := self._pool.move(address)) is not None:
                return moved
        return None

    def _put(self, lane: int, item: tuple[int, list[Any] | None], made: float = 0.0) -> None:
        with self.news:
            self._made += made
            self._waiting[lane].append(item)
            self.news.notify_all()
            while len(self._waiting[lane]) > self._ahead and not self._ended.is_set():
                self.news.wait()


class _LostError(OSError):
    """A worker that was reached, but lost while reading."""


def _place(piece: OneEpoch) -> str:
    return f"element {piece.taken} of piece {piece.number} of epoch {piece.epoch}"
