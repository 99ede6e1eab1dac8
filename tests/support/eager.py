"""Training and scoring without graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf


@contextmanager
def eagerly() -> Iterator[None]:
    """Run functions without graphs, whose tracing takes longer than a few small steps."""
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(False)
