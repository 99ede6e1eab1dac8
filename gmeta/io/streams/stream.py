"""Streams: what is read, in which batches, and the position in all of it, which a checkpoint holds."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import pyarrow as pa
import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.collectives.wire import pack, unpack
from gmeta.core.errors import ConfigError, GmetaError, whole_number
from gmeta.core.position import Position, int64_variable
from gmeta.core.settings import parse_duration, parse_size
from gmeta.io.streams.folder_log import FolderLog
from gmeta.io.streams.merge import Lane, Merge, Reader, place_of
from gmeta.io.streams.message_logs import parse_url
from gmeta.io.streams.records import (
    SECOND,
    UNITS,
    Columns,
    Format,
    Ints,
    Rows,
    StreamCounts,
    arrow_schema,
    check_columns,
    concat,
    event_times,
    tensor_specs,
    tensors,
)

if TYPE_CHECKING:
    from gmeta.io.streams.late_labels import LabelJoin

NEVER = "never"
_VERSION = 1


class Log(Protocol):
    """A source of rows, in partitions."""

    @property
    def name(self) -> str:
        """The log, for messages."""
        ...

    @property
    def unit(self) -> str | None:
        """The unit of the rows' own times; None if they have none."""
        ...

    def partitions(self) -> Sequence[str]:
        """Return the names of the partitions."""
        ...

    def infer(self, form: Format | None) -> dict[str, str] | None:
        """Infer the columns from the first rows; None if there are none yet."""
        ...

    def open(
        self, partition: str, place: Any, columns: Columns, form: Format | None, counts: StreamCounts | None
    ) -> Reader:
        """Read a partition from a place on; None is where a new reader begins."""
        ...


@dataclass(frozen=True)
class Source:
    """A log and how its rows are read.

    Attributes:
      log: The log.
      columns: The columns.
      time: The column of event times; None: the log's own times.
      unit: Its unit.
      form: The form of a row.
      skips: Whether bad rows are skipped.
      counts: Counters.
    """

    log: Log
    columns: Columns
    time: str | None
    unit: str
    form: Format | None
    skips: bool
    counts: StreamCounts

    def times(self, rows: Rows) -> Ints:
        """Return the event times of rows; 0 for a single partition without times."""
        if self.time is not None:
            return event_times(rows.batch, self.time, self.unit)
        return np.zeros(rows.batch.num_rows, np.int64) if rows.times is None else rows.times


@dataclass(frozen=True)
class Joining:
    """The arguments of `join`, in microseconds and bytes."""

    key: Sequence[str]
    within: int
    lateness: int
    corrections: int
    label: str
    outcome: str | None
    negatives: float
    memory: int
    spill: Path | None

    def start(self) -> LabelJoin:
        """Return a join without exposures."""
        from gmeta.io.streams.late_labels import LabelJoin

        return LabelJoin(
            key=self.key,
            within=self.within,
            lateness=self.lateness,
            corrections=self.corrections,
            label=self.label,
            outcome=self.outcome,
            negatives=self.negatives,
            memory=self.memory,
            spill=self.spill,
        )


