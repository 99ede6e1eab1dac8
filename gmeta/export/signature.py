"""Signatures of an exported model: the requests of clients and their inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from gmeta.layers import FeatureConfig

DEFAULT_SIGNATURE = "serving_default"
"""The signature that TensorFlow Serving calls when a client names none."""

OUTPUT = "output"
"""The name of an output tensor that has no name of its own."""


@dataclass(frozen=True)
class Signature:
    """A request that an exported model answers.

    Attributes:
      function: Maps the inputs by name to a tensor, or to tensors by name.
      inputs: Name -> ``tf.TensorSpec``, or a ``tf.RaggedTensorSpec`` of ids, (samples, None), which clients
        send dense and padded, and ``function`` receives ragged. If an int64 input has the name of a feature
        that hashes, clients send text and ``function`` receives the hashes (`gmeta.export.client_inputs`).
    """

    function: Callable[[dict[str, Any]], tf.Tensor | Mapping[str, tf.Tensor]]
    inputs: Mapping[str, tf.TypeSpec]


def feature_inputs(features: Sequence[FeatureConfig]) -> dict[str, tf.TypeSpec]:
    """Map each feature to the spec of its ids: (samples,), or ragged (samples, None) if they are pooled."""
    return {
        feature.name: tf.TensorSpec([None], tf.int64)
        if feature.combiner is None
        else tf.RaggedTensorSpec([None, None], tf.int64)
        for feature in features
    }
