"""Calls of a model on ranks that have different numbers of batches, and errors that all ranks hear of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.collectives.shared_data import empty_batch
from gmeta.core.errors import CollectiveError, GmetaError

T = TypeVar("T")


class ToldError(GmetaError):
    """An error of another rank."""


class Calls:
    """Calls a function of batches: a Keras model in step with all ranks, anything else on each rank alone.

    Args:
      model: A Keras model, whose ``predict_step`` is called, or a function.
      spec: The form of the batches.
    """

    def __init__(self, model: tf.keras.Model | Callable[[Any], Any], spec: Any) -> None:
        self._spec, self._in_step, self._inside = spec, False, False
        self._function: Callable[[Any], Any] = model
        if isinstance(model, tf.keras.Model):
            self._in_step = collectives.world().size > 1
            self._function = tf.function(model.predict_step, input_signature=[spec], autograph=False)

    def __call__(self, batch: Any) -> Any:
        """Return what the model predicts for a batch."""
        if self._in_step:
            _tell(True)
        self._inside = self._in_step
        found = self._function(batch)
        self._inside = False
        return found

    def nothing(self) -> tuple[Any, Any]:
        """Return a batch of no samples, and what the model predicts for it."""
        batch = empty_batch(self._spec)
        return batch, self(batch)

    @contextmanager
    def of_all_ranks(self) -> Iterator[None]:
        """Enter with all ranks, and leave when none has calls left; an error on one is raised on all."""
        try:
            yield
        except (ToldError, CollectiveError):
            raise
        except Exception as error:
            if not self._inside:  # or the others wait for this rank inside the model
                collectives.allgather_objects(str(error) or type(error).__name__)
            raise
        while _tell(False):
            self._function(empty_batch(self._spec))


def on_all_ranks(work: Callable[[], T]) -> list[T]:
    """Do something on each rank, and return the results of all; an error on one is raised on all."""
    try:
        found = work()
    except Exception as error:
        collectives.allgather_objects(str(error) or type(error).__name__)
        raise
    told = collectives.allgather_objects([found])
    _raise_told(told)
    return [result for (result,) in told]


def on_first_rank(work: Callable[[], T]) -> T:
    """Do something on rank 0, and return its result on all ranks; an error is raised on all."""
    first = collectives.world().rank == 0
    found: list[Any] = on_all_ranks(lambda: work() if first else None)
    result: T = found[0]
    return result


def _tell(has_batch: bool) -> bool:
    """Tell all ranks whether this one has a batch, and return whether any has."""
    told: list[Any] = collectives.allgather_objects(has_batch)
    _raise_told(told)
    return any(told)


def _raise_told(told: list[Any]) -> None:
    for rank, said in enumerate(told):
        if isinstance(said, str):
            raise ToldError(f"rank {rank}: {said}")
