"""Trains a whole experiment: every method with every seed, before one evaluation of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import tensorflow as tf
from rich.console import Console
from rich.progress import TextColumn, TimeElapsedColumn

from gmeta.core import collectives
from gmeta.core.collectives.rank_group import Ranks
from gmeta.core.data_manifest import Manifest
from gmeta.core.errors import ConfigError, DataError
from gmeta.core.row_formats import RowDtype
from gmeta.core.schema import OnBad
from gmeta.core.terminal import Bars
from gmeta.experiment.plan.experiment_config import ExperimentConfig
from gmeta.experiment.plan.task_sets import folder_of
from gmeta.experiment.results.evaluation import TrainingRun
from gmeta.experiment.runs.model_choice import build_model, experiment_features
from gmeta.experiment.runs.run_folder import RunFolder
from gmeta.experiment.runs.trainer import Outcome, restore, train
from gmeta.export.meta_models import Stale, meta_signatures
from gmeta.export.saved_model import Exported, Unknown, export_model
from gmeta.io.readers.prepared_split import open_split
from gmeta.io.readers.read_options import Waiting
from gmeta.models import MetaModel
from gmeta.models.meta.fast_weights import DeltaDtype

# The terminal's progress display of several training runs.


class TrainingProgress(Bars):
    """A progress bar for each training run or, if the output isn't a terminal, a line for each.

    Example:
      ::

        with TrainingProgress() as progress:
            model.fit(data, epochs=10, verbose=0, callbacks=[progress.track("MAML, seed 0", epochs=10)])
    """

    def __init__(self, console: Console | None = None) -> None:
        columns = (TextColumn("epochs"), TimeElapsedColumn(), TextColumn("{task.fields[logs]}"))
        super().__init__(*columns, console=console)

    def track(self, label: str, epochs: int) -> tf.keras.callbacks.Callback:
        """Make a Keras callback that shows one run of ``epochs`` epochs under ``label``."""
        return _EpochBar(self, label, epochs)


class _EpochBar(tf.keras.callbacks.Callback):
    def __init__(self, progress: Bars, label: str, epochs: int) -> None:
        super().__init__()
        self._progress, self._label, self._epochs = progress, label, epochs
        self._task = progress.bars.add_task(label, total=epochs, logs="")
        self._last = ""

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        text = "  ".join(f"{name} {value:.4f}" for name, value in (logs or {}).items())
        self._progress.bars.update(self._task, completed=epoch + 1, logs=text)
        self._last = f"{self._label}: {epoch + 1} epochs, {text}"

    def on_train_end(self, logs: Mapping[str, float] | None = None) -> None:
        if not self._progress.drawn and self._last:
            self._progress.say(self._last)


def run_training(
    config: ExperimentConfig,
    run: RunFolder,
    data: Path,
    *,
    progress: TrainingProgress,
    on_bad: OnBad = "raise",
    checkpoint_every: int | None = None,
) -> Waiting:
    """Train every method with every seed; resume unfinished training runs, and skip finished ones.

    In a job of several ranks, all ranks call it together; see `gmeta.experiment.runs.trainer.train`.

    Args:
      config: The experiment.
      run: The folder of checkpoints.
      data: A prepared data set.
      progress: The display of progress, including that of resumed runs.
      on_bad: What a bad record does: ``"raise"`` or ``"skip"``.
      checkpoint_every: As in `gmeta.experiment.runs.trainer.train`.

    Returns:
      The total time that training runs waited for data.

    Raises:
      ConfigError: The folder holds an experiment with other settings, or another job trains in it; or as for
        `check_experiment`.
      DataError: Records are bad, or a checkpoint can't be restored.
    """
    lock = run.lock
    with Ranks.of().together():
        if collectives.world().rank == 0:
            lock.take()
    try:
        return _train_all(config, run, data, progress, on_bad, checkpoint_every)
    finally:
        lock.release()


def _train_all(
    config: ExperimentConfig,
    run: RunFolder,
    data: Path,
    progress: TrainingProgress,
    on_bad: OnBad,
    checkpoint_every: int | None,
) -> Waiting:
    here = collectives.world()
    check_experiment(config, data, on_bad)
    with Ranks.of().together():
        if here.rank == 0:
            run.begin(config, data)
    collectives.check_agreement(
        {"data": Manifest.load(data).digest}, advice="give every rank the same prepared data set"
    )
    left_out: set[str] = set()
    waiting = Waiting()
    for method, settings in config.methods.items():
        for seed in config.seeds:
            label = f"{settings.label}, seed {seed}"
            bar = progress.track(label, settings.epochs)
            outcome = train(
                config,
                method,
                seed,
                data=data,
                folder=run.training(method, seed),
                callbacks=[bar],
                on_bad=on_bad,
                checkpoint_every=checkpoint_every,
            )
            if outcome.epochs_before == settings.epochs:
                progress.say(f"{label}: all {settings.epochs} epochs were done before")
            elif outcome.epochs_before or outcome.steps_before:
                progress.say(f"{label}: resumed {_where(outcome)}{_other_ranks(outcome)}")
            waiting += outcome.waiting
            for message in outcome.left_out:
                if message not in left_out:
                    progress.say(f"left out: {message}")
            left_out |= set(outcome.left_out)
    return waiting


def check_experiment(config: ExperimentConfig, data: Path, on_bad: OnBad = "raise") -> None:
    """Raise errors early that would otherwise end the training of a later method, or the evaluation.

    Raises:
      ConfigError: A method's model can't be built, or the data set lacks splits or columns.
      DataError: The data set can't be read.
    """
    for method in config.methods:
        build_model(config, method, config.seeds[0])
    needed = config.columns or [each.name for each in experiment_features(config)]
    needed = list(dict.fromkeys([*needed, config.label, *([config.item] if config.item else [])]))
    for split in dict.fromkeys((config.train_split, *config.test_splits)):
        path = data / folder_of(config, split)
        columns = [column.name for column in open_split(path, on_bad).schema]
        missing = [name for name in needed if name not in columns]
        if missing:
            named = "the experiment" if config.own_columns else f"features={config.features!r}"
            raise ConfigError(
                f"{path}: {named} needs the columns {', '.join(missing)}; there are {', '.join(columns)}"
            )


def _where(outcome: Outcome) -> str:
    if outcome.steps_before:
        return f"after step {outcome.steps_before} of epoch {outcome.epochs_before + 1}"
    return f"after epoch {outcome.epochs_before}"


def _other_ranks(outcome: Outcome) -> str:
    before, now = outcome.ranks_before, collectives.world().shares.total
    if before == now:
        return ""
    return f", which had {before} ranks; on {now} a step has {now}/{before} times as many tasks"


def load_trained(
    config: ExperimentConfig, run: RunFolder, method: str, seed: int
) -> tuple[MetaModel, TrainingRun]:
    """Load a trained model of a run and its curves.

    Raises:
      DataError: The model isn't fully trained, or its checkpoint can't be restored.
    """
    model, checkpoints = restore(config, method, seed, folder=run.training(method, seed))
    done, wanted = len(checkpoints.run.epoch), config.methods[method].epochs
    if done < wanted:
        raise DataError(
            f"{method}, seed {seed}: {done} of {wanted} epochs are trained",
            path=run.path,
            advice="run `gmeta train` again to finish",
        )
    return model, checkpoints.run


def choose_trained(run: RunFolder, method: str | None, seed: int | None) -> tuple[str, int, MetaModel]:
    """Load a trained model of a run: by default, of its first method and its first seed.

    Returns:
      The method, the seed and the model.

    Raises:
      ConfigError: The run has no such method or seed.
      DataError: The model isn't fully trained.
    """
    config, _ = run.load()
    method = next(iter(config.methods)) if method is None else method
    if method not in config.methods:
        raise ConfigError(f"{run.path} has no method {method!r}; it has {', '.join(config.methods)}")
    seed = config.seeds[0] if seed is None else seed
    if seed not in config.seeds:
        raise ConfigError(f"{run.path} has no seed {seed}; it has {', '.join(map(str, config.seeds))}")
    model, _ = load_trained(config, run, method, seed)
    return method, seed, model


# Exports a trained model from a run's folder to a version of a served model.


def export_run(
    run: RunFolder,
    out: Path,
    *,
    method: str | None = None,
    seed: int | None = None,
    version: int | None = None,
    unknown: Unknown = "initial",
    steps: int | None = None,
    dtype: DeltaDtype = "float32",
    stale: Stale = "refuse",
    row_dtype: RowDtype = "float32",
) -> Exported:
    """Export one trained model of a run to ``out/version``.

    Args:
      run: A fully trained run.
      out: The model's base path, in TensorFlow Serving's terms.
      method: The run's first method by default.
      seed: The run's first seed by default.
      version: One more than the highest existing version by default.
      unknown: See `gmeta.export.saved_model.Unknown`.
      steps: See `gmeta.export.meta_models`, also for the arguments below.
      dtype: The dtype of the deltas that clients receive and store.
      stale: The treatment of deltas from another version.
      row_dtype: How the model holds rows; the ``dtype`` of `gmeta.export.export_model`.

    Raises:
      ConfigError: The run has no such method or seed, or the version already exists.
      DataError: The model isn't fully trained.
    """
    config, _ = run.load()
    _, _, model = choose_trained(run, method, seed)
    folder = out / str(next_version(out) if version is None else version)
    signatures = meta_signatures(
        model, steps=steps, dtype=dtype, stale=stale, answer=config.label, of_logits=config.loss != "mse"
    )
    return export_model(model, folder, signatures=signatures, unknown=unknown, dtype=row_dtype)


class HeldModels(tf.keras.Model):
    """Holds the models to export, so that the export finds their tables."""

    def __init__(self, models: Sequence[tf.keras.Model], name: str) -> None:
        super().__init__(name=name)
        self.held = list(models)


def next_version(base: Path) -> int:
    """Return one more than the highest version in a model's base path; 1 if there is none."""
    found = base.iterdir() if base.is_dir() else ()
    return 1 + max((int(path.name) for path in found if path.name.isdecimal()), default=0)
