"""Tells a model the number of the optimizer step that trains a batch.

What a step looks up may depend on this number: negatives, for instance, that are drawn anew in each step. A
pipeline has to know the lookups of a batch before its step. So it predicts the number, and while it looks for
the lookups, the model reads the prediction in place of the optimizer's count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import tensorflow as tf


class _Told(NamedTuple):
    number: tf.Tensor
    note: Callable[[], None]


_told: ContextVar[_Told | None] = ContextVar("step_number", default=None)


@contextmanager
def use_step_number(number: tf.Tensor, note: Callable[[], None]) -> Iterator[None]:
    """Let `step_number` return a number in the ``with`` block.

    Args:
      number: The number, () int64.
      note: A function that is called when somebody reads the number.
    """
    token = _told.set(_Told(number, note))
    try:
        yield
    finally:
        _told.reset(token)


def step_number(optimizer: Any) -> tf.Tensor:
    """Return the number of the optimizer step that trains the batch at hand, () int64, from 0 on.

    Args:
      optimizer: The Keras optimizer, whose count is the number outside of `use_step_number`.
    """
    told = _told.get()
    if told is None:
        return tf.convert_to_tensor(optimizer.iterations)
    told.note()
    return told.number
