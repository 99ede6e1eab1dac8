"""The collectives of a step, which send rows and keys to their owners and sum over all ranks.

Horovod matches the ranks' calls by name. TensorFlow's names may differ between ranks, because they depend on
what was traced before, and in which scope. A collective therefore has the name that its caller passes, in any
scope. A second use of a name in one function gets ``_1``, in the order of tracing, which is the program's
order.

Horovod declares its ops free of side effects, so TensorFlow's graph optimizer merges two ops with the same
input, drops an op whose result isn't used, and may evaluate an op whose input is constant. Each input
therefore passes through a placeholder with a default, which the optimizer doesn't change. The result is
counted (`monitoring`), and counting is a side effect.

A lane (`lane`) for the collective, if open, replaces Horovod here; without Horovod, a lane is always open.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gmeta.core.collectives import lane
from gmeta.core.collectives.monitoring import count, count_start, name_failures
from gmeta.core.collectives.place import import_horovod, node_name, world
from gmeta.core.step import begin_span

_WIRE = {tf.bfloat16: tf.uint16}  # sent as another type of equal width; Horovod doesn't support this one
_SUMMED_AS = {tf.bfloat16: tf.float32}  # summed as a wider type


def alltoall(
    tensor: tf.Tensor,
    splits: tf.Tensor,
    *,
    name: str,
    place: lane.LaneDevice = "cpu",
    received_splits: tf.Tensor | None = None,
    ranks: Sequence[int] | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Send each rank its part of a tensor's rows, and receive a part from every rank.

    Rank r receives, from each rank s in order, the ``splits[r]`` rows of s that follow those for ranks below
    r. With one rank, this is the identity. A single collective also exchanges the sizes; on a GPU lane, the
    sizes take another collective unless ``received_splits`` is passed.

    Args:
      tensor: (rows, ...) of any numeric type or bool; the other dimensions are the same on all ranks.
      splits: int32 (world size,): how many rows to send to each rank; they sum to `rows` and may be 0.
      name: Identifies the collective. It is the same on all ranks, and unique among collectives that may run
        at the same time.
      place: Where the input and output rows are: ``"cpu"`` or ``"gpu"``; the same on all ranks. TensorFlow
        copies rows from elsewhere. The splits are always in host memory.
      received_splits: int32 (world size,): how many rows to receive from each rank, if known: rank s must
        send that many to this rank. The lane of host memory checks it; the GPU lane hangs if it is wrong.
      ranks: The ranks that take part, in ascending order, including this rank; all of them pass the same
        ranks, and the other ranks pass their own. Splits then have one element per rank in ``ranks``. A lane
        sends nothing to others. None: all ranks.

    Returns:
      The received rows, in the order of senders, and int32 (world size,): how many came from each rank.

    Raises:
      CollectiveError: A rank has ended, or the ranks' types or row shapes differ. This applies to eager
        calls: a ``tf.function`` raises TensorFlow's error when it is called, which `name_failures`
        translates.

    Example:
      >>> rows, received = alltoall(tf.constant([[1.0], [2.0]]), tf.constant([2]), name="rows")
      >>> rows.shape, received.numpy()
      (TensorShape([2, 1]), array([2], dtype=int32))
    """
    tensor = tf.convert_to_tensor(tensor)
    splits = tf.convert_to_tensor(splits, tf.int32)
    here = world()
    size = here.size if ranks is None else len(ranks)
    if size == 1:
        return tensor, splits
    splits.shape.assert_is_compatible_with([size])
    own = lane.find_lane(place, name)
    if own is not None and received_splits is None and own.kind == "nccl":
        ones = tf.ones([size], tf.int32)
        received_splits, _ = alltoall(splits, ones, name=f"{name}/splits", received_splits=ones, ranks=ranks)
    if ranks is None or size == here.size:
        return _alltoall(tensor, splits, received_splits, name, own, ())
    expected = None if received_splits is None else _of_world(received_splits, ranks)
    received, came = _alltoall(tensor, _of_world(splits, ranks), expected, name, own, ranks)
    with tf.device("CPU:0"):
        return received, tf.gather(came, list(ranks))


def _of_world(splits: Any, ranks: Sequence[int]) -> tf.Tensor:
    """Expand the splits of some ranks to all ranks; the others' are 0."""
    with tf.device("CPU:0"):
        splits = tf.convert_to_tensor(splits, tf.int32)
        return tf.scatter_nd([[rank] for rank in ranks], splits, [world().size])


