"""tf.data service: other processes read `groups` and `tasks` for the one that trains. Best effort.

Workers, and with dynamic sharding the dispatcher, must know gmeta's ops. Call `load_ops` there before the
server starts::

    import gmeta
    import tensorflow as tf
    from gmeta.io import data_service

    data_service.load_ops()
    config = tf.data.experimental.service.WorkerConfig(dispatcher_address="host:5050", port=0)
    tf.data.experimental.service.WorkerServer(config).join()

The service doesn't save iterators, keep an order, or give ranks equal numbers of steps.
"""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.native import load_op_library
from gmeta.io.readers.group_reader import in_pieces, reads_ranges


def load_ops() -> None:
    """Load gmeta's datasets into this process, which runs a worker or a dispatcher of tf.data service.

    Raises:
      NativeLibraryError: The native ops were never built.
    """
    load_op_library("io")


def distribute(
    dataset: tf.data.Dataset, service: str, *, dynamic: bool = True, job_name: str | None = None
) -> tf.data.Dataset:
    """Read a dataset of `groups` or `tasks` through tf.data service.

    The dataset decides what is read. With ``shard=(r, N)``, or as rank r of a job, it is rank r's range,
    which all workers read together; each rank's dataset is read separately. Ranks that share one reading by
    ``job_name`` must give the same dataset, ``shard=(0, 1)``. An element then goes to the rank that requests
    it first, and ranks may get different numbers of elements.

    Args:
      dataset: A dataset of `groups` or `tasks` with ``start=OneEpoch(e)``, or one derived from it.
      service: The dispatcher: ``"grpc://host:port"``.
      dynamic: True: the service distributes the epoch's ``pieces`` over the workers, and each group is read
        once; if a worker is lost, so is its piece. False: each worker reads the whole dataset.
      job_name: Datasets with the same name share one reading.

    Returns:
      A dataset of the same elements, in no fixed order. Each iteration is the same epoch: build another
      dataset for the next one. Iterators can't be saved. `ReadingTime` works only after this dataset, not
      before it. `ReaderStats` counts in the process that reads, so its counters stay zero here unless
      workers run in this process.

    Raises:
      ConfigError: The dataset counts in variables, which workers don't have; or ``dynamic`` is set and the
        dataset isn't in pieces.

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
    """Yield the tensors that the functions of a dataset, and of all its inputs, capture."""
    for function in dataset._functions():
        yield from function.function.captured_inputs
    for source in dataset._inputs():
        yield from _capture(source)
