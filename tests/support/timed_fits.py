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
from gmeta.models import FlatRetriever, GenerativeRetriever, MetaGRM, Model
from gmeta.ops import HashTable
from gmeta.preprocess import semantic_ids
from gmeta.reinforcement import PolicyTraining, Rollouts
from support.pipeline_runs import make_model, own_data
from support.softmax_policy import SoftmaxPolicy

_ITEMS, _LONGEST = 30, 6
_OWN_LOSS = ("grm", "next item", "generative", "flat", "meta grm", "policy")

FAMILIES = {
    **dict.fromkeys(("ctr", "grm", "next item", "generative", "policy"), ("lookup", "forward", "backward")),
    **dict.fromkeys(("maml", "meta grm"), ("lookup", "inner", "outer")),
    "flat": ("forward", "backward"),
}
"""Families of models, and the parts of their steps on one rank between "data" and "update"."""


def fit_timed(
    family: str,
    times: StepTimes,
    *,
    steps: int | None = None,
    depth: int = 0,
    micro_batches: int = 1,
    **settings: Any,
) -> dict[str, list[float]]:
    """Fit a model of a family for an epoch, and return its history.

    Args:
      family: One of `FAMILIES`.
      times: The callback.
      steps: The number of steps of the epoch; None: as many as its data.
      depth: The pipeline's depth.
      micro_batches: The pipeline's number of micro-batches.
      **settings: More arguments of `compile`.
    """
    random.seed(5)  # Keras draws seeds from it
    tf.random.set_seed(5)
    model, batches = make_family(family)
    if depth or micro_batches > 1:
        settings["pipeline"] = gmeta.Pipeline(depth, micro_batches)
    loss = [] if family in _OWN_LOSS else ["mse"]
    model.compile("adam", *loss, **settings)
    data = own_data(batches)
    history: dict[str, list[float]] = model.fit(
        data, steps_per_epoch=steps, callbacks=[times], verbose=0
    ).history
    return history


def make_family(family: str) -> tuple[Any, Callable[[], Iterator[Any]]]:
    """Make an uncompiled model of a family, and a function that draws this rank's batches."""
    return _OWN.get(family, lambda: make_model(family, 0.0))()


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


# Acts on a rank at a named stage of its training steps, for tests of the other ranks' reactions.

STAGES = ("keys", "peek", "values", "forward", "gradients", "dense", "update")
"""The exchange of keys; the reading ahead of rows; the exchange of rows; the forward pass; the exchange of
gradients; the sum over ranks of dense gradients; the update of a table."""


def act_at_stage(stage: str, call: int, act: Callable[[], None]) -> None:
    """Make this process call a function when a stage begins; for "forward", when it ends.

    The functions of the stage get an op that runs `act` once their inputs are computed. So call this before a
    step is traced. Other ops of the step may run meanwhile.

    Args:
      stage: One of `STAGES`.
      call: The number of the stage's call, counted from 1 over all tables, lookups and steps.
      act: The function; it runs on a TensorFlow thread.
    """
    count = _Count(call, act)
    if stage in ("keys", "values", "gradients"):
        alltoall = collectives.alltoall

        def exchange(tensor: tf.Tensor, *args: Any, name: str, **kwargs: Any) -> Any:
            held = count.hold(tensor) if name.endswith(f"/{stage}") else tensor
            return alltoall(held, *args, name=name, **kwargs)

        collectives.alltoall = exchange
    elif stage == "dense":
        allreduce = collectives.allreduce_sum

        def add_up(tensors: Any, *, name: str, **kwargs: Any) -> Any:
            first, *rest = tensors
            held = count.hold(first) if name == "step/dense" else first
            return allreduce([held, *rest], name=name, **kwargs)

        collectives.allreduce_sum = add_up
    elif stage == "forward":
        learn = Model.learn

        def learn_then_act(model: Any, data: Any) -> Any:
            loss, *rest = learn(model, data)
            return count.hold(loss), *rest

        setattr(Model, "learn", learn_then_act)  # noqa: B010 -- a method replaces another
    else:
        name = {"peek": "peek", "update": "apply_gradients"}[stage]
        method = getattr(HashTable, name)

        def act_then_call(table: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
            return method(table, count.hold(keys), *args, **kwargs)

        setattr(HashTable, name, act_then_call)


class _Count:
    """Counts calls, and acts at one of them."""

    def __init__(self, call: int, act: Callable[[], None]) -> None:
        self._left, self._act = call, act

    @tf.autograph.experimental.do_not_convert
    def hold(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return a tensor that is computed once the call is counted."""
        with tf.device("CPU:0"):
            counted = tf.numpy_function(self._count, [tf.shape(tensor)], tf.int32)
        with tf.control_dependencies([counted]):
            return tf.identity(tensor)

    def _count(self, _: Any) -> np.int32:
        self._left -= 1
        if self._left == 0:
            self._act()
        return np.int32(self._left)
