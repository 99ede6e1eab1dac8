"""The train function of a model that fetches ahead.

Each call makes one of Keras' steps and works on a queue of batches::

    depth 1    call t:   step(t)      beside   request + peek (t + 1)
    depth 2    call t:   step(t)      beside   peek (t + 1)    beside   request (t + 2)

Rows of tables on a GPU that may be in host memory (`gmeta.policies.Tiers`) are requested when the keys of
their batch have reached their owners, and move to the GPU while batches compute. They aren't peeked in the
same call, because they would cross the bus twice: with depth 1 their step reads them from the GPU ::

    depth 1    call t:   step(t)      beside   request + prefetch (t + 1)
    depth 2    call t:   step(t)      beside   peek (t + 1)    beside   request + prefetch (t + 2)

A call is one `tf.function`. Its arguments and results carry the batches that wait, with what was fetched for
them, so TensorFlow runs the two halves side by side, without another thread. The exchange of keys is traced
after the last exchange of rows and before the exchange of gradients: all ranks make their collectives in the
order of the trace, so the keys of the next batch delay no row of this one. With micro-batches, keys are
traced after the rows of the second one.

What a batch looks up may depend on the number of its step (`numbering`), which is predicted when its keys
are requested. The prediction is wrong if an epoch ends before as many batches are accumulated as make a step,
or if a callback sets the optimizer's count. So if the model reads the number, a call begins with a comparison
of the two. Where they differ, the batch's keys are requested and its rows are read again. All ranks count the
same steps, so they do so together.

On a GPU, a column of the data that ops read there is copied to it while the batch before computes. Which
columns these are is known when the step is traced; their other readers read them in host memory, as before.

The read-ahead ends where the data does. The last batch is then repeated as a placeholder, so that all ranks
go on making the same collectives; no rank makes a step of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function.polymorphic_function import (
    _frequent_tracing_detector_manager as _calls,
)
from tf_keras.src.engine import training

from gmeta.core import collectives
from gmeta.core.step import begin_span, beside_step, step_context
from gmeta.layers.exchange.fetch import Fetched, FetchedLookups, LookupsAhead, prefetch, use_fetched
from gmeta.layers.exchange.frozen_window import FrozenWindow
from gmeta.ops.device import (
    built_with_cuda,
    copy_to_gpu,
    from_caller,
    on_gpu,
    read_copy,
    shared_place,
    to_caller,
)
from gmeta.training.pipeline import foresee, use_step_number
from gmeta.training.rank_steps import batch_size

Function = Callable[..., Any]


class Waiting(NamedTuple):
    """A batch that waits for its step.

    Attributes:
      real: () bool, whether the data had it.
      number: () int64, the number of the optimizer step that is expected to train it.
      data: The batch.
      lookups: What is known of its lookups.
    """

    real: tf.Tensor
    number: tf.Tensor
    data: Any
    lookups: tuple[Fetched, ...]


Request = Callable[[tf.Tensor, tf.Tensor, Any], Waiting]


class _Functions(NamedTuple):
    """What is traced for data of a form; functions take and return the tensors of the batches that wait.

    Attributes:
      begin: Fetches the first batches.
      step: Makes a step.
      again: Fetches the first of the waiting batches again, for another number.
      copy: Copies the columns of waiting batches again, which another train function made.
    """

    begin: Function
    step: Function
    again: Function
    copy: Function


class Queue:
    """The batches that wait, and the iterator that they came from; several train functions may share it."""

    def __init__(self) -> None:
        self._iterator: Any = lambda: None
        self._waiting: Sequence[tf.Tensor] = ()
        self._functions: Any = None

    def take(self, iterator: Any, functions: _Functions) -> Sequence[tf.Tensor]:
        """Return the tensors of the batches that wait, and forget them; none if another iterator made them.

        Args:
          iterator: The iterator.
          functions: The functions that take the batches. If other functions made the tensors, columns are
            copied again, because these functions may read other ones.
        """
        waiting, self._waiting = self._waiting, ()
        if not len(waiting) or self._iterator() is not iterator:
            return ()
        return waiting if self._functions is functions else functions.copy(iterator, *waiting)

    def put(self, iterator: Any, functions: _Functions, waiting: Sequence[tf.Tensor]) -> None:
        """Keep the tensors that functions return for the next call, as long as their iterator lives."""
        self._waiting, self._functions = waiting, functions
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
        self._functions: dict[str, _Functions] = {}
        self._last: tuple[Callable[[], Any], str] = (lambda: None, "")  # the last iterator and its form
        self._reads_number = False  # whether the model does

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
        last, form = self._last
        if last() is not iterator:
            form = repr(iterator.element_spec)
            self._last = weakref.ref(iterator), form
        if form not in self._functions:
            self._functions[form] = self._trace(iterator)
        functions = self._functions[form]
        waiting = self._queue.take(iterator, functions) or functions.begin(iterator)
        real, number = waiting[:2]  # of the first batch
        if not real:
            raise tf.errors.OutOfRangeError(None, None, "End of sequence")
        if self._reads_number and not self._is_next(number):
            waiting = functions.again(iterator, *waiting)
        logs, waiting = functions.step(iterator, *waiting)
        self._queue.put(iterator, functions, waiting)
        return logs

    def _trace(self, iterator: Any) -> _Functions:
        request = self._request(iterator.element_spec)
        windows = self._model._windows
        forms: list[_Form] = []
        copied = on_gpu() and built_with_cuda() and not self._model.run_eagerly
        columns = _Columns(iterator.element_spec, copied)

        @tf.autograph.experimental.do_not_convert
        def begin(iterator: Any) -> list[tf.Tensor]:
            made = self._model.optimizer.iterations
            with beside_step():
                data = next(iterator)
                waiting = [request(tf.constant(True), self._after(made, 0), self._arrange(data))]
            while len(waiting) < self._depth:
                with beside_step(len(waiting)):
                    real, data = _next(iterator, waiting[-1])
                    waiting.append(request(real, self._after(made, len(waiting)), self._arrange(data)))
            with beside_step():
                waiting[0] = self._peek(waiting[0])
            forms[:] = [_Form(waiting)]
            return [*forms[0].leave(waiting), *columns.copy(waiting[0].data)]

        @tf.autograph.experimental.do_not_convert
        def again(iterator: Any, *tensors: tf.Tensor) -> list[tf.Tensor]:
            now, *later = forms[0].enter(tensors)
            number = self._after(self._model.optimizer.iterations, 0)
            with beside_step():
                fetched = self._peek(request(now.real, number, now.data))
            with tf.device("GPU:0"):
                copies = [tf.identity(each) for each in columns.copies_in(tensors)]
            return [*forms[0].leave([fetched, *later]), *copies]

        @tf.autograph.experimental.do_not_convert
        def copy(iterator: Any, *tensors: tf.Tensor) -> list[tf.Tensor]:
            waiting = forms[0].enter(tensors)
            return [*forms[0].leave(waiting), *columns.copy(waiting[0].data)]

        def step(iterator: Any, *tensors: tf.Tensor) -> tuple[Any, list[tf.Tensor]]:
            now, *later = forms[0].enter(tensors)
            rest: list[Waiting] = []
            number = self._after(now.number, self._depth)  # before the step changes what it depends on

            @tf.autograph.experimental.do_not_convert
            def fetch() -> None:
                with tf.control_dependencies(None):
                    rest[:] = self._advance(iterator, request, number, [now, *later])
                samples = step_context().samples
                if samples is not None:  # a step that ends the data does so on all ranks after this exchange
                    sent = [each.requested.sent for each in rest[-1].lookups]
                    samples.before_end.extend(each.owned.notes for each in sent if each is not None)

            ahead: LookupsAhead = FetchedLookups(now.lookups, fetch)
            if windows is not None:
                ahead = FrozenWindow(now.lookups, windows.micro_batches, fetch)
            with use_fetched(ahead), use_step_number(now.number, self._note_number):
                logs = self._model.train_step(now.data)
            with tf.control_dependencies(training._minimum_control_deps(logs)):
                self._model._train_counter.assign_add(1)
            columns.read_copies(now.data, columns.copies_in(tensors))
            return logs, [*forms[0].leave(rest), *columns.copy(rest[0].data)]

        if self._model.run_eagerly:
            return _Functions(begin, step, again, copy)
        first = tf.function(begin, input_signature=[iterator._type_spec]).get_concrete_function()
        copies = {id(out) for out in columns.copies_in(first.outputs)}
        ranks = [[None] * out.shape.rank if id(out) in copies else out.shape for out in first.outputs]
        given = [tf.TensorSpec(shape, out.dtype) for shape, out in zip(ranks, first.outputs, strict=True)]
        specs = [iterator._type_spec, *given]
        whole = tf.function(step, input_signature=specs).get_concrete_function()
        kept = whole.outputs[len(whole.outputs) - len(given) :]
        if [out.dtype for out in kept] != [spec.dtype for spec in given]:
            raise AssertionError("a step leaves other dtypes than it takes")
        # Few trainings need these, so they aren't traced before their first call.
        rare = [tf.function(each, input_signature=specs) for each in (again, copy)]
        return _Functions(_quick(first), _quick(whole), *rare)

    def _advance(
        self, iterator: Any, request: Request, number: tf.Tensor, waiting: list[Waiting]
    ) -> list[Waiting]:
        """Return the batches that wait in the next step, with what is to be fetched in this one."""
        with beside_step(self._depth):
            real, data = _next(iterator, waiting[-1])
            later = [*waiting[1:], request(real, number, self._arrange(data))]
        with beside_step(1):
            return [self._peek(later[0]), *later[1:]]

    def _peek(self, waiting: Waiting) -> Waiting:
        """Read the rows of the next batch without any effect, except those that are on their way to a GPU."""

        def peek(each: Fetched) -> Fetched:
            if self._depth == 1 and each.fetch.moves_to_gpu:
                return each
            end_read = begin_span("lookup", f"{each.fetch.name}/rows", each.requested.owned)
            peeked = each.fetch.peek(each.requested)
            end_read(peeked)
            return each._replace(peeked=peeked)

        return waiting._replace(lookups=tuple(map(peek, waiting.lookups)))

    def _arrange(self, data: Any) -> Any:
        windows = self._model._windows
        return data if windows is None else windows.arrange(data)

    def _is_next(self, number: tf.Tensor) -> bool:
        return int(from_caller(number, tf.int64)) == int(self._model.optimizer.iterations)

    @tf.autograph.experimental.do_not_convert
    def _after(self, made: tf.Tensor, batches: int) -> tf.Tensor:
        """Predict the number of the step that trains a batch.

        Args:
          made: How many steps are made by now.
          batches: How many batches are trained before it.
        """
        with tf.device("CPU:0"):
            return made + tf.cast(self._model._joint_optimizer.predict_steps(batches), tf.int64)

    def _note_number(self) -> None:
        self._reads_number = True

    def _request(self, spec: Any) -> Request:
        """Return a function that sends the keys of a batch to their owners, and asks for its rows there."""
        windows = self._model._windows
        wanted = foresee(self._model, spec) if windows is None else None

        def request(real: tf.Tensor, number: tf.Tensor, data: Any) -> Waiting:
            samples = batch_size(data) if collectives.world().size > 1 else 0
            with use_step_number(number, self._note_number):
                end_request = begin_span("lookup", "keys", data)
                if wanted is None:
                    lookups = windows.request(data, samples)
                else:
                    found = wanted(data)
                    lookups = tuple(Fetched(one.fetch, one.fetch.request(one.keys, samples)) for one in found)
                end_request([each.requested.owned for each in lookups])
            prefetch(((each.fetch, each.requested) for each in lookups), to_gpus_only=True)
            return Waiting(real, number, data, lookups)

        return request


# Calls a concrete function without searching for it, also for models that fetch nothing ahead.


class QuickCalls:
    """A train, test or predict function of Keras that finds its concrete function once for each iterator.

    At each call of a `tf.function`, TensorFlow hashes and compares the types of an iterator's columns to find
    the concrete function. It does so in Python, for some tenths of a millisecond in which a GPU has nothing
    to do. The types of one iterator don't change, so from its second call on, the concrete function is the
    same.

    Args:
      function: A `tf.function` of an iterator, whose attributes this object has too.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        # The last iterator and its concrete function. Other threads may call, so the pair is only replaced.
        self._last: tuple[Callable[[], Any], Function | None] = (lambda: None, None)

    @classmethod
    def of(cls, function: Any) -> Function:
        """Return the quick form of a function; functions that aren't traced have none."""
        traced = hasattr(function, "get_concrete_function") and not isinstance(function, cls)
        return cls(function) if traced else function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_function":  # an object that isn't filled yet, as in a copy
            raise AttributeError(name)
        return getattr(self._function, name)

    def __call__(self, iterator: Any) -> Any:
        """Call the function."""
        last, call = self._last
        if last() is not iterator:
            if isinstance(iterator, tf.data.Iterator):  # Keras takes any other, too
                self._last = weakref.ref(iterator), None
            return self._function(iterator)
        if tf.config.functions_run_eagerly():
            return self._function(iterator)
        if call is None:
            call = _quick(self._function.get_concrete_function(iterator))
            self._last = last, call
        if hasattr(self._function, "_key_for_call_stats"):
            # TensorFlow warns of functions that are traced in many of their calls, so it must count this one.
            _calls.called_without_tracing(self._function._key_for_call_stats)
        return call(iterator)


