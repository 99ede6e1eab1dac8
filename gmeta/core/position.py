"""The position of training in its data, as variables that a checkpoint of the model can hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

__all__ = ["Position", "count_by", "position_of", "uncounted"]


class Position(tf.Module):
    """The base class of what counts the elements that are taken from a dataset.

    It counts where the dataset ends, so a reader ahead of training makes it count too much.
    """


def count_by(position: Position, dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Note that a position counts this dataset, for `position_of`; return the dataset."""
    dataset._gmeta_position = position
    return dataset


def position_of(dataset: tf.data.Dataset) -> Position | None:
    """Return the position that counts a dataset, or one that it derives from."""
    found: Position | None = getattr(dataset, "_gmeta_position", None)
    return found or next(filter(None, map(position_of, dataset._inputs())), None)


@contextmanager
def uncounted(dataset: tf.data.Dataset) -> Iterator[None]:
    """Keep the dataset's position unchanged, even if elements are taken from it inside the block."""
    position = position_of(dataset)
    variables = [] if position is None else position.variables
    before = [variable.numpy() for variable in variables]
    try:
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
