"""Keras' way to sharded checkpoints: a callback that saves a model with its tables, and restores it."""

from __future__ import annotations

import os
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from gmeta.checkpoint.epoch_metrics import Sums, add_sums, results_of, sums_of
from gmeta.checkpoint.files.chain import CheckpointReader
from gmeta.checkpoint.files.record_file import RESTORE_ADVICE
from gmeta.checkpoint.resumed_fit import Data, Stages, fit_on
from gmeta.checkpoint.store import CheckpointStore, step_of
from gmeta.core import collectives
from gmeta.core.errors import ConfigError, DataError, GmetaError
from gmeta.core.json_values import whole
from gmeta.io.readers.group_reader import reads_ranges
from gmeta.ops.table.hash_table import HashTable
from gmeta.ops.table.saving import tables_saved_elsewhere

_DENSE = "dense"  # the prefix of TensorFlow's files, in the folder of that name
_METRICS = "metrics.npz"  # beside them, in a checkpoint from the middle of an epoch


def tables_by_name(model: tf.keras.Model) -> dict[str, HashTable]:
    """Every `HashTable` that a model holds, in whatever layer, by the table's name.

    Raises:
      ConfigError: Two tables have one name.
    """
    tables: dict[str, HashTable] = {}
    for thing in tf.train.TrackableView(model).descendants():
        if isinstance(thing, HashTable) and tables.setdefault(thing.name, thing) is not thing:
            raise ConfigError(
                f"two tables of the model are named {thing.name!r}: give their EmbeddingCollections "
                "different names"
            )
    return tables


