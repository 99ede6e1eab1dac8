"""Checks a condition before tensors are used."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.eager import context
from tensorflow.python.framework.ops import gradient_registry

from gmeta.core import errors
from gmeta.core.errors import ConfigError, GmetaError

_SENTENCE = re.compile(r"gmeta raises (\w+): (.*?)\.\.\.")


def assert_first(tensors: Any, holds: tf.Tensor, told: Sequence[Any], summarize: int | None = None) -> Any:
    """Check a condition before tensors are used.

    Args:
      tensors: Any nested structure of tensors; it may contain None.
      holds: Booleans of any shape, all of which must be true.
      told: Strings and tensors that the error message shows.
      summarize: Maximum number of values that the message shows per tensor.

    Returns:
      The same tensors. If the condition is false, eager code fails here, and a graph fails where the tensors
      are used.

    Raises:
      InvalidArgumentError: The condition doesn't hold.

    Example:
      >>> float(assert_first(tf.constant(2.0), tf.constant([True, True]), ["numbers must be positive"]))
      2.0
    """
    check = tf.debugging.Assert(tf.reduce_all(holds), list(told), summarize=summarize)
    return hold(tensors, [] if check is None else [check])


def hold(tensors: Any, until: Sequence[Any]) -> Any:
    """Return the same tensors, available in a graph only after the tensors and operations ``until`` have run.

    Args:
      tensors: Any nested structure of tensors; it may contain None.
      until: What must have run.
    """
    with tf.control_dependencies(list(until)):
        return tf.nest.map_structure(
            lambda tensor: None if tensor is None else tf.identity(tensor), tensors, expand_composites=True
        )


def hold_gradients(gradients: Any, until: Sequence[Any]) -> Any:
    """Return the same gradients, as `hold` does, but let one op return all matrices and vectors of floats.

    All gradients must be computed on one device. One op starts sooner than many. TensorFlow also moves a cast
    behind an identity that follows it, so that the cast would wait too; it moves none behind this op.

    Args:
      gradients: Any nested structure of gradients; it may contain None and `tf.IndexedSlices`.
      until: What must have run.
    """
    flat = tf.nest.flatten(gradients, expand_composites=True)
    joined = [each for each in flat if _is_numbers(each)]
    rest = hold([None if _is_numbers(each) else each for each in flat], until)
    with tf.control_dependencies(list(until)):
        together = iter(tf.identity_n(joined) if joined else [])
    held = [next(together) if _is_numbers(each) else other for each, other in zip(flat, rest, strict=True)]
    return tf.nest.pack_sequence_as(gradients, held, expand_composites=True)


def _is_numbers(tensor: tf.Tensor | None) -> bool:
    return tensor is not None and tensor.dtype.is_floating and tensor.shape.rank not in (None, 0)


def keep_whole(output: tf.Tensor) -> None:
    """Keep the `tf.cond` of an output one op, which calls a function; without a graph, this does nothing.

    Usually TensorFlow replaces it by a switch for each tensor that a branch uses, and an op that isn't run
    takes time too. One op has all these tensors as inputs, so they should be where it is.
    """
    if not tf.executing_eagerly():
        output.op.inputs[0].op._set_attr("_lower_using_switch_merge", attr_value_pb2.AttrValue(b=False))


def refuse_unless(
    tensors: Any, holds: tf.Tensor, sentence: str | tf.Tensor, error: type[GmetaError] = ConfigError
) -> Any:
    """Check a condition like `assert_first`, but raise a `GmetaError`.

    Args:
      tensors: Any nested structure of tensors.
      holds: Booleans of any shape, all of which must be true.
      sentence: The error message, a text or () string.
      error: The class of the error, one of `gmeta.core.errors`.

    Returns:
      The same tensors.

    Raises:
      GmetaError: The condition doesn't hold. A graph raises an error of the class ``error`` only inside
        `name_refusals`; elsewhere, it raises TensorFlow's `InvalidArgumentError` with the same message.
    """
    if tf.executing_eagerly() and not bool(tf.reduce_all(holds)):
        raise error(sentence if isinstance(sentence, str) else sentence.numpy().decode())
    return assert_first(
        tensors, holds, [tf.strings.join([f"gmeta raises {error.__name__}: ", sentence, "..."])]
    )


def refuse_numbers(numbers: tf.Tensor, good: tf.Tensor, wanted: str, advice: str = "") -> tf.Tensor:
    """Refuse numbers outside their domain.

    Args:
      numbers: Numbers of any shape.
      good: bool of that shape, which numbers are in their domain.
      wanted: The requirement, such as "labels must be at least 0".
      advice: What to do next.

    Returns:
      The same numbers.

    Raises:
      ConfigError: A number is outside its domain; the message shows the first. As in `refuse_unless`, a graph
        raises it only inside `name_refusals`.

    Example:
      >>> refuse_numbers(tf.constant([1.0, 2.0]), tf.constant([True, True]), "rates must be above 0").numpy()
      array([1., 2.], dtype=float32)
    """
    bad = tf.cast(tf.boolean_mask(numbers, ~good)[:1], tf.float64)
    shown = tf.strings.reduce_join(tf.strings.as_string(bad, shortest=True))
    sentence = tf.strings.join([f"{wanted}, got ", shown, f": {advice}" if advice else ""])
    return refuse_unless(numbers, good, sentence)


@contextmanager
def name_refusals() -> Iterator[None]:
    """Convert the error of a graph that `refuse_unless` stopped to the error that it names.

    Raises:
      GmetaError: The error, with only the sentence.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        found = _SENTENCE.search(str(error.message))
        if found is None:
            raise
        sentence = re.sub(r"\\(['\"\\])", r"\1", found[2])  # TensorFlow escapes quotes
        raise getattr(errors, found[1])(sentence) from None


