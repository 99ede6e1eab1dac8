"""Readers: what preprocessing wrote, as ``tf.data`` datasets.

`rows` gives shuffled batches of samples for ordinary models; `tasks` task batches for meta-learning, whose
query rows `After` and `Flag` may name, and whose tasks a `TaskChoice`; `sequences` users' histories and
exposures, which `SequenceSplit` cuts out of groups; `groups` the groups under all of them,
`group_batch` those of files that have no index; `epoch_plan` says what is left of an epoch, `ReaderStats`
what was read, skipped and bad; `ReadingTime` whether training waits for its data; `data_errors` and
`as_data_error` turn TensorFlow's errors into one line. `balance_over_ranks` and `balanced_elements` deal
groups out anew, so that all ranks have equally much to do. `join_features` adds features that a
`FeatureSource` has: in memory, in RocksDB or in HBase.
"""

from gmeta.io.balance.rank_balance import balance_over_ranks as balance_over_ranks
from gmeta.io.balance.rank_balance import balanced_elements as balanced_elements
from gmeta.io.balance.sequence_cost import SequenceCost as SequenceCost
from gmeta.io.cuts.query_rule import After as After
from gmeta.io.cuts.query_rule import Flag as Flag
from gmeta.io.cuts.sequence_split import SequenceSplit as SequenceSplit
from gmeta.io.cuts.task_choice import TaskChoice as TaskChoice
from gmeta.io.error_lines import as_data_error as as_data_error
from gmeta.io.error_lines import data_errors as data_errors
from gmeta.io.features import ArrowSource as ArrowSource
from gmeta.io.features import FeatureSource as FeatureSource
from gmeta.io.features import FetchCounts as FetchCounts
from gmeta.io.features import FetchPolicy as FetchPolicy
from gmeta.io.features import HBaseSource as HBaseSource
from gmeta.io.features import RocksDBSource as RocksDBSource
from gmeta.io.features import join_features as join_features
from gmeta.io.reader_stats import ReaderCounts as ReaderCounts
from gmeta.io.reader_stats import ReaderStats as ReaderStats
from gmeta.io.readers.epoch import EpochPlan as EpochPlan
from gmeta.io.readers.group_dataset import group_batch as group_batch
from gmeta.io.readers.group_reader import Balance as Balance
from gmeta.io.readers.group_reader import epoch_plan as epoch_plan
from gmeta.io.readers.group_reader import groups as groups
from gmeta.io.readers.position import ReadingPosition as ReadingPosition
from gmeta.io.readers.reading_time import ReadingTime as ReadingTime
from gmeta.io.readers.reading_time import Waiting as Waiting
from gmeta.io.readers.reading_time import from_memory as from_memory
from gmeta.io.readers.row_reader import rows as rows
from gmeta.io.readers.sequence_reader import sequences as sequences
from gmeta.io.readers.task_reader import tasks as tasks
