"""The position in a stream, which a checkpoint holds, and the reader that continues from it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.collectives.wire import pack, unpack
from gmeta.core.errors import ConfigError, GmetaError, StoreUnavailableError
from gmeta.core.position import Position, int64_variable
from gmeta.io.streams.merge import Described, Lane, Merge, Merged, place_of
from gmeta.io.streams.records import arrow_schema, concat, tensors

_VERSION = 1
_LOOK_EVERY = 10.0  # seconds between two looks for new partitions


class StreamPosition(Position):
    """The position in a stream: what is trained, and all that waits, as variables of a checkpoint.

    Make it an attribute of the model, and pass it to `batches` of a stream. `gmeta.models.Model.fit` counts
    the steps that are trained, at any depth of a pipeline. ``ShardedCheckpoint`` and ``BackupAndRestore``
    save it: the place in each partition, the exposures that wait for their outcomes, and the rows that were
    read and not trained. Training continues with the next row, on any number of ranks, and each row is
    trained once. In your own loop, call ``trained()`` after each step, and `gather_ranks` before you save.

    Attributes:
      step: () int64 variable, the number of trained steps.
      saved: (None,) uint8 variable, all the rest, as of the last `gather_ranks`.

    Example:
      >>> model.reading = StreamPosition()
      >>> data = events.batches(1024, label="click", start=model.reading)
    """

    _in_state: ClassVar[tuple[str, ...]] = ("step",)
    counts_training: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__(name="stream_position")
        self.step = int64_variable("step", 0)
        with tf.init_scope(), tf.device("CPU:0"):
            self.saved = tf.Variable(np.zeros(0, np.uint8), trainable=False, name="saved", shape=(None,))
        self._reader: StreamReader | None = None
        self._ready_until = 0  # the step before which all ranks have rows

    @property
    def counts_groups(self) -> bool:
        """Whether any number of ranks can resume from the position."""
        return True

    @property
    def newest(self) -> int | None:
        """The largest event time that was read, in microseconds; None before the first."""
        return None if self._reader is None else self._reader.newest

    def trained(self, steps: int = 1) -> None:
        """Count steps that are trained."""
        self.step.assign_add(steps)

    def wait(self) -> bool:
        """Wait for the next batch, which the next iteration returns; return False if the stream has ended.

        All ranks must call this together.
        """
        self._ready_until = 0
        while True:
            rows = None if self._reader is None else self._reader.look()
            found = collectives.allgather_objects(rows)
            if any(found) or None in found:  # else all ranks wait for their own partitions
                return any(found)

    def ready(self) -> bool:
        """Return whether the next step needn't wait for rows on any rank; a rank that stops stops all.

        It reads the rows that are available, and skips none. All ranks must call this together, between two
        steps. They exchange a message only after the steps for which all of them had rows the last time.
        """
        step, reader = int(self.step), self._reader
        if step < self._ready_until:
            return True
        here = (1, False) if reader is None else (reader.ready(), reader.stopped)
        everyone = collectives.allgather_objects(here)
        if any(stopped for _, stopped in everyone):
            self.stop()
            return True
        self._ready_until = step + min(batches for batches, _ in everyone)
        return step < self._ready_until

    def stop(self) -> None:
        """End the stream: the current iteration, or else the next one, returns what it has, and ends."""
        if self._reader is not None:
            self._reader.stopped = True

    def state(self) -> dict[str, Any]:
        """Return the position as JSON values."""
        self.gather_ranks()
        return {"step": int(self.step), "saved": self.saved.numpy().tobytes().hex()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the position to a value that `state` returned.

        Raises:
          ConfigError: The value isn't such a state.
        """
        try:
            step, saved = int(state["step"]), bytes.fromhex(state["saved"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"StreamPosition: {error!r} in what should be a value of state()") from error
        self.step.assign(step)
        self.saved.assign(np.frombuffer(saved, np.uint8))

    def gather_ranks(self) -> None:
        """Store the position in the variables; on several ranks, that of all of them.

        All ranks must call this together, between two steps.
        """
        if self._reader is not None:
            self._reader.save()


class StreamReader:
    """Reads a stream in batches; each iteration goes on after the last trained batch.

    Args:
      of: The stream.
      batch_size: Rows of a rank's batch.
      position: The position; None: each iteration begins at the beginning.
      remainder: As in `Stream.batches`.
      event_time: As in `Stream.batches`.
    """

    def __init__(
        self,
        of: Described,
        batch_size: int,
        position: StreamPosition | None,
        remainder: bool,
        event_time: str | None = None,
    ) -> None:
        self._stream, self._position, self._remainder = of, position, remainder
        self.schema, self._size, self._event_time = of.schema, batch_size, event_time
        if event_time is not None:
            place = len(of.sources[0].columns)  # after the exposures' own columns
            self.schema = of.schema.insert(place, pa.field(event_time, pa.int64()))
        self.newest: int | None = None
        self.stopped = False
        self._lock = threading.Lock()
        self._turn = 0
        self._merge: Merge | None = None
        self._places: dict[str, Any] | None = None  # when nothing is open; None: nothing was read yet
        self._join: Any = None
        self._broken = False  # whether the join has failed
        self._queue: deque[pa.RecordBatch] = deque()  # examples that no batch has yet
        self._queued = 0
        self._given: deque[pa.RecordBatch] = deque()  # examples of batches that aren't trained yet
        self._since = 0  # the steps that were trained before the first of them
        self._known = b""  # what this reader stored last
        self._over = self._slow = False
        self._waits: float | None = None  # since when the others wait for this rank's batch
        self._partitions = [list(source.log.partitions()) for source in of.sources]
        self.shares = collectives.world().shares
        sizes = {len(each) for each in self._partitions}
        self._apart = self.shares.total > 1 and min(sizes) >= self.shares.total
        if self._apart and len(sizes) > 1:
            raise ConfigError(
                f"join: the logs have {' and '.join(map(str, sorted(sizes)))} partitions, and ranks read "
                "their own: partition both by the key, and in the same number"
            )
        # Ranks that read all partitions must add one at the same row, and those that join must divide alike.
        self._may_grow = of.follow and (of.joining is None if self._apart else self.shares.total == 1)
        self._looked = time.monotonic()
        together = sum(map(len, self._partitions)) > 1
        ranks = self.shares.total
        if ranks > 1 and not self._apart and together and of.idle is not None:
            raise ConfigError(
                f"stream: {ranks} ranks read {max(sizes)} partitions together, so their order may "
                "not depend on a clock: give idle='never', or the log as many partitions as ranks"
            )

    def look(self) -> int | None:
        """Wait for the next batch, and return its rows; None if the stream has ended."""
        try:
            found = next(iter(self), None)
        except ValueError as error:
            if isinstance(error.__cause__, GmetaError):
                raise error.__cause__ from None  # outside of a graph
            raise
        if found is None:
            return None
        return self._given[-1].num_rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterate over batches; an earlier iteration ends."""
        with self._lock:
            self._turn += 1
            turn = self._turn
            with _in_graph():
                self._begin()
        while True:
            with self._lock, _in_graph():
                if turn != self._turn:
                    return
                found = self._next()
            if found is not None:
                yield tensors(found)
            elif self._over:
                self._pause(turn)
                return
            else:
                time.sleep(self._stream.poll)

    def ready(self) -> int:
        """Return how many steps get a batch, or the end of the stream, without waiting for rows."""
        with self._lock:
            if self._merge is None or self._over or self.stopped or self._position is None:
                return 1
            read_ahead = self._since + len(self._given) - int(self._position.step)
            if read_ahead <= 0 and not self._fill():
                return int(self._has_ended() or self._is_slow())
            return max(read_ahead, 0) + self._queued // self._whole

    def end(self) -> None:
        """End all iterations."""
        self._turn += 1
        self._pause(self._turn)

    def _pause(self, turn: int) -> None:
        """Close the connections; a further iteration opens them at the same place."""
        with self._lock:
            if turn == self._turn and self._merge is not None:
                self._places = self._merge.places()
                self._merge.close()
                self._merge = None

    def save(self) -> None:
        """Store the position in its variables."""
        position = self._position
        assert position is not None
        with self._lock:
            if self._places is None:  # nothing was read since it was restored, or ever
                return
            own = pack(self._state())
            states = collectives.allgather_objects(own) if self._apart else [own]
            self._known = pack({"version": _VERSION, "columns": str(self.schema), "states": states})
            position.saved.assign(np.frombuffer(self._known, np.uint8))

    def _state(self) -> dict[str, Any]:
        self._trim()
        return {
            "places": self._places if self._merge is None else self._merge.places(),
            "rows": _to_bytes(concat([*self._given, *self._queue], self.schema)),
            "join": b"" if self._join is None else self._join.state(),
        }

    def _trim(self) -> None:
        """Forget the examples of trained steps."""
        if self._position is None:
            self._given.clear()
            return
        step = int(self._position.step)
        while self._given and self._since < step:
            self._given.popleft()
            self._since += 1
        if not self._given:
            self._since = step

    def _begin(self) -> None:
        """Go on after the last trained batch: from memory, or else from the position's variables."""
        saved = b"" if self._position is None else self._position.saved.numpy().tobytes()
        if self._broken and self._position is not None and saved == self._known:
            raise GmetaError(
                "a join of streams failed before, and rows that it had read would be lost: restore the model "
                "from its last checkpoint"
            )
        self._broken = False
        if self._position is None or self._places is None or saved != self._known:
            self._load(saved)
            self._known = saved
        else:
            self._merge = self._merge or self._open(self._places)
            self._trim()
            self._queue.extendleft(reversed(self._given))
            self._queued += sum(batch.num_rows for batch in self._given)
        self._given.clear()
        self._since = 0 if self._position is None else int(self._position.step)
        self._over, self._slow, self._waits = False, False, None

    def _load(self, saved: bytes) -> None:
        if self._merge is not None:
            self._merge.close()
        states: list[dict[str, Any]] = []
        if saved:
            held = unpack(saved)
            if held["version"] != _VERSION:
                raise ConfigError(
                    f"StreamPosition: stored in version {held['version']}, and this gmeta reads {_VERSION}: "
                    "use the gmeta that stored it"
                )
            if held["columns"] != str(self.schema):
                raise ConfigError(
                    f"StreamPosition: stored for the columns\n{held['columns']}\nand the stream has\n"
                    f"{self.schema}\nname the former ones in columns="
                )
            states = [unpack(each) for each in held["states"]]
        places: dict[str, Any] = {}
        for each in states:
            places |= each["places"]
        joining, shares = self._stream.joining, self.shares
        self._join = None if joining is None else joining.start()
        if self._join is not None and states:
            self._join.restore(
                [each["join"] for each in states],
                (lambda parts: self._own(parts))
                if self._apart
                else (lambda parts: np.ones(len(parts), bool)),
            )
        rows = [_from_bytes(each["rows"]) for each in states]
        if self._apart and len(rows) == shares.total:
            rows = rows[shares.first : shares.first + shares.count]
        elif self._apart and rows:
            whole = concat(rows, self.schema)
            begin, end = (
                whole.num_rows * at // shares.total for at in (shares.first, shares.first + shares.count)
            )
            rows = [whole.slice(begin, end - begin)]
        self._queue = deque(batch for batch in rows if batch.num_rows)
        self._queued = sum(batch.num_rows for batch in self._queue)
        self._merge, self._places = self._open(places), places

    def _own(self, parts: Any) -> Any:
        share = np.asarray(parts) % self.shares.total
        return (share >= self.shares.first) & (share < self.shares.first + self.shares.count)

    def _open(self, places: Mapping[str, Any]) -> Merge:
        lanes = []
        for side, names in enumerate(self._partitions):
            for part, name in enumerate(names):
                if self._apart and not self._own(np.array([part]))[0]:
                    continue
                lanes.append(self._open_lane(places, side, part, name))
        schemas = [arrow_schema(source.columns) for source in self._stream.sources]
        return Merge(lanes, schemas, self._stream.idle if self._stream.follow else 0.0)

    def _open_lane(self, places: Mapping[str, Any], side: int, part: int, name: str) -> Lane:
        """Open a partition; one that is new among others is read from its first row on."""
        source = self._stream.sources[side]
        place, key, seen = place_of(places, side, part)
        counts = source.counts if source.skips else None
        log = source.log.from_first() if places and place is None else source.log
        reader = log.open(name, place, source.columns, source.form, counts)
        reader.seen = seen
        return Lane(side, part, reader, reader.start, key, source.times)

    def _add_partitions(self) -> None:
        """Open the partitions that were added to the logs meanwhile."""
        if time.monotonic() - self._looked < _LOOK_EVERY or self._merge is None or not self._may_grow:
            return
        self._looked = time.monotonic()
        for side, source in enumerate(self._stream.sources):
            with suppress(StoreUnavailableError):  # the next look may succeed; rows report what is wrong
                found, known = source.log.partitions(), self._partitions[side]
                for name in found[len(known) :] if [*found[: len(known)]] == known else ():
                    part = len(known)
                    if not self._apart or self._own(np.array([part]))[0]:
                        self._merge.add(self._open_lane(self._merge.places(), side, part, name))
                    known.append(name)

    def _next(self) -> pa.RecordBatch | None:
        """Return the next batch; None if there is none yet, or, with `_over`, none any more."""
        if not self._fill() and (self.stopped or not self._is_slow()):
            stopped = self.stopped
            self._over = stopped or self._has_ended()
            if stopped:
                self.stopped = False
            if stopped or not self._over or not self._remainder or not self._queued:
                return None
        self._waits = None
        batch = self._cut(min(self._whole, self._queued))
        self._trim()
        self._given.append(batch)
        if self._apart or self.shares.total == 1:
            return batch
        share = np.arange(batch.num_rows) % self.shares.total
        return batch.filter(pa.array(self._own(share)))

    @property
    def _whole(self) -> int:
        """The rows that are read for a whole batch."""
        return self._size * (self.shares.count if self._apart else self.shares.total)

    def _has_ended(self) -> bool:
        """Return whether the log has no further rows and isn't followed."""
        return not self._stream.follow and self._merge is not None and self._merge.at_end

    def _fill(self) -> bool:
        """Read rows until there is a whole batch, or until none are available; return whether there is."""
        self._add_partitions()
        while self._queued < self._whole:
            merged = None if self.stopped else self._read()
            if merged is None:
                return False
            self.newest = int(merged.keys[-1])
            rows = merged.batches[0]
            if self._event_time is not None:
                times = pa.array(merged.times[merged.sides == 0])
                own = pa.schema([*rows.schema, pa.field(self._event_time, pa.int64())])
                rows = pa.RecordBatch.from_arrays([*rows.columns, times], schema=own)
            if self._join is not None:
                self._broken = True  # unless it ends without an error
                rows = self._join.push(
                    merged.keys, merged.times, merged.sides, merged.parts, rows, merged.batches[1]
                )
                self._broken = False
            for source, batch in zip(self._stream.sources, merged.batches, strict=True):
                source.counts.rows += batch.num_rows
            if rows.num_rows:
                self._queue.append(rows)
                self._queued += rows.num_rows
        self._slow = False
        return True

    def _is_slow(self) -> bool:
        """Return whether other ranks no longer wait for this one to fill a batch from its own partitions.

        That is so after they have waited ``idle`` seconds. The rank then gives the rows that it has, or none,
        until it has a full batch again, or no rank has rows.
        """
        idle = self._stream.idle
        if self._apart and self._stream.follow and idle is not None:
            self._waits = self._waits or time.monotonic()
            self._slow |= time.monotonic() - self._waits >= idle
        return self._slow

    def _read(self) -> Merged | None:
        """Read merged rows. After an error, the next iteration reads again from the last returned row."""
        assert self._merge is not None
        try:
            return self._merge.read()
        except BaseException:
            self._places = self._merge.places()
            self._merge.close()
            self._merge = None
            raise

    def _cut(self, rows: int) -> pa.RecordBatch:
        taken, left = [], rows
        while left:
            first = self._queue.popleft()
            if first.num_rows > left:
                self._queue.appendleft(first.slice(left))
                first = first.slice(0, left)
            taken.append(first)
            left -= first.num_rows
        self._queued -= rows
        return taken[0] if len(taken) == 1 else concat(taken, self.schema)


@contextmanager
def _in_graph() -> Iterator[None]:
    """Raise gmeta's errors so that their text passes through TensorFlow (`gmeta.io.reader_stats`)."""
    try:
        yield
    except GmetaError as error:
        raise ValueError(f"gmeta: {error}\n") from error


def _to_bytes(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    found: bytes = sink.getvalue().to_pybytes()
    return found


def _from_bytes(stored: bytes) -> pa.RecordBatch:
    with pa.ipc.open_stream(stored) as reader:
        return concat(list(reader), reader.schema)
