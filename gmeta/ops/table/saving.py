"""A switch that excludes the tables from TensorFlow's checkpoints when something else saves them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_elsewhere: ContextVar[bool] = ContextVar("tables_are_saved_elsewhere", default=False)


@contextmanager
def tables_saved_elsewhere() -> Iterator[None]:
    """Exclude the tables from what ``tf.train.Checkpoint`` and Keras save or restore inside the block.

    It is for code that saves the tables itself, such as `gmeta.checkpoint.ShardedCheckpoint`. TensorFlow's
    checkpoint then has the dense weights, the optimizer's state and the object graph.

    Example:
      ::

        with tables_saved_elsewhere():
            tf.train.Checkpoint(model=model, optimizer=model.optimizer).write("dense")
    """
    token = _elsewhere.set(True)
    try:
        yield
    finally:
        _elsewhere.reset(token)


def are_saved_elsewhere() -> bool:
    """Return whether a block of `tables_saved_elsewhere` is running."""
    return _elsewhere.get()
