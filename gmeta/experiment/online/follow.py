"""Trains on a stream until it is stopped, and continues from where it was.

::

  RUN/online.json        the settings; a run continues only with the same
  RUN/start/             the model that it began with, if it isn't a new one
  RUN/checkpoints/       weights, rows, the position in the stream, and the metrics so far, all of one moment
  RUN/progress.json      the progressive metrics by window

Each batch is evaluated before it is trained. If the metrics break a rule, training ends, or weights and
rows return to the last checkpoint before that, while the position stays: the rows since then are not trained
again, because they would break the rule again. What is due is published and saved while no rows come, too.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from gmeta.checkpoint import ShardedCheckpoint
from gmeta.checkpoint.store import step_of
from gmeta.core import collectives
from gmeta.core.errors import ConfigError, DataError, GmetaError
from gmeta.core.files import remove_unfinished, write_atomically
from gmeta.core.json_values import parse_json
from gmeta.core.settings import from_mapping, to_mapping
from gmeta.core.step import StepCallback
from gmeta.experiment.online.monitor import OnlineMonitor
from gmeta.experiment.online.online_model import OnlineConfig, OnlineModel
from gmeta.experiment.online.warm_start import OF_THE_RUN, ContinuedModel, Start
from gmeta.export import Publisher
from gmeta.io import StreamPosition
from gmeta.io.reader_stats import data_errors
from gmeta.io.streams.event_stream import Stream
from gmeta.io.streams.late_labels import CORRECTS, LOG_ODDS
from gmeta.metrics.guard import Decision, Guard
from gmeta.metrics.progressive import Window
from gmeta.ops import hash_text
from gmeta.training.progressive_evaluation import ProgressiveEvaluation

_TIME = "/time"
_STOPS = (signal.SIGINT, signal.SIGTERM)
_USUAL = {each.name: each.default for each in fields(OnlineConfig)} | {"label": ""}
_CONFIG, _CHECKPOINTS, _PROGRESS = "online.json", "checkpoints", "progress.json"


def is_online(run: Path) -> bool:
    """Return whether a run's folder holds training on a stream."""
    return (run / _CONFIG).exists()


def load_config(run: Path) -> OnlineConfig:
    """Return the settings of a run.

    Raises:
      DataError: The run holds none, or damaged ones.
    """
    path = run / _CONFIG
    try:
        return from_mapping(OnlineConfig, parse_json(path.read_bytes()), str(path))
    except FileNotFoundError:
        raise DataError(
            "no training on a stream has begun here",
            path=run,
            advice="begin one: gmeta train --follow SOURCE",
        ) from None


def check_folder(run: Path) -> None:
    """Refuse the folder of a run on a prepared data set.

    Raises:
      ConfigError: It is one.
    """
    if (run / "config.json").exists():
        raise ConfigError(
            f"{run} holds a run of `gmeta train --data`; give another folder to --run, and to begin with a "
            f"model of this run, --from {run}"
        )


def begin(run: Path, given: OnlineConfig, follow: bool) -> tuple[OnlineConfig, Stream]:
    """Return the settings, completed, and the stream; record them, or compare them with the recorded ones.

    Raises:
      ConfigError: They differ from those with which the run began, or another kind of run is here.
    """
    check_folder(run)
    if not is_online(run):
        opened = given.open(follow)
        start = None if given.start is None else Start.find(Path(given.start))
        config = given.complete(opened) if start is None else start.complete(given, opened)
        if collectives.world().rank == 0:
            run.mkdir(parents=True, exist_ok=True)
            if start is not None:
                start.save(run)
            write_atomically(run / _CONFIG, json.dumps(to_mapping(config), indent=1))
        collectives.barrier()
        return config, opened if start is None else config.open(follow)
    config = load_config(run)
    old, new = to_mapping(config), to_mapping(given)
    for name, value in new.items():
        inferred = value is None and name in ("columns", "features", "users", "learning_rate", "start")
        if config.start is not None and name in (*OF_THE_RUN, "label"):
            inferred |= value == to_mapping({name: _USUAL[name]})[name]
        if name == "start" and value is not None and old.get(name) is not None:
            inferred = Path(value).absolute() in (Path(old[name]), *Path(old[name]).parents)
        if value != old.get(name) and not inferred and name != "on_bad":
            raise ConfigError(
                f"{run} began with {name} = {old.get(name)!r}, and {value!r} is given: give the same, or "
                "another folder to --run"
            )
    return config, replace(config, on_bad=given.on_bad).open(follow)


class KeptState(tf.Module):
    """The state of a callback, as a variable that checkpoints hold.

    Args:
      read: Returns the state, on all ranks together.
    """

    def __init__(self, read: Callable[[], bytes]) -> None:
        super().__init__(name="kept_state")
        self._read = read
        with tf.init_scope(), tf.device("CPU:0"):
            self.saved = tf.Variable(np.zeros(0, np.uint8), trainable=False, name="saved", shape=(None,))

    def gather_ranks(self) -> None:
        """Store the state in the variable."""
        self.saved.assign(np.frombuffer(self._read(), np.uint8))


