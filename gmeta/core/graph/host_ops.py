"""Keeps some ops of a step on the host although there is a GPU, and some out of the order of the trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

_SHAPE_OPS = frozenset({"DynamicStitch", "Fill", "FloorMod", "GatherV2", "Range"})


@contextmanager
def shapes_on_host() -> Iterator[None]:
    """Keep the arithmetic of shapes off the GPU, for ops that are traced in a ``with`` block.

    The gradient of a reduction needs the shape of the reduction's input. Where batches have no static size,
    the step computes that shape. TensorFlow has GPU kernels for some of those ops, so a few numbers go to the
    GPU and back, and each time the host waits until the GPU has finished all earlier work. In a loop of inner
    steps this leaves the GPU idle for a tenth of the time. In eager mode, or without a GPU, this context
    changes nothing.
    """
    if tf.executing_eagerly():
        yield
        return
    with collect_ops() as made:
        yield
    for op in made:
        if op.type in _SHAPE_OPS and _is_of_int32(op) and not op.device:
            # TensorFlow places these ops beside the tensor whose shape they reduce. A device function can't
            # see that, so the device is set afterwards.
            if "_class" in op.node_def.attr:
                op._clear_attr("_class")
            op._set_device("/device:CPU:0")


@contextmanager
def collect_ops() -> Iterator[list[tf.Operation]]:
    """Collect the ops that are traced in a ``with`` block.

    The list is filled when the block ends. It doesn't hold ops that run eagerly.
    """
    found: list[tf.Operation] = []
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    before = 0 if graph is None else len(graph.get_operations())
    yield found
    if graph is not None:
        found.extend(graph.get_operations()[before:])


@contextmanager
def out_of_turn() -> Iterator[None]:
    """Let ops that are traced in a ``with`` block run as soon as their inputs are there.

    TensorFlow runs ops that have effects and no resource, such as one that reads the time, in the order of
    the trace. So such an op would wait for all before it, and all after it would wait for that.
    """
    with collect_ops() as made:
        yield
    turns = made and getattr(made[0].graph, "experimental_acd_manager", None)
    for op in made:
        if turns and op._is_stateful and all(tensor.dtype != tf.resource for tensor in op.inputs):
            turns.run_independently(op)


def _is_of_int32(op: tf.Operation) -> bool:
    return all(tensor.dtype.base_dtype == tf.int32 for tensor in (*op.inputs, *op.outputs))