def _quick(concrete: Any) -> Function:
    """Return a function that calls a concrete one without a check of each argument."""

    def call(iterator: Any, *tensors: tf.Tensor) -> Any:
        handles = tf.nest.flatten(iterator, expand_composites=True)
        return concrete._call_flat([*handles, *tensors], concrete.captured_inputs)

    return call


def _next(iterator: Any, last: Waiting) -> tuple[tf.Tensor, Any]:
    """Return whether the data has another batch, and the batch, or in its place the last one."""
    with tf.device("CPU:0"):
        end_read = begin_span("data", "next batch")
        found = iterator.get_next_as_optional()
        real = last.real & found.has_value()
        data = tf.cond(real, found.get_value, lambda: last.data)
        end_read(data)
        return real, data


class _Form:
    """How the tensors of some batches leave a function and enter the next call.

    Args:
      waiting: Such batches, in the function that computes them.
    """

    def __init__(self, waiting: list[Waiting]) -> None:
        self._form = tf.nest.map_structure(_spec, waiting)
        self._places = [shared_place([part]) for part in _tensors(waiting)]

    def leave(self, waiting: list[Waiting]) -> list[tf.Tensor]:
        """Return all tensors, as they leave a function."""
        pairs = zip(_tensors(waiting), self._places, strict=True)
        return [to_caller(part, place) for part, place in pairs]

    def enter(self, tensors: Sequence[tf.Tensor]) -> list[Waiting]:
        """Return the batches whose tensors left a function."""
        given = iter(tensors)
        parts = [
            from_caller(next(given), part.dtype) if isinstance(part, tf.TypeSpec) else part
            for part in tf.nest.flatten(self._form, expand_composites=True)
        ]
        return tf.nest.pack_sequence_as(self._form, parts, expand_composites=True)


