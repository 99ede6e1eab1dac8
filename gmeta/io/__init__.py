"""Readers of prepared data sets, as ``tf.data`` datasets.

- `rows` returns shuffled batches of samples for ordinary models.
- `tasks` returns task batches for meta-learning. `After` and `Flag` choose the query rows.
- `sequences` returns users' histories and exposures.
- `groups` returns the groups from which all of these are made.
- `ReadOptions` configures them. `AfterSteps` and `ReadingPosition` set where reading begins, and `Balance`
  and `SequenceCost` distribute equal work to all ranks.
- `HistoryStore` rebuilds users' histories as of a given time, and `late` returns the batches of `sequences`
  with histories from such a store. `RecentHistories` adds the events that a store doesn't have yet, for a
  ranker; it loads no TensorFlow.
- `write_predictions` writes predictions for all rows of a split to Arrow files; any number of ranks can
  resume it.
- `stream` reads a log that grows, such as a topic of Kafka, and `join` labels exposures by their later
  outcomes; `StreamPosition` is the position in both.
- `distribute` makes workers read (`gmeta workers`), and `ScaledPool` starts as many as training needs.
- `join_features` adds features from a source (`gmeta.io.features`): in memory, in RocksDB or in HBase.

`reader_stats` counts data that was read, skipped or bad, and reduces TensorFlow's errors to one line.

Each name is loaded at its first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gmeta.core.imports import load_lazily

if TYPE_CHECKING:
    from gmeta.io.cuts.task_split import After, Flag
    from gmeta.io.features import ArrowSource, HBaseSource, RocksDBSource, join_features
    from gmeta.io.histories.late_reader import late
    from gmeta.io.histories.recent import RecentHistories
    from gmeta.io.histories.store import HistoryStore
    from gmeta.io.predictions.write import write_predictions
    from gmeta.io.readers.balance import Balance, SequenceCost
    from gmeta.io.readers.cut_reader import sequences, tasks
    from gmeta.io.readers.group_reader import groups
    from gmeta.io.readers.position import ReadingPosition
    from gmeta.io.readers.read_options import AfterSteps, ReadOptions
    from gmeta.io.readers.row_reader import rows
    from gmeta.io.service.served_epochs import distribute
    from gmeta.io.service.worker_pool import ScaledPool
    from gmeta.io.streams.event_stream import join, stream
    from gmeta.io.streams.position import StreamPosition

_WHERE = {
    "After": "gmeta.io.cuts.task_split",
    "AfterSteps": "gmeta.io.readers.read_options",
    "ArrowSource": "gmeta.io.features",
    "Balance": "gmeta.io.readers.balance",
    "Flag": "gmeta.io.cuts.task_split",
    "HBaseSource": "gmeta.io.features",
    "HistoryStore": "gmeta.io.histories.store",
    "ReadOptions": "gmeta.io.readers.read_options",
    "ReadingPosition": "gmeta.io.readers.position",
    "RecentHistories": "gmeta.io.histories.recent",
    "RocksDBSource": "gmeta.io.features",
    "ScaledPool": "gmeta.io.service.worker_pool",
    "SequenceCost": "gmeta.io.readers.balance",
    "StreamPosition": "gmeta.io.streams.position",
    "distribute": "gmeta.io.service.served_epochs",
    "groups": "gmeta.io.readers.group_reader",
    "join": "gmeta.io.streams.event_stream",
    "join_features": "gmeta.io.features",
    "late": "gmeta.io.histories.late_reader",
    "rows": "gmeta.io.readers.row_reader",
    "sequences": "gmeta.io.readers.cut_reader",
    "stream": "gmeta.io.streams.event_stream",
    "tasks": "gmeta.io.readers.cut_reader",
    "write_predictions": "gmeta.io.predictions.write",
}
"""Name -> the module that defines it."""

_MOVED = {
    "EpochPiece": "gmeta.io.readers.read_options:OneEpoch",
    "EpochPlan": "gmeta.io.readers.epoch",
    "FeatureSource": "gmeta.io.features",
    "FetchCounts": "gmeta.io.features.cells",
    "FetchPolicy": "gmeta.io.features",
    "OneEpoch": "gmeta.io.readers.read_options",
    "Predictions": "gmeta.io.predictions.plan",
    "ReaderCounts": "gmeta.io.reader_stats",
    "ReaderStats": "gmeta.io.reader_stats",
    "ReadingTime": "gmeta.io.readers.read_options",
    "SequenceSplit": "gmeta.io.cuts.sequence_split",
    "ServedPosition": "gmeta.io.service.pieces",
    "Start": "gmeta.io.readers.read_options",
    "TaskChoice": "gmeta.io.cuts.task_choice",
    "Waiting": "gmeta.io.readers.read_options",
    "WorkerPool": "gmeta.io.service.worker_pool",
    "as_data_error": "gmeta.io.reader_stats",
    "data_errors": "gmeta.io.reader_stats",
    "epoch_plan": "gmeta.io.readers.group_reader",
    "from_memory": "gmeta.io.readers.read_options",
    "history_crc": "gmeta.io.histories.history_plan:history_crc_of_ragged",
    "rebatch": "gmeta.io.service.served_epochs",
}
"""Old name -> the module that has it now, for one release."""

__all__ = [
    "After",
    "AfterSteps",
    "ArrowSource",
    "Balance",
    "Flag",
    "HBaseSource",
    "HistoryStore",
    "ReadOptions",
    "ReadingPosition",
    "RecentHistories",
    "RocksDBSource",
    "ScaledPool",
    "SequenceCost",
    "StreamPosition",
    "distribute",
    "groups",
    "join",
    "join_features",
    "late",
    "rows",
    "sequences",
    "stream",
    "tasks",
    "write_predictions",
]

__getattr__, __dir__ = load_lazily(__name__, _WHERE, _MOVED)
