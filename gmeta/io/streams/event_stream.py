"""Describes streams: `stream` a log that grows, `join` exposures with their later outcomes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.errors import ConfigError, whole_number
from gmeta.core.settings import parse_duration, parse_size
from gmeta.io.streams.folder_log import FolderLog
from gmeta.io.streams.late_labels import WEIGHT
from gmeta.io.streams.merge import Described, Joining, Log, Source
from gmeta.io.streams.message_logs import parse_url
from gmeta.io.streams.position import StreamPosition, StreamReader
from gmeta.io.streams.records import (
    SECOND,
    UNITS,
    Columns,
    Format,
    StreamCounts,
    check_columns,
    tensor_specs,
)

NEVER = "never"


class Stream(Described):
    """Rows of a log, or examples joined from two; made by `stream` and `join`.

    Attributes:
      sources: The logs.
      joining: How they are joined; None for a single log.
      follow: Whether to wait for further rows at the end.
      idle: After how many seconds at its end a partition no longer holds up others; None: never.
      poll: Seconds between two looks for new rows.
    """

    def batches(
        self,
        batch_size: int = 1024,
        *,
        label: str | None = None,
        weight: str | None = None,
        start: StreamPosition | None = None,
        remainder: bool = True,
        event_time: str | None = None,
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
          remainder: Whether the last rows of a stream that ends make a smaller batch. If not, they wait for
            further rows, if there is a `start`.
          event_time: The name of a further feature, the event times in int64 microseconds; of a join, those
            of exposures. None: there is none.

        Returns:
          A dataset of features, or of (features, label), or (features, label, weight). Features are column ->
          (batch_size,) int64, float32, float64 or string, or ragged (batch_size, None) for a list.

        Raises:
          ConfigError: There is no such column; or ranks can't share the stream.
          DataError: While iterating: a row is bad, or rows to be read next are gone.
        """
        if self.joining is not None:
            label, weight = label or self.joining.label, weight or WEIGHT
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
        data = self.columns(batch_size, start=start, remainder=remainder, event_time=event_time)
        taken = [name for name in (label, weight) if name is not None]

        def element(parts: dict[str, Any]) -> Any:
            features = {name: each for name, each in parts.items() if name not in taken}
            return (features, *(parts[name] for name in taken))

        return data.map(element) if taken else data

    def columns(
        self,
        batch_size: int = 1024,
        *,
        start: StreamPosition | None = None,
        remainder: bool = True,
        event_time: str | None = None,
    ) -> tf.data.Dataset:
        """Return batches of all columns by name; arguments, errors and order are those of `batches`."""
        whole_number("batch_size", batch_size, least=1)
        if event_time in self.schema.names:
            raise ConfigError(
                f"stream: event_time={event_time!r} is a column of the stream: name it otherwise"
            )
        reader = StreamReader(self, batch_size, start, remainder, event_time)
        data = tf.data.Dataset.from_generator(
            lambda: iter(reader), output_signature=tensor_specs(reader.schema)
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
      idle: How long a partition may be without rows before it no longer holds up the others, and how long
        other ranks wait for a rank to fill a batch from its own partitions; ``"never"``: they always wait, so
        that neither the order nor the batches depend on the clock.
      poll: The time between two looks for new rows.
      on_bad: What a row does that can't be parsed, or a file that comes too late: ``"raise"`` or ``"skip"``;
        `Stream.counts` counts them.
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
                "columns={'user': 'int64', 'ts': 'timestamp'}, or --set 'columns={user=\"int64\"}'"
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
      The stream of examples: the exposures' columns, then, in float32, `label`, ``weight``, with `negatives`
      ``log_odds``, and with `corrections` ``corrects``, which is 1 for rows that correct a negative.

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
