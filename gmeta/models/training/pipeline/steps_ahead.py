"""The train function of a model that fetches ahead.

It makes Keras' steps, one a call, and works on a queue of batches::

    depth 1    call t:   step(t)      beside   request + peek (t + 1)
    depth 2    call t:   step(t)      beside   peek (t + 1)    beside   request (t + 2)

A call is one `tf.function`. Its arguments and results carry the batches that wait, with what was fetched for
them, so TensorFlow runs the two halves side by side, without a thread of ours. The exchange of keys is traced
after the last exchange of rows and before the exchange of gradients: all ranks make their collectives in the
order of the trace, and the keys of the next batch so delay no row of this one.

The read-ahead ends where the data does. A batch that isn't there is stood in for by the last one, so that all
ranks go on making the same collectives; nobody makes its step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from tf_keras.src.engine import training

from gmeta.core import collectives
from gmeta.core.graph.crossings import from_caller, to_caller
from gmeta.layers.exchange.ahead import Fetched, FetchedLookups, Wanted, use_fetched
from gmeta.layers.exchange.sample_counts import active_step_samples
from gmeta.models.training.pipeline.foresight import foresee
from gmeta.models.training.ranks.step import batch_size

Foresight = Callable[[Any], list[Wanted]]
Function = Callable[..., Any]


class Waiting(NamedTuple):
    """A batch that waits for its step.

    Attributes:
      real: () bool, whether the data had it.
      data: The batch.
      lookups: What is known of its lookups.
    """

    real: tf.Tensor
    data: Any
    lookups: tuple[Fetched, ...]


class Queue:
    """The batches that wait, and the iterator that they came from; several train functions may share it."""

    def __init__(self) -> None:
        self._iterator: Any = lambda: None
        self._waiting: tuple[Waiting, ...] = ()

    def take(self, iterator: Any) -> tuple[Waiting, ...]:
        """Return the batches of an iterator that wait, and forget them; none if they are of another."""
        waiting, self._waiting = self._waiting, ()
        return waiting if self._iterator() is iterator else ()

    def put(self, iterator: Any, waiting: tuple[Waiting, ...]) -> None:
        """Keep batches for the next call, as long as their iterator lives."""
        self._waiting = waiting
        self._iterator = weakref.ref(iterator, self._forget)

    def _forget(self, dead: Any) -> None:
        if self._iterator is dead:
            self._waiting = ()


class StepsAhead:
    """A train function of a compiled model, as `tf.keras.Model.make_train_function` returns one.

    Args:
      model: The model.
      depth: 1 or 2.
      queue: The batches that wait.
    """

    def __init__(self, model: Any, depth: int, queue: Queue) -> None:
        self._model, self._depth, self._queue = model, depth, queue
        self._functions: dict[str, tuple[Function, Function]] = {}

    def __call__(self, iterator: Any) -> Any:
        """Make one step, or as many as ``steps_per_execution`` says.

        Raises:
          tf.errors.OutOfRangeError: The data has ended.
        """
        several = self._model._steps_per_execution
        for _ in range(1 if several is None else int(several.numpy())):
            logs = self._step(iterator)
        return logs

    def _step(self, iterator: Any) -> Any:
        form = repr(iterator.element_spec)
        if form not in self._functions:
            self._functions[form] = self._trace(iterator)
        begin, step = self._functions[form]
        waiting = self._queue.take(iterator) or begin(iterator)
        if not waiting[0]:  # whether the first batch is real
            raise tf.errors.OutOfRangeError(None, None, "End of sequence")
        logs, waiting = step(iterator, *waiting)
        self._queue.put(iterator, waiting)
        return logs

    def _trace(self, iterator: Any) -> tuple[Function, Function]:
        """Make a function that fetches the first batches, and one that makes a step.

        Functions take and return the tensors of a `Waiting` for each batch, one after another.
        """
        wanted = foresee(self._model, iterator.element_spec)
        forms: list[list[Waiting]] = []

        @tf.autograph.experimental.do_not_convert
        def begin(iterator: Any) -> list[tf.Tensor]:
            waiting = [_request(wanted, tf.constant(True), next(iterator))]
            while len(waiting) < self._depth:
                waiting.append(_request(wanted, *_next(iterator, waiting[-1])))
            waiting[0] = _peek(waiting[0])
            forms[:] = [tf.nest.map_structure(_form, waiting)]
            return _tensors(waiting)

        def step(iterator: Any, *tensors: tf.Tensor) -> tuple[Any, list[tf.Tensor]]:
            now, *later = _like(forms[0], tensors)
            rest: list[Waiting] = []

            @tf.autograph.experimental.do_not_convert
            def fetch() -> None:
                with tf.control_dependencies(None):
                    rest[:] = self._advance(iterator, wanted, [now, *later])
                samples = active_step_samples()
                if samples is not None:  # a step that ends the data does so on all ranks after this exchange
                    sent = [each.requested.sent for each in rest[-1].lookups]
                    samples.before_end.extend(each.owned.notes for each in sent if each is not None)

            with use_fetched(FetchedLookups(now.lookups, fetch)):
                logs = self._model.train_step(now.data)
            with tf.control_dependencies(training._minimum_control_deps(logs)):
                self._model._train_counter.assign_add(1)
            return logs, _tensors(rest)

        if self._model.run_eagerly:
            return begin, step
        first = tf.function(begin, input_signature=[iterator._type_spec]).get_concrete_function()
        specs = [tf.TensorSpec(out.shape, out.dtype) for out in first.outputs]
        whole = tf.function(step, input_signature=[iterator._type_spec, *specs]).get_concrete_function()
        return _quick(first), _quick(whole)

    def _advance(self, iterator: Any, wanted: Foresight, waiting: list[Waiting]) -> list[Waiting]:
        """Return the batches that wait in the next step, with what is to be fetched in this one."""
        later = [*waiting[1:], _request(wanted, *_next(iterator, waiting[-1]))]
        return [_peek(later[0]), *later[1:]]


def _quick(concrete: Any) -> Function:
    """Return a function that calls a concrete one without a check of each argument, which takes 20 µs."""

    def call(iterator: Any, *tensors: tf.Tensor) -> Any:
        handles = tf.nest.flatten(iterator, expand_composites=True)
        return concrete._call_flat([*handles, *tensors], concrete.captured_inputs)

    return call


def _next(iterator: Any, last: Waiting) -> tuple[tf.Tensor, Any]:
    """Return whether the data has another batch, and the batch, or in its place the last one."""
    with tf.device("CPU:0"):
        found = iterator.get_next_as_optional()
        real = last.real & found.has_value()
        return real, tf.cond(real, found.get_value, lambda: last.data)


def _request(wanted: Foresight, real: tf.Tensor, data: Any) -> Waiting:
    """Send the keys of a batch to their owners."""
    samples = batch_size(data) if collectives.world().size > 1 else 0
    lookups = [Fetched(one.fetch, one.fetch.request(one.keys, samples), None) for one in wanted(data)]
    return Waiting(real, data, tuple(lookups))


def _peek(waiting: Waiting) -> Waiting:
    """Read the rows of a batch where they are, without any effect."""
    lookups = [each._replace(peeked=each.fetch.peek(each.requested)) for each in waiting.lookups]
    return waiting._replace(lookups=tuple(lookups))


def _tensors(waiting: list[Waiting]) -> list[tf.Tensor]:
    """Return all tensors of some batches, as they leave a function."""
    parts = tf.nest.flatten(waiting, expand_composites=True)
    return [to_caller(part) for part in parts if tf.is_tensor(part)]


def _form(part: Any) -> Any:
    """Return the specification of a tensor of any size; a part that isn't a tensor stays as it is."""
    if not tf.is_tensor(part):
        return part
    spec = tf.type_spec_from_value(part)
    return spec._with_tensor_ranks_only()


def _like(form: list[Waiting], tensors: Sequence[tf.Tensor]) -> list[Waiting]:
    """Return the batches that some tensors belong to."""
    given = iter(tensors)
    parts = tf.nest.flatten(form, expand_composites=True)
    parts = [
        from_caller(next(given), part.dtype) if isinstance(part, tf.TypeSpec) else part for part in parts
    ]
    return tf.nest.pack_sequence_as(form, parts, expand_composites=True)
