"""What retrievers are trained with, and how one is made."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import gmeta  # noqa: F401 - before TensorFlow: it selects Keras 2

# isort: split
import tensorflow as tf
from settings import OF_SEQUENCES, warm_up

from gmeta.core.errors import ConfigError
from gmeta.initializers import Normal
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.models import FlatRetriever, GenerativeRetriever
from gmeta.optimizers import AdamW
from gmeta.preprocess import SemanticIds

KS = (5, 10, 50)


@dataclass(frozen=True)
class RetrieverSettings:
    """Of the ids, the model and its training."""

    form: str = "decoder"  # or flat: histories are read as codes
    ids: str = "attributes"  # or cooccurrence, items, random, or a folder of ids; {seed} in its name: of each
    levels: int = 3
    codes: int = 128
    depth: int | None = None  # codes that are told as digits; None: 1, and all of the flat form
    softmax: str = "children"  # or codes, what the flat form's training normalises over
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


OF_FORM = {
    "decoder": (
        "width",
        "decoder_blocks",
        "decoder_heads",
        "sampled",
        "negatives",
        "repeats",
        "weight_decay",
    ),
    "flat": ("softmax",),
}
"""What only one form has."""


def check_given(form: str, given: Collection[str]) -> None:
    """Refuse settings that a user gave and the form doesn't have.

    Raises:
      ConfigError: There is such a setting, or no such form.
    """
    if form not in OF_FORM:
        raise ConfigError(f"form must be one of {', '.join(OF_FORM)}, got {form!r}")
    for other, own in OF_FORM.items():
        if other != form and (unread := [name for name in own if name in given]):
            raise ConfigError(f"{', '.join(unread)} is of --form {other}, and this is {form}: leave it out")


def make_retriever(
    ids: SemanticIds, settings: RetrieverSettings, seed: int
) -> GenerativeRetriever | FlatRetriever:
    """A retriever, compiled."""
    s = settings
    rate: Any = s.learning_rate if not s.warm_up else warm_up(s.learning_rate, s.warm_up)
    depth = s.depth or (1 if s.form == "decoder" else s.levels)
    both = {"depth": min(depth, s.levels), "beam": s.beam, "dropout": s.dropout, "seed": seed, "ks": KS}
    model: GenerativeRetriever | FlatRetriever
    if s.form == "flat":
        tokens = (both["depth"] + 1) * (s.max_length + 1) + 1  # of a history, its beginning and the answer
        model = FlatRetriever(
            make_backbone(s, tokens, seed),
            ids,
            dim=s.dim,
            max_length=s.max_length,
            softmax=s.softmax,
            **both,
        )
    else:
        table = TableConfig("item", s.dim, initializer=Normal(0.0, (2 / (len(ids.items) + s.dim)) ** 0.5))
        collection = EmbeddingCollection(
            [FeatureConfig("item", table)],
            optimizer=AdamW(rate, beta_2=s.beta_2, weight_decay=s.weight_decay),
            seed=seed,
        )
        model = GenerativeRetriever(
            collection,
            make_backbone(s, s.max_length, seed),
            ids,
            max_length=s.max_length,
            width=s.width,
            blocks=s.decoder_blocks,
            heads=s.decoder_heads,
            sampled=s.sampled,
            negatives=s.negatives,
            repeats=s.repeats,
            **both,
        )
    model.compile(tf.keras.optimizers.Adam(rate, beta_2=s.beta_2))
    return model


def make_backbone(settings: RetrieverSettings, tokens: int, seed: int) -> tf.keras.layers.Layer:
    """The backbone, for sequences of so many tokens."""
    s = settings
    return OF_SEQUENCES[s.backbone](
        {
            "blocks": s.blocks,
            "heads": s.heads,
            "attention_dim": s.dim // s.heads,
            "value_dim": s.dim // s.heads,
            "max_length": tokens,
            "dropout": s.dropout,
            "seed": seed,
        }
    )
