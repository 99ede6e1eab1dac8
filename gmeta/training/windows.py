"""Makes a train step of micro-batches, between which no parameter changes: NestPipe's frozen windows.

A step's batch is split into micro-batches. Each one computes its gradients as a batch of its own would, on
rows that `gmeta.layers.exchange.frozen_window.FrozenWindow` brings. Their sums, weighted by samples,
make the gradients of the batch. All that comes after sees one batch.

The units of a batch, such as samples, come in an order in which a micro-batch's share keys. The paper names
the aim (NestPipe, section V: key-centric clustering of samples) without an algorithm; the algorithm here is
that of `gmeta.ops.distinct.cluster_units`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.graph import hold, refuse_unless
from gmeta.core.step import begin_span, mark_end, step_context
from gmeta.layers.exchange.fetch import Fetched, Wanted, use_fetched
from gmeta.layers.exchange.frozen_window import FrozenWindow
from gmeta.layers.exchange.window_keys import request_window
from gmeta.ops import Jagged, jagged
from gmeta.ops.distinct import cluster_units
from gmeta.training.mean_gradients import Gradient, StepGradients, times_samples, with_number
from gmeta.training.pipeline import Pipeline, foresee
from gmeta.training.rank_steps import KeptState


class Windows:
    """The train steps of a compiled model in micro-batches.

    Args:
      model: The model.
      pipeline: Its settings, with N micro-batches, at least 2.
    """

    def __init__(self, model: Any, pipeline: Pipeline) -> None:
        self._model, self._cluster = model, pipeline.cluster
        self.micro_batches = pipeline.micro_batches
        self._wanted: dict[str, Callable[[Any], list[Wanted]]] = {}

    def arrange(self, data: Any) -> Any:
        """Return a batch in the order in which `split` divides it; call this once per batch."""
        return cluster(self._model, data, self.micro_batches) if self._cluster else data

    def split(self, data: Any) -> list[Any]:
        """Split a batch into N micro-batches."""
        model = self._model
        parts: list[Any] = model.split_batch(data, even_units(model.count_units(data), self.micro_batches))
        return parts

    def request(self, data: Any, samples: tf.Tensor | int) -> tuple[Fetched, ...]:
        """Send the keys of a batch's lookups to their owners.

        Args:
          data: The batch, as `arrange` returned it.
          samples: The number of samples that other ranks learn.

        Raises:
          ConfigError: The lookups can't be known before the step.
        """
        wanted = [self._wanted_by(part) for part in self.split(data)]
        return tuple(
            Fetched(each[0].fetch, request_window(each[0].fetch, [one.keys for one in each], samples))
            for each in zip(*wanted, strict=True)
        )

    def compute_gradients(self, data: Any) -> StepGradients:
        """Compute the gradients of a batch, which are means over its samples, and update metrics.

        Args:
          data: The batch; if its rows were fetched ahead, as `arrange` returned it.
        """
        window = step_context().fetched
        if isinstance(window, FrozenWindow):
            return self._compute(window, data)
        data, step = self.arrange(data), step_context().samples
        end_request = begin_span("lookup", "keys", data)
        lookups = self.request(data, 0 if step is None else step.own)
        end_request([each.requested.owned for each in lookups])
        window = FrozenWindow(lookups, self.micro_batches)
        with use_fetched(window):
            return self._compute(window, data)

    def _compute(self, window: FrozenWindow, data: Any) -> StepGradients:
        sums = _Sums()
        for part in self.split(data):
            kept = KeptState(self._model)
            held = hold(part, sums.computed)  # so that micro-batches don't overlap
            window.begin(sums.computed)
            found = self._model.compute_gradients(held)
            mark_end(self._model.gradients_part, found.dense, found.rows)
            rows = times_samples(found.rows, found.samples)
            window.end(found.lookups, rows)
            kept.restore_unless(found.samples > 0)  # a loss of no samples may be NaN
            sums.add(found, rows)
        return sums.means(window)

    def _wanted_by(self, part: Any) -> list[Wanted]:
        spec = tf.nest.map_structure(_spec, part)
        form = repr(spec)
        if form not in self._wanted:
            with tf.init_scope():
                self._wanted[form] = foresee(self._model, spec)
        return self._wanted[form](part)


class _Totals(NamedTuple):
    loss: tf.Tensor
    samples: tf.Tensor
    dense: list[Gradient]
    logs: dict[str, Any]


class _Sums:
    """The sums over the micro-batches of a batch so far.

    Attributes:
      computed: The tensors that the last micro-batch ends with.
    """

    def __init__(self) -> None:
        self.computed: list[tf.Tensor] = []
        self._totals: _Totals | None = None

    @tf.autograph.experimental.do_not_convert
    def add(self, found: StepGradients, rows: Sequence[Gradient]) -> None:
        """Add a micro-batch.

        Args:
          found: Its means.
          rows: Its rows' gradients.
        """
        loss = tf.math.multiply_no_nan(found.loss, tf.cast(found.samples, found.loss.dtype))
        dense = times_samples(found.dense, found.samples)
        parts = [*(each for each in (*dense, *rows) if each is not None), loss]
        self.computed = tf.nest.flatten(parts, expand_composites=True)
        before = self._totals
        if before is None:
            self._totals = _Totals(loss, found.samples, dense, found.logs)
            return

        def latest(new: Any, old: Any) -> tf.Tensor:
            return tf.where(found.samples > 0, new, old)

        self._totals = _Totals(
            before.loss + loss,
            before.samples + found.samples,
            [_plus(one, other) for one, other in zip(before.dense, dense, strict=True)],
            tf.nest.map_structure(latest, found.logs, before.logs),
        )

    @tf.autograph.experimental.do_not_convert
    def means(self, window: FrozenWindow) -> StepGradients:
        """Return the means over the samples of all micro-batches."""
        assert self._totals is not None
        loss, samples, dense, logs = self._totals
        return StepGradients(
            loss / tf.cast(samples, loss.dtype),
            samples,
            [with_number(tf.math.divide_no_nan, each, samples) for each in dense],
            [with_number(tf.math.divide_no_nan, each, samples) for each in window.sums()],
            window,
            logs,
        )


def _spec(part: Any) -> Any:
    """Return the specification of a part with any first dimension."""
    if part is None:
        return None
    spec = tf.type_spec_from_value(part)
    if isinstance(spec, tf.RaggedTensorSpec):
        shape = [None, *spec.shape[1:]]
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return type(spec)([None, *spec.shape[1:]], spec.dtype)


def _plus(one: Gradient, other: Gradient) -> Gradient:
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, tf.IndexedSlices) and isinstance(other, tf.IndexedSlices):
        values, indices = ((getattr(one, n), getattr(other, n)) for n in ("values", "indices"))
        return tf.IndexedSlices(tf.concat(values, axis=0), tf.concat(indices, axis=0), one.dense_shape)
    return tf.convert_to_tensor(one) + tf.convert_to_tensor(other)


# Takes some units of a batch, such as samples, along the first dimension of its tensors.


def count_units(name: str, data: Any) -> tf.Tensor:
    """Return the first dimension of all parts of a batch, () int64.

    Args:
      name: The name of the model that is trained.
      data: The batch: a nest of tensors, dense, ragged, sparse or `Jagged`, and None.

    Raises:
      ConfigError: The parts have different first dimensions (in a graph, raised as by
        `gmeta.core.graph.refuse_unless`), or one has none.
    """
    sizes = [_size(name, part) for part in _parts(data) if part is not None]
    if not sizes:
        raise ConfigError(f"{name}: micro_batches divide a batch, and this one has no tensors")
    alike = tf.reduce_all(tf.stack(sizes) == sizes[0])
    told = (
        f"{name}: micro_batches divide a batch by its first dimension, which its parts don't have in common"
    )
    count: tf.Tensor = refuse_unless(sizes[0], alike, told)
    return count


def take_units(data: Any, units: tf.Tensor) -> Any:
    """Return a batch of some units.

    Args:
      data: The batch, as for `count_units`.
      units: (n,) int64, the numbers of the units, each at most once.
    """
    return _map(lambda part: None if part is None else _take(part, units), data)


def even_units(count: tf.Tensor, micro_batches: int) -> list[tf.Tensor]:
    """Divide units into micro-batches: contiguous, of nearly equal size, the first not empty if any isn't."""
    with tf.device("CPU:0"):
        ends = [(count * number + micro_batches - 1) // micro_batches for number in range(micro_batches + 1)]
        return [tf.range(begin, end) for begin, end in pairwise(ends)]


def _take(part: Any, units: tf.Tensor) -> Any:
    if isinstance(part, Jagged):
        whole = jagged.as_jagged(part)
        assert whole is not None
        return jagged.from_ragged(tf.gather(jagged.to_ragged(whole), units))
    if isinstance(part, tf.SparseTensor):
        numbers = tf.tensor_scatter_nd_update(
            tf.fill(part.dense_shape[:1], tf.constant(-1, tf.int64)),
            units[:, tf.newaxis],
            tf.range(_length(units)),
        )
        row = tf.gather(numbers, part.indices[:, 0])
        kept = row >= 0
        indices = tf.concat([row[:, tf.newaxis], part.indices[:, 1:]], axis=1)
        taken = tf.SparseTensor(
            tf.boolean_mask(indices, kept),
            tf.boolean_mask(part.values, kept),
            tf.concat([[_length(units)], part.dense_shape[1:]], axis=0),
        )
        return tf.sparse.reorder(taken)
    return tf.gather(part, units)


def _size(name: str, part: Any) -> tf.Tensor:
    if isinstance(part, Jagged):
        return _length(part.offsets) - 1
    if isinstance(part, tf.RaggedTensor):
        return tf.cast(part.nrows(), tf.int64)
    if isinstance(part, tf.SparseTensor):
        return part.dense_shape[0]
    if tf.convert_to_tensor(part).shape.rank == 0:
        raise ConfigError(
            f"{name}: micro_batches divide a batch by its first dimension, and a part of this one is a "
            "single number: repeat it for each sample, or leave micro_batches out"
        )
    return _length(part)


def _length(vector: Any) -> tf.Tensor:
    return tf.shape(vector, tf.int64)[0]


def _parts(data: Any) -> Iterator[Any]:
    if isinstance(data, Mapping):
        for value in data.values():
            yield from _parts(value)
    elif isinstance(data, list | tuple) and not isinstance(data, Jagged):
        for value in data:
            yield from _parts(value)
    else:
        yield data


def _map(change: Callable[[Any], Any], data: Any) -> Any:
    if isinstance(data, Mapping):
        return {name: _map(change, value) for name, value in data.items()}
    if isinstance(data, list | tuple) and not isinstance(data, Jagged):
        changed = [_map(change, value) for value in data]
        return type(data)(*changed) if hasattr(data, "_fields") else type(data)(changed)
    return change(data)


_ODD = 0x2545F4914F6CDD1D  # multiplication by it changes no two numbers into one


def cluster(model: Any, data: Any, micro_batches: int) -> Any:
    """Return a batch whose units, divided evenly into micro-batches, share keys within each.

    Args:
      model: The model, whose `unit_keys` returns the keys of units.
      data: The batch.
      micro_batches: Their number.
    """
    keys, units = model.unit_keys(data)
    with tf.device("CPU:0"):
        even = even_units(model.count_units(data), micro_batches)
        order = cluster_units(keys, units, tf.stack([tf.size(each, tf.int64) for each in even]))
    (arranged,) = model.split_batch(data, [order])
    return arranged


def column_keys(columns: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the integers and texts of columns as keys, and in which row each is.

    The keys of two columns differ, also for equal numbers.

    Args:
      columns: A nest of tensors, dense, ragged, sparse or `Jagged`; those of other types are left out.

    Returns:
      (n,) int64 keys, and (n,) int64 rows.
    """
    found = []
    with tf.device("CPU:0"):
        for name, column in _columns(columns, ""):
            values, rows = _entries(column)
            if values.dtype == tf.string:
                values = tf.strings.to_hash_bucket_fast(values, 2**63 - 1)
            salt = zlib.crc32(name.encode())
            found.append(((tf.cast(values, tf.int64) + salt) * _ODD, rows))
        if not found:
            return tf.zeros([0], tf.int64), tf.zeros([0], tf.int64)
        keys, rows = zip(*found, strict=True)
        return tf.concat(keys, axis=0), tf.concat(rows, axis=0)


def _columns(data: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(data, Mapping):
        for name, part in data.items():
            yield from _columns(part, f"{path}/{name}")
    elif isinstance(data, list | tuple) and not isinstance(data, Jagged):
        for number, part in enumerate(data):
            yield from _columns(part, f"{path}/{number}")
    elif data is not None:
        dtype = data.values.dtype if isinstance(data, Jagged) else data.dtype
        if dtype.is_integer or dtype == tf.string:
            yield path, data


def _entries(column: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the entries of a column, and in which row each is."""
    if isinstance(column, Jagged):
        return _flat(column.values, tf.cast(jagged.row_ids(column), tf.int64))
    if isinstance(column, tf.SparseTensor):
        return column.values, column.indices[:, 0]
    if isinstance(column, tf.RaggedTensor):
        rows = column.value_rowids()
        while isinstance(column.values, tf.RaggedTensor):
            column = column.values
            rows = tf.gather(rows, column.value_rowids())
        return _flat(column.values, tf.cast(rows, tf.int64))
    return _flat(column, tf.range(tf.shape(column, tf.int64)[0]))


def _flat(values: tf.Tensor, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Flatten (n, ...) values, given the row of each of the n."""
    width = tf.reduce_prod(tf.shape(values, tf.int64)[1:])
    return tf.reshape(values, [-1]), tf.repeat(rows, width)
