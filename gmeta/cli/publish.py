"""``gmeta train --follow`` and ``gmeta publish``: training on a stream, and its model for servers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from gmeta.core.errors import ConfigError


def follow(
    source: str,
    run: Path,
    settings: dict[str, Any],
    where: str,
    *,
    publish: Path | None,
    metrics_port: str | None,
    until_end: bool,
) -> None:
    """Train on a stream until it ends or a signal comes.

    Args:
      source: The log.
      run: The run's folder.
      settings: The settings of `gmeta.experiment.online.online_model.OnlineConfig` but ``source``.
      where: Where they come from, for errors.
      publish: The folder for servers.
      metrics_port: The address for Prometheus.
      until_end: Whether to end with the log.
    """
    from gmeta.core.collectives import world
    from gmeta.core.settings import from_mapping
    from gmeta.experiment.online.follow import Following, begin, load_config
    from gmeta.experiment.online.online_model import OnlineConfig

    if (run / "online.json").exists() and not settings:
        given = replace(load_config(run), source=source)
    else:
        if "label" not in settings:
            raise ConfigError(
                "--follow needs the column of labels, and usually that of times: --set 'label=\"click\"' "
                "--set 'time=\"ts\"'"
            )
        given = from_mapping(OnlineConfig, {**settings, "source": source}, where)
    config, stream = begin(run, given, follow=not until_end)
    monitor = None
    if metrics_port is not None and world().rank == 0:
        from gmeta.callbacks.online_monitor import OnlineMonitor

        monitor = OnlineMonitor()
        port = monitor.serve(metrics_port)
        click.echo(f"counters for Prometheus on port {port}", err=True)

    def show(line: str) -> None:
        if world().rank == 0:
            click.echo(line, err=True)

    following = Following(run, config, stream, publish=publish, monitor=monitor, show=show)
    show(f"trains {config.label} on {config.source} by {', '.join(config.features or ())}, in {run}")
    following.train()
    rows = sum(counts.rows for counts in stream.counts)
    show(f"read {rows:,} rows; the same command continues")


@click.command("publish")
@click.option(
    "--run",
    "run_path",
    type=click.Path(path_type=Path),
    required=True,
    help="The run of `gmeta train --follow`.",
)
@click.option(
    "--to",
    "folder",
    type=click.Path(path_type=Path),
    default=Path("online"),
    show_default=True,
    help="The folder for servers.",
)
def command(run_path: Path, folder: Path) -> None:
    """Publish the last checkpoint of a run on a stream, as a SavedModel.

    Training publishes by itself with `gmeta train --follow --publish FOLDER`, with deltas in between. This
    command publishes a run that doesn't train now, for example to go back to an earlier run.
    """
    from gmeta.checkpoint import ShardedCheckpoint
    from gmeta.experiment.online.follow import build, load_config
    from gmeta.export import Publisher

    config = load_config(run_path)
    model = build(config)
    saving = ShardedCheckpoint(run_path / "checkpoints")
    saving.restore(model)
    if not saving.batches:
        raise ConfigError(f"{run_path} has no checkpoint yet: let `gmeta train --follow` save one")
    export = {"signatures": {"predict": model.signature()}}
    publisher = Publisher(model, folder, dtype=config.row_dtype, export=export)
    published = publisher.publish()
    publisher.close()
    if published is not None:
        click.echo(f"{folder}: version {published.version}, {published.rows:,} rows")


_OPTIONS = (
    click.option(
        "--follow",
        "followed",
        metavar="SOURCE",
        help="Train on a stream instead, until stopped: a folder that grows, kafka://host:port/topic or "
        "redis://host:port/stream. Settings by --set: label, time, and those of docs/online.md.",
    ),
    click.option(
        "--publish",
        type=click.Path(path_type=Path),
        help="With --follow: the folder to which deltas for servers are published.",
    ),
    click.option(
        "--metrics-port",
        metavar="[HOST:]PORT",
        help="With --follow: where Prometheus reads counters, on this machine alone unless a host is given.",
    ),
    click.option("--until-end", is_flag=True, help="With --follow: stop at the end of the log."),
)


def follow_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of training on a stream."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def refuse_without_follow(
    source: str | None, publish: Path | None, metrics_port: str | None, until_end: bool
) -> None:
    """Refuse options that only training on a stream reads.

    Raises:
      ConfigError: One is given without ``--follow``.
    """
    given = {
        "--publish": publish is not None,
        "--metrics-port": metrics_port is not None,
        "--until-end": until_end,
    }
    for option in [name for name, there in given.items() if there]:
        if source is None:
            raise ConfigError(f"{option} is for training on a stream: give --follow SOURCE, or leave it out")
