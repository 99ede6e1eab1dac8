"""What a step's slowest part says: a table of the parts, and what to change."""

from __future__ import annotations

from gmeta.callbacks.step_clock import PARTS, StepSeconds
from gmeta.meta import InnerLoop

_HALF_BYTES = "let rows travel in half the bytes (EmbeddingCollection(wire_dtype='bfloat16'))"
_CYCLE_TIME = "set HOROVOD_CYCLE_TIME=0.1 in the ranks' environment"


def advice(part: str, ranks: int = 1, inner: InnerLoop | None = None) -> str:
    """What makes a part of a step faster.

    Args:
      part: One of `PARTS`.
      ranks: How many ranks take the step together.
      inner: The model's inner loop: what it hasn't set isn't advised to be changed.
    """
    return "; ".join(_BY_PART[part](ranks, inner or InnerLoop(steps=2, recompute=True)))


def summary(times: StepSeconds, ranks: int = 1, inner: InnerLoop | None = None) -> str:
    """A few lines for the end of a training: the parts of a step, the slowest, and what to change."""
    if not times.steps:
        return "step times: no step was measured; measure every step of a short training, StepTimes(every=1)"
    parts = [part for part in PARTS if times.seconds.get(part)]
    lines = [f"  {part:<8}{times.milliseconds(part):9.2f} ms{times.share(part):6.0%}" for part in parts]
    whole = 1e3 * times.total / times.steps
    head = f"step times: {whole:.2f} ms a step, the mean of {times.steps:.0f} that were measured"
    slowest = f"{times.slowest} takes longest: {advice(times.slowest, ranks, inner)}"
    return "\n".join([head, *lines, slowest])


def _data(ranks: int, inner: InnerLoop) -> list[str]:
    return [
        "read with more threads (gmeta.io.ReadOptions(threads=)) or from a faster disk",
        "prepare in the columnar layout (gmeta prepare --layout columnar)",
        "keep data that is the same in every epoch in memory (.cache())",
    ]


def _lookup(ranks: int, inner: InnerLoop) -> list[str]:
    of_ranks = [_CYCLE_TIME, _HALF_BYTES, "give ranks batches of equal cost (gmeta.io.Balance)"]
    return [
        *(of_ranks if ranks > 1 else []),
        "give features equal widths and settings, so that fewer tables are looked up "
        "(EmbeddingCollection.plan() shows which share one)",
        "make batches of more tasks: an id that several of them have is looked up once",
    ]


def _loops(ranks: int, inner: InnerLoop) -> list[str]:
    return [
        *(["take fewer inner steps (InnerLoop(steps=))"] if inner.steps > 1 else []),
        "adapt fewer layers (InnerLoop(adapt=))",
        *(
            ["try order=1, which leaves out second derivatives and learns otherwise"]
            if inner.order == 2
            else []
        ),
    ]


def _outer(ranks: int, inner: InnerLoop) -> list[str]:
    kept = "recompute=False, where memory allows it, leaves out a second forward pass of every inner step"
    return [*([kept] if inner.recompute else []), *_loops(ranks, inner)]


def _update(ranks: int, inner: InnerLoop) -> list[str]:
    return [
        *([_CYCLE_TIME, _HALF_BYTES] if ranks > 1 else []),
        "make batches of more tasks, so that a row which several of them have steps once",
        "make one step of several batches (compile(accumulate_steps=))",
    ]


_BY_PART = {"data": _data, "lookup": _lookup, "inner": _loops, "outer": _outer, "update": _update}