def build(config: OnlineConfig, run: Path | None = None) -> OnlineModel | ContinuedModel:
    """Build and compile the model of a run.

    Args:
      config: Completed settings.
      run: The run's folder, which has the model that it began with, if there is one.
    """
    tf.random.set_seed(config.seed)
    if config.start is not None:
        assert run is not None  # `begin` has saved it there
        continued = Start.load(run).build(config, run)
        continued.reading = StreamPosition()
        return continued
    model = OnlineModel(config)
    model.reading = StreamPosition()
    loss = tf.keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.Adam(config.rate()), loss, weighted_metrics=[])
    model.create_weights()
    # A checkpoint restores, and a publisher describes, weights and moments that are there.
    model.optimizer.build(model.trainable_variables)
    return model


class Following:
    """A training on a stream.

    Args:
      run: The run's folder.
      config: Its completed settings.
      stream: The stream.
      publish: The folder for servers (`gmeta.export.Publisher`), or its address; None: nothing is published.
      monitor: Counters; None: none.
      show: Receives a line for each window.
    """

    def __init__(
        self,
        run: Path,
        config: OnlineConfig,
        stream: Stream,
        *,
        publish: str | os.PathLike[str] | None = None,
        monitor: OnlineMonitor | None = None,
        show: Callable[[str], Any] = print,
    ) -> None:
        self.run, self.config, self._show, self._monitor = run, config, show, monitor
        self.model = build(config, run)
        by_time = isinstance(config.windows, str)
        extra = [*([_TIME] if by_time else []), *([CORRECTS] if config.corrects else [])]
        self.progress = ProgressiveEvaluation(
            self.model,
            config.windows,
            users=config.users,
            times=_TIME if by_time else None,
            corrects=CORRECTS if config.corrects else None,
            guard=Guard(stop_if=config.stop_if, fall_back_if=config.fall_back_if),
            on_window=self._note,
        )
        self.model.progress = KeptState(self.progress.state)
        self.saving = ShardedCheckpoint(run / _CHECKPOINTS, every=config.checkpoint_every)
        self.saving.store.claim()  # before any effect, so that a second training of the run has none
        if collectives.world().rank == 0:
            remove_unfinished(run)
        self.epochs = self.saving.restore(self.model)
        if len(state := self.model.progress.saved.numpy()):
            self.progress.restore(state.tobytes())
        self.publisher = None
        if publish is not None:
            self.publisher = Publisher(
                self.model,
                publish,
                every=config.publish_every,
                dense_every=config.dense_every,
                base_every=config.base_every,
                dtype=config.row_dtype,
                export={"signatures": {"predict": self.model.signature()}},
            )
            if monitor is not None:
                monitor.follow(self.publisher)
        self.stream = stream
        self._ends = _read_ends(run / _PROGRESS)  # window -> the step at which it ended
        self._data = self._batches(stream, [*self.model.kinds, *extra], by_time)

    def _batches(self, stream: Stream, kept: list[str], by_time: bool) -> tf.data.Dataset:
        """Return batches of the columns that are read, with texts as hashes."""
        texts = {name for name, kind in self.model.kinds.items() if kind.startswith("string")}
        odds = [LOG_ODDS] if LOG_ODDS in stream.schema.names else []

        def take(x: dict[str, Any], *rest: tf.Tensor) -> tuple[Any, ...]:
            found = {name: x[name] for name in (*kept, *odds)}
            found |= {name: tf.ragged.map_flat_values(hash_text, found[name]) for name in texts}
            if self.config.positive is not None:
                rest = (tf.cast(rest[0] >= self.config.positive, tf.float32), *rest[1:])
            return (found, *rest)

        batches = stream.batches(
            self.config.batch_size,
            label=self.config.label,
            start=self.model.reading,
            event_time=_TIME if by_time else None,
        )
        return batches.map(take)

    def train(self) -> None:
        """Train until the stream ends, a signal stops it, or a rule does.

        Raises:
          DataError: The stream has a bad row, or a file that came too late.
          GmetaError: A rule ended it, or the last changes couldn't be published.
        """
        callbacks = [_Count(self, self._monitor), self.progress]
        due = [self.saving.save_due]
        if self.publisher is not None:
            callbacks.append(self.publisher)
            due.append(self.publisher.publish_due)
        callbacks.append(_WhileQuiet(self.model.reading, self.stream.poll, due))
        with data_errors(), self._published(), _stops_on_signals(self.model) as stopped:
            if self.publisher is not None and (self.saving.batches or self.config.start):
                # What was trained before is published now, not after the next event. What was published after
                # the last checkpoint is trained again.
                self.publisher.publish_base()
            while True:
                if not self.model.reading.wait():
                    return
                self.epochs += 1
                self.saving.fit(self.model, self._data, epochs=self.epochs, callbacks=callbacks, verbose=0)
                decision = self.progress.decision
                if any(collectives.allgather_objects(stopped())):
                    return
                if decision is None:
                    alone = collectives.world().size == 1
                    if alone or not self.stream.follow or self.model.stop_training:
                        return
                    continue  # no rank has rows now
                if self._monitor is not None:
                    self._monitor.note_decision(decision)
                if decision.action == "stop":
                    raise GmetaError(
                        f"training stopped by a rule: {decision.reason}; see {self.run / _PROGRESS}; "
                        "the same command continues"
                    )
                self._fall_back(decision)

    @contextmanager
    def _published(self) -> Iterator[None]:
        """Raise an error at the end if what was trained last isn't published."""
        yield
        if self.publisher is not None and self.publisher.failure:
            raise GmetaError(
                f"trained and saved, but the last changes aren't published: {self.publisher.failure}; the "
                "same command publishes them"
            )

    def _fall_back(self, decision: Decision) -> None:
        """Restore weights and rows from before the metrics broke; the position stays."""
        progress = self.progress.state()
        collectives.gather_states(self.model)
        begin = self._ends.get(decision.since - 1, 0)
        good = [path for path in self.saving.store.checkpoints() if step_of(path) <= begin]
        if not good:
            raise GmetaError(
                f"training stopped by a rule: {decision.reason}; no checkpoint from before that is kept: "
                "give a longer window, or a shorter checkpoint_every"
            )
        kept = [*self.model.reading.variables, *self.model.progress.variables]
        self.saving.return_to(self.model, good[-1], kept)
        self.progress.restore(progress)
        self._show(f"weights and rows are those of {good[-1].name} again: {decision.reason}")

    def _note(self, window: Window) -> None:
        """Record a window that ended."""
        self._ends[window.number] = self.saving.batches
        if collectives.world().rank == 0:
            windows = [
                {name: None if value != value else value for name, value in asdict(each).items()}
                | {"step": self._ends.get(each.number, 0)}
                for each in self.progress.metrics.windows
            ]
            write_atomically(self.run / _PROGRESS, json.dumps(windows))
            self._show(_line(window))
        if self._monitor is not None:
            self._monitor.note_window(window, self.progress.metrics.overall())


