"""Readers: what preprocessing wrote, as ``tf.data`` datasets.

`tasks` gives task batches for meta-learning, `group_batch` the groups under it, `ReaderStats` what was
read, skipped and bad; `data_errors` and `as_data_error` turn TensorFlow's errors into one line.
"""

from gmeta.io.errors import as_data_error as as_data_error
from gmeta.io.errors import data_errors as data_errors
from gmeta.io.group_batch import group_batch as group_batch
from gmeta.io.reader_stats import ReaderCounts as ReaderCounts
from gmeta.io.reader_stats import ReaderStats as ReaderStats
from gmeta.io.tasks import tasks as tasks
