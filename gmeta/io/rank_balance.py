"""Redistribution of sequences over the ranks, so that all ranks have equal work.

What it does. Each rank has read some groups, such as the sequences of some users. Together they are the
global batch, and the global batch doesn't change: no sequence is held back or read ahead, as it would be when
cutting batches of equal cost (`balancing.prefix_batches`). Gradients are means over the global samples
(docs/ranks.md), so gradients and training are the same as without redistribution. Only the rank that computes
a sequence changes.

1. Every rank sends every other the costs and sizes of its sequences: one all-to-all, with a line of some
   integers for each sequence.
2. Every rank assigns all sequences by Karmarkar and Karp (io/balance/karmarkar_karp.h). The same numbers give
   the same result on every rank, so nobody has to send it.
3. Sequences are sent to their ranks: one all-to-all, in which all columns travel as words of 32 bits
   (`group_packing`). A rank orders them by the rank, and the place there, that they came from.

When it pays. N ranks wait for the costliest batch, so a step takes max/mean times as long as needed. With
long-tailed lengths and a fixed number of sequences in a batch, this factor is 1.09 (480 sequences, 8 ranks,
d 512) to 1.35 (80 sequences, 64 ranks, d 1024); after redistribution it is 1.0000 (`gmeta bench grm`). The
price is two collectives, a millisecond or two each, and (N - 1) / N of all samples on the wire. A token of c
columns has about 8 c bytes and costs some 30 d^2 operations a block with the backward pass. So moving it
takes 8 c / bandwidth, and computing it takes 30 d^2 blocks / speed. At d 512, 8 blocks, 20 columns, 10 GB/s
and 2e14 operations a second this is 16 ns against 315 ns, which pays if max/mean is above 1.05; at d 256, if
it is above 1.2. `balanced_elements` redistributes for the next step while this one computes; then only the
time beyond a step counts. Where it doesn't pay, `prefix_batches` on costs moves nothing, and leaves a factor
of 1.003 to 1.034.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.errors import ConfigError
from gmeta.core.native import load_op_library
from gmeta.io.balance import SequenceCost

# Groups of rows packed into words of 32 bits, so that one tensor carries all columns, in any group order.
#
# A group's record is the pieces of its columns, one after the other. A column's piece is its numbers; a list
# column has one more piece before it, the length of each row's list. A float32 takes one word, an int64 two,
# a length one. The length of each piece follows from the group's line, a row of int64: its task, batch,
# number of rows, and the count of numbers in each list column.

TASK, BATCH, ROWS = 0, 1, 2
"""Columns of a line; the sizes of the list columns follow."""


class GroupPacking:
    """The packing of elements with the same columns.

    Args:
      columns: An element's columns, or their specs: tensors (N,) or RaggedTensors (N, None), int64 or
        float32.

    Raises:
      ConfigError: A column is of another kind.
    """

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self._dtypes = {name: column.dtype for name, column in columns.items()}
        self._lists = [name for name, column in columns.items() if _is_ragged(column)]
        for name, column in columns.items():
            ranks = (2,) if name in self._lists else (1,)
            if column.dtype not in (tf.int64, tf.float32) or column.shape.rank not in ranks:
                raise ConfigError(
                    f"groups are moved with columns (N,) or RaggedTensor (N, None) of int64 or float32; "
                    f"column {name!r} is {column.dtype.name} of shape {column.shape}"
                )

    def lines(self, element: Mapping[str, Any]) -> tf.Tensor:
        """Return the line of each group, int64 (G, 3 + list columns)."""
        splits, columns = element["row_splits"], element["columns"]
        sizes = [_lengths(tf.gather(columns[name].row_splits, splits)) for name in self._lists]
        return tf.stack([element["task"], element["batch_id"], _lengths(splits), *sizes], axis=1)

    def pack(self, element: Mapping[str, Any], order: tf.Tensor) -> tf.Tensor:
        """Pack the records of an element's groups in the given order, as int32 words."""
        splits, pieces = element["row_splits"], []
        for name, column in element["columns"].items():
            values, ends = column, splits
            if name in self._lists:
                lengths = tf.cast(column.row_lengths(), tf.int32)
                pieces.append(tf.RaggedTensor.from_row_splits(lengths, splits, validate=False))
                values, ends = column.flat_values, tf.gather(column.row_splits, splits)
            words = tf.reshape(tf.bitcast(values, tf.int32), [-1])
            ends = ends * self._width(name)
            pieces.append(tf.RaggedTensor.from_row_splits(words, ends, validate=False))
        # The pieces are ordered by piece, then by group; one gather reorders them by group, then by piece.
        groups = tf.size(splits) - 1
        places = order[:, None] + groups * tf.range(len(pieces))[None, :]
        return tf.gather(tf.concat(pieces, axis=0), tf.reshape(places, [-1])).flat_values

    def words(self, lines: tf.Tensor) -> tf.Tensor:
        """Count the words of each group's record, int64 (G,)."""
        return tf.reduce_sum(self._piece_words(lines), axis=1)

    def unpack(self, words: tf.Tensor, lines: tf.Tensor) -> dict[str, Any]:
        """Rebuild an element from its records, in their order."""
        piece_words = self._piece_words(lines)
        groups, pieces = tf.shape(lines)[0], piece_words.shape[1]
        by_group = tf.RaggedTensor.from_row_lengths(words, tf.reshape(piece_words, [-1]), validate=False)
        places = pieces * tf.range(groups)[None, :] + tf.range(pieces)[:, None]
        by_piece = tf.gather(by_group, tf.reshape(places, [-1])).flat_values
        parts = iter(tf.split(by_piece, tf.reduce_sum(piece_words, axis=0), num=pieces))
        columns: dict[str, Any] = {}
        for name, dtype in self._dtypes.items():
            lengths = next(parts) if name in self._lists else None
            part = next(parts)
            values = tf.bitcast(tf.reshape(part, [-1, 2]) if dtype == tf.int64 else part, dtype)
            if lengths is not None:
                values = tf.RaggedTensor.from_row_lengths(values, tf.cast(lengths, tf.int64), validate=False)
            columns[name] = values
        splits = tf.concat([[0], tf.cumsum(lines[:, ROWS])], axis=0)
        return {"task": lines[:, TASK], "batch_id": lines[:, BATCH], "row_splits": splits, "columns": columns}

    def _piece_words(self, lines: tf.Tensor) -> tf.Tensor:
        sizes = []
        for name in self._dtypes:
            numbers = lines[:, ROWS]
            if name in self._lists:
                sizes.append(numbers)  # the lengths' piece
                numbers = lines[:, ROWS + 1 + self._lists.index(name)]
            sizes.append(numbers * self._width(name))
        return tf.stack(sizes, axis=1)

    def _width(self, name: str) -> int:
        return int(self._dtypes[name].size) // 4