def _read_ends(path: Path) -> dict[int, int]:
    if not path.exists():
        return {}
    return {int(window["number"]): int(window["step"]) for window in parse_json(path.read_bytes())}


def _line(window: Window) -> str:
    names = ("auc", "gauc", "log_loss", "normalised_entropy", "calibration")
    found = [f"{name} {getattr(window, name):.4f}" for name in names if np.isfinite(getattr(window, name))]
    return f"window {window.number}: {window.rows:,} rows, {', '.join(found)}"


class _Count(StepCallback):
    """Counts events for the monitor."""

    def __init__(self, of: Following, monitor: OnlineMonitor | None) -> None:
        super().__init__()
        self._of, self._monitor, self._last, self._skipped = of, monitor, -1, 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Start counting batches."""
        self._last = -1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the rows of a step."""
        if self._monitor is not None:
            of = self._of
            self._monitor.note_events(
                (batch - self._last) * of.config.batch_size, latest=of.model.reading.newest
            )
            skipped = sum(counts.bad for counts in of.stream.counts)
            self._monitor.note_skipped(skipped - self._skipped)
            self._skipped = skipped
        self._last = batch


class _WhileQuiet(StepCallback):
    """Waits for rows before a step, and does meanwhile what is due, because other callbacks act after steps.

    The steps and their batches stay the same.

    Args:
      reading: The position in the stream.
      poll: Seconds between two looks for rows.
      due: What to call.
    """

    def __init__(self, reading: StreamPosition, poll: float, due: Sequence[Callable[[], Any]]) -> None:
        super().__init__()
        self._reading, self._poll, self._acts = reading, poll, due

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Wait until the next step has a batch on all ranks."""
        while not self._reading.ready():
            for act in self._acts:
                act()
            time.sleep(self._poll)


@contextmanager
def _stops_on_signals(model: tf.keras.Model) -> Iterator[Callable[[], bool]]:
    """At SIGINT or SIGTERM, end the training after its step and save; a second one ends the process.

    Python runs handlers between two operations of the main thread, which may wait for rows within TensorFlow.
    Therefore a thread reads signals from the pipe that Python writes to at once.

    Yields:
      A function that returns whether a signal came.
    """
    came, over = threading.Event(), threading.Event()
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def watch() -> None:
        while not over.is_set() and (numbers := reader.recv(1)):
            if numbers[0] not in _STOPS:
                continue
            if came.is_set():
                os._exit(128 + numbers[0])
            came.set()
            threading.Thread(target=insist, daemon=True).start()

    def insist() -> None:
        """Ask again and again: an epoch that begins meanwhile forgets what was asked before."""
        while not over.wait(0.05):
            model.stop_training = True
            model.reading.stop()

    before = {each: signal.signal(each, lambda *_: None) for each in _STOPS}
    earlier = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=watch, name="gmeta-signals", daemon=True).start()
    try:
        yield came.is_set
    finally:
        over.set()
        signal.set_wakeup_fd(earlier)
        for number, handler in before.items():
            signal.signal(number, handler)
        writer.close()
