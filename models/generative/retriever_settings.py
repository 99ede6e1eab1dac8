"""What retrievers are trained with, and how one is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gmeta  # noqa: F401 - before TensorFlow: it selects Keras 2

# isort: split
import tensorflow as tf
from settings import OF_SEQUENCES, WarmUp

from gmeta.initializers import Normal
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.models import GenerativeRetriever
from gmeta.optimizers import AdamW
from gmeta.preprocess import SemanticIds

KS = (5, 10, 50)


@dataclass(frozen=True)
class RetrieverSettings:
    """Of the ids, the model and its training."""

    ids: str = "attributes"  # or cooccurrence, items, random
    levels: int = 3
    codes: int = 128
    depth: int | None = 1  # codes that are told as digits; the others are part of items' vectors alone
    balanced: bool = True
    vectors: int = 64  # the width of what ids are made of
    item_epochs: int = 10  # of the model whose items' vectors ids are made of
    backbone: str = "sasrec"  # or esasrec, hstu, fuxi
    dim: int = 64
    blocks: int = 1
    heads: int = 1
    max_length: int = 50
    width: int = 64  # of the decoder
    decoder_blocks: int = 1
    decoder_heads: int = 2
    sampled: float = 1.0  # the weight of the sampled softmax beside
    negatives: int | None = None
    repeats: bool = True
    dropout: float = 0.3
    batch: int = 128
    learning_rate: float = 1e-3
    beta_2: float = 0.98
    warm_up: int = 0  # steps
    weight_decay: float = 0.0  # of rows
    beam: int = 50
    epochs: int = 100
    patience: int = 10
    every: int = 1
    measured: int = 0  # users of validation; 0: all


def make_retriever(ids: SemanticIds, settings: RetrieverSettings, seed: int) -> GenerativeRetriever:
    """A retriever, compiled."""
    s = settings
    rate: Any = s.learning_rate if not s.warm_up else WarmUp(s.learning_rate, s.warm_up)
    table = TableConfig("item", s.dim, initializer=Normal(0.0, (2 / (len(ids.items) + s.dim)) ** 0.5))
    collection = EmbeddingCollection(
        [FeatureConfig("item", table)],
        optimizer=AdamW(rate, beta_2=s.beta_2, weight_decay=s.weight_decay),
        seed=seed,
    )
    backbone = OF_SEQUENCES[s.backbone](
        {
            "blocks": s.blocks,
            "heads": s.heads,
            "attention_dim": s.dim // s.heads,
            "value_dim": s.dim // s.heads,
            "max_length": s.max_length,
            "dropout": s.dropout,
            "seed": seed,
        }
    )
    model = GenerativeRetriever(
        collection,
        backbone,
        ids,
        max_length=s.max_length,
        depth=min(s.depth, s.levels) if s.depth else None,
        width=s.width,
        blocks=s.decoder_blocks,
        heads=s.decoder_heads,
        beam=s.beam,
        sampled=s.sampled,
        negatives=s.negatives,
        repeats=s.repeats,
        dropout=s.dropout,
        seed=seed,
        ks=KS,
    )
    model.compile(tf.keras.optimizers.Adam(rate, beta_2=s.beta_2))
    return model