@dataclass(frozen=True)
class Stream:
    """Rows of a log, or examples joined from two; made by `stream` and `join`.

    Attributes:
      sources: The logs.
      joining: How they are joined; None for a single log.
      follow: Whether to wait for further rows at the end.
      idle: After how many seconds at its end a partition no longer holds up others; None: never.
      poll: Seconds between two looks for new rows.
    """

    sources: Sequence[Source]
    joining: Joining | None
    follow: bool
    idle: float | None
    poll: float

    @property
    def counts(self) -> Sequence[StreamCounts]:
        """What was read from each log."""
        return [source.counts for source in self.sources]

    @property
    def schema(self) -> pa.Schema:
        """The columns of the examples."""
        schema = arrow_schema(self.sources[0].columns)
        if self.joining is None:
            return schema
        extra = [(self.joining.label, pa.float32()), ("weight", pa.float32())]
        if self.joining.negatives < 1:
            extra.append(("log_odds", pa.float32()))
        return pa.schema([*schema, *(pa.field(name, kind) for name, kind in extra)])

    def batches(
        self,
        batch_size: int = 1024,
        *,
        label: str | None = None,
        weight: str | None = None,
        start: StreamPosition | None = None,
        remainder: bool = True,
    ) -> tf.data.Dataset:
        """Return the stream as batches of tensors, the k-th the same each time that the log is read.

        On several ranks, with at least as many partitions as ranks, each rank reads its own partitions, the
        i-th of which belongs to rank i mod N. With fewer, every rank reads all of them and takes every N-th
        row. A step has ``batch_size`` rows of each rank.

        Args:
          batch_size: Rows of a batch.
          label: The column that is the label; of a join, its own label. None: no label.
          weight: The column of weights; of a join, its own. None: no weights. It requires a label.
          start: The position to continue from; it counts what was trained. None: the beginning, at each
            iteration.
          remainder: Whether the last rows of a stream that ends make a smaller batch. If not, they wait, with
            `start`, for further rows.

        Returns:
          A dataset of features, or of (features, label), or (features, label, weight). Features are column ->
          (batch_size,) int64, float32, float64 or string, or ragged (batch_size, None) for a list.

        Raises:
          ConfigError: There is no such column; or ranks can't share the stream.
          DataError: While iterating: a row is bad, or rows to be read next are gone.
        """
        whole_number("batch_size", batch_size, least=1)
        if self.joining is not None:
            label, weight = label or self.joining.label, weight or "weight"
        for what, name in (("label", label), ("weight", weight)):
            if name is not None and name not in self.schema.names:
                raise ConfigError(
                    f"stream: {what}={name!r} is no column among {', '.join(self.schema.names)}"
                )
        if weight is not None and label is None:
            raise ConfigError(f"stream: weight={weight!r} needs a label, as Keras takes them: give label=")
        if start is not None and start._reader is not None:  # of a data set that this one replaces
            start.gather_ranks()
            start._reader.end()
        reader = StreamReader(self, batch_size, start, remainder)
        specs = tensor_specs(self.schema)
        taken = [name for name in (label, weight) if name is not None]

        def element(parts: dict[str, Any]) -> Any:
            found = [parts[name] for name in taken]
            features = {name: each for name, each in parts.items() if name not in taken}
            return (features, *found) if found else features

        data = tf.data.Dataset.from_generator(
            lambda: map(element, reader), output_signature=element(dict(specs))
        )
        if start is not None:
            start._reader = reader
            data._gmeta_position = start
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        return data.with_options(options)


