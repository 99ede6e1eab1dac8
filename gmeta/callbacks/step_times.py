"""Measures the parts of training steps, for TensorBoard, as a trace, and as a summary with advice."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from gmeta.callbacks.step_clock import Step, StepClock, StepSeconds
from gmeta.callbacks.step_trace import StepTrace, offsets_of, seconds_of, take_rounds
from gmeta.core import collectives
from gmeta.core.collectives.lane import lane_kind
from gmeta.core.errors import ConfigError
from gmeta.core.step import StepCallback, mark_end, use_clock
from gmeta.meta import InnerLoop
from gmeta.ops.device import compute_place
from gmeta.training.steps_ahead import StepsAhead

# The summary: a table of a step's parts, and advice on the slowest.


@dataclass(frozen=True)
class Setting:
    """The settings that a training uses already, which the advice leaves out.

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
    """Return the settings of a compiled model and its job."""
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
    """Return advice that makes a part of a step faster.

    Args:
      part: One of `gmeta.callbacks.step_clock.PARTS`.
      setting: The settings in use; None: none.
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
    """Name the rank that the others wait for."""
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


Function = Callable[[Any], Any]

_MOST_KEPT = 256  # steps, until ranks exchange them


class StepTimes(StepCallback):
    """Measures the parts of a training step of any `gmeta.models.Model`.

    ========  ==================================================================================
    data      the step waits for its batch
    lookup    rows of tables are looked up
    exchange  keys, rows and gradients travel between ranks while the step waits for them
    wait      this rank is ready for such an exchange, and another one isn't
    forward   the loss is computed, with all that comes before it, such as the rollouts of a policy
    inner     tasks adapt (models of `gmeta.models.meta`)
    backward  the gradients are computed
    outer     the outer loss and its gradients are computed (models of `gmeta.models.meta`)
    update    tables and dense weights step; metrics are updated
    step      all but data and lookup, where a train step doesn't call that of `gmeta.models.Model`
    ========  ==================================================================================

    Parts add up to the step; those that a model doesn't have aren't shown. Transfers and reads that run while
    the step computes cost no time, and so belong to no part: a `gmeta.Pipeline` reduces the exchange's part.

    Waiting is separated from the exchange without a barrier: ranks record when they are ready for a
    collective, and exchange these times between steps. Until the last of them is ready, the others wait
    (`gmeta.callbacks.step_trace`; MTGenRec, section 3.4 and figure 7, calls it synchronization delay). Their
    clocks are aligned by the times of a few sums (`gmeta.callbacks.step_trace`).

    Every k-th step runs in a separate graph, which reads the time where parts end. All other steps run in the
    graph that training without this callback uses, so they have no overhead. The cost is a second tracing of
    the step; the gradients of a measured step wait for its loss, and on a GPU the host waits for such a step.

    At the end of each epoch the milliseconds of the parts go to TensorBoard, as ``step_ms/data`` and so on,
    with their sum ``step_ms/all``. When training ends, a summary is printed: the parts and their shares, the
    slowest part, and what to change. On several ranks both are means over all of them, shown by rank 0.

    Work of Keras and of callbacks between the steps belongs to no part. If one call makes the steps of
    several batches (``steps_per_execution``), all are measured.

    Args:
      log_dir: TensorBoard's folder, which it shares with `tf.keras.callbacks.TensorBoard`. None: only the
        summary.
      every: Measure every k-th step. The training's first step is never measured, because it traces the plain
        graph, which TensorBoard draws; nor is the first run of the measured graph, which allocates memory.
      trace: A file, ``*.json``, that chrome://tracing and ui.perfetto.dev show: a process for each rank, with
        its step, its exchanges, and what it fetches for later batches. Rank 0 writes it at the end of each
        epoch, whole, with the latest measured steps (at most 100,000 events, some 15 MB). None: no trace.
      print_fn: The function that receives the summary. None: `print`.

    Attributes:
      times: The times measured since training began, over all ranks.

    Raises:
      ConfigError: ``every`` is below 1; there is a ``log_dir``, but no TensorBoard; ``trace`` doesn't end in
        ``.json``, is a folder, or is in a folder that doesn't exist. In `fit`: XLA compiles the step.

    Example:
      ::

        times = gmeta.callbacks.StepTimes(log_dir="runs/a/tensorboard", trace="runs/a/trace.json")
        model.fit(data, epochs=30, callbacks=[times])
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | None = None,
        *,
        every: int = 10,
        trace: str | os.PathLike[str] | None = None,
        print_fn: Callable[[str], Any] | None = None,
    ) -> None:
        super().__init__()
        if every < 1:
            raise ConfigError(f"StepTimes: every must be at least 1, got {every}")
        if log_dir is not None and importlib.util.find_spec("tensorboard") is None:
            raise ConfigError(
                f"StepTimes: log_dir={os.fspath(log_dir)!r} is for TensorBoard, which isn't installed, as "
                "newer TensorFlows don't bring it: pip install tensorboard, or leave log_dir out"
            )
        self.times = StepSeconds({})
        self._log_dir = log_dir
        self._every = every
        self._print = print_fn or print
        self._writer: Any = None
        self._trace_path = trace
        self._trace = self._new_trace()

    def on_train_begin(self, logs: Any = None) -> None:
        """Set everything to zero.

        Raises:
          ConfigError: XLA compiles the model's step.
        """
        if getattr(self.model, "jit_compile", None):
            raise ConfigError(
                f"StepTimes: {self.model.name} is compiled with jit_compile=True, and XLA has no op that "
                "reads the time: compile it without, or leave StepTimes out"
            )
        self.times = StepSeconds({})
        several = self.model._steps_per_execution
        self._several = 1 if several is None else int(several.numpy())
        self._clock = StepClock(room=64 * self._several)
        self._function: Function | None = None  # recreated: the model may have been compiled again
        self._calls, self._settled = 0, False
        self._steps: list[Step] = []
        self._of_epoch = StepSeconds({})
        self._trace = self._new_trace()
        if self._log_dir is not None and collectives.world().rank == 0:
            self._writer = tf.summary.create_file_writer(os.fspath(self._log_dir))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Let the next step be measured, if it is a k-th one."""
        if len(self._steps) >= _MOST_KEPT:
            self._gather()
        if self._calls == 1 or (self._calls and self._calls % self._every == 0):
            if self._function is None:
                self._function = self._measured_function()
            self.model.train_function = functools.partial(self._run, self.model.train_function)
        self._calls += 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Write the epoch's means, and the trace."""
        self._gather()
        times, self._of_epoch = self._of_epoch, StepSeconds({})
        self.times += times
        if self._trace is not None:
            self._trace.write()
        if self._writer is None or not times.steps:
            return
        with self._writer.as_default(step=epoch):
            for part in times.seconds:
                tf.summary.scalar(f"step_ms/{part}", times.milliseconds(part))
            tf.summary.scalar("step_ms/all", 1e3 * times.total / times.steps)

    def on_train_end(self, logs: Any = None) -> None:
        """Print the summary."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if collectives.world().rank == 0:
            self._print(summary(self.times, of_model(self.model)))

    def _run(self, plain: Function, iterator: Any) -> Any:
        """Measure the step of a ``with`` block, and then restore the model's train function."""
        model = self.model
        model.train_function = plain
        step = model.train_step

        def train_step(data: Any) -> Any:
            mark_end("data", data)
            return step(data)

        model.train_step = train_step
        try:
            assert self._function is not None
            with use_clock(self._clock):
                logs = self._function(iterator)
        except BaseException:
            self._clock.read()
            raise
        finally:
            del model.train_step
        steps = self._clock.read(first=(self._calls - 1) * self._several)
        self._steps += steps if self._settled else []
        self._settled = True
        return logs

    def _measured_function(self) -> Function:
        """Return Keras' train function, traced again, between a clock's start and stop."""
        model, clock = self.model, self._clock
        kept = model.train_function, model.train_tf_function
        inside = model.make_train_function(force=True)
        model.train_function, model.train_tf_function = kept

        @tf.autograph.experimental.do_not_convert
        def measure(iterator: Any) -> Any:
            with tf.control_dependencies([clock.start()]):
                logs = inside(iterator)
            with tf.control_dependencies(_ops_of(logs)):
                # A GPU runs all of a step's kernels in order, so the last one to be launched ends last.
                clock.stop(*(variable.read_value() for variable in model.trainable_variables[:1]))
            return logs

        graph = not (model.run_eagerly or isinstance(inside, StepsAhead))  # StepsAhead is not of one graph
        return tf.function(measure, reduce_retracing=True) if graph else measure

    def _new_trace(self) -> StepTrace | None:
        leads = collectives.world().rank == 0
        return StepTrace(self._trace_path) if leads and self._trace_path is not None else None

    def _gather(self) -> None:
        """Exchange the steps of all ranks; all call it together, as they measure the same steps."""
        own, self._steps = self._steps, []
        if not own:
            return
        said = [take_rounds(self._clock.now), [step.to_list() for step in own]]
        rounds, told = zip(*collectives.allgather_objects(said), strict=True)
        offsets = offsets_of(rounds)
        by_rank = [
            [Step.from_list(step).earlier(ahead) for step in steps]
            for steps, ahead in zip(told, offsets.ahead, strict=True)
        ]
        steps = list(zip(*by_rank, strict=True))
        for ranks in steps:
            self._of_epoch += seconds_of(ranks)
        if self._trace is not None:
            self._trace.add(steps, offsets)


def _ops_of(logs: Any) -> list[Any]:
    return [] if tf.executing_eagerly() else tf.nest.flatten(logs)
