"""A Keras callback that saves a model with its tables in sharded checkpoints, and restores it."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

from gmeta.checkpoint import dense_weights as dense
from gmeta.checkpoint.chain import CheckpointReader
from gmeta.checkpoint.resumed_fit import (
    Data,
    Stages,
    Sums,
    add_sums,
    fit_on,
    read_metrics,
    results_of,
    sums_of,
    write_metrics,
)
from gmeta.checkpoint.store import CheckpointStore, step_of
from gmeta.checkpoint.table_load import count_rows
from gmeta.core import collectives
from gmeta.core.errors import ConfigError, DataError
from gmeta.core.json_values import whole
from gmeta.core.keras import submodules
from gmeta.core.position import position_of, positions_in
from gmeta.core.settings import parse_duration
from gmeta.core.step import StepCallback
from gmeta.io.readers.group_reader import reads_ranges
from gmeta.ops.table.restored_rows import tables_by_name

_ASK_EVERY = 8  # batches between two looks at the clock, about which ranks agree
_METRICS = "metrics.npz"  # beside the dense weights, if the checkpoint is from the middle of an epoch


@dataclass(frozen=True)
class PartialRestore:
    """The weights that `ShardedCheckpoint.restore` with ``partial=True`` didn't load.

    Attributes:
      checkpoint: The checkpoint.
      tables_left: Table that the model lacks, or has with another width -> its rows in the checkpoint.
      tables_new: Tables that start without rows, each with the reason.
      tables_without_slots: Tables whose rows were loaded but whose optimizer slots are reinitialized.
      dense: The same report for dense weights.
    """

    checkpoint: Path
    tables_left: Mapping[str, int]
    tables_new: Mapping[str, str]
    tables_without_slots: Sequence[str]
    dense: dense.DenseReport

    def __str__(self) -> str:
        """Describe these weights, one line for each table and weight."""
        lines = [
            *(f"left out: table {name}, {rows:,} rows" for name, rows in self.tables_left.items()),
            *(f"left out: weight {name}" for name in self.dense.left),
            *(f"stays new: table {name} ({why})" for name, why in self.tables_new.items()),
            *(f"stays new: weight {name}" for name in self.dense.new),
            *(f"reinitialized: the optimizer's slots of table {name}" for name in self.tables_without_slots),
        ]
        if self.dense.slots:
            lines.append(f"reinitialized: {self.dense.slots} slots of the optimizer of dense weights")
        if self.dense.later:
            lines.append("weights that the model hasn't created yet are compared when it creates them")
        return "\n  ".join([f"{self.checkpoint}: loaded what fits", *(lines or ["nothing was left out"])])


class ShardedCheckpoint(StepCallback):
    """Callback that saves a model during training: its tables in shards, the rest by ``tf.train.Checkpoint``.

    Tables, dense weights and optimizer state are all saved between the same two batches and appear under one
    name at once. The last checkpoint stays complete even if the process is killed. Its name is the number of
    batches trained. `CheckpointStore` decides which checkpoints are full or incremental, and which are kept.

    A checkpoint from the middle of an epoch records how many of the epoch's batches were trained, and the
    metrics' sums over them. `fit` continues after these batches, so that weights and metrics equal those of
    an uninterrupted run. Keras' own ``fit`` does the same with the data that `rest_of_epoch` returns.
    Otherwise, the batches are trained again, with a warning. If ``fit`` accumulates gradients
    (``accumulate_steps``), a save waits for the batch that completes the optimizer's step, because
    checkpoints don't contain accumulated gradients. Nor do they contain the state of TensorFlow's random
    generators (dropout, ``Dataset.shuffle``) or of other callbacks.

    The same script works on several ranks (``gmeta.init()``): every rank saves and restores the rows that it
    owns, rank 0 saves the dense weights, and all ranks restore them. The number of ranks may differ after
    `restore`. An error on one rank is raised by all ranks, with the number of that rank. In an elastic job
    (``gmeta launch --elastic``) the ranks restart from the last checkpoint when one rank is lost, and exit
    after a save when other ranks are waiting to join.

    Args:
      store: Where to save the checkpoints, in a file system that the ranks share. A folder stands for a
        `CheckpointStore` with default settings.
      every: Save after this many batches, or after a time such as ``"10m"`` by the clock of rank 0, and at
        the end of each epoch; None: at the end of each epoch.

    Attributes:
      results_before: If `restore` loaded a checkpoint from the middle of an epoch: the metrics' values over
        that epoch's trained batches.
      left_out: What the last `restore` with ``partial=True`` didn't load; None without one.

    Raises:
      ConfigError: ``every`` is below 1, or no time.

    Example:
      ::

        checkpoints = ShardedCheckpoint("runs/a/checkpoints", every=1000)
        model.compile(...)
        checkpoints.fit(model, data, epochs=10)
    """

    def __init__(
        self, store: CheckpointStore | str | os.PathLike[str], *, every: int | str | None = None
    ) -> None:
        super().__init__()
        self._seconds = parse_duration(every, "every") if isinstance(every, str) else None
        self._every = every if isinstance(every, int) else None
        if every is not None and not (self._every or 0) >= 1 and not self._seconds:
            raise ConfigError(f'every must be at least 1, or a time such as "10m", got {every!r}')
        self.store = store if isinstance(store, CheckpointStore) else CheckpointStore(store)
        self._saved_at = time.monotonic()
        self._batches = 0
        self._saved = 0  # of these, how many the last checkpoint has
        self._epochs = 0
        self._last_batch = -1  # of this epoch, in this process
        self._before: Stages = ()  # the steps of this epoch that the restored checkpoint contains
        self._sums: Sums = {}  # the metrics' sums over these steps
        self._goes_on = False  # whether the next fit trains the rest of that epoch
        self._restored: tf.keras.Model | None = None  # the model that was restored and not trained since
        self.results_before: dict[str, float] = {}
        self.left_out: PartialRestore | None = None
        self._due = False

    @property
    def batches(self) -> int:
        """Number of steps so far, including those before `restore`. A step is a batch on every rank."""
        return self._batches

    def restore(
        self,
        model: tf.keras.Model,
        checkpoint: Path | None = None,
        *,
        partial: bool = False,
        print_fn: Callable[[str], Any] | None = None,
    ) -> int:
        """Load the named checkpoint, or the latest one if one exists, into a model.

        Rows belong to the tables that users name. The model's features may therefore be in a different order
        than when they were saved, and different features or admission and eviction policies may merge their
        tables differently. After adding or removing features, load what fits with ``partial=True``.

        Args:
          model: The model; compile it first if its optimizer's state is to be restored. Weights that it
            hasn't created yet are restored when it creates them.
          checkpoint: One of ``store.checkpoints()``.
          partial: Whether to load what fits. Tables that weren't saved, or were saved with another width,
            start without rows. Tables that the model doesn't have are left out. Dense weights that weren't
            saved, or whose shape has changed, stay new, and so do their optimizer's slots. All of this is
            printed and stored in ``left_out``. Weights of layers that you named are found by these names,
            others by their place in the model.
          print_fn: The function that receives the text. None: `print`, on rank 0.

        Returns:
          How many epochs are done. If the next epoch has started, `rest_of_epoch` continues within it.

        Raises:
          ConfigError: A table's width or optimizer differs from the saved one, or the checkpoint has tables
            that the model doesn't have.
          DataError: The checkpoint is damaged, or belongs to another model.
        """
        chosen = checkpoint or self.store.agree_on_latest()
        self._restored, self.left_out = model, None
        ranks = self.store.ranks
        tell = (print_fn or print) if ranks.rank == 0 else None
        if chosen is None:
            if partial and tell:
                tell(f"{self.store.root}: no checkpoint is here, so nothing was loaded")
            return 0
        with ranks.together(), CheckpointReader(chosen) as reader:
            reader.verify_files()
            progress = _progress(chosen, reader.manifest.metadata)
        info = self.store.load(tables_by_name(model), chosen, partial=partial)
        if info.left and not partial:
            raise ConfigError(
                f"{chosen}: the model doesn't have the tables {', '.join(info.left)} of this checkpoint: "
                "make it with them, or leave their rows out by restore(model, partial=True)"
            )
        if partial:
            with ranks.together():
                report = dense.read_fitting(model, chosen)
            rows = ranks.from_first(lambda: count_rows(chosen, info.left))
            self.left_out = PartialRestore(chosen, rows, info.new, info.without_slots, report)
            if tell:
                tell(str(self.left_out))
        else:
            with ranks.together():
                dense.read_dense(model, chosen)
        self._batches = self._saved = step_of(chosen)
        self._epochs, self._before = progress
        self._last_batch, self._goes_on = -1, False
        metrics = chosen / dense.FOLDER / _METRICS
        self._sums, self.results_before = read_metrics(metrics) if self._before else ({}, {})
        return self._epochs

    def return_to(self, model: tf.keras.Model, checkpoint: Path, keep: Sequence[tf.Variable] = ()) -> None:
        """Load an earlier checkpoint in the course of training, keep some variables, and save.

        Call it between two calls of `fit`. After bad data, weights and rows are those of the checkpoint
        again, while a position in the data stays. The save counts as a step, so it is the latest checkpoint.

        Args:
          model: The model that `fit` trained.
          checkpoint: One of ``store.checkpoints()``.
          keep: Variables that don't change.
        """
        values, batches, epochs = [variable.numpy() for variable in keep], self._batches, self._epochs
        self.restore(model, checkpoint)
        for variable, value in zip(keep, values, strict=True):
            variable.assign(value)
        self._batches, self._epochs, self._before, self._sums = batches + 1, epochs, (), {}
        self._restored = model
        self._save()

    def fit(
        self,
        model: tf.keras.Model,
        data: Data,
        *,
        epochs: int,
        callbacks: Sequence[tf.keras.callbacks.Callback] = (),
        **options: Any,
    ) -> tf.keras.callbacks.History:
        """Train a model for ``epochs`` epochs in total, starting from its last checkpoint if one exists.

        Restores the model, unless it was just restored, and calls the model's ``fit``. If the
        checkpoint is from the middle of an epoch, it calls ``fit`` twice: for the rest of that epoch, and for
        the epochs after it. The result equals that of an uninterrupted run if an epoch has the same order
        each time it is read. That holds for data that isn't shuffled, and for data whose order is a function
        of the epoch, such as that of `gmeta.io.tasks`.

        Args:
          model: The compiled model.
          data: One of three forms: the batches of an epoch; a function of an epoch's number, counted from 0,
            that returns data whose first iteration yields that epoch and each later iteration the next epoch,
            such as ``gmeta.io.tasks(start=)``; or a function of that number and of `stages_of_epoch` that
            also skips the data that these steps have read.
          epochs: The total number of epochs, including those trained before. If all are trained and the data
            are a stream (`gmeta.io.StreamPosition`) that has more rows, one more epoch trains these.
          callbacks: Other callbacks; this one runs after them.
          **options: As in ``tf.keras.Model.fit``, such as ``validation_data`` and ``verbose``.

        Returns:
          The history of the epochs that were trained or completed in this call.

        Raises:
          ConfigError: As in `restore`; or an option sets the first epoch or the length of an epoch.
          DataError: As in `restore`.

        Example:
          ::

            checkpoints = ShardedCheckpoint("runs/a/checkpoints", every=1000)
            checkpoints.fit(
                model,
                lambda epoch, passed: gmeta.io.tasks("data/warm", start=gmeta.io.AfterSteps(passed, epoch)),
                epochs=10,
            )
        """
        first = self._epochs if self._restored is model else self.restore(model)
        if first >= epochs and any(each.wait() for each in positions_in(model)):
            epochs = first + 1
        return fit_on(self, model, data, first, epochs=epochs, callbacks=callbacks, **options)

    @property
    def batches_of_epoch(self) -> int:
        """Number of batches of the unfinished epoch that the weights have been trained on.

        A step has one batch per rank; in an elastic job, one per rank that the job was started with.
        """
        return sum(shares * steps for shares, steps in self.stages_of_epoch)

    @property
    def stages_of_epoch(self) -> Stages:
        """Steps of the unfinished epoch: (ranks, steps), for each number of ranks in turn.

        `gmeta.io.tasks` takes it as ``passed``. In an elastic job, ranks are those with which the job was
        started.
        """
        ranks, steps = collectives.world().shares.total, self._last_batch + 1
        before = self._before
        if before and before[-1][0] == ranks:
            steps += before[-1][1]
            before = before[:-1]
        return (*before, (ranks, steps)) if steps else before

    def rest_of_epoch(self, data: tf.data.Dataset) -> tf.data.Dataset:
        """Skip the batches of an unfinished epoch that the restored weights have already been trained on.

        The skipped batches are still read. What remains is the rest of the epoch under two conditions. The
        epoch must have the same order each time it is read, as with `gmeta.io.tasks` and ``start``, or with
        data that isn't shuffled. And a rank's batch must be as large as before; the number of ranks may
        differ. Use the result in a ``fit`` of this epoch alone: Keras expects all epochs of a ``fit`` to be
        as long as the first.

        Args:
          data: Batches. `gmeta.io.tasks` and `gmeta.io.groups` divide the data into one range for each
            current rank; if the number of ranks has changed, pass `stages_of_epoch` to them instead. Balanced
            data that start at a `gmeta.io.ReadingPosition`, an attribute of the model, are returned
            unchanged, on any number of ranks.

        Raises:
          ConfigError: The batches are the rank's own, each joined from several, and the checkpoint ends
            inside one; or the data is divided into ranges, and the number of ranks was different before.
        """
        self._goes_on = True
        shares, passed = collectives.world().shares, self.batches_of_epoch
        position, model = position_of(data), self._restored or self.model
        held = position is not None and any(part is position for part in submodules(model))
        if position is not None and position.counts_groups:
            if not held:
                raise ConfigError(
                    f"the data begin at a {type(position).__name__} that the checkpoint doesn't hold: make "
                    "it an attribute of the model, before the model is restored"
                )
            return data
        policy = data.options().experimental_distribute.auto_shard_policy
        if reads_ranges(data) and any(ranks != shares.total for ranks, _ in self._before):
            stages = " and ".join(f"{steps} steps of {ranks} ranks" for ranks, steps in self._before)
            raise ConfigError(
                f"epoch {self._epochs + 1} was begun with {stages}, and {shares.total} ranks read other "
                "ranges of it: give fit a function of the epoch and of what was passed, lambda epoch, "
                "passed: gmeta.io.tasks(..., start=gmeta.io.AfterSteps(passed, epoch))"
            )
        if policy == tf.data.experimental.AutoShardPolicy.OFF:  # the rank's own batches, one per step
            if shares.count > 1 and passed % shares.total:
                raise ConfigError(
                    f"the checkpoint has {passed} batches of epoch {self._epochs + 1}, which are no whole "
                    f"steps of {shares.total}: finish the epoch with {collectives.world().size} ranks, and "
                    "without --elastic"
                )
            passed = shares.steps(passed)
        return data if held else data.skip(passed)  # a position was restored with the model

    def goes_on(self, rest: tf.data.Dataset) -> tf.data.Dataset:
        """Declare that this data is the rest of an unfinished epoch, for the next ``fit``, and return it."""
        self._goes_on = True
        return rest

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Claim the folder against other jobs, and note that the restored model is about to change.

        Raises:
          ConfigError: Another job saves in the folder.
        """
        self.store.claim()
        self._restored = None

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Start counting the epoch's batches."""
        self._last_batch = -1
        if self._before and not (self._goes_on and epoch == self._epochs):
            warnings.warn(
                f"the checkpoint is from the middle of an epoch: {self.batches_of_epoch} batches of epoch "
                f"{self._epochs + 1} are in the weights, and are trained again; call fit with "
                f"initial_epoch={self._epochs} and the data that rest_of_epoch gives to leave them out",
                stacklevel=2,
            )
            self._before, self._sums = (), {}

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Save if the previous batch made a save due. After an epoch's last batch, `on_epoch_end` saves.

        Raises:
          GmetaError: The checkpoint can't be written; those before it are whole.
        """
        if self._due and not getattr(self.model, "is_accumulating", False):
            self._save()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Count the batches; with ``steps_per_execution`` there may be several."""
        if self._sums:  # a model creates its metrics in its first step
            add_sums(self.model, self._sums)
            self._sums = {}
        before = self._batches
        self._batches += batch - self._last_batch
        self._last_batch = batch
        if self._every is not None and self._batches // self._every > before // self._every:
            self._due = True
        if self._seconds is not None and self._batches // _ASK_EVERY > before // _ASK_EVERY:
            over = time.monotonic() - self._saved_at >= self._seconds
            self._due = self._due or collectives.broadcast_object(over)

    def save_due(self) -> None:
        """Save if ``every`` is over, for example while no data come; all ranks call this between two steps.

        Raises:
          GmetaError: As for `on_train_batch_begin`.
        """
        over = self._seconds is not None and time.monotonic() - self._saved_at >= self._seconds
        due = collectives.broadcast_object(over) or self._due
        if due and self._batches > self._saved and not getattr(self.model, "is_accumulating", False):
            self._save()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Save, and count the epoch as done.

        Raises:
          GmetaError: The checkpoint can't be written; those before it are whole.
        """
        self._epochs = epoch + 1
        self._before, self._last_batch, self._sums, self.results_before = (), -1, {}, {}
        latest = self.store.agree_on_latest()
        if latest is not None and step_of(latest) == self._batches:
            # With data of unknown length, Keras began a batch that didn't exist: the last is already saved.
            self.store.describe(self._metadata())
        else:
            self._save()

    def _save(self) -> None:
        sums = sums_of(self.model) if self.batches_of_epoch else {}
        values = results_of(self.model, sums) if sums else {}

        def write(folder: Path) -> None:
            dense.write_dense(self.model, folder)
            if sums:
                write_metrics(folder / _METRICS, sums, values)

        merge = getattr(self.model, "merge_moving_averages", None)
        if merge is not None:  # otherwise the checkpoint would hold the averages of rank 0 alone
            merge()
        collectives.gather_states(self.model)
        with dense.whole_slots(self.model, gather=True):
            self.store.save(tables_by_name(self.model), self._batches, dense=write, metadata=self._metadata())
        self._due, self._saved_at, self._saved = False, time.monotonic(), self._batches

    def _metadata(self) -> dict[str, Any]:
        return {
            "epochs": self._epochs,
            "batches": self._batches,
            "batches_of_epoch": self.batches_of_epoch,
            "shares": collectives.world().shares.total,
            # If the number of ranks never changed, the two entries above are equivalent.
            **({"stages": self.stages_of_epoch} if len(self.stages_of_epoch) > 1 else {}),
        }


def _progress(checkpoint: Path, metadata: Mapping[str, Any]) -> tuple[int, Stages]:
    """Read the number of finished epochs, and the steps of the unfinished one."""
    try:
        return whole(metadata["epochs"], "epochs"), _stages(metadata)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"its metadata isn't what this callback writes: {error}",
            path=checkpoint,
            advice="name a folder of checkpoints that ShardedCheckpoint has saved",
        ) from error


def _stages(metadata: Mapping[str, Any]) -> Stages:
    if "stages" in metadata:
        return tuple((whole(ranks, "ranks", 1), whole(steps, "steps")) for ranks, steps in metadata["stages"])
    ranks = whole(metadata.get("shares", 1), "shares", 1)
    batches = whole(metadata["batches_of_epoch"], "batches_of_epoch")
    return ((ranks, batches // ranks),) if batches else ()