def _is_ragged(column: Any) -> bool:
    return isinstance(column, (tf.RaggedTensor, tf.RaggedTensorSpec))


def _lengths(splits: tf.Tensor) -> tf.Tensor:
    return splits[1:] - splits[:-1]


Exchange = Callable[..., tuple[tf.Tensor, tf.Tensor]]
_KEYS = {"task", "batch_id", "row_splits", "columns"}
_PLACE = {"cursor", "epoch"}  # of the rank that has read the groups


def rank_of_each(costs: tf.Tensor, ranks: int) -> tf.Tensor:
    """Assign sequences to ranks by Karmarkar and Karp, as `balancing.karmarkar_karp` describes.

    Args:
      costs: float64 (n,), at least 0.
      ranks: The number of ranks.

    Returns:
      int32 (n,), the rank of each sequence.

    Raises:
      tf.errors.InvalidArgumentError: A cost is below 0 or not finite, or there is no rank.

    Example:
      >>> rank_of_each(tf.constant([4.0, 5, 6, 7, 8], tf.float64), ranks=2).numpy()
      array([0, 0, 1, 0, 1], dtype=int32)
    """
    return load_op_library("io").gmeta_karmarkar_karp(costs=tf.cast(costs, tf.float64), ranks=ranks)


def balance_over_ranks(
    element: Mapping[str, Any], cost: SequenceCost, *, length: str | None = None, name: str = "balance"
) -> dict[str, Any]:
    """Redistribute the groups of all ranks' elements, so that all ranks have about equal costs.

    All ranks must call it, even a rank whose element has no groups; it makes two all-to-alls. On one rank it
    is the identity, and Horovod isn't imported. In a ``tf.function``, pass the function's arguments, not
    tensors that the function captures.

    Args:
      element: An element of `gmeta.io.groups` or `gmeta.io.readers.group_dataset.group_batch`: ``task`` (G,),
        ``batch_id`` (G,), ``row_splits`` (G + 1,) and ``columns``, (N,) or RaggedTensor (N, None), int64 or
        float32.
      cost: The cost of a group, by its number of tokens.
      length: The list column whose numbers are a group's tokens; None: its rows are.
      name: The name of the collectives; calls that may run at the same time need different names.

    Returns:
      An element of the same form, but without ``cursor`` and ``epoch``, which say where a rank's own reader
      is. The elements of all ranks together hold the same groups as before. A rank's groups are in the order
      of the ranks that read them, and of their places there. A rank may have none.

    Raises:
      ConfigError: The element is of another form, or has no such list column.
      CollectiveError: As `gmeta.core.collectives.alltoall`.

    Example:
      >>> for element in groups("data/train", groups_per_element=32):  # doctest: +SKIP
      ...     step(balance_over_ranks(element, SequenceCost.of_hstu(dim=512)))

    References:
      MTGenRec, section 3.4; Karmarkar and Karp, "The differencing method of set partitioning", 1982.
    """
    packing = _packing(element, length)
    element, here = _without_place(element), collectives.world()
    if here.size == 1:
        return element
    return _deal(element, cost, length, packing, here.rank, here.size, collectives.alltoall, name)[0]