class _Columns:
    """The columns of the next batch that are copied to a GPU.

    Args:
      spec: The specification of a batch.
      copied: Whether there is a GPU, and the step is traced.
    """

    def __init__(self, spec: Any, copied: bool) -> None:
        parts = tf.nest.flatten(spec, expand_composites=True) if copied else []
        self._taken = [_is_numeric(part) for part in parts]
        self._read = [True] * sum(self._taken)  # which ops may read on the GPU

    def copies_in(self, tensors: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        """Return the copies among the tensors that enter or leave a function: the last ones."""
        return tensors[len(tensors) - sum(self._taken) :]

    def copy(self, data: Any) -> list[tf.Tensor]:
        """Copy the columns of a batch; a column that no op reads on the GPU is replaced by zeros.

        An op on ids counts as a reader, even if only the lookup needs its result.
        """
        with tf.device("CPU:0"):
            parts = [
                column if read else tf.zeros([0] * column.shape.rank, column.dtype)
                for column, read in zip(self._of(data), self._read, strict=True)
            ]
        return [copy_to_gpu(part) for part in parts]

    def read_copies(self, data: Any, copies: Sequence[tf.Tensor]) -> None:
        """Make the ops of a step, which are traced by now, read copies where they compute on the GPU."""
        pairs = zip(self._of(data), copies, strict=True)
        self._read = [read_copy(column, from_caller(copy, column.dtype)) for column, copy in pairs]

    def _of(self, data: Any) -> list[tf.Tensor]:
        parts = tf.nest.flatten(data, expand_composites=True) if self._taken else []
        return [part for part, taken in zip(parts, self._taken, strict=True) if taken]


def _is_numeric(spec: Any) -> bool:
    return spec.shape.rank is not None and (
        spec.dtype.is_bool or spec.dtype.is_floating or spec.dtype.is_integer
    )


def _tensors(waiting: list[Waiting]) -> list[tf.Tensor]:
    return [part for part in tf.nest.flatten(waiting, expand_composites=True) if tf.is_tensor(part)]


def _spec(part: Any) -> Any:
    """Return the specification of a tensor of any size; a part that isn't a tensor is unchanged."""
    return tf.type_spec_from_value(part)._with_tensor_ranks_only() if tf.is_tensor(part) else part