# Keeps some ops of a step on the host despite a GPU, and exempts some from the order of tracing.

_SHAPE_OPS = frozenset({"DynamicStitch", "Fill", "FloorMod", "GatherV2", "Range"})


@contextmanager
def shapes_on_host() -> Iterator[None]:
    """Keep the arithmetic of shapes off the GPU, for ops that are traced in a ``with`` block.

    The gradient of a reduction requires the shape of the reduction's input. If batches have no static size,
    the step computes that shape. TensorFlow has GPU kernels for some of those ops, so a few numbers are
    copied to the GPU and back, and each time the host waits until the GPU has finished all earlier work. In a
    loop of inner steps, this leaves the GPU idle for a tenth of the time. In eager mode, or without a GPU,
    this context changes nothing.
    """
    if tf.executing_eagerly():
        yield
        return
    with collect_ops() as made:
        yield
    for op in made:
        if op.type in _SHAPE_OPS and _is_of_int32(op) and not op.device:
            # TensorFlow colocates these ops with the tensor whose shape they reduce. A device function can't
            # see that, so the device is set afterwards.
            if "_class" in op.node_def.attr:
                op._clear_attr("_class")
            op._set_device("/device:CPU:0")


@contextmanager
def collect_ops() -> Iterator[list[tf.Operation]]:
    """Collect the ops that are traced in a ``with`` block.

    The list is filled when the block ends. It doesn't contain ops that run eagerly.
    """
    found: list[tf.Operation] = []
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    before = 0 if graph is None else len(graph.get_operations())
    yield found
    if graph is not None:
        found.extend(graph.get_operations()[before:])


@contextmanager
def out_of_turn() -> Iterator[None]:
    """Make ops that are traced in a ``with`` block run as soon as their inputs are computed.

    TensorFlow runs ops that have side effects but no resource, such as one that reads the time, in the order
    of tracing. Such an op would wait for all earlier ones, and all later ones would wait for it.
    """
    with collect_ops() as made:
        yield
    turns = made and getattr(made[0].graph, "experimental_acd_manager", None)
    for op in made:
        if turns and op._is_stateful and all(tensor.dtype != tf.resource for tensor in op.inputs):
            turns.run_independently(op)


@contextmanager
def gradients_released(graphs: Sequence[tf.Graph] | None = None) -> Iterator[None]:
    """Release the graphs that are traced in a ``with`` block from TensorFlow's registry of gradients.

    For each traced call, `tf.custom_gradient`, which `tf.nn.silu` uses too, registers a function that refers
    to the call's graph. The registry would keep the graph, and all tables and variables that it reads, until
    the process ends. After the block, the functions that it traced run as before, and can't be differentiated
    from outside.

    Args:
      graphs: A list that the block fills. Only gradients of these graphs are released, because other threads
        may trace meanwhile. None: all that are registered while the block runs.
    """
    registry = gradient_registry._registry
    before = set(registry)
    try:
        yield
    finally:
        made = [name for name in registry if name not in before and name.startswith("CustomGradient-")]
        mine = made if graphs is None else _gradients_of(graphs)
        for name in made:
            if name in mine:
                registry.pop(name, None)


