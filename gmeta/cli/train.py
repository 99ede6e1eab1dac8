"""``gmeta train``: trains every method of an experiment with every seed."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gmeta.cli.options import FAMILY, find_data, on_bad_option, run_option
from gmeta.cli.publish import follow, follow_options, refuse_without_follow
from gmeta.cli.rank_options import elastic_of, elastic_options, ranks_option, start_ranks
from gmeta.core.data_manifest import Manifest
from gmeta.core.errors import ConfigError, DataError, NotFiniteError
from gmeta.core.imports import MissingExtraError
from gmeta.core.json_values import parse_json
from gmeta.core.schema import OnBad

if TYPE_CHECKING:
    from gmeta.experiment.plan.experiment_config import ExperimentConfig
    from gmeta.experiment.ranking.plan import PlannedRanking
    from gmeta.experiment.runs.run_folder import RunFolder


@click.command("train")
@run_option
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="A prepared data set.  [default: RUN/data, or else data]",
)
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    help="Settings in TOML.  [default: MeLU on MovieLens; for your own data, inferred from the data set]",
)
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    help="A setting in TOML that replaces the one of --config, such as seeds=[0]; may be repeated.",
)
@click.option(
    "--for",
    "family",
    type=FAMILY,
    help="What to learn: the label of a new user's rows, the next item of a user's history, which items a "
    "user takes in any order, or the label of any row.  [default: next-item for data that were prepared "
    "without a label; ranking for data without users; else cold-start and ranking]",
)
@click.option(
    "--budget",
    metavar="TIME",
    help="About how long settings of methods are tried on training tasks before the training, such as 90s, "
    "2m or 1h; 0: not at all.  [default: 2m for your own data, if no methods are given]",
)
@follow_options
@on_bad_option
@click.option(
    "--checkpoint-every",
    type=click.IntRange(min=1),
    metavar="STEPS",
    help="Save after so many steps too, besides at the end of each epoch; for cold start alone.",
)
@ranks_option
@elastic_options
def command(
    run_path: Path,
    data: Path | None,
    config_path: Path | None,
    assignments: tuple[str, ...],
    family: str | None,
    budget: str | None,
    on_bad: OnBad,
    checkpoint_every: int | None,
    followed: str | None,
    publish: str | None,
    metrics_port: str | None,
    until_end: bool,
    start: Path | None,
    size: int | None,
    elastic: bool,
    min_np: int | None,
    script: str | None,
) -> None:
    """Train on a prepared data set, or resume a run that stopped.

    On your own data set, the models predict the label that the data were prepared with from all other
    columns, and the command prints its choices; --config and --set override them. It trains twice: for new
    users, from a few of their rows (cold start), and in RUN/ranking for the rows of all users (ranking).
    Trials on training data choose the settings of methods. Without a label, or with --for next-item, the
    models predict the next item in a user's history: SASRec and HSTU beside sequential rules, item
    neighbours, EASE and implicit ALS, and a blend of all of them. With --for retrieval, they predict which
    items belong to a user, in any order: a two-tower model beside item neighbours, RP3beta, EASE and implicit
    ALS, and a blend; this needs no times. For ranking, they predict from the ids and numbers of a row:
    DCN-v2, DLRM and a factorisation machine beside linear models and matrix factorisation, and a blend of
    all of them; if settings name it, also GRM, which reads users' earlier rows. With --for ranking, or
    without users, the command trains for ranking alone.

    With --follow, it trains DCN-v2 on a log that grows, until it is stopped: each batch is evaluated before
    it is trained, and the same command continues where it was, each row trained once (docs/online.md). With
    --from, it continues training a DCN-v2, DLRM or FM of a run for ranking. Models of other families train on
    a stream in Python (docs/streams.md).

    Every epoch ends with a checkpoint. After an interruption, the same command continues from the last
    checkpoint, also with another --np. With --elastic it continues automatically when a rank is lost.
    """
    if start_ranks(size, elastic=elastic_of(size, elastic, min_np, script)):
        if followed is None:
            _finish_catalogue(run_path, on_bad)
        return
    # Imported here, so that `gmeta train --help` doesn't wait for TensorFlow.
    from rich.console import Console

    from gmeta.core.collectives import check_agreement, world
    from gmeta.core.settings import override, read_toml, to_mapping
    from gmeta.experiment.plan.own_plan import plan_experiment
    from gmeta.experiment.ranking.drawn_data import with_negatives
    from gmeta.experiment.runs.all_runs import TrainingProgress, run_training
    from gmeta.experiment.runs.run_folder import RunFolder, choose_families

    settings = override(read_toml(config_path) if config_path else {}, assignments)
    refuse_without_follow(followed, publish, metrics_port, until_end, start)
    if followed is not None:
        for option, value in (("--data", data), ("--for", family), ("--budget", budget)):
            if value is not None:
                raise ConfigError(
                    f"{option} isn't for --follow, which trains DCN-v2 on a stream, or with --from a model "
                    "of a run for ranking; leave it out, or train other models in Python (docs/streams.md)"
                )
        where = f"{config_path or 'config'}{' and --set' if assignments else ''}"
        follow(
            followed,
            run_path,
            settings,
            where,
            publish=publish,
            metrics_port=metrics_port,
            until_end=until_end,
            start=start,
            on_bad=on_bad,
        )
        return
    if budget is not None:
        settings["budget"] = budget
    check_agreement({name: repr(value) for name, value in settings.items()})
    data = data or find_data(RunFolder(run_path).data)
    where = f"{config_path or 'config'}{' and --set' if assignments else ''}"
    run = RunFolder(run_path)
    named = family or settings.get("for")
    chosen, *beside = choose_families(family, settings, data)
    if chosen != "cold-start":
        if checkpoint_every is not None:
            raise ConfigError(f"--checkpoint-every: training for {chosen} saves after each epoch alone")
        if budget is not None and chosen != "ranking":
            raise ConfigError(f"--budget isn't for {chosen}, where validation ends each training")
        if chosen == "ranking":
            _train_ranking(settings, run, data, where, on_bad)
        else:
            _train_catalogue(chosen, settings, run, data, where, on_bad, finish=size is not None)
        return
    shared, source = dict(settings), data
    data = with_negatives(settings, data, run, where, on_bad)
    planned = plan_experiment(settings, data, where)
    config = planned.config
    check_agreement({name: repr(value) for name, value in to_mapping(config).items()})
    first = world().rank == 0
    if first and beside:
        click.echo("learns to predict for new users: cold start", err=True)
    for note in planned.notes if first else ():
        click.echo(note, err=True)
    if first and not beside and named is None and Manifest.load(data).config.get("table"):
        click.echo("learns to predict for new users; --for ranking learns from all rows", err=True)
    resumed = run.resume(config)
    config = _choose(config, data, on_bad, first) if resumed is None else resumed
    with TrainingProgress(None if first else Console(quiet=True)) as progress:
        waiting = run_training(
            config,
            run,
            data,
            progress=progress,
            on_bad=on_bad,
            checkpoint_every=checkpoint_every,
        )
    if first:
        if waiting.elements:
            click.echo(str(waiting), err=True)
        if beside and world().size > 1:
            own = ["--for", "ranking", "--run", str(run.beside.path), "--data", str(source)]
            own += ["--config", str(config_path)] if config_path else []
            own += [word for each in assignments for word in ("--set", each)]
            own += ["--budget", budget] if budget is not None else []
            own += ["--on-bad", on_bad] if on_bad != "raise" else []
            click.echo(f"ranking trains in one process: `{shlex.join(['gmeta', 'train', *own])}`", err=True)
        elif beside:
            _train_beside(shared, run.beside, source, where, on_bad)
        _point_to_evaluate(run.path)


def _train_beside(settings: Mapping[str, Any], run: RunFolder, data: Path, where: str, on_bad: OnBad) -> None:
    """Train for ranking after cold start, unless the data or the folder's contents don't allow it."""
    from gmeta.experiment.ranking.plan import plan_ranking

    click.echo(f"learns to predict for all rows: ranking, in {run.path}", err=True)
    try:
        _train_planned(plan_ranking(settings, data, where, on_bad), run, data)
    except (ConfigError, DataError, NotFiniteError) as error:
        click.echo(f"ranking is left out: {error}", err=True)


def _train_catalogue(
    family: str,
    settings: Mapping[str, Any],
    run: RunFolder,
    data: Path,
    where: str,
    on_bad: OnBad,
    finish: bool,
) -> None:
    """Train; with ``finish``, the process that started the ranks finishes the run."""
    from rich.console import Console

    from gmeta.core.collectives import check_agreement, world
    from gmeta.core.settings import to_mapping
    from gmeta.experiment.next_item.runs import plan_catalogue, train_catalogue
    from gmeta.experiment.runs.all_runs import TrainingProgress
    from gmeta.experiment.runs.run_folder import FAMILIES

    here = world()
    kind: Any = FAMILIES[family]
    planned = plan_catalogue(settings, data, where, on_bad, kind)
    check_agreement({name: repr(value) for name, value in to_mapping(planned.config).items()})
    for note in planned.notes if here.rank == 0 else ():
        click.echo(note, err=True)
    with TrainingProgress(Console(quiet=True) if here.rank else None) as progress:
        train_catalogue(planned.config, run, data, progress=progress, on_bad=on_bad)
    if here.size == 1:
        _point_to_evaluate(run.path)
    elif here.rank == 0 and not finish:
        click.echo(f"trained on {here.size} ranks: {run.path}; now the same command in one process")


def _finish_catalogue(run_path: Path, on_bad: OnBad) -> None:
    """Choose the baselines and fit the blend, in the one process that started the ranks, after they end."""
    file = run_path / "config.json"
    if not file.exists() or parse_json(file.read_text()).get("for") not in ("next-item", "retrieval"):
        return
    from gmeta.experiment.next_item.runs import finish_catalogue
    from gmeta.experiment.runs.all_runs import TrainingProgress
    from gmeta.experiment.runs.run_folder import RunFolder

    with TrainingProgress() as progress:
        finish_catalogue(RunFolder(run_path), say=progress.say, on_bad=on_bad)
    _point_to_evaluate(run_path)


def _point_to_evaluate(run_path: Path) -> None:
    click.echo(f"trained: {run_path}; now `gmeta evaluate --run {run_path}`")


def _train_ranking(
    settings: Mapping[str, Any], run: RunFolder, data: Path, where: str, on_bad: OnBad
) -> None:
    from gmeta.experiment.ranking.plan import plan_ranking

    _train_planned(plan_ranking(settings, data, where, on_bad), run, data)
    _point_to_evaluate(run.path)


def _train_planned(planned: PlannedRanking, run: RunFolder, data: Path) -> None:
    from gmeta.experiment.ranking.runs import train_ranking
    from gmeta.experiment.runs.all_runs import TrainingProgress

    for note in planned.notes:
        click.echo(note, err=True)
    with TrainingProgress() as progress:
        train_ranking(planned.config, run, data, planned.parts, progress=progress)


def _choose(config: ExperimentConfig, data: Path, on_bad: OnBad, first: bool) -> ExperimentConfig:
    """Choose the settings of methods and print them; without the packages of an extra, use the defaults."""
    from gmeta.experiment.plan.experiment_config import budget_seconds

    def say(note: str) -> None:
        if first:
            click.echo(note, err=True)

    if not budget_seconds(config.budget):
        return config
    try:
        from gmeta.experiment.search.trials import choose_settings
    except MissingExtraError as error:
        say(f"settings: the usual ones, because their choice needs a package: {error}")
        return config
    return choose_settings(config, data, say=say, on_bad=on_bad)
