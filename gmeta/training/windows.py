"""Makes a train step of micro-batches, between which no parameter changes: NestPipe's frozen windows.

A step's batch is split into micro-batches. Each one computes its gradients as a batch of its own would, on
rows that `gmeta.layers.exchange.frozen_window.FrozenWindow` brings. Their sums, weighted by samples,
make the gradients of the batch. All that comes after sees one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from gmeta.core.graph import hold
from gmeta.core.step import begin_span, mark_end, step_context
from gmeta.layers.exchange.ahead import Fetched, Wanted, use_fetched
from gmeta.layers.exchange.frozen_window import FrozenWindow
from gmeta.layers.exchange.window_keys import request_window
from gmeta.training.clusters import cluster, even_units
from gmeta.training.foresight import foresee
from gmeta.training.mean_gradients import Gradient, StepGradients, times_samples, with_number
from gmeta.training.pipeline import Pipeline
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