def _gradients_of(graphs: Sequence[tf.Graph]) -> set[str]:
    """Return the names of gradients that graphs and the functions that they call refer to."""
    names: set[str] = set()
    seen: set[int] = set()
    ahead = list(graphs)
    while ahead:
        graph = ahead.pop()
        if id(graph) in seen:
            continue
        seen.add(id(graph))
        for op in graph.get_operations():
            if op.type == "IdentityN" and "_gradient_op_type" in op.node_def.attr:
                names.add(op.get_attr("_gradient_op_type").decode())
        ahead += [each.graph for each in graph._functions.values()]
    return names


def _is_of_int32(op: tf.Operation) -> bool:
    return all(tensor.dtype.base_dtype == tf.int32 for tensor in (*op.inputs, *op.outputs))


# Creates variables in the middle of a function, without making TensorFlow trace it twice.
#
# When a function is first called, TensorFlow records each variable that the call creates. A variable might be
# created only under a condition, so TensorFlow traces the whole function again, this time without creating
# variables. That doubles the time until the first train step, because Keras creates an optimizer's slots and
# the metrics' sums in that step. `tf.init_scope` computes their values outside the function, but TensorFlow
# still records the variables.


@contextmanager
def lift_variables() -> Iterator[None]:
    """Create variables in a ``with`` block as if no function were being traced.

    The variables have their values when the block ends. In a TensorFlow 1 graph, and under a distribution
    strategy, which must see each new variable, this is `tf.init_scope`.

    Example:
      >>> @tf.function
      ... def step():
      ...     with lift_variables():
      ...         count = tf.Variable(3)
      ...     return count.assign_add(1)
      >>> int(step())
      4
    """
    inside = tf.inside_function()
    with tf.init_scope():
        if not inside or not tf.executing_eagerly() or tf.distribute.has_strategy():
            yield
            return
        # The hook that records variables belongs to the function's graph; another graph has none.
        with tf.Graph().as_default(), context.eager_mode():
            yield


def read_where_it_is(variable: tf.Variable) -> tf.Variable:
    """Make ``variable.numpy()`` read the variable on its own device.

    TensorFlow's method first copies the value to the current device. If that is a GPU and the variable is in
    host memory, the value goes to the GPU and back, behind the kernels that are queued there.

    Returns:
      The variable.
    """
    variable.numpy = MethodType(_read_there, variable)
    return variable


def _read_there(variable: tf.Variable) -> Any:
    return variable.value().numpy()


# Runs a function so that its gradient recomputes the intermediate results instead of keeping them.


def recompute(
    function: Callable[[Sequence[tf.Tensor]], list[tf.Tensor]], tensors: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Compute ``function(tensors)``, and keep only ``tensors`` for the gradient.

    ``tf.recompute_grad`` isn't used, because it stops all tapes while it runs the function. That includes
    tapes inside the function, such as an inner loop's: its results would be wrong without any error.

    Args:
      function: Float tensors -> float tensors. Gradients reach ``tensors`` and the variables that it reads.
      tensors: The function's arguments.
    """

    @tf.custom_gradient
    def run(*given: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
        def backward(*upstream: Any, variables: Sequence[tf.Variable] = ()) -> Any:
            upstream = tuple(tf.convert_to_tensor(gradient) for gradient in upstream)
            with tf.GradientTape() as tape:
                again = _not_before(given, upstream[0])
                tape.watch(again)
                results = function(again)
            found = tape.gradient(
                results,
                [*again, *variables],
                output_gradients=list(upstream),
                unconnected_gradients=tf.UnconnectedGradients.ZERO,
            )
            found = [tf.convert_to_tensor(gradient) for gradient in found]
            own, of_variables = found[: len(given)], found[len(given) :]
            return (own, of_variables) if variables else own

        return function(given), backward

    return list(run(*tensors))


def _not_before(tensors: Sequence[tf.Tensor], gradient: tf.Tensor) -> list[tf.Tensor]:
    """Return the same tensors, but available only once the gradient is.

    Otherwise TensorFlow would notice that the results were computed before, and keep those.
    """
    first = tf.reduce_max(tf.reshape(gradient, [-1])[:1])
    # Always 0, also for NaN, in a form that TensorFlow doesn't simplify.
    zero = tf.cast(tf.math.is_nan(first) & (first == first), first.dtype)
    return [tensor + tf.cast(zero, tensor.dtype) for tensor in tensors]