def stream(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    columns: Columns | None = None,
    time: str | None = None,
    unit: str | None = None,
    form: Format | None = None,
    follow: bool = True,
    begin: str = "earliest",
    idle: str = "5s",
    poll: str = "0.1s",
    on_bad: str = "raise",
    settings: Mapping[str, Any] | None = None,
) -> Stream:
    """Describe rows of a log that grows.

    Rows are in the order of their times (`gmeta.io.streams.merge`), which doesn't depend on when they are
    read: a stream that is followed and a later replay of its log give the same batches.

    Args:
      source: A folder or prefix whose files appear whole and in the order of their names, in Parquet, JSON
        lines or TFRecord (`gmeta.io.streams.folder_log`), several of which are partitions;
        ``"kafka://host:port,host:port/topic"``; or ``"redis://host:port/stream,stream"``.
      columns: Column -> ``"int64"``, ``"float32"``, ``"float64"``, ``"string"``, each also as a list, such as
        ``"int64[]"``, or ``"timestamp"``. None: all columns of the first rows, by their types.
      time: The column of event times. None: the time at which the broker received the row; a folder has
        none, and must be alone.
      unit: The unit of a column of numbers: ``"s"``, ``"ms"``, ``"us"`` or ``"ns"``. None: ``"s"``.
      form: What a message or a record of a TFRecord is: ``"json"`` or ``"example"``. None: JSON in messages,
        ``tf.train.Example`` in files.
      follow: Whether to wait for further rows at the end. If not, the stream ends there.
      begin: Where a reader without a position begins: ``"earliest"`` or ``"latest"``.
      idle: How long a partition may be without rows before it no longer holds up the others; ``"never"``:
        the others always wait for its next row, so that the order doesn't depend on the clock.
      poll: The time between two looks for new rows.
      on_bad: What a row does that can't be parsed: ``"raise"`` or ``"skip"``; `Stream.counts` counts them.
      settings: Settings of Kafka's consumer, such as those of TLS.

    Returns:
      The stream; `Stream.batches` reads it.

    Raises:
      ConfigError: An argument is invalid, or the log has no rows yet from which to infer columns.
      StoreUnavailableError: No broker answers.

    Example:
      ::

        events = gmeta.io.stream("kafka://broker:9092/events", columns={"user": "int64", "click": "float32"})
        model.reading = gmeta.io.StreamPosition()
        checkpoints = gmeta.checkpoint.ShardedCheckpoint("checkpoints", every="10m")
        checkpoints.fit(model, events.batches(1024, label="click", start=model.reading), epochs=1)
    """
    for what, value, known in (
        ("begin", begin, ("earliest", "latest")),
        ("on_bad", on_bad, ("raise", "skip")),
        ("form", form, (None, "json", "example")),
        ("unit", unit, (None, *UNITS)),
    ):
        if value not in known:
            raise ConfigError(f"stream: {what} must be one of {', '.join(map(repr, known))}, got {value!r}")
    latest = begin == "latest"
    paths = [source] if isinstance(source, (str, os.PathLike)) else list(source)
    named = [os.fspath(path) for path in paths]
    log: Log | None = parse_url(named[0], settings or {}, latest) if len(named) == 1 else None
    if log is None:
        if settings:
            raise ConfigError(f"stream: settings={settings!r} are for Kafka, and the source is {source!r}")
        log = FolderLog(named, latest)
    if time is None and log.unit is None and len(log.partitions()) > 1:
        raise ConfigError(
            f"stream: {log.name}: several folders are read in order of time: name its column, as in time='ts'"
        )
    if columns is None:
        columns = collectives.broadcast_object(log.infer(form) if collectives.world().rank == 0 else None)
        if columns is None:
            raise ConfigError(
                f"stream: {log.name} has no rows yet, so its columns aren't known: name them, as in "
                "columns={'user': 'int64', 'ts': 'timestamp'}"
            )
        if time is not None and columns.get(time) == "float32":
            columns = {**columns, time: "float64"}  # a time in seconds takes more digits
    check_columns(columns)
    if time is not None and columns.get(time) not in ("int64", "float64", "timestamp"):
        found = f"is {columns[time]}" if time in columns else f"isn't among {', '.join(columns)}"
        raise ConfigError(f"stream: time={time!r} {found}: name a column of int64, float64 or timestamp")
    if unit is not None and (time is None or columns[time] == "timestamp"):
        raise ConfigError(f"stream: unit={unit!r} is for a column of numbers, and time={time!r} is none")
    one = Source(log, dict(columns), time, unit or "s", form, on_bad == "skip", StreamCounts())
    waits = None if idle == NEVER else parse_duration(idle, "stream: idle")
    return Stream([one], None, follow, waits, parse_duration(poll, "stream: poll"))


