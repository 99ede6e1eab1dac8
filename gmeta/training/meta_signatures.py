"""What can be asked of an exported `MetaModel`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gmeta.models import MetaModel
from gmeta.training.export import Signature, feature_inputs


def meta_signatures(model: MetaModel) -> dict[str, Signature]:
    """``predict``: ratings of samples by the shared weights, those that adaptation starts from.

    Inputs: the features' ids of n samples. Output ``rating``: (n,) float32.
    """

    def predict(features: dict[str, Any]) -> dict[str, tf.Tensor]:
        embeddings = model.collection.concat(model.collection.lookup(features, insert=False))
        return {"rating": model.network(embeddings[tf.newaxis])[0, :, 0]}

    return {"predict": Signature(predict, feature_inputs(model.collection.features))}
