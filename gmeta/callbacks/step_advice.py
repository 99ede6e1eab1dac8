"""What a step's slowest part says: a table of the parts, and what to change."""

from __future__ import annotations

from gmeta.models.step_clock import PARTS, StepSeconds

_ADVICE = {
    "data": (
        "the step waits for its batch: read with more threads (gmeta.io.tasks(threads=)) or from a faster "
        "disk, and prepare in the columnar layout (gmeta prepare --layout columnar); a data set that is the "
        "same in every epoch can be kept in memory (.cache())"
    ),
    "lookup": (
        "give features equal widths and settings, so that fewer tables are looked up "
        "(EmbeddingCollection.plan() shows which share one), and make batches of more tasks: an id that "
        "several of them have is looked up once"
    ),
    "inner": (
        "take fewer inner steps (InnerLoop(steps=)) or adapt fewer layers (adapt=); order=1 makes inner "
        "gradients that nothing is derived through"
    ),
    "outer": (
        "order=1 leaves out the second derivatives, recompute=False the second forward pass of every inner "
        "step where memory allows it; fewer inner steps make it shorter too"
    ),
    "update": (
        "make batches of more tasks, so that a row which several of them have steps once, or one step of "
        "several batches (compile(accumulate_steps=))"
    ),
}
_ON_RANKS = {
    "lookup": (
        "ranks wait for each other here: set HOROVOD_CYCLE_TIME=0.1 in their environment, let rows travel in "
        "half the bytes (EmbeddingCollection(wire_dtype='bfloat16')), and give ranks batches of equal cost "
        "(gmeta.io.Balance)"
    ),
    "update": (
        "ranks exchange gradients here: set HOROVOD_CYCLE_TIME=0.1 in their environment, let rows travel in "
        "half the bytes (EmbeddingCollection(wire_dtype='bfloat16'))"
    ),
}


def advice(part: str, ranks: int = 1) -> str:
    """What makes a part of a step faster.

    Args:
      part: One of `PARTS`.
      ranks: How many ranks take the step together.
    """
    both = [_ON_RANKS[part]] if ranks > 1 and part in _ON_RANKS else []
    return "; ".join([*both, _ADVICE[part]])


def summary(times: StepSeconds, ranks: int = 1) -> str:
    """A few lines for the end of a training: the parts of a step, the slowest, and what to change."""
    if not times.steps:
        return "step times: no step was measured; measure every step of a short training, StepTimes(every=1)"
    parts = [part for part in PARTS if times.seconds.get(part)]
    lines = [f"  {part:<8}{times.milliseconds(part):9.2f} ms{times.share(part):6.0%}" for part in parts]
    whole = 1e3 * times.total / times.steps
    head = f"step times: {whole:.2f} ms a step, the mean of {times.steps:.0f} that were measured"
    slowest = f"{times.slowest} takes longest: {advice(times.slowest, ranks)}"
    return "\n".join([head, *lines, slowest])
