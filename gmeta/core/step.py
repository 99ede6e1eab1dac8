"""The context that code around a training step sets for code inside it, and the marks that a clock measures.

A step's lookups happen deep inside a user's model, whose signatures gmeta can't change. The code that defines
the step therefore passes their settings in a `StepContext`: `within_step` sets fields in a ``with`` block,
and `step_context` returns the context of the caller's thread. Outside a step, all fields have their defaults.

The code of a step sets two kinds of marks. `mark_end`: a part of the step, such as its forward pass, ends
when some tensors are computed. `begin_span`: an activity that may overlap with parts, such as an exchange
between ranks, lasts from some tensors to others. `use_clock` activates a clock while the step is traced
(`gmeta.callbacks.step_clock`). Without a clock, the marks add nothing to the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import tensorflow as tf


class StepNumber(NamedTuple):
    """The number of a step, predicted before the step.

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
      recording: The `RecordedLookups` of `gmeta.layers.exchange.recorded_lookups` that record each lookup.
      samples: The `StepSamples` of the same module, which the first key exchange sends.
      wanted: The list of `gmeta.layers.exchange.fetch.note_lookups`, to which lookups are added without
        reading.
      fetched: The `LookupsAhead` of the same module, from which lookups take keys and rows.
      number: The number of the step, if predicted (`gmeta.training.pipeline.step_number`).
      clock: The `Clock` that measures the step.
      batches_ahead: How many steps later the batch of new spans is trained.
      beside: Whether spans run concurrently with the step.
      mapped: Whether one task's graph is traced, to be vectorized over all tasks.
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


@dataclass(frozen=True)
class SpanKind:
    """The description of a span.

    Attributes:
      kind: ``"data"``, ``"lookup"`` or ``"exchange"``.
      name: The name of the collection, or of the collective.
      lane: The channel of an exchange: ``"tcp"`` and ``"nccl"`` carry one at a time.
      ranks: The ranks that take part in an exchange; () means all.
      batches_ahead: How many steps later its batch is trained.
      beside: Whether the step continues concurrently until it needs the span's result.
    """

    kind: str
    name: str
    lane: str = ""
    ranks: tuple[int, ...] = ()
    batches_ahead: int = 0
    beside: bool = False


class Clock(Protocol):
    """The interface of a clock."""

    def mark(self, part: str, *tensors: Any) -> None:
        """End a part of the step when these tensors are computed."""

    def begin(self, what: SpanKind, *tensors: Any) -> Callable[..., None]:
        """Begin a span when these tensors are computed; return a function of the tensors that end it."""


def use_clock(clock: Clock | None) -> AbstractContextManager[None]:
    """Measure the steps that are traced in a ``with`` block with a clock; None measures nothing."""
    return within_step(clock=clock)


def beside_step(batches_ahead: int = 0) -> AbstractContextManager[None]:
    """Mark spans of a ``with`` block as concurrent with the step, for the batch of a later step."""
    return within_step(batches_ahead=batches_ahead, beside=True)


def mark_end(part: str, *tensors: Any) -> None:
    """Mark the end of a part of the step: the moment when these tensors are computed.

    Args:
      part: One of `gmeta.callbacks.step_clock.PARTS`.
      *tensors: Tensors, and nests of them; None is ignored. Without tensors, the part ends with the ops that
        an enclosing ``tf.control_dependencies`` names.
    """
    clock = step_context().clock
    if clock is not None:
        clock.mark(part, *tensors)


def upstream_of(loss: tf.Tensor) -> tf.Tensor | None:
    """Return ``output_gradients`` for a tape that delay the gradients until after the loss.

    An op runs when its inputs are available, and gradients seldom require the loss itself. TensorFlow
    therefore computes most of them before it, and a mark at the loss would come at the end of both. Output
    gradients that wait for the loss separate the two. Without a clock, this returns None, and the tape uses
    its own.
    """
    if step_context().clock is None:
        return None
    with tf.control_dependencies([loss]):
        return tf.ones_like(loss)


def begin_span(
    kind: str, name: str, *tensors: Any, lane: str = "", ranks: Sequence[int] = ()
) -> Callable[..., None]:
    """Mark the beginning of a span: the moment when these tensors are computed.

    Args:
      kind: As in `SpanKind`, like the other arguments.
      name: The name of the collection, or of the collective.
      *tensors: As in `mark_end`; without tensors, it begins with the step's graph.
      lane: The channel.
      ranks: The ranks that take part.

    Returns:
      A function; call it with the tensors that the span ends with.
    """
    here = step_context()
    if here.clock is None:
        return _end_nothing
    what = SpanKind(kind, name, lane, tuple(ranks), here.batches_ahead, here.beside)
    end: Callable[..., None] = tf.autograph.experimental.do_not_convert(here.clock.begin(what, *tensors))
    return end


def _end_nothing(*tensors: Any) -> None:
    """Do nothing."""


# A base class for step callbacks that lets the next step start while the GPU still computes the previous one.


class StepCallback(tf.keras.callbacks.Callback):
    """The base class of callbacks that are called in each step and don't read the step's logs.

    Keras copies the loss and the metrics from the GPU for a callback with a batch method, so each step would
    wait for the end of the previous one. With this base class, the logs of a step are tensors, and no step
    waits for them. An epoch's logs are numbers, as usual.
    """

    def __init__(self) -> None:
        super().__init__()
        self._supports_tf_logs = True
