"""What a client can ask of an exported model, and what it sends for that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from gmeta.layers import FeatureConfig

DEFAULT_SIGNATURE = "serving_default"
"""The signature that TensorFlow Serving calls when a client names none."""

OUTPUT = "output"
"""What a tensor is called that has no name."""


@dataclass(frozen=True)
class Signature:
    """Something that a client can ask of an exported model.

    Attributes:
      function: Maps the inputs by name to a tensor, or to tensors by name.
      inputs: Name -> ``tf.TensorSpec``, or a ``tf.RaggedTensorSpec`` of ids, (samples, None), which clients
        send dense and padded, and ``function`` gets ragged. What is called as a feature that hashes, and is
        int64, clients send as text; ``function`` gets its numbers (`gmeta.export.client_inputs`).
    """

    function: Callable[[dict[str, Any]], tf.Tensor | Mapping[str, tf.Tensor]]
    inputs: Mapping[str, tf.TypeSpec]


def feature_inputs(features: Sequence[FeatureConfig]) -> dict[str, tf.TypeSpec]:
    """Feature -> the spec of its ids: (samples,), or ragged (samples, None) where they are pooled."""
    return {
        feature.name: tf.TensorSpec([None], tf.int64)
        if feature.combiner is None
        else tf.RaggedTensorSpec([None, None], tf.int64)
        for feature in features
    }
