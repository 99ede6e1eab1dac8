"""Readers of prepared data sets, as ``tf.data`` datasets.

- `rows` gives shuffled batches of samples for ordinary models.
- `tasks` gives task batches for meta-learning. `After` and `Flag` choose the query rows, `TaskChoice` the
  tasks.
- `sequences` gives users' histories and exposures, which `SequenceSplit` cuts out of groups.
- `groups` gives the groups that all of these are made of; `group_batch` reads them from files without an
  index.
- `epoch_plan` returns the rest of an epoch, `ReaderStats` counts read, skipped and bad data, and
  `ReadingTime` measures whether training waits for its data.
- `data_errors` and `as_data_error` turn TensorFlow's errors into one line.
- `HistoryStore` rebuilds users' histories as they were at a moment, and `late` gives the batches of
  `sequences` with histories out of such a store; `history_crc` is a history's checksum.
- `write_predictions` predicts for all rows of a split, into Arrow files; any number of ranks can resume it.
- `distribute` lets workers read (`gmeta workers`), and `rebatch` makes large batches of small ones.
- `join_features` adds features from a `FeatureSource`: in memory, in RocksDB or in HBase.
"""

from gmeta.io.balance import SequenceCost
from gmeta.io.cuts.query_rule import After, Flag
from gmeta.io.cuts.sequence_split import SequenceSplit
from gmeta.io.cuts.task_choice import TaskChoice
from gmeta.io.features import (
    ArrowSource,
    FeatureSource,
    FetchCounts,
    FetchPolicy,
    HBaseSource,
    RocksDBSource,
    join_features,
)
from gmeta.io.histories.history_plan import history_crc
from gmeta.io.histories.late_reader import late
from gmeta.io.histories.store import HistoryStore
from gmeta.io.predictions.plan import Predictions
from gmeta.io.predictions.write import write_predictions
from gmeta.io.reader_stats import ReaderCounts, ReaderStats, as_data_error, data_errors
from gmeta.io.readers.epoch import EpochPlan
from gmeta.io.readers.group_dataset import group_batch
from gmeta.io.readers.group_reader import epoch_plan, groups
from gmeta.io.readers.position import ReadingPosition
from gmeta.io.readers.read_options import (
    AfterSteps,
    EpochPiece,
    OneEpoch,
    ReadingTime,
    ReadOptions,
    Start,
    Waiting,
    from_memory,
)
from gmeta.io.readers.row_reader import rows
from gmeta.io.readers.sequence_reader import sequences
from gmeta.io.readers.step_balance import Balance
from gmeta.io.readers.task_reader import tasks
from gmeta.io.service.scaled_pool import ScaledPool
from gmeta.io.service.served_epochs import distribute, rebatch
from gmeta.io.service.served_position import ServedPosition
from gmeta.io.service.worker_pool import WorkerPool

__all__ = [
    "After",
    "AfterSteps",
    "ArrowSource",
    "Balance",
    "EpochPiece",
    "EpochPlan",
    "FeatureSource",
    "FetchCounts",
    "FetchPolicy",
    "Flag",
    "HBaseSource",
    "HistoryStore",
    "OneEpoch",
    "Predictions",
    "ReadOptions",
    "ReaderCounts",
    "ReaderStats",
    "ReadingPosition",
    "ReadingTime",
    "RocksDBSource",
    "ScaledPool",
    "SequenceCost",
    "SequenceSplit",
    "ServedPosition",
    "Start",
    "TaskChoice",
    "Waiting",
    "WorkerPool",
    "as_data_error",
    "data_errors",
    "distribute",
    "epoch_plan",
    "from_memory",
    "group_batch",
    "groups",
    "history_crc",
    "join_features",
    "late",
    "rebatch",
    "rows",
    "sequences",
    "tasks",
    "write_predictions",
]