def join(
    exposures: Stream,
    outcomes: Stream,
    *,
    key: str | Sequence[str],
    within: str,
    lateness: str = "0s",
    corrections: str = "0s",
    label: str = "label",
    outcome: str | None = None,
    negatives: float = 1.0,
    memory: str = "256MB",
    spill: str | os.PathLike[str] | None = None,
) -> Stream:
    """Label exposures by their outcomes, which come later (`gmeta.io.streams.late_labels`).

    An exposure waits for its outcome. The outcome, such as a click, makes a positive example at once; without
    one, the exposure becomes a negative example `within` its time. An outcome that comes later still, within
    `corrections`, takes that negative back, by the same example with the weight -1, and adds the positive.

    Args:
      exposures: What users were shown.
      outcomes: What they did. On several ranks that read their own partitions, both logs must be partitioned
        alike: by the key, and in the same number.
      key: The columns that an exposure and its outcomes have in common, and no two exposures.
      within: How long after the exposure an outcome counts, such as ``"30m"``, in event time.
      lateness: How much later than its time an outcome may arrive.
      corrections: How long after that an outcome is still a correction.
      label: The name of the column of labels, 1 or 0.
      outcome: The outcomes' column of numbers that is the label in place of 1.
      negatives: The share of negatives that is kept, drawn by a hash of the key. Below 1, training adds the
        column ``log_odds`` to the logit, so that the logit without it is that of all negatives.
      memory: The bound on the rows of waiting exposures in memory; further ones wait in files.
      spill: The folder of these files. None: a temporary one.

    Returns:
      The stream of examples: the exposures' columns, `label` and ``weight``, all float32.

    Raises:
      ConfigError: A column is missing, or an argument is out of range.

    Example:
      ::

        shown = gmeta.io.stream("kafka://broker:9092/shown", time="ts")
        clicks = gmeta.io.stream("kafka://broker:9092/clicks", time="ts")
        examples = gmeta.io.join(shown, clicks, key="request", within="30m", corrections="1d")
        model.fit(examples.batches(1024, start=model.reading))
    """
    keys = [key] if isinstance(key, str) else list(key)
    for name, side in (("exposures", exposures), ("outcomes", outcomes)):
        if side.joining is not None:
            raise ConfigError(f"join: {name} are joined already; join logs, as stream() returns them")
        source = side.sources[0]
        if missing := [column for column in keys if column not in source.columns]:
            raise ConfigError(
                f"join: {source.log.name} doesn't have the key's columns {', '.join(missing)}: it has "
                f"{', '.join(source.columns)}"
            )
        if source.time is None and source.log.unit is None:
            raise ConfigError(f"join: {source.log.name} has no times: name their column, as in time='ts'")
    kinds = [[side.sources[0].columns[column] for column in keys] for side in (exposures, outcomes)]
    if kinds[0] != kinds[1]:
        raise ConfigError(
            f"join: the key is {kinds[0]} of exposures and {kinds[1]} of outcomes: give one type"
        )
    settings = {name: getattr(exposures, name) for name in ("follow", "idle", "poll")}
    for name, value in settings.items():
        if getattr(outcomes, name) != value:
            raise ConfigError(
                f"join: {name} differs between the streams: {value!r} and {getattr(outcomes, name)!r}"
            )
    if not 0.0 < negatives <= 1.0:
        raise ConfigError(f"join: negatives must be above 0 and at most 1, got {negatives!r}")

    def micros(text: str, what: str) -> int:
        return round(parse_duration(text, f"join: {what}") * SECOND)

    joining = Joining(
        keys,
        micros(within, "within"),
        micros(lateness, "lateness"),
        micros(corrections, "corrections"),
        label,
        outcome,
        negatives,
        parse_size(memory, "join: memory"),
        None if spill is None else Path(spill),
    )
    joining.start()  # checks the columns that it adds
    return Stream([*exposures.sources, *outcomes.sources], joining, **settings)


