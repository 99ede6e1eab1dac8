"""``gmeta tune``: searches for better settings of methods, and writes them as a settings file."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gmeta.cli.options import FAMILY, find_data, on_bad_option, run_option
from gmeta.core.errors import ConfigError

if TYPE_CHECKING:
    from gmeta.experiment.runs.run_folder import RunFolder
    from gmeta.experiment.search.study import Found, Search, Tuned


@click.command("tune")
@run_option
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="A prepared data set.  [default: that of the run, or as for `gmeta train`]",
)
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    help="Settings to begin with, in TOML.  [default: those of the run, or as for `gmeta train`]",
)
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    help="A setting in TOML that replaces the one of --config; may be repeated.",
)
@click.option("--for", "family", type=FAMILY, help="As for `gmeta train`.")
@click.option(
    "--budget",
    default="30m",
    show_default=True,
    metavar="TIME",
    help="How long to search, such as 90s, 30m or 2h; each method gets an equal part.",
)
@click.option("--trials", type=click.IntRange(min=1), help="The most trials of a method in this call.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="The settings file to write.  [default: RUN/tuned.toml]",
)
@on_bad_option
def command(
    run_path: Path,
    data: Path | None,
    config_path: Path | None,
    assignments: tuple[str, ...],
    family: str | None,
    budget: str,
    trials: int | None,
    out: Path | None,
    on_bad: Any,
) -> None:
    """Search for better settings of a run's methods, and write a settings file for `gmeta train`.

    The first trial of a method uses the present settings. Trials train on training data and are measured on
    validation data, never on test data. They are stored in RUN/tune: the same command resumes from there,
    after Ctrl-C too, and a second process with the same command joins the search. Needs
    `pip install 'gmeta[tune,report]'`.
    """
    # Imported here, so that `gmeta tune --help` doesn't wait for TensorFlow; first what names its own extra.
    from gmeta.experiment.search.study import search_settings

    # isort: split
    from rich.console import Console

    from gmeta.core.files import explain_write_errors, write_atomically
    from gmeta.core.settings import override, read_toml, to_mapping
    from gmeta.experiment.plan.experiment_config import budget_seconds
    from gmeta.experiment.ranking.drawn_data import with_negatives
    from gmeta.experiment.runs.run_folder import RunFolder, choose_families
    from gmeta.experiment.search.tunables import FAMILIES

    seconds = budget_seconds(budget)
    if not seconds:
        raise ConfigError(f"--budget {budget}: give a time above 0, such as 30m")
    run = RunFolder(run_path)
    settings = override(read_toml(config_path) if config_path else {}, assignments)
    begun = run.begun
    if begun and not settings and family in (None, run.family):
        family, (config, held) = run.family, run.load()
        data, notes = data or held, tuple[str, ...]()
        kept = {
            name: value for name, value in to_mapping(config).items() if name in _DATA and value is not None
        }
        if family == "cold-start":
            data = with_negatives(kept, data, run, "config", on_bad)
        settings = kept | _given(config, FAMILIES[family].plan(kept, data, "config", on_bad).config)
    else:
        data = data or find_data(run.data)
        where = f"{config_path or 'config'}{' and --set' if assignments else ''}"
        family = choose_families(family, settings, data)[0]
        if family == "cold-start":
            data = with_negatives(settings, data, run, where, on_bad)
        planned = FAMILIES[family].plan(settings, data, where, on_bad)
        config, notes = planned.config, planned.notes
    for note in notes:
        click.echo(note, err=True)
    search = FAMILIES[family].search(config, data, on_bad)
    found = search_settings(
        search, run.path / "tune", seconds=seconds, trials=trials, say=lambda line: click.echo(line, err=True)
    )
    out = out or run.path / "tuned.toml"
    with explain_write_errors(out):
        write_atomically(out, _as_toml(family, settings, search, found))
    console = Console(soft_wrap=False)
    console.print(_table(search, found))
    if found.interrupted:
        click.echo("interrupted: the same command goes on from here", err=True)
    click.echo(f"written: {out}; now `{_next_command(run, data, out, begun)}`")
    if found.interrupted:
        raise KeyboardInterrupt


_DATA = ("item", "label", "protocol", "core", "user", "time", "negatives", "exposed", "binary")
"""The settings of a run by which its data are read."""


def _given(config: Any, planned: Any) -> dict[str, Any]:
    """Return the settings of a run that differ from those that would be chosen without them."""
    from gmeta.core.settings import to_mapping

    usual = to_mapping(planned)
    return {
        key: value
        for key, value in to_mapping(config).items()
        if value != usual[key] and key not in ("methods", "budget", "labels")
    }


def _as_toml(family: str, settings: Mapping[str, Any], search: Search, found: Found) -> str:
    from gmeta.core.settings import to_toml, without_defaults

    others = {key: value for key, value in settings.items() if key not in ("methods", "budget", "for")}
    methods = {each.tunable.name: without_defaults(each.method) for each in found.methods}
    comments = {f"methods.{each.tunable.name}": _describe(each, search) for each in found.methods}
    return "# Written by `gmeta tune`.\n" + to_toml({"for": family, **others, "methods": methods}, comments)


def _describe(tuned: Tuned, search: Search) -> str:
    before, after = (_number(value) for value in (tuned.before, tuned.after))
    kept = "" if tuned.changes else ", so the settings are as before"
    trials = f"{tuned.trials} trial{'s' * (tuned.trials != 1)}"
    return f"{search.measure} in validation: {before} before, {after} the best of {trials}{kept}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _table(search: Search, found: Found) -> Any:
    from rich.table import Table

    table = Table(title=f"{search.measure} in validation", title_justify="left")
    for column in ("method", "before", "best", "trials", "ended early"):
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    table.add_column("settings", overflow="fold")
    for each in found.methods:
        numbers = (_number(each.before), _number(each.after), str(each.trials), str(each.pruned))
        table.add_row(each.tunable.label, *numbers, _outcome(each))
    return table


def _outcome(tuned: Tuned) -> str:
    from gmeta.experiment.search.trials import LEAST_GAIN

    if tuned.changes:
        return "\n".join(tuned.changes)
    if tuned.before is None:
        return f"kept: no trial of them has ended, which takes about {tuned.tunable.seconds:.0f} s"
    other = f"none of {tuned.trials} trials is better by {LEAST_GAIN:.1%}"
    return f"kept: {other if tuned.trials > 1 else 'no other trial has ended'}"


def _next_command(run: RunFolder, data: Path, out: Path, begun: bool) -> str:
    """Return the command that trains with the settings; a run that has started keeps its own."""
    path = run.path.with_name(f"{run.path.name}-tuned") if begun else run.path
    return shlex.join(["gmeta", "train", "--run", str(path), "--data", str(data), "--config", str(out)])
