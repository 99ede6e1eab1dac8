"""Evaluates each batch in `fit` before training on it, window by window, and stops by rules."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any

import numpy as np
import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.errors import ConfigError, DataError, whole_number
from gmeta.core.keras import submodules
from gmeta.core.step import StepCallback
from gmeta.metrics.guard import Decision, Guard
from gmeta.metrics.progressive import ProgressiveMetrics, Window
from gmeta.training.model import Model

_DTYPES = {
    "labels": tf.float64,  # of which float32 and whole numbers lose nothing
    "scores": tf.float32,
    "weights": tf.float32,
    "users": tf.int64,
    "times": tf.int64,
    "corrects": tf.bool,
}
_MOST_STEPS = 1 << 20  # in the queue; a step would wait for room
_RANDOM_IN_TRAINING = ("rate", "dropout", "recurrent_dropout", "stddev")

Column = str | Callable[[Any], Any]


class ProgressiveEvaluation(StepCallback):
    """Callback that evaluates each batch before training on it.

    The forward pass of a train step computes with the weights before the update, so its outputs are the
    predictions to evaluate, and cost nothing more. Where layers behave differently in training (dropout,
    noise, batch normalization), the step first makes another one, with ``training=False``. Samples leave
    the step through a queue in host memory. After every k-th step they go to a
    `gmeta.metrics.progressive.ProgressiveMetrics`, whose windows don't depend on k.

    On several ranks, all ranks' samples are evaluated together: ranks send each other their samples, 9 to 33
    bytes each, after every k-th step, and all hold the same windows. Samples come in the order of steps, and
    in a step in that of ranks.

    Models: `gmeta.models.Model`, in functional style or as a base class, with a loss of `compile`, and
    `gmeta.models.GRM`; a model that overrides `learn` calls its ``observer`` there.

    Args:
      model: The compiled model, which `fit` then trains.
      window: As for `ProgressiveMetrics`, as are ``positive`` and ``max_rows``.
      users: The column of the inputs that has the user of each sample, or a function of the inputs. None: no
        GAUC, unless the model knows users, as `gmeta.models.GRM` does.
      times: The column, or a function, of event times in microseconds, int64, for windows of a duration.
      corrects: The column, or a function, of whether a sample corrects an earlier one.
      output: The output to evaluate, of a model with several.
      logits: Whether outputs are logits. None: taken from the loss (``from_logits``).
      positive: The least positive label.
      max_rows: The most samples of a window.
      guard: Rules by which training ends. All ranks decide the same.
      every: k.
      extra_pass: Whether a step makes a forward pass with ``training=False``. None: if the model has layers
        of Keras that need it. Set it if layers of your own behave differently in training.
      on_window: A function that is called with each window that ends, on every rank.

    Attributes:
      metrics: The `ProgressiveMetrics`.
      decision: The `gmeta.metrics.guard.Decision` by which the last training ended; None if no rule was
        broken. If its action is ``"fall back"``, restore a checkpoint from before ``decision.since``, with
        the state of this callback, and train on.
      fall_backs: How many decisions to fall back there were.

    Raises:
      ConfigError: An argument is invalid; the model isn't compiled, or isn't a `gmeta.models.Model`; or
        ``logits`` isn't known. In `fit`: a column is missing, or the model reports no predictions.
      DataError: In `fit`, as for `ProgressiveMetrics.update`.

    Example:
      ::

        guard = Guard(stop_if=["normalised_entropy > 1.05 for 3 windows"])
        progressive = ProgressiveEvaluation(model, "10m", users="user", times="time", guard=guard)
        model.fit(stream, callbacks=[progressive])
        progressive.metrics.windows[-1].auc
    """

    def __init__(
        self,
        model: Any,
        window: str | int = "1h",
        *,
        users: Column | None = None,
        times: Column | None = None,
        corrects: Column | None = None,
        output: str | None = None,
        logits: bool | None = None,
        positive: float | None = None,
        max_rows: int = 1_000_000,
        guard: Guard | None = None,
        every: int = 50,
        extra_pass: bool | None = None,
        on_window: Callable[[Window], Any] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(model, Model):
            raise ConfigError(
                f"ProgressiveEvaluation: {type(model).__name__} is no gmeta.models.Model, whose train step "
                "gives its predictions"
            )
        if getattr(model, "optimizer", None) is None:
            raise ConfigError(f"ProgressiveEvaluation: {model.name} isn't compiled: call compile before")
        self._columns: dict[str, Column | None] = {"users": users, "times": times, "corrects": corrects}
        self._output, self._guard, self._on_window = output, guard or Guard(), on_window
        self._every = whole_number("ProgressiveEvaluation: every", every, least=1)
        self._evaluated: Any = model
        self._extra = _differs_in_training(model) if extra_pass is None else extra_pass
        takes = _takes_logits(model.loss, output) if logits is None else logits
        if takes is None:
            raise ConfigError(
                f"ProgressiveEvaluation: the loss of {model.name} doesn't say whether outputs are logits or "
                "probabilities: give logits=True or logits=False"
            )
        self.metrics = ProgressiveMetrics(window, logits=takes, positive=positive, max_rows=max_rows)
        if self.metrics.by_time and times is None:
            raise ConfigError(
                f"ProgressiveEvaluation: window={window!r} is a duration of event time: give times, the "
                "column that has it, or a number of rows as window"
            )
        self.decision: Decision | None = None
        self.fall_backs = 0
        self._steps, self._reports = 0, False
        self._queue = self._new_queue()

    def on_train_begin(self, logs: Any = None) -> None:
        """Begin to observe the model's steps."""
        if self.model is not None and self.model is not self._evaluated:
            raise ConfigError(
                f"ProgressiveEvaluation was made for {self._evaluated.name}, and {self.model.name} trains"
            )
        self.decision = None
        self._queue, self._reports = self._new_queue(), False
        self._evaluated.observe(self._observe, extra_pass=self._extra)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Evaluate the samples of the last steps, if this is a k-th one; apply the rules."""
        self._steps += 1
        if not self._reports:
            self._reports = int(self._queue.size()) > 0
            if not self._reports:
                raise ConfigError(
                    f"ProgressiveEvaluation: the train step of {self._evaluated.name} reports no "
                    "predictions, as it doesn't call gmeta.models.Model.learn: let its learn call "
                    "self.observer"
                )
        if self._steps % self._every == 0:
            self.evaluate()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Evaluate the samples of the last steps; apply the rules."""
        self.evaluate()

    def on_train_end(self, logs: Any = None) -> None:
        """End the observation; the open window stays open for the next `fit`."""
        self.evaluate()
        self._evaluated.observe(None)

    def evaluate(self) -> list[Window]:
        """Evaluate the samples of the steps since the last call, and return the windows that ended.

        On several ranks all call this together.
        """
        steps = [[part.numpy() for part in self._queue.dequeue()] for _ in range(int(self._queue.size()))]
        if collectives.world().size > 1:
            by_rank = collectives.allgather_objects(steps)
            steps = [step for ranks in zip_longest(*by_rank) for step in ranks if step is not None]
        if not steps:
            return []
        columns = dict(zip(_DTYPES, map(np.concatenate, zip(*steps, strict=True)), strict=True))
        absent = [name for name, column in columns.items() if not len(column)]
        labels, scores = columns.pop("labels"), columns.pop("scores")
        windows = list(self.metrics.windows)
        options = {name: column for name, column in columns.items() if name not in absent}
        ended = self.metrics.update(labels, scores, **options)
        for window in ended:
            windows.append(window)
            if self._on_window is not None:
                self._on_window(window)
            if self.decision is None:
                self._decide(windows)
        return ended

    def state(self) -> bytes:
        """Return all that a later process needs to continue with the same windows and decisions, bit for bit.

        Call it between two steps, on several ranks on all of them, and save it with the weights of that
        moment. All ranks' states are the same, and any number of ranks can restore one.
        """
        self.evaluate()
        own = json.dumps({"steps": self._steps, "fall_backs": self.fall_backs})
        return own.encode() + b"\n" + self.metrics.state()

    def restore(self, state: bytes) -> None:
        """Continue from a result of `state`; ``fall_backs`` doesn't decrease.

        Raises:
          ConfigError: It was made with other settings.
          DataError: It is damaged.
        """
        own, _, rest = state.partition(b"\n")
        try:
            about = json.loads(own)
            steps, fall_backs = int(about["steps"]), int(about["fall_backs"])
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"the state of a progressive evaluation is damaged: {error}") from error
        self.metrics.restore(rest)
        self._steps, self.fall_backs = steps, max(fall_backs, self.fall_backs)
        self._queue = self._new_queue()

    def _decide(self, windows: list[Window]) -> None:
        self.decision = self._guard.decide(windows, self.fall_backs)
        if self.decision is not None:
            self.fall_backs += self.decision.action == "fall back"
            self._evaluated.stop_training = True

    def _new_queue(self) -> Any:
        with tf.device("CPU:0"):
            return tf.queue.FIFOQueue(_MOST_STEPS, list(_DTYPES.values()))

    # In the train step.

    @tf.autograph.experimental.do_not_convert
    def _observe(self, x: Any, labels: Any, outputs: Any, weights: Any, users: Any) -> None:
        """Put a batch's samples into the queue."""
        found = {
            "labels": self._chosen(labels, "label"),
            "scores": self._chosen(outputs, "output"),
            "weights": self._chosen(weights, "sample weight"),
            **{name: self._column(x, name) for name in self._columns},
        }
        found["users"] = users if found["users"] is None else found["users"]
        with tf.device("CPU:0"):
            self._queue.enqueue([_flat(found[name], dtype, name) for name, dtype in _DTYPES.items()])

    def _chosen(self, value: Any, what: str) -> Any:
        """Return the part of labels, outputs or weights that belongs to the output."""
        if isinstance(value, Mapping):
            if self._output is None and len(value) == 1:
                return next(iter(value.values()))
            if self._output not in value:
                raise ConfigError(
                    f"ProgressiveEvaluation: {self._evaluated.name} has a {what} for each of "
                    f"{', '.join(map(repr, value))}: name one by output=, got {self._output!r}"
                )
            return value[self._output]
        if isinstance(value, list | tuple):
            raise ConfigError(
                f"ProgressiveEvaluation: {self._evaluated.name} has {len(value)} {what}s: return them as a "
                "dict, and name one by output="
            )
        return value

    def _column(self, x: Any, name: str) -> Any:
        column = self._columns[name]
        if column is None or callable(column):
            return None if column is None else column(x)
        if not isinstance(x, Mapping) or column not in x:
            has = ", ".join(x) if isinstance(x, Mapping) else f"a {type(x).__name__}"
            raise ConfigError(
                f"ProgressiveEvaluation: {name}={column!r} is no column of the inputs, which have {has}: "
                "name one of them, or give a function of the inputs"
            )
        return x[column]