def balanced_elements(
    dataset: tf.data.Dataset, cost: SequenceCost, *, length: str | None = None, name: str = "balance"
) -> Iterator[dict[str, Any]]:
    """Yield the elements of a dataset, each redistributed over all ranks.

    Every rank gets the same number of elements, that of the rank with the most. A rank whose dataset has
    ended contributes nothing, and receives its part of the others' groups.

    A separate thread reads and redistributes the next element while this one is processed, so a step waits
    for the exchange only if the exchange takes longer than the step. All ranks must take the same number of
    elements.

    Args:
      dataset: This rank's dataset, of `gmeta.io.groups` or `gmeta.io.readers.group_dataset.group_batch`.
      cost: As for `balance_over_ranks`.
      length: As for `balance_over_ranks`.
      name: As for `balance_over_ranks`.

    Yields:
      Elements; when few groups are left, an element may have none on some ranks.

    Raises:
      ConfigError, CollectiveError: As `balance_over_ranks`.

    Example:
      >>> for element in balanced_elements(dataset, SequenceCost.of_hstu(dim=512)):  # doctest: +SKIP
      ...     step(element)
    """
    packing = _packing(dataset.element_spec, length)
    dataset, here = dataset.map(_without_place), collectives.world()
    spec = dataset.element_spec
    if here.size == 1:
        yield from dataset
        return

    @tf.function(input_signature=[spec], autograph=False)
    def deal(element: dict[str, Any]) -> tuple[dict[str, Any], tf.Tensor]:
        return _deal(element, cost, length, packing, here.rank, here.size, collectives.alltoall, name)

    elements, nothing = iter(dataset), _nothing(spec)

    def read() -> tuple[dict[str, Any], tf.Tensor]:
        with collectives.name_failures(f"balanced_elements {name!r}"):
            return deal(next(elements, nothing))

    with ThreadPoolExecutor(1, thread_name_prefix="gmeta-balance") as ahead:
        coming = ahead.submit(read)
        while True:
            element, groups = coming.result()
            if groups == 0:
                return
            coming = ahead.submit(read)
            yield element


def _deal(
    element: Mapping[str, Any],
    cost: SequenceCost,
    length: str | None,
    packing: GroupPacking,
    rank: int,
    size: int,
    exchange: Exchange,
    name: str,
) -> tuple[dict[str, Any], tf.Tensor]:
    """Return this rank's element, and the number of groups on all ranks."""
    with tf.device("CPU:0"):
        lines = packing.lines(element)
        # Costs are sent, not lengths to compute them from, so that all ranks have the same to the last bit.
        costs = tf.bitcast(_costs(element, cost, length), tf.int64)
        told = tf.concat([lines, costs[:, None]], axis=1)
        groups = tf.shape(told)[0]
        everything, counts = exchange(tf.tile(told, [size, 1]), tf.fill([size], groups), name=f"{name}_lines")
        rank_of = rank_of_each(tf.bitcast(everything[:, -1], tf.float64), size)
        begin = tf.reduce_sum(counts[:rank])
        mine = rank_of[begin : begin + groups]
        order = tf.argsort(mine, stable=True)
        sent = tf.math.unsorted_segment_sum(packing.words(lines), mine, size)
        words, _ = exchange(packing.pack(element, order), tf.cast(sent, tf.int32), name=f"{name}_words")
        received = tf.boolean_mask(everything[:, :-1], rank_of == rank)
        return packing.unpack(words, received), tf.shape(everything)[0]


def _costs(element: Mapping[str, Any], cost: SequenceCost, length: str | None) -> tf.Tensor:
    splits = element["row_splits"]
    if length is not None:
        splits = tf.gather(element["columns"][length].row_splits, splits)
    tokens = tf.cast(splits[1:] - splits[:-1], tf.float64)
    return cost.linear * tokens + cost.quadratic * tokens * tokens


def _packing(element: Mapping[str, Any], length: str | None) -> GroupPacking:
    if not isinstance(element, Mapping) or set(element) - _PLACE != _KEYS:
        there = sorted(element) if isinstance(element, Mapping) else type(element).__name__
        raise ConfigError(
            f"an element of gmeta.io.groups or group_batch has {', '.join(sorted(_KEYS))}, not {there}"
        )
    columns = element["columns"]
    if length is not None and not isinstance(columns.get(length), (tf.RaggedTensor, tf.RaggedTensorSpec)):
        raise ConfigError(f"length={length!r} is no list column; there are {', '.join(columns)}")
    return GroupPacking(columns)


def _without_place(element: Mapping[str, Any]) -> dict[str, Any]:
    return {name: element[name] for name in sorted(_KEYS)}


def _nothing(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return an element of no groups."""
    splits = tf.zeros([1], tf.int64)
    columns: dict[str, Any] = {}
    for name, column in spec["columns"].items():
        columns[name] = tf.zeros([0], column.dtype)
        if isinstance(column, tf.RaggedTensorSpec):
            columns[name] = tf.RaggedTensor.from_row_splits(columns[name], splits)
    none = tf.zeros([0], tf.int64)
    return {"task": none, "batch_id": none, "row_splits": splits, "columns": columns}