class StreamPosition(Position):
    """The position in a stream: what is trained, and all that waits, as variables that a checkpoint stores.

    Make it an attribute of the model, and pass it to `Stream.batches`. `gmeta.models.Model.fit` counts the
    steps that are trained, at any depth of a pipeline. ``ShardedCheckpoint`` and ``BackupAndRestore`` save
    it: the place in each partition, the exposures that wait for their outcomes, and the rows that were read
    and not trained. Training continues with the next row, on any number of ranks, and each row is trained
    once. In your own loop, call ``trained()`` after each step, and `gather_ranks` before you save.

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

    @property
    def counts_groups(self) -> bool:
        """Whether any number of ranks can resume from the position."""
        return True

    def trained(self, steps: int = 1) -> None:
        """Count steps that are trained."""
        self.step.assign_add(steps)

    def stop(self) -> None:
        """End the stream: iterations return what they have read, and then end."""
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
    """

    def __init__(self, of: Stream, batch_size: int, position: StreamPosition | None, remainder: bool) -> None:
        self._stream, self._position, self._remainder = of, position, remainder
        self._schema, self._size = of.schema, batch_size
        self.stopped = False
        self._lock = threading.Lock()
        self._turn = 0
        self._merge: Merge | None = None
        self._places: dict[str, Any] | None = None  # when nothing is open; None: nothing was read yet
        self._join: LabelJoin | None = None
        self._queue: deque[pa.RecordBatch] = deque()  # examples that no batch has yet
        self._queued = 0
        self._given: deque[pa.RecordBatch] = deque()  # examples of batches that aren't trained yet
        self._since = 0  # the steps that were trained before the first of them
        self._known = b""  # what this reader stored last
        self._partitions = [list(source.log.partitions()) for source in of.sources]
        self.shares = collectives.world().shares
        sizes = {len(each) for each in self._partitions}
        self._apart = self.shares.total > 1 and min(sizes) >= self.shares.total
        if self._apart and len(sizes) > 1:
            raise ConfigError(
                f"join: the logs have {' and '.join(map(str, sorted(sizes)))} partitions, and ranks read "
                "their own: partition both by the key, and in the same number"
            )
        together = sum(map(len, self._partitions)) > 1
        ranks = self.shares.total
        if ranks > 1 and not self._apart and together and of.idle is not None:
            raise ConfigError(
                f"stream: {ranks} ranks read {max(sizes)} partitions together, so their order may "
                "not depend on a clock: give idle='never', or the log as many partitions as ranks"
            )

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterate over batches; an earlier iteration ends."""
        with self._lock:
            self._turn += 1
            turn = self._turn
            self.stopped = False
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
            self._known = pack({"version": _VERSION, "columns": str(self._schema), "states": states})
            position.saved.assign(np.frombuffer(self._known, np.uint8))

    def _state(self) -> dict[str, Any]:
        self._trim()
        return {
            "places": self._places if self._merge is None else self._merge.places(),
            "rows": _to_bytes(concat([*self._given, *self._queue], self._schema)),
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
        self._since = max(self._since, step) if not self._given else self._since

    def _begin(self) -> None:
        """Go on after the last trained batch: from memory, or else from the position's variables."""
        saved = b"" if self._position is None else self._position.saved.numpy().tobytes()
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
        self._over = False

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
            if held["columns"] != str(self._schema):
                raise ConfigError(
                    f"StreamPosition: stored for the columns\n{held['columns']}\nand the stream has\n"
                    f"{self._schema}\nname the former ones in columns="
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
            whole = concat(rows, self._schema)
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
        for side, source in enumerate(self._stream.sources):
            for part, name in enumerate(self._partitions[side]):
                if self._apart and not self._own(np.array([part]))[0]:
                    continue
                place, key = place_of(places, side, part)
                counts = source.counts if source.skips else None
                reader = source.log.open(name, place, source.columns, source.form, counts)
                lanes.append(Lane(side, part, reader, reader.start, key, source.times))
        schemas = [arrow_schema(source.columns) for source in self._stream.sources]
        return Merge(lanes, schemas, self._stream.idle if self._stream.follow else 0.0)

    def _next(self) -> pa.RecordBatch | None:
        """Return the next batch; None if there is none yet, or, with `_over`, none any more."""
        whole = self._size * (self.shares.count if self._apart else self.shares.total)
        while self._queued < whole:
            if self.stopped:
                self._over = True
                return None
            assert self._merge is not None
            merged = self._merge.read()
            if merged is None:
                if self._stream.follow or not self._merge.at_end:
                    return None
                self._over = True
                if not self._remainder or not self._queued:
                    return None
                break
            rows = merged.batches[0]
            if self._join is not None:
                rows = self._join.push(
                    merged.keys, merged.times, merged.sides, merged.parts, rows, merged.batches[1]
                )
            for source, batch in zip(self._stream.sources, merged.batches, strict=True):
                source.counts.rows += batch.num_rows
            if rows.num_rows:
                self._queue.append(rows)
                self._queued += rows.num_rows
        batch = self._cut(min(whole, self._queued))
        self._trim()
        self._given.append(batch)
        if self._apart or self.shares.total == 1:
            return batch
        share = np.arange(batch.num_rows) % self.shares.total
        return batch.filter(pa.array(self._own(share)))

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
        return taken[0] if len(taken) == 1 else concat(taken, self._schema)


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