def _flat(value: Any, dtype: tf.DType, name: str) -> tf.Tensor:
    """(n,) numbers of a column; (0,) of None."""
    if value is None:
        return tf.zeros([0], dtype)
    if not isinstance(value, tf.Tensor | tf.Variable):
        raise ConfigError(
            f"ProgressiveEvaluation: {name} must be a tensor with a number for each sample, got a "
            f"{type(value).__name__}"
        )
    if value.dtype == tf.string:
        value = tf.strings.to_hash_bucket_fast(value, 2**63 - 1)
    return tf.reshape(tf.cast(value, dtype), [-1])


def _differs_in_training(model: Any) -> bool:
    """Whether a layer of Keras in a model computes something else in training."""
    for part in submodules(model):
        if isinstance(part, tf.keras.layers.BatchNormalization) and part.trainable:
            return True
        if isinstance(part, tf.keras.layers.Layer) and any(
            isinstance(rate := getattr(part, name, None), float) and rate > 0 for name in _RANDOM_IN_TRAINING
        ):
            return True
    return False


def _takes_logits(loss: Any, output: str | None) -> bool | None:
    """Whether a loss of `compile` is of logits; None if it doesn't say."""
    if isinstance(loss, Mapping):
        loss = loss.get(output) if len(loss) > 1 else next(iter(loss.values()), None)
    if isinstance(loss, str):
        return False if loss in ("binary_crossentropy", "bce", "BinaryCrossentropy") else None
    return getattr(loss, "from_logits", None)