def _alltoall(
    tensor: tf.Tensor,
    splits: tf.Tensor,
    received_splits: tf.Tensor | None,
    name: str,
    own: lane.Lane | None,
    ranks: Sequence[int],
) -> tuple[tf.Tensor, tf.Tensor]:
    """Run an `alltoall` with splits for all ranks; on a lane, only ``ranks``, if not None, take part."""
    here = world()
    kind = lane.kind_of(own)
    end_exchange = begin_span("exchange", name, tensor, splits, lane=kind, ranks=ranks)
    if own is not None:
        with name_failures(f"alltoall {name!r}"):
            received, came = lane.exchange(own, tensor, splits, received_splits, _unique(name), ranks)
        end_exchange(received, came)
        came.set_shape([here.size])
        return received, came
    wire = _WIRE.get(tensor.dtype, tensor.dtype)
    sent = tensor if wire == tensor.dtype else tf.bitcast(tensor, wire)
    with name_failures(f"alltoall {name!r}"), lane.beside_lanes():
        sent, sent_splits = count_start("alltoall", [sent, splits])
        received, came = import_horovod().alltoall(
            sent, splits=sent_splits, name=node_name(_unique(name)), ignore_name_scope=True
        )
        away = _bytes_away(sent, splits)
        count("alltoall", away, after=came)
    end_exchange(received, came)
    received.set_shape([None, *tensor.shape[1:]])
    came.set_shape([here.size])
    if wire != tensor.dtype:
        received = tf.bitcast(received, tensor.dtype)
    return received, came


def allreduce_sum(
    tensors: Sequence[tf.Tensor], *, name: str, place: lane.LaneDevice = "cpu"
) -> list[tf.Tensor]:
    """Sum tensors over all ranks, in one grouped collective.

    There is one collective per dtype, so pass tensors of one dtype. bfloat16 is summed in float32 and rounded
    once; on a lane, so is float16, and other integers are summed in int32 or int64. With one rank, this is
    the identity.

    Args:
      tensors: Any shapes, the same on all ranks; integer or floating.
      name: As in `alltoall`.
      place: Where the tensors and the sums are, as in `alltoall`.

    Returns:
      The sums, in the order and the types of `tensors`.

    Raises:
      CollectiveError: As in `alltoall`; also if shapes differ between ranks.

    Example:
      >>> total, count = allreduce_sum([tf.constant([1.0, 2.0]), tf.constant(3.0)], name="dense")
      >>> float(count)
      3.0
    """
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    if world().size == 1 or not tensors:
        return tensors
    results: list[tf.Tensor | None] = [None] * len(tensors)
    groups: dict[tf.DType, list[int]] = {}
    own = lane.find_lane(place, name)
    for index, tensor in enumerate(tensors):
        groups.setdefault(_summed_as(tensor.dtype, own is not None), []).append(index)
    for dtype, members in groups.items():
        summed = _sum_group([tf.cast(tensors[i], dtype) for i in members], name, own)
        for index, total in zip(members, summed, strict=True):
            total.set_shape(tensors[index].shape)
            results[index] = tf.cast(total, tensors[index].dtype)
    return results


def reduce_scatter_sum(parts: Sequence[tf.Tensor], *, name: str, place: lane.LaneDevice = "cpu") -> tf.Tensor:
    """Sum vectors over all ranks, and return the sum of one of them on each rank.

    One alltoall sends each rank the terms of its sum. The rank adds them in the order of ranks, as the lane
    of host memory does in `allreduce_sum`, whose sums then have the same bits. NCCL and Horovod add in orders
    of their own. Floats of 16 bits are summed in float32 and rounded once. With one rank, this is the
    identity.

    Args:
      parts: For each rank its vector, of one dtype. Their static sizes are the same on all ranks, and may be
        0.
      name: As in `alltoall`.
      place: As in `alltoall`.

    Returns:
      The sum of ``parts[r]`` over all ranks, on rank r.

    Raises:
      CollectiveError: As in `alltoall`.

    Example:
      >>> reduce_scatter_sum([tf.constant([1.0, 2.0])], name="gradients").numpy()
      array([1., 2.], dtype=float32)
    """
    here = world()
    if here.size == 1:
        return parts[0]
    sizes = [part.shape.num_elements() for part in parts]
    own = sizes[here.rank]
    received = _alltoall_of(tf.concat(list(parts), axis=0), sizes, [own] * here.size, name, place)
    terms = tf.reshape(received, [here.size, own])
    dtype = terms.dtype
    wide = tf.float32 if dtype.is_floating and dtype.size < 4 else dtype
    total = tf.cast(terms[0], wide)
    for rank in range(1, here.size):
        total += tf.cast(terms[rank], wide)
        # The graph optimizer would make one sum of all, in another order.
        total = tf.raw_ops.PlaceholderWithDefault(input=total, shape=total.shape)
    return tf.cast(total, dtype)


