"""What the code around a training step sets for the code inside it, in one place.

A step's lookups happen deep inside a user's model, whose signatures gmeta can't change. So the code that
makes the step passes what concerns them in a `StepContext`: `within_step` sets fields in a ``with`` block,
and `step_context` returns the context of the caller's thread. Outside of a step, all fields have their
defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import tensorflow as tf


class StepNumber(NamedTuple):
    """The number of a step that is predicted before the step.

    Attributes:
      number: () int64.
      note: A function that is called when the number is read.
    """

    number: tf.Tensor
    note: Callable[[], None]


@dataclass(frozen=True)
class StepContext:
    """The context of a step.

    Attributes:
      recording: The `RecordedLookups` of `gmeta.layers.exchange.recorded_lookups` that note each lookup.
      samples: The `StepSamples` of the same module, which the first key exchange sends.
      wanted: The list of `gmeta.layers.exchange.ahead.note_lookups`, which lookups join; nothing is read.
      fetched: The `LookupsAhead` of the same module, from which lookups take keys and rows.
      number: The number of the step, where it is predicted (`gmeta.training.foresight.step_number`).
      clock: The `gmeta.core.step_marks.Clock` that measures the step.
      batches_ahead: How many steps later the batch is trained for which spans are begun.
      beside: Whether spans are beside the step.
      mapped: Whether the graph of one task is traced, to be turned into that of all tasks.
    """

    recording: Any = None
    samples: Any = None
    wanted: list[Any] | None = None
    fetched: Any = None
    number: StepNumber | None = None
    clock: Any = None
    batches_ahead: int = 0
    beside: bool = False
    mapped: bool = False


_OUTSIDE = StepContext()
_context: ContextVar[StepContext] = ContextVar("step_context", default=_OUTSIDE)


def step_context() -> StepContext:
    """Return the context of this thread."""
    return _context.get()


@contextmanager
def within_step(**fields: Any) -> Iterator[None]:
    """Set fields of the context in a ``with`` block; the others keep their values.

    Args:
      **fields: Attributes of `StepContext`.

    Example:
      >>> with within_step(mapped=True):
      ...     step_context().mapped
      True
    """
    token = _context.set(replace(_context.get(), **fields))
    try:
        yield
    finally:
        _context.reset(token)
