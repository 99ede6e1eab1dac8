"""Data sets that workers read: the pieces of an epoch, merged, each element exactly once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.errors import ConfigError, whole_number
from gmeta.io.readers.group_reader import settle
from gmeta.io.readers.read_options import OneEpoch, Waiting
from gmeta.io.service.pieces import Cursor, Lanes, ServedPosition
from gmeta.io.service.worker_pool import WorkerPool

# Large batches made of small ones: each row once, shuffled over a block of base batches.


def rebatch(
    dataset: tf.data.Dataset, batches: int, *, shuffle: int | None = None, seed: int = 0
) -> tf.data.Dataset:
    """Make large batches from small ones, with each row exactly once.

    Workers make small base batches, which take little memory and arrive early. Training uses larger ones. The
    rows of ``shuffle`` base batches, a block, are permuted together and cut into one batch for each
    ``batches`` base batches; their sizes differ by at most one row. The permutation is a pure function of
    (``seed``, the block's number). With `gmeta.io.distribute`, use its arguments of the same names instead,
    so that training can resume inside a block.

    Args:
      dataset: Batches of rows: a nested structure of dense or ragged tensors whose first dimension is the
        rows, such as those of `gmeta.io.rows`, `gmeta.io.sequences` and `gmeta.io.late`. (Tasks of
        `gmeta.io.tasks` address their rows by number, so they can't be joined.)
      batches: Number of base batches per batch; the last batch of a block may have fewer.
      shuffle: Number of base batches that are permuted together and kept in memory. None: rows keep their
        order.
      seed: The seed of the permutations.

    Returns:
      A dataset of the same structure. It reads a block at its first batch, so add a ``prefetch`` after it.

    Raises:
      ConfigError: A number is out of its range, or a part of an element has no rows.
      tf.errors.InvalidArgumentError: While iterating: parts of an element differ in their number of rows.

    Example:
      >>> base = tf.data.Dataset.from_tensor_slices(tf.range(6)).batch(2)
      >>> sorted(len(batch) for batch in rebatch(base, 2, shuffle=2))
      [2, 4]
    """
    numbered = dataset.enumerate().map(lambda number, *element: (number, number, _one(element)))
    joined = join_base_batches(numbered, batches, shuffle, seed)
    return joined.map(lambda _, __, ___, element: element)


def join_base_batches(
    dataset: tf.data.Dataset, batches: int, shuffle: int | None, seed: int
) -> tf.data.Dataset:
    """Make large batches of elements (salt, cursor, base batch).

    Args:
      dataset: Elements of a number () int64 on which the block's permutation depends, a tensor with the
        reading position after the base batch, and a base batch.
      batches: As for `rebatch`.
      shuffle: As for `rebatch`.
      seed: As for `rebatch`.

    Returns:
      Elements of (cursor of the block's last base batch, number of the batch in its block, batches in the
      block, batch), the numbers () int64.
    """
    whole_number("rebatch: batches", batches, least=1)
    block = batches if shuffle is None else whole_number("rebatch: shuffle", shuffle, least=batches)
    spec = dataset.element_spec[2]
    flat = tf.nest.flatten(spec)
    for part in flat:
        if not isinstance(part, tf.TensorSpec | tf.RaggedTensorSpec) or part.shape.rank in (None, 0):
            raise ConfigError(
                f"rebatch: {part} of an element has no rows, and each part must have them in its first "
                "dimension: leave it out by a map before"
            )

    @tf.autograph.experimental.do_not_convert
    def cut(salts: Any, cursors: Any, blocks: Any) -> tf.data.Dataset:
        rows = tf.nest.map_structure(_join, blocks)
        sizes = [_rows(part) for part in tf.nest.flatten(rows)]
        equal = [
            tf.debugging.assert_equal(
                size, sizes[0], f"rebatch: parts of {spec} differ in their number of rows"
            )
            for size in sizes[1:]
        ]
        with tf.control_dependencies(equal):
            size = tf.identity(sizes[0])
        given = _rows(salts)
        count = -(-given // batches)
        order = tf.range(size)
        if shuffle is not None:
            order = tf.random.experimental.stateless_shuffle(order, [tf.constant(seed, tf.int64), salts[-1]])

        def batch(number: tf.Tensor) -> tuple[Any, ...]:
            first, end = number * batches, tf.minimum((number + 1) * batches, given)
            own = order[first * size // given : end * size // given]
            return cursors[-1], number, count, tf.nest.map_structure(lambda part: tf.gather(part, own), rows)

        return tf.data.Dataset.range(count).map(batch)

    return dataset.ragged_batch(block).flat_map(cut)


def _join(part: Any) -> Any:
    """Join the rows of the base batches of a block; parts are dense if all base batches have equally many."""
    if isinstance(part, tf.RaggedTensor):
        return part.merge_dims(0, 1)
    return tf.reshape(part, tf.concat([[-1], tf.shape(part)[2:]], axis=0))


def _rows(part: Any) -> tf.Tensor:
    return part.nrows(tf.int64) if isinstance(part, tf.RaggedTensor) else tf.shape(part, tf.int64)[0]


def _one(element: tuple[Any, ...]) -> Any:
    return element if len(element) > 1 else element[0]


_TICK_SECONDS = 0.5


@tf.autograph.experimental.do_not_convert
def distribute(
    dataset: Callable[[OneEpoch], tf.data.Dataset],
    workers: WorkerPool | Sequence[str] | str | os.PathLike[str],
    *,
    position: ServedPosition | None = None,
    at_once: int = 8,
    ahead: int = 2,
    deterministic: bool = True,
    batches: int = 1,
    shuffle: int | None = None,
    seed: int = 0,
    patience: float = 600.0,
) -> tf.data.Dataset:
    """Read a data set on workers; training receives each element exactly once, even if workers fail.

    An epoch is cut into pieces, of which ``at_once`` are read at the same time, each by one worker. Training
    receives their elements in turn. If a worker is lost, others read the rest of its pieces, from the first
    element that didn't arrive; workers that join take over pieces. Each iteration is the next epoch.

    ``dataset`` is sent to the workers, which call it for each piece. There it may run any Python code, such
    as joining features from a store that it opens (`gmeta.io.join_features`). A function defined in the
    training script is sent by value; modules that it imports must be installed on the workers, or be in a
    folder of their ``--path``, and paths must refer to the same data.

    Args:
      dataset: A function of a start that returns the data set of that piece of an epoch, the same at any time
        on any machine: pass the start to `gmeta.io.tasks`, `groups`, `sequences`, `rows` or `late`. With
        several ranks, each reads its own part.
      workers: Addresses, ``["host:port", ...]``; a folder in which workers announce themselves
        (`gmeta workers FOLDER`); a `WorkerPool`; or a `ScaledPool`, which starts and stops workers.
      position: Where reading starts, and its progress; a checkpoint can store it. None: a new one, with 32
        pieces.
      at_once: Number of pieces that are read at the same time, and thus the maximum number of busy workers.
      ahead: Number of elements of each of them that are buffered here, in addition to the connection's
        buffers.
      deterministic: True: the order is a pure function of the epoch, ``at_once`` and the number of pieces,
        independent of the workers. False: training takes elements as they arrive.
      batches: Number of base batches, elements of ``dataset``, that are joined to one batch
        (`rebatch`).
      shuffle: Number of base batches that are permuted together. None: rows keep their order.
      seed: The seed of these permutations, which differ from epoch to epoch.
      patience: Seconds without an element after which a worker counts as lost.

    Returns:
      A dataset of the elements of ``dataset``. The position counts an element when this dataset returns it: a
      later ``prefetch`` would count elements that training hasn't consumed. Its cardinality is unknown.

    Raises:
      ConfigError: An argument is invalid; or the dataset can't be sent, doesn't start at the given piece, or
        never ends.
      tf.errors.OpError: While iterating: no worker could be reached within the pool's ``timeout``, or reading
        failed; `gmeta.io.reader_stats.data_errors` reduces it to one line.

    Example:
      >>> def train(start):
      ...     return tasks("gs://bucket/data/warm", query=10, start=start)
      >>> model.reading = ServedPosition(pieces=128)  # doctest: +SKIP
      >>> model.fit(distribute(train, "/shared/workers", position=model.reading), epochs=3)  # doctest: +SKIP

    References:
      Versioned Late Materialization, section 3.3: workers that preprocess, base batches.
    """
    pool = workers if isinstance(workers, WorkerPool) else WorkerPool(workers)
    position = ServedPosition() if position is None else position
    lanes = min(whole_number("distribute: at_once", at_once, least=1), position.pieces)
    whole_number("distribute: ahead", ahead, least=1)
    if not patience > 0:
        raise ConfigError(f"distribute: patience={patience} must be above 0 seconds")
    if not deterministic and shuffle is not None:
        raise ConfigError(
            "distribute: with deterministic=False a block of base batches isn't the same when it is read "
            "again, and training couldn't resume inside it: leave out deterministic=False, or shuffle="
        )
    shares = collectives.world().shares
    spec = _spec(dataset, OneEpoch(pieces=position.pieces, shares=shares))
    flat = tf.nest.flatten(spec, expand_composites=True)
    try:
        import cloudpickle

        function = cloudpickle.dumps(dataset)
    except Exception as error:  # the values may raise any error
        raise ConfigError(
            f"distribute: {dataset!r} can't be sent to workers: {error}; open stores and files in the "
            "function, and leave out counters of this process, such as ReaderStats"
        ) from error

    def elements(vector: np.ndarray[Any, Any]) -> Iterator[tuple[Any, ...]]:
        cursor = Cursor(vector)
        pieces = [
            [
                OneEpoch(cursor.epoch, number, len(cursor.taken), int(cursor.taken[number]), shares)
                for number in range(lane, len(cursor.taken), lanes)
                if not cursor.ended[number]
            ]
            for lane in range(lanes)
        ]
        reading = Lanes(pool, function, pieces, ahead=ahead, patience=patience)
        try:
            for salt, place, arrays in _with_end(_merge(reading, cursor, lanes, deterministic, pool)):
                yield salt, place, *arrays
        finally:
            reading.close()

    @tf.autograph.experimental.do_not_convert
    def epoch(vector: tf.Tensor, within: tf.Tensor) -> tf.data.Dataset:
        scalar, cursor = tf.TensorSpec([], tf.int64), tf.TensorSpec([3 + 2 * position.pieces], tf.int64)
        read = tf.data.Dataset.from_generator(
            elements, output_signature=(scalar, cursor, *flat), args=(vector,)
        )
        base = read.map(
            lambda salt, place, *parts: (
                salt,
                place,
                tf.nest.pack_sequence_as(spec, parts, expand_composites=True),
            )
        )
        if batches == 1 and shuffle is None:
            return base.map(lambda _, place, element: (place, _number(0), _number(1), element))
        return join_base_batches(base, batches, shuffle, seed).skip(within)

    starts = tf.data.Dataset.range(1).map(lambda _: position.begin())
    return settle(position.count(starts.flat_map(lambda vector: epoch(vector, vector[2]))))


def _number(value: int) -> tf.Tensor:
    return tf.constant(value, tf.int64)


def _merge(
    reading: Lanes, cursor: Cursor, lanes: int, deterministic: bool, pool: WorkerPool
) -> Iterator[tuple[int, Cursor, list[Any]]]:
    """Yield the lanes' elements in turn, and set the cursor after each; report waiting times to the pool."""
    over = [False] * lanes
    began: float | None = None  # the first element isn't counted: datasets are built for it
    mark = time.monotonic()
    while not all(over):
        with reading.news:
            turns = [(cursor.turn + step) % lanes for step in range(lanes)]
            alive = [lane for lane in turns if not over[lane]]
            found = next(
                (
                    (lane, item)
                    for lane in (alive[:1] if deterministic else alive)
                    if (item := reading.look(lane)) is not None
                ),
                None,
            )
            if found is None:
                reading.news.wait(_TICK_SECONDS)
        if found is None or found[1][1] is not None:
            now = time.monotonic()
            waited = 0.0 if began is None else now - mark
            pool.note(Waiting(waited, 0.0, int(found is not None)), reading.made(), len(alive))
            mark = now
        if found is None:
            continue
        lane, (piece, arrays) = found
        if arrays is None:
            over[lane] = piece < 0
            if piece >= 0:
                cursor.ended[piece] = 1
            continue
        cursor.taken[piece] += 1
        cursor.turn = (lane + 1) % lanes
        began = mark
        yield int(cursor.taken.sum()), cursor, arrays
        now = time.monotonic()
        pool.note(Waiting(0.0, now - mark), 0.0, len(alive))
        mark = now


def _with_end(
    merged: Iterator[tuple[int, Cursor, list[Any]]],
) -> Iterator[tuple[np.int64, np.ndarray[Any, Any], list[Any]]]:
    """Yield (salt, position, arrays) of each element, one late: the last position shows that all is read."""
    held: tuple[np.int64, np.ndarray[Any, Any], list[Any]] | None = None
    for total, cursor, arrays in merged:
        if held is not None:
            yield held
        held = np.int64((cursor.epoch << 40) + total), cursor.vector(), arrays
    if held is not None:
        salt, vector, arrays = held
        vector[-(len(vector) - 3) // 2 :] = 1
        yield salt, vector, arrays


def _spec(dataset: Callable[[OneEpoch], tf.data.Dataset], start: OneEpoch) -> Any:
    """Return the structure of the elements; this builds the dataset without reading it."""
    if not callable(dataset):
        raise ConfigError(
            f"distribute: dataset={dataset!r} must be a function of a start, such as "
            'lambda start: gmeta.io.tasks("data/warm", start=start)'
        )
    built = dataset(start)
    if not isinstance(built, tf.data.Dataset):
        raise ConfigError(f"distribute: the function returned {built!r}, and must return a tf.data.Dataset")
    if any(_is_variable(tensor) for tensor in _capture(built)):
        raise ConfigError(
            "distribute: the dataset counts in variables (epochs, a ReadingPosition, ReadingTime), and each "
            "worker would have its own: pass it the start that the function is called with, start=start"
        )
    if int(built.cardinality()) == tf.data.INFINITE_CARDINALITY:
        raise ConfigError("distribute: the dataset never ends: put repeat() behind distribute")
    return built.element_spec


def _capture(dataset: tf.data.Dataset) -> Iterator[tf.Tensor]:
    """Yield the tensors that the functions of a dataset, and of all its inputs, capture."""
    for function in dataset._functions():
        yield from function.function.captured_inputs
    for source in dataset._inputs():
        yield from _capture(source)


def _is_variable(tensor: tf.Tensor) -> bool:
    """Return whether a resource is a variable, unlike lookup tables and others that reading never changes."""
    handle = getattr(tensor, "_handle_data", None)
    return tensor.dtype == tf.resource and handle is not None and bool(handle.shape_and_type)
