"""Graphs that are traced once for a structure of inputs, whatever the numbers of samples in it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from gmeta.core.graph.host_ops import shapes_on_host


class TracedGraphs:
    """A graph for each purpose and each structure of what it is called with.

    A loop over users calls with a new number of samples each time; a plain ``tf.function`` would trace anew
    for each, which takes a thousand times as long as to run it.

    Args:
      *made_for: What all graphs were traced with; see `still_for`.
    """

    def __init__(self, *made_for: object) -> None:
        self._made_for = made_for
        self._graphs: dict[Any, Any] = {}

    def still_for(self, *made_for: object) -> bool:
        """Whether these are the very objects that the graphs were traced with."""
        return len(made_for) == len(self._made_for) and all(map(operator.is_, self._made_for, made_for))

    def run(self, purpose: tuple[Any, ...], function: Callable[[Any], Any], given: Any) -> Any:
        """``function(given)``, from its graph, as NumPy values.

        Args:
          purpose: What the function is; equal ones have equal functions.
          function: Maps a nest of tensors to one.
          given: A nest of arrays and tensors, ragged ones too. Any dimension of ids may change, and those of
            the index and the mask of a side of a task batch; of other numbers the first, which is the
            samples'.
        """
        spec = _specs(given)
        key = (*purpose, _hashable(spec))
        if key not in self._graphs:

            def traced(given: Any) -> Any:
                with shapes_on_host():
                    return function(given)

            made = tf.function(traced, input_signature=[spec], autograph=False)
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
