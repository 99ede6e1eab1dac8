"""Lets a step tell a clock, if there is one, where its parts end, and what goes on beside them.

The code that makes a step says two things. `mark_end`: a part of the step, such as its forward pass, ends
when some tensors are there. `begin_span`: something that may overlap with parts, such as an exchange between
ranks, lasts from some tensors to others. A clock that measures a step is put up by `use_clock` while the step
is traced (`gmeta.callbacks.step_clock`). Without one nothing is added to the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import tensorflow as tf

from gmeta.core.step import step_context, within_step


@dataclass(frozen=True)
class SpanKind:
    """What a span is.

    Attributes:
      kind: ``"data"``, ``"lookup"`` or ``"exchange"``.
      name: Of what: a collection's name, or that of a collective.
      lane: Of an exchange, the channel that it takes: ``"tcp"`` and ``"nccl"`` carry one at a time.
      ranks: Of an exchange, the ranks that take part; () stands for all.
      batches_ahead: For the batch of how many steps later it is.
      beside: Whether the step goes on meanwhile, up to where what comes of it is needed.
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
        """A part of the step ends when these tensors are there."""

    def begin(self, what: SpanKind, *tensors: Any) -> Callable[..., None]:
        """A span begins when these tensors are there; return a function that takes those it ends with."""


def use_clock(clock: Clock | None) -> AbstractContextManager[None]:
    """Measure the steps that are traced in a ``with`` block by a clock; None measures nothing."""
    return within_step(clock=clock)


def beside_step(batches_ahead: int = 0) -> AbstractContextManager[None]:
    """Say that spans of a ``with`` block are beside the step, for the batch of so many steps later."""
    return within_step(batches_ahead=batches_ahead, beside=True)


@tf.autograph.experimental.do_not_convert  # AutoGraph would rewrite the clock wherever a step is traced
def mark_end(part: str, *tensors: Any) -> None:
    """Say that a part of the step ends when these tensors are there.

    Args:
      part: One of `gmeta.callbacks.step_clock.PARTS`.
      *tensors: Tensors, and nests of them; None counts for nothing. Without any, the part ends with the ops
        that ``tf.control_dependencies`` around the call names.
    """
    clock = step_context().clock
    if clock is not None:
        clock.mark(part, *tensors)


def upstream_of(loss: tf.Tensor) -> tf.Tensor | None:
    """Return the ``output_gradients`` that a tape gets, so that the gradients come after the loss.

    An op runs when its inputs are there, and gradients seldom need the loss itself. So TensorFlow computes
    most of them before it, and a mark at the loss would come at the end of both. Ones that wait for the loss
    tell the two apart. Without a clock it is None, for which the tape takes ones that wait for nothing.
    """
    if step_context().clock is None:
        return None
    with tf.control_dependencies([loss]):
        return tf.ones_like(loss)


@tf.autograph.experimental.do_not_convert
def begin_span(
    kind: str, name: str, *tensors: Any, lane: str = "", ranks: Sequence[int] = ()
) -> Callable[..., None]:
    """Say that a span begins when these tensors are there.

    Args:
      kind: As in `SpanKind`, like the other arguments.
      name: Of what.
      *tensors: As in `mark_end`; without any, it begins with the step's graph.
      lane: The channel.
      ranks: Who takes part.

    Returns:
      A function; call it with the tensors that the span ends with.
    """
    here = step_context()
    if here.clock is None:
        return _end_nothing
    what = SpanKind(kind, name, lane, tuple(ranks), here.batches_ahead, here.beside)
    end: Callable[..., None] = tf.autograph.experimental.do_not_convert(here.clock.begin(what, *tensors))
    return end


@tf.autograph.experimental.do_not_convert
def _end_nothing(*tensors: Any) -> None:
    """Do nothing."""


# A Keras callback of steps that lets the next step begin while the GPU still works on the last.


class StepCallback(tf.keras.callbacks.Callback):
    """The base class of callbacks that are called in each step and don't read the step's logs.

    Keras copies the loss and the metrics from the GPU for a callback that has a method of batches, so each
    step would wait for the end of the last. With this base class the logs of a step are tensors, and nobody
    waits for them. An epoch's logs are numbers, as ever.
    """

    def __init__(self) -> None:
        super().__init__()
        self._supports_tf_logs = True
