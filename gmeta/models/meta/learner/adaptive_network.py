"""The interface that a `MetaModel` needs of its network, and functions that give it to any Keras network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.keras import refuse_keras_3
from gmeta.layers import EmbeddingCollection
from gmeta.layers.adaptive.task_network import TaskNetwork


@runtime_checkable
class AdaptiveNetwork(Protocol):
    """A network that can be called with weights from outside, one set for each task."""

    def task_weights(self) -> Mapping[str, tf.Variable]:
        """Return ``"layer/weight"`` -> variable: all that a task may adapt, in forward-pass order."""

    def fast_weights(self) -> Mapping[str, tf.Variable]:
        """Return the part of `task_weights` that a task adapts by default."""

    def __call__(self, x: Any, weights: Mapping[str, tf.Tensor] | None = None, training: bool = False) -> Any:
        """Compute outputs: (tasks, samples, ...) -> (tasks, samples, outputs).

        A weight has the shape of its variable, or (tasks, ...) where each task has its own.
        """


def adaptive(network: Any) -> Any:
    """Return the network itself if it is an `AdaptiveNetwork`, otherwise a `TaskNetwork` around it.

    Raises:
      ConfigError: The network is not a Keras layer or model.
      KerasError: It is one of Keras 3.
    """
    refuse_keras_3("network", network)
    if not isinstance(network, tf.keras.layers.Layer):
        got = f"the class {network.__name__}" if isinstance(network, type) else type(network).__name__
        raise ConfigError(
            f"network must be a Keras layer or model, got {got}; derive from tf.keras.layers.Layer for code "
            "of your own"
        )
    return network if isinstance(network, AdaptiveNetwork) else TaskNetwork(network)


def given_network(network: Any) -> Any:
    """Return the network that was passed to `adaptive`."""
    return network.network if isinstance(network, TaskNetwork) else network


def inputs_by_name(network: Any, collection: EmbeddingCollection) -> list[str] | None:
    """Return the names of a network's inputs if it takes features by name, else None: vectors side by side.

    The inputs of a functional model have names. Any other network that takes a dict lists the names in its
    attribute ``takes_by_name``.

    Raises:
      ConfigError: The model has several inputs that aren't named by a dict, or an input has another width
        than the vectors of its feature.
    """
    named = getattr(network, "takes_by_name", None)
    if named is not None:
        return list(named)
    given = getattr(network, "input", None) if getattr(network, "_is_graph_network", False) else None
    features = {feature.name: feature.width for feature in collection.features}
    if isinstance(given, Mapping):
        wrong = [
            f"{name} {tensor.shape[-1]} wide, of which the collection makes {features[name]}"
            for name, tensor in given.items()
            if name in features and tensor.shape[-1] not in (None, features[name])
        ]
        if wrong:
            raise ConfigError(f"{network.name} takes {'; '.join(wrong)}: give its Input that shape")
        return list(given)
    if isinstance(given, Sequence):
        raise ConfigError(
            f"{network.name} takes its inputs in a list: make it as Model({{'feature': input, ...}}, "
            "outputs), so that each finds its vectors"
        )
    return [given.name] if given is not None and given.name in features else None


def build(network: Any, collection: EmbeddingCollection, names: Sequence[str] | None) -> None:
    """Call the network once to create its weights.

    Raises:
      ConfigError: The network doesn't take these inputs, or its outputs aren't (samples, outputs).
    """
    if names is not None:
        if isinstance(network, TaskNetwork) and not network.network.built:
            widths = {feature.name: [feature.width] for feature in collection.features}
            network({name: tf.zeros([1, 1, *widths.get(name, [])]) for name in names})
        return
    width = sum(feature.width for feature in collection.features)
    outputs = network(tf.zeros([1, 1, width]))
    if outputs.shape.rank != 3:
        raise ConfigError(
            f"{network.name}: outputs must be (samples, outputs), got {outputs.shape[1:]} for "
            f"inputs (samples, {width})"
        )
