"""Acts on a rank at a named stage of its training steps, for tests of what the other ranks then do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from gmeta.core import collectives
from gmeta.models import Model
from gmeta.ops import HashTable

STAGES = ("keys", "peek", "values", "forward", "gradients", "dense", "update")
"""The exchange of keys; the reading ahead of rows; the exchange of rows; the forward pass; the exchange of
gradients; the sum over ranks of dense gradients; the update of a table."""


def act_at_stage(stage: str, call: int, act: Callable[[], None]) -> None:
    """Let this process, from now on, call a function as a stage begins; of "forward", as it ends.

    The functions of the stage get an op that runs `act` once what they begin with is computed. So call this
    before a step is traced. Other ops of the step may run meanwhile.

    Args:
      stage: One of `STAGES`.
      call: In which call of the stage, counted from 1 over all tables, lookups and steps.
      act: The function; it runs on a thread of TensorFlow's.
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

        setattr(Model, "learn", learn_then_act)  # noqa: B010 -- a method in place of another
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
        """Return a tensor that is there once the call is counted."""
        with tf.device("CPU:0"):
            counted = tf.numpy_function(self._count, [tf.shape(tensor)], tf.int32)
        with tf.control_dependencies([counted]):
            return tf.identity(tensor)

    def _count(self, _: Any) -> np.int32:
        self._left -= 1
        if self._left == 0:
            self._act()
        return np.int32(self._left)
