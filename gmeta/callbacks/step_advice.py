"""What a step's slowest part says: a table of the parts, and what to change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from gmeta.callbacks.step_records import StepSeconds
from gmeta.core import collectives
from gmeta.core.collectives.lane import lane_kind
from gmeta.meta import InnerLoop
from gmeta.ops.device import compute_place


@dataclass(frozen=True)
class Setting:
    """What a training has set already, which isn't advised.

    Attributes:
      ranks: How many ranks take a step together.
      groups: How many groups they form.
      through_horovod: Whether exchanges go through Horovod.
      depth: The pipeline's.
      micro_batches: The pipeline's.
      inner: The model's inner loop, if it has one.
      half: Whether layers compute in half precision.
    """

    ranks: int = 1
    groups: int = 1
    through_horovod: bool = True
    depth: int = 0
    micro_batches: int = 1
    inner: InnerLoop | None = None
    half: bool = False


def of_model(model: Any) -> Setting:
    """Return what a compiled model, and its job, have set."""
    here, pipeline = collectives.world(), getattr(model, "_pipeline", None)
    inner = getattr(model, "inner", None)
    return Setting(
        here.size,
        here.groups,
        lane_kind(compute_place()) == "horovod",
        getattr(pipeline, "depth", 0),
        getattr(pipeline, "micro_batches", 1),
        inner if isinstance(inner, InnerLoop) else None,
        tf.keras.mixed_precision.global_policy().compute_dtype in ("float16", "bfloat16"),
    )


def advice(part: str, setting: Setting | None = None) -> str:
    """Say what makes a part of a step faster.

    Args:
      part: One of `gmeta.callbacks.step_records.PARTS`.
      setting: What is set already; None: nothing.
    """
    return "; ".join(_BY_PART[part](setting or Setting()))


def summary(times: StepSeconds, setting: Setting | None = None) -> str:
    """Return a few lines for the end of a training: a step's parts, the slowest, and what to change."""
    if not times.steps:
        return "step times: no step was measured; measure every step of a short training, StepTimes(every=1)"
    lines = [
        f"  {part:<8}{times.milliseconds(part):9.2f} ms{times.share(part):6.0%}" for part in times.seconds
    ]
    whole = 1e3 * times.total / times.steps
    head = f"step times: {whole:.2f} ms a step, the mean of {times.steps:.0f} that were measured"
    slowest = f"{times.slowest} takes longest: {advice(times.slowest, setting)}"
    return "\n".join([head, *lines, *_waits(times), slowest])


def _waits(times: StepSeconds) -> list[str]:
    """Say which rank is waited for."""
    if len(times.waits) < 2:
        return []
    each = [1e3 * seconds * len(times.waits) / times.steps for seconds in times.waits]
    most, least = max(range(len(each)), key=each.__getitem__), min(range(len(each)), key=each.__getitem__)
    return [
        f"rank {least} waits least, {each[least]:.2f} ms a step, and rank {most} most, {each[most]:.2f} ms: "
        f"rank {least} is the one that is waited for"
    ]


def _data(setting: Setting) -> list[str]:
    return [
        *([] if setting.depth else ["read while a step computes (Dataset.prefetch, or gmeta.Pipeline())"]),
        "read with more threads (gmeta.io.ReadOptions(threads=)) or from a faster disk",
        "prepare in the columnar layout (gmeta prepare --layout columnar)",
        "keep data that is the same in every epoch in memory (.cache())",
    ]


def _lookup(setting: Setting) -> list[str]:
    ahead = f"read rows {setting.depth + 1} batches ahead, while a step computes"
    return [
        *([f"{ahead} (gmeta.Pipeline(depth={setting.depth + 1}))"] if setting.depth < 2 else []),
        "give features equal widths and settings, so that fewer tables are looked up "
        "(EmbeddingCollection.plan() shows which share one)",
        "make batches larger: an id that several samples, or tasks, have is looked up once",
    ]


def _exchange(setting: Setting) -> list[str]:
    micro = "let rows and gradients travel while parts of a batch compute (gmeta.Pipeline(micro_batches=2))"
    return [
        *(["set HOROVOD_CYCLE_TIME=0.1 in the ranks' environment"] if setting.through_horovod else []),
        *([] if setting.depth else ["send keys while a step computes (gmeta.Pipeline(depth=1))"]),
        *([micro] if setting.micro_batches == 1 else []),
        "let rows travel in half the bytes (EmbeddingCollection(wire_dtype='bfloat16'))",
        *(
            ["keep rows within groups of ranks (gmeta.init(groups=2))"]
            if setting.ranks > 2 > setting.groups
            else []
        ),
    ]


def _wait(setting: Setting) -> list[str]:
    return [
        "give ranks batches of equal cost (gmeta.io.Balance)",
        "see in the trace which rank is late, and in what part (StepTimes(trace='trace.json'))",
        "leave each rank its own cores",
    ]


def _computes(setting: Setting) -> list[str]:
    half = "compute in half precision on a GPU (tf.keras.mixed_precision.set_global_policy('mixed_bfloat16'))"
    return [
        *([] if setting.half else [half]),
        "make the network smaller, or sequences shorter",
        *(["share the work among more ranks (gmeta launch)"] if setting.ranks == 1 else []),
    ]


def _loops(setting: Setting) -> list[str]:
    inner = setting.inner or InnerLoop(steps=2, recompute=True)
    return [
        *(["take fewer inner steps (InnerLoop(steps=))"] if inner.steps > 1 else []),
        "adapt fewer layers (InnerLoop(adapt=))",
        *(
            ["try order=1, which leaves out second derivatives and learns otherwise"]
            if inner.order == 2
            else []
        ),
    ]


def _outer(setting: Setting) -> list[str]:
    inner = setting.inner or InnerLoop(steps=2, recompute=True)
    kept = "recompute=False, where memory allows it, leaves out a second forward pass of every inner step"
    return [*([kept] if inner.recompute else []), *_loops(setting)]


def _update(setting: Setting) -> list[str]:
    return [
        "make batches larger, so that a row which several samples, or tasks, have steps once",
        "make one step of several batches (compile(accumulate_steps=))",
    ]


def _step(setting: Setting) -> list[str]:
    return [
        "to see its parts, derive the model from gmeta.models.Model, and let its train_step call "
        "super().train_step(data)"
    ]


_BY_PART = {
    "data": _data,
    "lookup": _lookup,
    "exchange": _exchange,
    "wait": _wait,
    "forward": _computes,
    "inner": _loops,
    "backward": _computes,
    "outer": _outer,
    "update": _update,
    "step": _step,
}