def allgather(
    vector: tf.Tensor, sizes: Sequence[int], *, name: str, place: lane.LaneDevice = "cpu"
) -> list[tf.Tensor]:
    """Send each rank's vector to all ranks, in one alltoall; with one rank, this is the identity.

    Args:
      vector: This rank's vector.
      sizes: The size of each rank's vector, the same on all ranks; sizes may be 0.
      name: As in `alltoall`.
      place: As in `alltoall`.

    Returns:
      The vectors by rank.

    Raises:
      CollectiveError: As in `alltoall`.

    Example:
      >>> [each.numpy().tolist() for each in allgather(tf.constant([1, 2]), [2], name="weights")]
      [[1, 2]]
    """
    here = world()
    if here.size == 1:
        return [vector]
    own = sizes[here.rank]
    others = [rank for rank in range(here.size) if rank != here.rank]
    sent = [0 if rank == here.rank else own for rank in range(here.size)]
    expected = [0 if rank == here.rank else sizes[rank] for rank in range(here.size)]
    received = _alltoall_of(tf.tile(vector, [len(others)]), sent, expected, name, place)
    found = dict(zip(others, tf.split(received, [sizes[rank] for rank in others]), strict=True))
    return [found.get(rank, vector) for rank in range(here.size)]


def _alltoall_of(
    vector: tf.Tensor, sent: Sequence[int], expected: Sequence[int], name: str, place: lane.LaneDevice
) -> tf.Tensor:
    """Run an `alltoall` of which all sizes are known."""
    with tf.device("CPU:0"):
        splits, coming = tf.constant(sent, tf.int32), tf.constant(expected, tf.int32)
    received, _ = alltoall(vector, splits, name=name, place=place, received_splits=coming)
    received.set_shape([sum(expected)])
    return received


def _summed_as(dtype: tf.DType, by_lane: bool) -> tf.DType:
    if not by_lane or dtype in lane.SUMMED:
        return _SUMMED_AS.get(dtype, dtype)
    if dtype.is_floating:
        return tf.float32
    return tf.int32 if dtype.size < 4 else tf.int64


def _sum_group(tensors: list[tf.Tensor], name: str, through: lane.Lane | None) -> list[tf.Tensor]:
    own = _unique(f"{name}_{tensors[0].dtype.name}")
    end_exchange = begin_span("exchange", name, tensors, lane=lane.kind_of(through))
    with name_failures(f"allreduce {name!r}"), lane.beside_lanes():
        if through is not None:
            sums = lane.add_up(through, tensors, own)
            end_exchange(sums)
            return sums
        hvd = import_horovod()
        summed = hvd.mpi_ops._grouped_allreduce(
            count_start("allreduce", tensors), name=node_name(own), op=hvd.Sum, ignore_name_scope=True
        )
        count("allreduce", sum(_bytes(tensor) for tensor in tensors), after=summed[0])
    end_exchange(summed)
    return list(summed)


def _unique(name: str) -> str:
    """Return `name`, with a number if the function being traced has already used it."""
    if tf.executing_eagerly():
        return name
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "outer_graph", None) is not None and graph.outer_graph.building_function:
        graph = graph.outer_graph
    used = graph.get_collection_ref("gmeta_collectives")
    used.append(name)
    repeats = used.count(name) - 1
    return f"{name}_{repeats}" if repeats else name


def _bytes(tensor: tf.Tensor) -> tf.Tensor:
    return tf.size(tensor, tf.int64) * tensor.dtype.size


def _bytes_away(tensor: tf.Tensor, splits: tf.Tensor) -> tf.Tensor:
    """Compute the bytes of the rows sent to other ranks."""
    size = tensor.shape[1:].num_elements()
    if size is None:
        size = tf.reduce_prod(tf.shape(tensor, tf.int64)[1:])
    with tf.device("CPU:0"):
        return tf.cast(tf.reduce_sum(splits) - splits[world().rank], tf.int64) * size * tensor.dtype.size
