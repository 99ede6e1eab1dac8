"""Whether TensorFlow's checkpoints carry the tables, or something else saves them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_elsewhere: ContextVar[bool] = ContextVar("tables_are_saved_elsewhere", default=False)


@contextmanager
def tables_saved_elsewhere() -> Iterator[None]:
    """Leave the tables out of what ``tf.train.Checkpoint`` and Keras save or restore inside the block.

    For savers of their own, such as `gmeta.checkpoint.ShardedCheckpoint`: the dense weights,
    the optimizer's state and the object graph go to TensorFlow's checkpoint, the tables to theirs.

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
    """Whether a block of `tables_saved_elsewhere` is running."""
    return _elsewhere.get()
