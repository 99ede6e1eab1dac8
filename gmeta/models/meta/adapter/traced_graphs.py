"""Graphs that are traced once for each structure of inputs, whatever the number of samples."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from gmeta.core.graph.host_ops import shapes_on_host


class TracedGraphs:
    """A cache of graphs, one for each purpose and structure of inputs.

    A loop over users passes a new number of samples in each call. A plain ``tf.function`` would be traced
    again each time, which takes a thousand times as long as a run.

    Args:
      *made_for: The objects that all graphs are traced with; see `still_for`.
    """

    def __init__(self, *made_for: object) -> None:
        self._made_for = made_for
        self._graphs: dict[Any, Any] = {}

    def still_for(self, *made_for: object) -> bool:
        """Return whether these are the same objects that the graphs were traced with."""
        return len(made_for) == len(self._made_for) and all(map(operator.is_, self._made_for, made_for))

    def run(self, purpose: tuple[Any, ...], function: Callable[[Any], Any], given: Any) -> Any:
        """Run ``function(given)`` as a graph and return NumPy values.

        Args:
          purpose: The identity of the function; equal purposes must have equal functions.
          function: A function from a nest of tensors to a nest of tensors.
          given: A nest of arrays and tensors, which may be ragged. Between calls, any dimension of ids may
            change, and any dimension of the index and mask of support or query; other numbers may change
            only in their first dimension, that of the samples.
        """
        spec = _specs(given)
        key = (*purpose, _hashable(spec))
        if key not in self._graphs:

            def trace(given: Any) -> Any:
                with shapes_on_host():
                    return function(given)

            made = tf.function(trace, input_signature=[spec], autograph=False)
            self._graphs[key] = made.get_concrete_function()
        return tf.nest.map_structure(lambda tensor: tensor.numpy(), self._graphs[key](given))


def _specs(given: Any) -> Any:
    if not isinstance(given, Mapping):
        return tf.nest.map_structure(_spec, given)
    side = given.keys() == {"index", "mask"}
    return {name: _spec(part, side) if side else _specs(part) for name, part in given.items()}


def _spec(value: Any, any_shape: bool = False) -> tf.TypeSpec:
    if isinstance(value, tf.RaggedTensor):
        return tf.RaggedTensorSpec(
            [None] * value.shape.rank, value.dtype, row_splits_dtype=value.row_splits.dtype
        )
    dtype = tf.as_dtype(value.dtype)
    flexible = value.ndim if any_shape or dtype.is_integer else min(value.ndim, 1)
    return tf.TensorSpec([None] * flexible + list(value.shape[flexible:]), dtype)


def _hashable(spec: Any) -> Any:
    if isinstance(spec, Mapping):
        return tuple((name, _hashable(part)) for name, part in sorted(spec.items()))
    return tuple(map(_hashable, spec)) if isinstance(spec, list | tuple) else spec
