"""The position of training in its data, as variables that a checkpoint of the model can store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.keras import submodules
from gmeta.core.step import StepCallback

__all__ = ["CountTrained", "Position", "int64_variable", "position_of", "positions_in", "uncounted"]


class Position(tf.Module):
    """Base class of positions, which count the consumed elements of a dataset in int64 variables.

    It counts at the end of the dataset, so a later prefetch makes it count too much. A checkpoint of a model
    with a position as an attribute contains its variables; `state` returns the same as JSON values.
    """

    _in_state: ClassVar[tuple[str, ...]]
    """The names of the variables that `state` returns."""
    counts_training: ClassVar[bool] = False
    """Whether it counts the steps of training, by `trained`, instead of the elements that are consumed."""
    _least: ClassVar[int] = 0
    """The least number in those that are vectors."""

    @property
    def counts_groups(self) -> bool:
        """Whether any number of ranks can resume from the position."""
        return False

    def wait(self) -> bool:
        """Wait until data that grow have more, or end; return whether they have more."""
        return False

    def state(self) -> dict[str, Any]:
        """Return the position as JSON values."""
        return {name: getattr(self, name).numpy().tolist() for name in self._in_state}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the position to a value that `state` returned.

        Raises:
          ConfigError: The value isn't such a state, or doesn't fit the position.
        """
        kind = type(self).__name__
        variables = {name: getattr(self, name) for name in self._in_state}
        try:
            values = {name: np.asarray(state[name], np.int64) for name in variables}
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"{kind}: {state!r} isn't what state() returned: {error!r}") from error
        for name, variable in variables.items():
            if None in variable.shape and not values[name].size:  # JSON has no dimensions of an empty array
                values[name] = values[name].reshape([size or 0 for size in variable.shape])
            least = self._least if variable.shape.rank else 0
            if not variable.shape.is_compatible_with(values[name].shape) or (values[name] < least).any():
                raise ConfigError(
                    f"{kind}: {name} of the state is {values[name].tolist()}, {self._misfit(values)}"
                )
        for name, variable in variables.items():
            variable.assign(values[name])

    def _misfit(self, values: Mapping[str, np.ndarray[Any, Any]]) -> str:
        """Return how the values of `restore` differ from this position, and what to do."""
        return "and state() never returns that: pass what it returned"

    def trained(self, steps: int = 1) -> None:
        """Count steps of training, if the position counts them."""

    def gather_ranks(self) -> None:
        """Send the positions of all ranks to each rank, if they differ.

        All ranks must call this together, between two steps.
        """

    def _count(
        self, dataset: tf.data.Dataset, take: Callable[..., tuple[Sequence[Any], Any]]
    ) -> tf.data.Dataset:
        """Return a dataset that updates the position for each consumed element.

        Args:
          dataset: A dataset.
          take: A function of an element that returns updates of the variables, and the element to return
            after them.
        """

        @tf.autograph.experimental.do_not_convert
        def count(*element: Any) -> Any:
            updates, taken = take(*element)
            with tf.control_dependencies(updates):
                return tf.nest.map_structure(tf.identity, taken, expand_composites=True)

        options = tf.data.Options()
        # It would add a buffer after the counting.
        options.experimental_optimization.inject_prefetch = False
        counted = dataset.map(count).with_options(options)
        counted._gmeta_position = self
        return counted


def int64_variable(name: str, value: Any, shape: Any = None) -> tf.Variable:
    """Create a variable of a position, in host memory."""
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.Variable(value, dtype=tf.int64, trainable=False, name=name, shape=shape)


def position_of(dataset: tf.data.Dataset) -> Position | None:
    """Return the position that counts a dataset, or a dataset from which it derives."""
    found: Position | None = getattr(dataset, "_gmeta_position", None)
    return found or next(filter(None, map(position_of, dataset._inputs())), None)


@contextmanager
def uncounted(dataset: tf.data.Dataset) -> Iterator[None]:
    """Keep the dataset's position unchanged, even if elements are consumed inside the block."""
    position = position_of(dataset)
    variables = [] if position is None else position.variables
    before = [variable.numpy() for variable in variables]
    try:
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)


def positions_in(model: tf.Module) -> list[Position]:
    """Return the positions that a model holds."""
    return [part for part in submodules(model) if isinstance(part, Position)]


class CountTrained(StepCallback):
    """A callback that counts steps of training in the model's position."""

    def __init__(self, position: Position) -> None:
        super().__init__()
        self._position, self._last = position, -1

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Start counting batches."""
        self._last = -1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the batches; with ``steps_per_execution`` there may be several."""
        self._position.trained(batch - self._last)
        self._last = batch