class ShardedCheckpoint(tf.keras.callbacks.Callback):
    """Saves a model in training: its tables in shards and the rest by ``tf.train.Checkpoint``, together.

    Tables, dense weights and optimizer state are of one moment, between two batches, and appear under one
    name at once: whatever kills the process, the last checkpoint is whole. It is named by the number of
    batches trained. `CheckpointStore` says which are full, incremental, and kept.

    A checkpoint from the middle of an epoch says how many of the epoch's batches are in it, and what its
    metrics have summed up in them. `fit` goes on behind them, so that weights and metrics are those of an
    uninterrupted run; Keras' own ``fit`` does so on what `rest_of_epoch` leaves of the data. Where neither is
    called, the batches are trained again, and a warning says so. Where ``fit`` accumulates gradients
    (``accumulate_steps``), what is accumulated is in no checkpoint, so a save waits for the batch that makes
    the optimizer's step. The state of TensorFlow's random generators (dropout, ``Dataset.shuffle``) is in
    none either, nor that of other callbacks.

    On several ranks (``gmeta.init()``) the same script works: every rank saves and restores the rows that it
    owns, rank 0 saves the dense weights, and all restore them. The number of ranks may be another one after
    `restore`. What fails on one rank is raised by all, with its number. In an elastic job
    (``gmeta launch --elastic``) ranks start again from the last checkpoint when one is lost, and leave after
    a save when others are to join them.

    Args:
      store: Where the checkpoints go, in a file system that the ranks share; a folder stands for a
        `CheckpointStore` as it comes.
      every: Save after so many batches, and at the end of each epoch; None: at the end of each epoch.

    Attributes:
      results_before: The metrics' values of the batches of an epoch that `restore` has found begun.

    Raises:
      ConfigError: ``every`` is below 1.

    Example:
      ::

        checkpoints = ShardedCheckpoint("runs/a/checkpoints", every=1000)
        model.compile(...)
        checkpoints.fit(model, data, epochs=10)
    """

    def __init__(self, store: CheckpointStore | str | os.PathLike[str], *, every: int | None = None) -> None:
        super().__init__()
        if every is not None and every < 1:
            raise ConfigError(f"every must be at least 1, got {every}")
        self.store = store if isinstance(store, CheckpointStore) else CheckpointStore(store)
        self._every = every
        self._batches = 0
        self._epochs = 0
        self._last_batch = -1  # of this epoch, in this process
        self._before: Stages = ()  # of this epoch, that a restored checkpoint has
        self._sums: Sums = {}  # of the metrics in them
        self._goes_on = False  # with the rest of that epoch
        self._restored: tf.keras.Model | None = None  # and not trained since
        self.results_before: dict[str, float] = {}
        self._due = False

    @property
    def batches(self) -> int:
        """How many steps have been taken, of a batch on every rank; with those before `restore`."""
        return self._batches

    def restore(self, model: tf.keras.Model, checkpoint: Path | None = None) -> int:
        """Load the latest checkpoint, or the one named, into a model, if there is one.

        Args:
          model: The model, compiled if its optimizer's state is to come back. Weights that it hasn't made yet
            are restored when it makes them.
          checkpoint: One of ``store.checkpoints()``.

        Returns:
          How many epochs are done. If the next one was begun, `rest_of_epoch` goes on inside it.

        Raises:
          ConfigError: A table has another width or optimizer than was saved.
          DataError: The checkpoint is damaged, or belongs to another model.
        """
        chosen = checkpoint or self.store.agree_on_latest()
        self._restored = model
        if chosen is None:
            return 0
        with self.store.ranks.together(), CheckpointReader(chosen) as reader:
            reader.verify_files()
        info = self.store.load(tables_by_name(model), chosen)
        with self.store.ranks.together():
            _read_dense(model, chosen)
        self._batches = step_of(chosen)
        try:
            self._epochs, self._before = whole(info.metadata["epochs"], "epochs"), _stages(info.metadata)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"its metadata isn't what this callback writes: {error}",
                path=chosen,
                advice="name a folder of checkpoints that ShardedCheckpoint has saved",
            ) from error
        self._last_batch, self._goes_on = -1, False
        self._sums, self.results_before = _read_metrics(chosen) if self._before else ({}, {})
        return self._epochs

    def fit(
        self,
        model: tf.keras.Model,
        data: Data,
        *,
        epochs: int,
        callbacks: Sequence[tf.keras.callbacks.Callback] = (),
        **options: Any,
    ) -> tf.keras.callbacks.History:
        """Train a model from its last checkpoint on, if there is one, to so many epochs.

        It restores the model unless that was done just before, and calls its ``fit``, twice where the
        checkpoint is from the middle of an epoch: on the rest of that epoch, and on the epochs after it. The
        result is the uninterrupted run's if an epoch's order is the same whenever it is read: of data that
        isn't shuffled, or whose order is a function of the epoch, as that of `gmeta.io.tasks`.

        Args:
          model: The compiled model.
          data: Batches of an epoch; or a function of an epoch's number, counted from 0, that gives data whose
            first iteration is that epoch, and each further one the next, as ``gmeta.io.tasks(start=)``;
            or one of that number and of `stages_of_epoch`, which leaves out what these have read.
          epochs: How many epochs the model has been trained for in the end.
          callbacks: Besides this one, which comes after them.
          **options: As in ``tf.keras.Model.fit``, such as ``validation_data`` and ``verbose``.

        Returns:
          The epochs that were trained, or ended, in this call.

        Raises:
          ConfigError: As `restore`; or an option that says where to begin, or how long an epoch is.
          DataError: As `restore`.

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
        return fit_on(self, model, data, first, epochs=epochs, callbacks=callbacks, **options)

    @property
    def batches_of_epoch(self) -> int:
        """How many batches of the epoch that isn't finished are in the weights.

        A step has one on each rank; in an elastic job, one of each rank that it was started with.
        """
        return sum(shares * steps for shares, steps in self.stages_of_epoch)

    @property
    def stages_of_epoch(self) -> Stages:
        """The steps of the epoch that isn't finished: (ranks, steps), for each number of ranks in turn.

        `gmeta.io.tasks` takes it as ``passed``. In an elastic job ranks are those that it was started with.
        """
        ranks, steps = collectives.world().shares.total, self._last_batch + 1
        before = self._before
        if before and before[-1][0] == ranks:
            steps += before[-1][1]
            before = before[:-1]
        return (*before, (ranks, steps)) if steps else before

    def rest_of_epoch(self, data: tf.data.Dataset) -> tf.data.Dataset:
        """The data without the batches of a begun epoch that `restore` has found in the weights.

        They are read, and passed over. It is the rest if an epoch's order is the same whenever the epoch is
        read, as that of `gmeta.io.tasks` with ``start`` is, or of data that isn't shuffled; and if a
        batch of a rank is as large as before, while there may be more or fewer ranks. Give it to a ``fit`` of
        this epoch alone: Keras expects all epochs of a ``fit`` to be as long as the first.

        Args:
          data: Batches. Those of `gmeta.io.tasks` and `gmeta.io.groups` are ranges of as many ranks as there
            are; with another number of ranks than before pass them `stages_of_epoch` instead.

        Raises:
          ConfigError: Batches are the rank's own, each joined of several, and the checkpoint ends inside one;
            or they are ranges, and there were more or fewer ranks before.
        """
        self._goes_on = True
        shares, passed = collectives.world().shares, self.batches_of_epoch
        policy = data.options().experimental_distribute.auto_shard_policy
        if reads_ranges(data) and any(ranks != shares.total for ranks, _ in self._before):
            stages = " and ".join(f"{steps} steps of {ranks} ranks" for ranks, steps in self._before)
            raise ConfigError(
                f"epoch {self._epochs + 1} was begun with {stages}, and {shares.total} ranks read other "
                "ranges of it: give fit a function of the epoch and of what was passed, lambda epoch, "
                "passed: gmeta.io.tasks(..., start=AfterSteps(passed, epoch))"
            )
        if policy == tf.data.experimental.AutoShardPolicy.OFF:  # the rank's own part, one for each step
            if shares.count > 1 and passed % shares.total:
                raise ConfigError(
                    f"the checkpoint has {passed} batches of epoch {self._epochs + 1}, which are no whole "
                    f"steps of {shares.total}: finish the epoch with {collectives.world().size} ranks, and "
                    "without --elastic"
                )
            passed = shares.steps(passed)
        return data.skip(passed)

    def goes_on(self, rest: tf.data.Dataset) -> tf.data.Dataset:
        """Say that the next ``fit`` is on the rest of a begun epoch, which this data is already."""
        self._goes_on = True
        return rest

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """From here on the model isn't the one that was restored, and no other job saves in the folder.

        Raises:
          ConfigError: Another job does.
        """
        self.store.claim()
        self._restored = None

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Begin to count the epoch's batches."""
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
        """Save, if the batch before made it due: after an epoch's last batch, its end is saved instead.

        Raises:
          GmetaError: The checkpoint can't be written; those before it are whole.
        """
        if self._due and not getattr(self.model, "is_accumulating", False):
            self._save()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Count the batches: with ``steps_per_execution`` there may be several."""
        if self._sums:  # a model makes its metrics in its first step
            add_sums(self.model, self._sums)
            self._sums = {}
        before = self._batches
        self._batches += batch - self._last_batch
        self._last_batch = batch
        if self._every is not None and self._batches // self._every > before // self._every:
            self._due = True

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Save, with the epoch counted as done.

        Raises:
          GmetaError: The checkpoint can't be written; those before it are whole.
        """
        self._epochs = epoch + 1
        self._before, self._last_batch, self._sums, self.results_before = (), -1, {}, {}
        latest = self.store.agree_on_latest()
        if latest is not None and step_of(latest) == self._batches:
            # Data of unknown length: Keras began a batch that wasn't there, so the last one is saved already.
            self.store.describe(self._metadata())
        else:
            self._save()

    def _save(self) -> None:
        sums = sums_of(self.model) if self.batches_of_epoch else {}
        values = results_of(self.model, sums) if sums else {}

        def dense(folder: Path) -> None:
            try:
                with tables_saved_elsewhere():
                    _dense(self.model).write(str(folder / _DENSE))
                if sums:
                    _write_metrics(folder / _METRICS, sums, values)
            except tf.errors.OpError as error:
                raise GmetaError(
                    f"{folder}: the dense weights can't be written: {str(error.message).splitlines()[0]}; "
                    "make room or mend the folder: the checkpoints before it are whole"
                ) from error

        merge = getattr(self.model, "merge_moving_averages", None)
        if merge is not None:  # or the checkpoint would have those of rank 0 alone
            merge()
        self.store.save(tables_by_name(self.model), self._batches, dense=dense, metadata=self._metadata())
        self._due = False

    def _metadata(self) -> dict[str, Any]:
        return {
            "epochs": self._epochs,
            "batches": self._batches,
            "batches_of_epoch": self.batches_of_epoch,
            "shares": collectives.world().shares.total,
            # Where one number of ranks has taken all steps, the two above say the same.
            **({"stages": self.stages_of_epoch} if len(self.stages_of_epoch) > 1 else {}),
        }


