"""Training of a whole experiment: every method with every seed, followed by one evaluation of all of them."""

from __future__ import annotations

from pathlib import Path

from gmeta import io
from gmeta.checkpoint.files.rank_group import Ranks
from gmeta.core import collectives
from gmeta.core.data.manifest import Manifest
from gmeta.core.data.on_bad import OnBad
from gmeta.core.errors import ConfigError, DataError
from gmeta.experiment.plan.experiment_config import ExperimentConfig
from gmeta.experiment.plan.task_sets import folder_of
from gmeta.experiment.results.evaluation import TrainingRun
from gmeta.experiment.runs.model_choice import build_model, experiment_features
from gmeta.experiment.runs.run_folder import RunFolder
from gmeta.experiment.runs.run_progress import TrainingProgress
from gmeta.experiment.runs.trainer import Outcome, restore, train
from gmeta.io.readers.prepared_split import open_split
from gmeta.models import MetaModel


def run_training(
    config: ExperimentConfig,
    run: RunFolder,
    data: Path,
    *,
    progress: TrainingProgress,
    on_bad: OnBad = "raise",
    checkpoint_every: int | None = None,
) -> io.Waiting:
    """Train every method with every seed; resume unfinished training runs, and skip finished ones.

    In a job of several ranks, all ranks call it together; see `gmeta.experiment.train`.

    Args:
      config: The experiment.
      run: Where checkpoints go.
      data: A prepared data set.
      progress: Where progress is shown, including that of resumed runs.
      on_bad: What a bad record does: ``"raise"`` or ``"skip"``.
      checkpoint_every: As in `gmeta.experiment.train`.

    Returns:
      How long all training runs together have waited for data.

    Raises:
      ConfigError: The folder holds an experiment with other settings, or another job trains in it; or as in
        `check_experiment`.
      DataError: Bad records, or a checkpoint that can't be restored.
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
) -> io.Waiting:
    here = collectives.world()
    check_experiment(config, data, on_bad)
    with Ranks.of().together():
        if here.rank == 0:
            run.begin(config, data)
    collectives.check_agreement(
        {"data": Manifest.load(data).digest}, advice="give every rank the same prepared data set"
    )
    left_out: set[str] = set()
    waiting = io.Waiting()
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
    """Raise errors now that would otherwise end the training of a later method, or the evaluation after it.

    Raises:
      ConfigError: A method's model can't be made, or the data set lacks splits or columns.
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
      DataError: The model isn't trained to the end, or its checkpoint can't be restored.
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
