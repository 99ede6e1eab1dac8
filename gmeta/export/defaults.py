"""The default signatures of exported models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.export.meta_models import RATING, meta_sequence_signatures, meta_signatures
from gmeta.export.sequence_models import (
    exposure_signatures,
    next_item_signatures,
    retrieval_signatures,
    two_tower_signatures,
)
from gmeta.export.signature import DEFAULT_SIGNATURE, Signature, feature_inputs
from gmeta.layers import EmbeddingCollection
from gmeta.models import GRM, FlatRetriever, GenerativeRetriever, MetaGRM, MetaModel, NextItemModel, TwoTower


def default_signatures(
    model: tf.keras.Model,
    collections: Sequence[EmbeddingCollection],
    *,
    label: str | None = None,
    text_ids: bool = True,
) -> Mapping[str, Signature]:
    """Choose the signatures of a model by its class.

    A `MetaModel` or a `MetaGRM` has those of `gmeta.export.meta_models`, and a `GRM`, a `NextItemModel`, a
    `TwoTower`, a `GenerativeRetriever` or a `FlatRetriever` those of `gmeta.export.sequence_models`. Any
    other model has one signature, its own call with ``training=False``. The inputs of that signature are a
    functional model's inputs, or else the features of the model's embedding collections; its answer is the
    same as that of `predict`.

    Args:
      model: The model.
      collections: The embedding collections in the model.
      label: As for `gmeta.export.export_model`.
      text_ids: As for `gmeta.export.export_model`.

    Raises:
      ConfigError: The inputs can't be determined; or a label is given although answers have names already.
    """
    if label is not None and isinstance(model, MetaGRM | GRM | NextItemModel | TwoTower | FlatRetriever):
        raise ConfigError(
            f"{model.name}: label={label!r} has no use, because its answers have names: leave it out"
        )
    if isinstance(model, MetaGRM):
        return meta_sequence_signatures(model, text_ids=text_ids)
    if isinstance(model, MetaModel):
        of_logits = label is not None and takes_logits(model)
        return meta_signatures(model, answer=label or RATING, of_logits=of_logits)
    if isinstance(model, GRM):
        return exposure_signatures(model, text_ids=text_ids)
    if isinstance(model, GenerativeRetriever | FlatRetriever):
        return retrieval_signatures(model, text_ids=text_ids)
    if isinstance(model, NextItemModel):
        return next_item_signatures(model, text_ids=text_ids)
    if isinstance(model, TwoTower):
        return two_tower_signatures(model, text_ids=text_ids)
    return {DEFAULT_SIGNATURE: _own_call(model, collections, label)}


def takes_logits(model: tf.keras.Model) -> bool:
    """Return whether a model was compiled with a binary cross-entropy that takes logits."""
    loss = getattr(model, "loss", None)
    binary = tf.keras.losses.BinaryCrossentropy | tf.keras.losses.BinaryFocalCrossentropy
    return isinstance(loss, binary) and bool(loss.get_config().get("from_logits"))


def _own_call(
    model: tf.keras.Model, collections: Sequence[EmbeddingCollection], label: str | None
) -> Signature:
    def answer(outputs: Any) -> Any:
        if label is None:
            return outputs
        if not tf.is_tensor(outputs):
            raise ConfigError(
                f"{model.name} has several outputs, which have names: leave label={label!r} out"
            )
        if takes_logits(model):
            return {label: tf.sigmoid(outputs), f"{label}_logit": outputs}
        return {label: outputs}

    if getattr(model, "inputs", None):  # a functional model knows its inputs and their structure
        tensors = tf.nest.flatten(model.input)
        return Signature(
            lambda inputs: answer(
                model(
                    tf.nest.pack_sequence_as(model.input, [inputs[tensor.name] for tensor in tensors]),
                    training=False,
                )
            ),
            {tensor.name: tensor.type_spec for tensor in tensors},
        )
    if not collections:
        raise ConfigError(f"{model.name} has no inputs or features of its own: give signatures")
    features = [feature for collection in collections for feature in collection.features]
    return Signature(lambda inputs: answer(model(inputs, training=False)), feature_inputs(features))
