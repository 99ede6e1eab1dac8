"""Trains small models of every family under `gmeta.callbacks.StepTimes`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

import gmeta
from gmeta.callbacks import StepTimes
from gmeta.core import collectives
from gmeta.initializers import Normal
from gmeta.layers import HSTU, EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.meta import InnerLoop
from gmeta.models import FlatRetriever, GenerativeRetriever, MetaGRM
from gmeta.preprocess import semantic_ids
from gmeta.reinforcement import PolicyTraining, Rollouts
from gmeta.testing.jobs.pipeline_runs import make_model, own_data
from gmeta.testing.softmax_policy import SoftmaxPolicy

_ITEMS, _LONGEST = 30, 6
_OWN_LOSS = ("grm", "next item", "generative", "flat", "meta grm", "policy")

FAMILIES = {
    **dict.fromkeys(("ctr", "grm", "next item", "generative", "policy"), ("lookup", "forward", "backward")),
    **dict.fromkeys(("maml", "meta grm"), ("lookup", "inner", "outer")),
    "flat": ("forward", "backward"),
}
"""Families of models, and the parts between "data" and "update" that a step of theirs has on one rank."""


def fit_timed(
    family: str,
    times: StepTimes,
    *,
    steps: int | None = None,
    depth: int = 0,
    micro_batches: int = 1,
    **settings: Any,
) -> dict[str, list[float]]:
    """Fit a model of a family for an epoch; return its history.

    Args:
      family: One of `FAMILIES`.
      times: The callback.
      steps: How many steps the epoch has; None: as many as its data.
      depth: The pipeline's.
      micro_batches: The pipeline's.
      **settings: More arguments of `compile`.
    """
    random.seed(5)  # Keras draws seeds from it
    tf.random.set_seed(5)
    made = _OWN.get(family, lambda: make_model(family, 0.0))
    model, batches = made()
    if depth or micro_batches > 1:
        settings["pipeline"] = gmeta.Pipeline(depth, micro_batches)
    loss = [] if family in _OWN_LOSS else ["mse"]
    model.compile("adam", *loss, **settings)
    data = own_data(batches)
    history: dict[str, list[float]] = model.fit(
        data, steps_per_epoch=steps, callbacks=[times], verbose=0
    ).history
    return history


def _meta_grm() -> tuple[Any, Callable[[], Iterator[Any]]]:
    base, batches = make_model("grm")
    return MetaGRM(base, inner=InnerLoop(steps=1, adapt=("heads",))), batches


def _generative() -> tuple[Any, Callable[[], Iterator[Any]]]:
    table = TableConfig("item", 4, initializer=Normal(0.0, 0.3))
    collection = EmbeddingCollection([FeatureConfig("item", table)])
    settings: dict[str, Any] = {"max_length": _LONGEST, "width": 4, "negatives": 8, "beam": 10, "ks": [5]}
    return GenerativeRetriever(collection, _backbone(_LONGEST), _semantic(), **settings), _users


def _flat() -> tuple[Any, Callable[[], Iterator[Any]]]:
    return FlatRetriever(_backbone(20), _semantic(), dim=4, max_length=_LONGEST, beam=10, ks=[5]), _users


def _policy() -> tuple[Any, Callable[[], Iterator[Any]]]:
    table = TableConfig("user", 32, initializer=Normal(0.0, 1.0))
    policy = SoftmaxPolicy(EmbeddingCollection([FeatureConfig("user", table)]))

    def reward(batch: Any, items: tf.Tensor) -> tf.Tensor:
        return tf.cast(items == batch["next"][:, tf.newaxis], tf.float32)

    return PolicyTraining(policy, reward, rollouts=Rollouts(group=4), user="user", k=1, updates=2), _nexts


def _backbone(length: int) -> HSTU:
    return HSTU(blocks=1, heads=1, attention_dim=4, value_dim=4, max_length=length, bias_by_time=False)


def _semantic() -> Any:
    return semantic_ids(
        np.random.default_rng(0).normal(size=(_ITEMS, 3)).astype(np.float32), levels=2, codes=3
    )


def _users() -> Iterator[Any]:
    for step in range(8):
        draw = np.random.default_rng([collectives.world().rank, step])
        lengths = draw.integers(2, _LONGEST + 2, 5)
        items = tf.constant(draw.integers(0, _ITEMS, lengths.sum()))
        yield {"item": tf.RaggedTensor.from_row_lengths(items, lengths)}


def _nexts() -> Iterator[Any]:
    for step in range(8):
        users = 8 * step + np.arange(8)
        yield {"user": tf.constant(users), "next": tf.constant(users * 5 % 9)}


_OWN: dict[str, Callable[[], tuple[Any, Callable[[], Iterator[Any]]]]] = {
    "meta grm": _meta_grm,
    "generative": _generative,
    "flat": _flat,
    "policy": _policy,
}
