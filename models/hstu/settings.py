"""What models are trained with: on text files of sequences, and on MovieLens as HSTU was published."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gmeta  # noqa: F401 - before TensorFlow: it selects Keras 2

# isort: split
import click
import tensorflow as tf

from gmeta.initializers import Normal
from gmeta.layers import HSTU, EmbeddingCollection, FeatureConfig, FuXi, TableConfig
from gmeta.losses import SampledSoftmax
from gmeta.models import NextItemModel
from gmeta.models.zoo.softmax_blocks import LiGR, SASRec
from gmeta.optimizers import AdamW, Warmup

KS = (10, 50)


@dataclass(frozen=True)
class Settings:
    """Of all models alike; the defaults are those for text files, chosen on Beauty's validation items."""

    dim: int = 64
    max_length: int = 50
    batch: int = 128
    negatives: int | None = None  # `NextItemModel`'s default
    negatives_per: str = "step"
    repeats: bool = True
    in_batch: bool = False
    log_q: bool = False  # for in-batch negatives
    temperature: float | None = None  # of cosines; None: dot products
    initial: float | None = None  # standard deviation of new rows; None: Xavier's
    token_scale: float | None = None
    places: str = "from_end"
    norm: bool = True
    dropout: float = 0.3
    learning_rate: float = 1e-3
    beta_2: float = 0.98
    warm_up: int = 0  # steps
    weight_decay: float = 0.0  # of rows
    epochs: int = 100
    patience: int = 10
    every: int = 1


MOVIELENS = Settings(
    dim=50,
    max_length=200,
    batch=32,  # 128 in the paper, on MovieLens-1M: 48 steps an epoch; of MovieLens-100K's users, 32 make 30
    negatives=512,  # for all tokens of a step; there 128 for each token
    repeats=False,
    temperature=0.05,
    initial=0.02,
    places="from_start",
    norm=False,
    dropout=0.2,
    patience=100,
    every=5,
)
"""What HSTU and SASRec were published with on MovieLens-1M, but for two numbers."""

Make = Callable[[dict[str, Any]], tf.keras.layers.Layer]
_TIMELESS = {"bias_by_time": False}

OF_SEQUENCES: dict[str, Make] = {
    "sasrec": lambda s: SASRec(**s),
    "esasrec": lambda s: LiGR(**s),
    "hstu": lambda s: HSTU(**s, **_TIMELESS),
    "fuxi": lambda s: FuXi(**s, **_TIMELESS),
}
OF_MOVIELENS: dict[str, Make] = {
    "sasrec": lambda s: SASRec(**{**s, "blocks": 2}),
    "hstu-2": lambda s: HSTU(**{**s, "blocks": 2}),
    "hstu-8": lambda s: HSTU(**{**s, "blocks": 8, **_heads(2, s["value_dim"])}),
    "fuxi-2": lambda s: FuXi(**{**s, "blocks": 2}),
}
_OWN = {"fuxi": {"learning_rate": 2e-3, "dropout": 0.2}}
"""What differs for a model on text files."""


def settings_of(name: str, settings: Settings, given: dict[str, Any]) -> Settings:
    """A model's settings: those of the data, then its own, then what the user gave."""
    own = _OWN.get(name, {})
    return Settings(**{**vars(settings), **own, **given})


def options_of(settings: Any) -> Callable[[Any], Any]:
    """Return a decorator that adds an option for each field of a dataclass of settings to a command."""
    kinds = {"int": int, "float": float, "str": str, "bool": bool}

    def add(command: Any) -> Any:
        for name, kind in reversed(settings.__annotations__.items()):
            flag = "--" + name.replace("_", "-")
            flag = f"{flag}/--no-{flag[2:]}" if kind == "bool" else flag
            given = None if kind == "bool" else kinds[kind.split(" ")[0]]
            command = click.option(flag, name, type=given, default=None)(command)
        return command

    return add


def make_model(
    name: str, makers: dict[str, Make], items: int, settings: Settings, seed: int, counts: Any = None
) -> NextItemModel:
    """A model, compiled.

    Args:
      name: One of ``makers``.
      makers: `OF_SEQUENCES` or `OF_MOVIELENS`.
      items: V, the size of the catalogue.
      settings: Of all of it.
      seed: Of weights, rows, dropout and negatives.
      counts: (V,), how often each item occurs in training, for ``log_q``.
    """
    s = settings
    deviation = (2 / (items + s.dim)) ** 0.5 if s.initial is None else s.initial
    rate: Any = s.learning_rate if not s.warm_up else warm_up(s.learning_rate, s.warm_up)
    table = TableConfig("item", s.dim, initializer=Normal(0.0, deviation))
    collection = EmbeddingCollection(
        [FeatureConfig("item", table)],
        optimizer=AdamW(rate, beta_2=s.beta_2, weight_decay=s.weight_decay),
        seed=seed,
    )
    blocks = {"blocks": 1, "max_length": s.max_length, "dropout": s.dropout, "seed": seed}
    cosine = s.temperature is not None
    timed = makers is OF_MOVIELENS and name != "sasrec"
    model = NextItemModel(
        collection,
        makers[name]({**blocks, **_heads(1, s.dim)}),
        items=items,
        max_length=s.max_length,
        time="time" if timed else None,
        negatives=s.negatives,
        negatives_per=s.negatives_per,
        repeats=s.repeats,
        popularity=counts if s.log_q else None,
        loss=SampledSoftmax(s.temperature if cosine else 1.0, normalize=cosine, in_batch=s.in_batch),
        token_scale=s.token_scale,
        places=s.places,
        norm=s.norm,
        dropout=s.dropout,
        seed=seed,
        ks=KS,
    )
    model.compile(tf.keras.optimizers.Adam(rate, beta_2=s.beta_2))
    return model


def warm_up(rate: float, steps: int) -> Warmup:
    """A rate that grows evenly, from ``rate / steps`` in the first step to ``rate`` in step ``steps``."""
    return Warmup(rate, max(steps - 1, 1), start=1 / steps)


def _heads(heads: int, dim: int) -> dict[str, Any]:
    return {"heads": heads, "attention_dim": dim // heads, "value_dim": dim // heads}
