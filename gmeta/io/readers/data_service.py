"""tf.data service: `groups` and `tasks` read by other processes than the one that trains. Best effort.

Workers, and with dynamic sharding the dispatcher, must know gmeta's ops: call `load_ops` there, before the
server is started::

    import gmeta
    import tensorflow as tf
    from gmeta.io import data_service

    data_service.load_ops()
    config = tf.data.experimental.service.WorkerConfig(dispatcher_address="host:5050", port=0)
    tf.data.experimental.service.WorkerServer(config).join()

What the service doesn't do: save an iterator, keep an order, or give ranks equal numbers of steps.
"""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.native import load_op_library
from gmeta.io.readers.group_reader import in_pieces, reads_ranges


def load_ops() -> None:
    """Make gmeta's datasets known to this process, which runs a worker or a dispatcher of tf.data service.

    Raises:
      NativeLibraryError: The native ops were never built.
    """
    load_op_library("io")


def distribute(
    dataset: tf.data.Dataset, service: str, *, dynamic: bool = True, job_name: str | None = None
) -> tf.data.Dataset:
    """Have a dataset of `groups` or `tasks` read by tf.data service.

    The dataset says what is read: with ``shard=(r, N)``, or as rank r of a job, it is rank r's range, read by
    all workers, so each rank's dataset is read apart. Ranks that share one reading by ``job_name`` must give
    the same dataset, ``shard=(0, 1)``; elements then go to whoever asks first, and ranks may have different
    numbers of them.

    Args:
      dataset: Of `groups` or `tasks` with ``start=OneEpoch(e)``, and what is made of it.
      service: The dispatcher: ``"grpc://host:port"``.
      dynamic: True: workers are dealt the epoch's ``pieces``, and each group is read once; a worker that is
        lost takes its piece along. False: each worker reads all of it.
      job_name: Datasets of one name are one reading, shared.

    Returns:
      A dataset of the same elements, in no order. It is the same epoch each time: for the next one, build
      another. Iterators can't be saved. `ReadingTime` counts if it comes behind. The counters of
      `ReaderStats` are of the process that reads, so they stay zero here unless workers run in it.

    Raises:
      ConfigError: The dataset counts in variables, which workers don't have; or it is to be dealt out, but
        isn't in pieces.

    Example:
      >>> epoch = tasks("data/warm", start=OneEpoch(e, pieces=64))
      >>> for batch in distribute(epoch, "grpc://host:5050").prefetch(2):
      ...     train(batch)
    """
    if any(tensor.dtype == tf.resource for tensor in _capture(dataset)):
        raise ConfigError(
            "data_service: the dataset counts in variables (epochs, a ReadingPosition, ReadingTime), which "
            "workers don't have: pass start=OneEpoch(epoch), and put ReadingTime behind it"
        )
    if dynamic and reads_ranges(dataset) and not in_pieces(dataset):
        raise ConfigError(
            "data_service: only a dataset in pieces can be dealt out to workers: pass start=OneEpoch(epoch, "
            "pieces=), about four pieces for each worker, or dynamic=False for every worker to read all of it"
        )
    policy = tf.data.experimental.service.ShardingPolicy
    mode = policy.DYNAMIC if dynamic else policy.OFF
    return dataset.apply(tf.data.experimental.service.distribute(mode, service, job_name=job_name))


def _capture(dataset: tf.data.Dataset) -> Iterator[tf.Tensor]:
    """What the functions of a dataset, and of all that it is made of, hold of the world outside."""
    for function in dataset._functions():
        yield from function.function.captured_inputs
    for source in dataset._inputs():
        yield from _capture(source)