def _stages(metadata: Mapping[str, Any]) -> Stages:
    if "stages" in metadata:
        return tuple((whole(ranks, "ranks", 1), whole(steps, "steps")) for ranks, steps in metadata["stages"])
    ranks = whole(metadata.get("shares", 1), "shares", 1)
    batches = whole(metadata["batches_of_epoch"], "batches_of_epoch")
    return ((ranks, batches // ranks),) if batches else ()


def _write_metrics(file: Path, sums: Sums, results: Mapping[str, float]) -> None:
    parts = {f"sum/{name}": value for name, value in sums.items()}
    parts |= {f"result/{name}": np.asarray(value) for name, value in results.items()}
    with file.open("wb") as stream:
        np.savez(stream, **parts)


def _read_metrics(checkpoint: Path) -> tuple[Sums, dict[str, float]]:
    file = checkpoint / "dense" / _METRICS
    if not file.exists():
        return {}, {}
    try:
        with np.load(file) as parts:
            named = {name: parts[name] for name in parts}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(
            f"the metrics' sums can't be read: {error}", path=file, advice=RESTORE_ADVICE
        ) from error
    sums = {name.removeprefix("sum/"): value for name, value in named.items() if name.startswith("sum/")}
    results = {
        name.removeprefix("result/"): float(v) for name, v in named.items() if name.startswith("result/")
    }
    return sums, results


def _read_dense(model: tf.keras.Model, checkpoint: Path) -> None:
    try:
        with tables_saved_elsewhere():
            status = _dense(model).read(str(checkpoint / "dense" / _DENSE))
            status.assert_existing_objects_matched()
    except (tf.errors.OpError, AssertionError, ValueError) as error:
        raise DataError(
            f"its dense weights don't fit this model: {str(error).splitlines()[0]}",
            path=checkpoint,
            advice="build the model as it was when it was saved",
        ) from error


def _dense(model: tf.keras.Model) -> tf.train.Checkpoint:
    optimizer = getattr(model, "optimizer", None)
    return tf.train.Checkpoint(model=model, **({} if optimizer is None else {"optimizer": optimizer}))
