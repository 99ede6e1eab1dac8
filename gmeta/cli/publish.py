"""``gmeta export``, ``gmeta serve``, ``gmeta publish`` and ``gmeta deliver``: models for servers.

``gmeta export`` writes a model that was trained on a prepared data set, and ``gmeta serve`` serves it.
``gmeta train --follow`` (`follow`) trains on a stream and publishes its model with deltas, ``gmeta publish``
publishes such a model later, and ``gmeta deliver`` sends the deltas to servers.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from gmeta.cli.options import refuse_options, run_option, seen_option
from gmeta.core.errors import ConfigError
from gmeta.core.row_formats import RowDtype
from gmeta.core.settings import parse_duration, parse_size

if TYPE_CHECKING:
    from gmeta.export.model_server import ModelServer
    from gmeta.export.saved_model import Exported


@click.command("export")
@run_option
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("serving"),
    show_default=True,
    help="The model's folder, as TensorFlow Serving's --model_base_path names it.",
)
@click.option(
    "--method",
    help="Which method of the run; of a run for next-item, retrieval or ranking, a baseline too.  [default: "
    "for cold start the first; else the best in validation]",
)
@click.option("--seed", type=int, help="Which of its seeds.  [default: the first]")
@click.option(
    "--model-version", type=click.IntRange(1), help="Subfolder of OUT to make.  [default: the next number]"
)
@click.option(
    "--unknown",
    type=click.Choice(["initial", "zeros"]),
    default="initial",
    show_default=True,
    help="What an id reads that was never trained: the row that training would start it with, or zeros.",
)
@click.option(
    "--steps", type=click.IntRange(0), help="Inner steps of `adapt`.  [default: the method's, for serving]"
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16"]),
    default="float32",
    show_default=True,
    help="Of the deltas that `adapt` answers; float16 is half the bytes.",
)
@click.option(
    "--row-dtype",
    type=click.Choice(["float32", "bfloat16", "int8"]),
    default="float32",
    show_default=True,
    help="Of the model's rows: bfloat16 takes half the bytes; int8, with a scale a row, about a quarter.",
)
@click.option(
    "--stale",
    type=click.Choice(["refuse", "apply"]),
    default="refuse",
    show_default=True,
    help="What `predict_with` does with deltas that another version answered.",
)
@click.option(
    "-k",
    "k",
    type=click.IntRange(1),
    default=20,
    show_default=True,
    help="Items of an answer, for next-item and retrieval.",
)
@seen_option
@click.option(
    "--for",
    "server",
    type=click.Choice(["tensorflow-serving", "triton"]),
    default="tensorflow-serving",
    show_default=True,
    help="The server. TensorFlow Serving's form is also that of gmeta serve. For Triton, OUT is a model "
    "repository with a model for each signature, OUT_SIGNATURE.",
)
@click.pass_context
def export_command(
    context: click.Context,
    run_path: Path,
    out: Path,
    method: str | None,
    seed: int | None,
    model_version: int | None,
    unknown: Literal["initial", "zeros"],
    steps: int | None,
    dtype: Literal["float32", "float16"],
    row_dtype: RowDtype,
    stale: Literal["refuse", "apply"],
    k: int,
    seen: bool | None,
    server: Literal["tensorflow-serving", "triton"],
) -> None:
    """Write a trained model as a SavedModel that stock TensorFlow Serving loads.

    The SavedModel has TensorFlow's own ops only. For a run for next-item or retrieval it has one signature,
    `recommend`: it takes histories, a matrix of ids padded with -1, or of the texts that gmeta prepare
    hashed, and returns the likeliest items with their scores, texts and titles. For a run for ranking it
    has one, `predict`: it takes the columns of rows and returns their scores. For a run for cold start it
    has four: `predict` takes the features of samples and predicts with the shared weights; `adapt` takes a
    new task's samples with their labels and returns the adapted weights, as bytes to store, and `adapt_many`
    those of many tasks; `predict_with` takes features and those bytes. Clients send a feature with several
    ids per sample as a matrix whose rows are padded with -1. OUT/VERSION appears whole or not at all.
    """
    from gmeta.experiment.runs.run_folder import RunFolder

    run = RunFolder(run_path)
    refuse_options(context, _OF_FAMILY, run.family)
    common: dict[str, Any] = {"method": method, "seed": seed, "row_dtype": row_dtype}
    write: Callable[..., Exported]
    if run.family == "ranking":
        from gmeta.experiment.ranking.served import export_ranking

        write = partial(export_ranking, run, **common)
    elif run.family in ("next-item", "retrieval"):
        from gmeta.experiment.next_item.served import export_catalogue

        write = partial(
            export_catalogue, run, k=k, leave_out_seen=None if seen is None else not seen, **common
        )
    else:
        from gmeta.experiment.runs.all_runs import export_run

        common |= {"unknown": unknown, "steps": steps, "dtype": dtype, "stale": stale}
        write = partial(export_run, run, **common)
    if server == "tensorflow-serving":
        exported = write(out, version=model_version)
        last = f"exported: {exported.folder}"
    else:
        from gmeta.export.server_files import triton_version, write_triton

        version = model_version or triton_version(out)
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
            exported = write(Path(folder, "model"), version=1)
            names = write_triton(exported.folder, out, version)
        last = f"exported: {out}, version {version} of {', '.join(names)}"
    for signature, inputs in exported.signatures.items():
        click.echo(f"{signature}: {_list(inputs)} -> {_list(exported.answers[signature])}")
    for note in exported.notes:
        click.echo(f"note: {note}")
    click.echo(f"{last}, {exported.rows:,} embedding rows")


def _list(tensors: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {form}" for name, form in tensors.items())


_OF_FAMILY = {
    "cold-start": ("unknown", "steps", "dtype", "stale"),
    "next-item": ("k", "seen"),
    "retrieval": ("k", "seen"),
}
"""Family of runs -> the options that it takes and not every family does."""


def follow(
    source: str,
    run: Path,
    settings: dict[str, Any],
    where: str,
    *,
    publish: str | None,
    metrics_port: str | None,
    until_end: bool,
    start: Path | None,
    on_bad: str,
) -> None:
    """Train on a stream until it ends or a signal comes.

    Args:
      source: The log.
      run: The run's folder.
      settings: The settings of `gmeta.experiment.online.online_model.OnlineConfig` but ``source``.
      where: Where they come from, for errors.
      publish: The folder for servers, or its address.
      metrics_port: The address for Prometheus.
      until_end: Whether to end with the log.
      start: The trained model to begin with; None: a new one.
      on_bad: What a bad row does.
    """
    from gmeta.core.collectives import world
    from gmeta.core.settings import from_mapping
    from gmeta.experiment.online.follow import Following, begin, check_folder, load_config
    from gmeta.experiment.online.online_model import OnlineConfig
    from gmeta.experiment.online.warm_start import OF_THE_RUN, refuse_settings

    check_folder(run)
    if (run / "online.json").exists() and not settings:
        given = replace(load_config(run), source=source, on_bad="raise")
        given = given if start is None else replace(given, start=str(start))
    else:
        if start is not None:
            refuse_settings(settings.keys() & {*OF_THE_RUN})
            settings = {"label": "", **settings, "start": str(start)}
        if "label" not in settings:
            raise ConfigError(
                "--follow needs the column of labels, and usually that of times: --set 'label=\"click\"' "
                "--set 'time=\"ts\"'"
            )
        given = from_mapping(OnlineConfig, {**settings, "source": source}, where)
    given = replace(given, on_bad=on_bad if on_bad != "raise" else given.on_bad)
    config, stream = begin(run, given, follow=not until_end)
    monitor = None
    if metrics_port is not None and world().rank == 0:
        from gmeta.experiment.online.monitor import OnlineMonitor

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
    steps = int(following.model.reading.step)
    show(f"read {rows:,} rows, {steps:,} steps are trained; the same command continues")


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
    metavar="FOLDER",
    default="online",
    show_default=True,
    help="The folder for servers, or its address, such as s3://bucket/prefix.",
)
def command(run_path: Path, folder: str) -> None:
    """Publish the last checkpoint of a run on a stream, as a SavedModel.

    Training publishes by itself with `gmeta train --follow --publish FOLDER`, with deltas in between. This
    command publishes a run that doesn't train now, for example to go back to an earlier run.
    """
    from gmeta.checkpoint import ShardedCheckpoint
    from gmeta.experiment.online.follow import build, load_config
    from gmeta.export import Publisher

    config = load_config(run_path)
    model = build(config, run_path)
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


@click.command("serve")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8500, show_default=True, help="0: any free one."
)
@click.option("--name", help="What clients call the model.  [default: the name of its folder]")
@click.option(
    "--workers",
    type=click.IntRange(1),
    help="Requests that run at a time.  [default: the processor's cores]",
)
@click.option(
    "--threads", type=click.IntRange(1), default=1, show_default=True, help="Threads of one op of a request."
)
@click.option(
    "--max-bytes", default="64MB", show_default=True, metavar="SIZE", help="The most bytes of a request."
)
@click.option(
    "--max-queue", type=click.IntRange(0), default=64, show_default=True, help="The most requests that wait."
)
@click.option(
    "--every", default="1s", show_default=True, metavar="TIME", help="How often to look for a new version."
)
@click.option(
    "--grace", default="30s", show_default=True, metavar="TIME", help="How long the end waits for requests."
)
def serve_command(
    folder: Path,
    host: str,
    port: int,
    name: str | None,
    workers: int | None,
    threads: int,
    max_bytes: str,
    max_queue: int,
    every: str,
    grace: str,
) -> None:
    """Serve an exported model over gRPC, by stock TensorFlow.

    FOLDER is a SavedModel, or a folder of versions whose names are numbers, as `gmeta export` writes it. The
    highest one serves; a new one takes its place once it is loaded and has answered its warm-up requests.
    Clients of TensorFlow Serving's gRPC interface need no change. Ctrl-C or SIGTERM refuses new requests,
    answers those that are there, and ends.
    """
    from gmeta.export.model_server import ModelServer

    most = parse_size(max_bytes, "--max-bytes", least=1 << 20)
    if most >= 1 << 31:
        raise ConfigError(f"--max-bytes must be below 2GiB, the most that gRPC takes, got {max_bytes!r}")
    server = ModelServer(
        folder,
        name=name,
        host=host,
        port=port,
        workers=workers or len(os.sched_getaffinity(0)),
        threads=threads,
        max_bytes=most,
        max_queue=max_queue,
        poll=parse_duration(every, "--every"),
        say=lambda line: click.echo(line, err=True),
    )
    asyncio.run(_until_signal(server, parse_duration(grace, "--grace")))


async def _until_signal(server: ModelServer, grace: float) -> None:
    """Serve until a signal, then end when requests are answered; a second signal ends them."""
    signals: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signals.put_nowait, signal.Signals(number).name)
    await server.start()
    click.echo(f"{await signals.get()}: ends when the requests that are here are answered", err=True)
    stopping, again = asyncio.create_task(server.stop(grace)), asyncio.create_task(signals.get())
    await asyncio.wait({stopping, again}, return_when=asyncio.FIRST_COMPLETED)
    if not stopping.done():
        await server.stop(0)
    left = await stopping
    again.cancel()
    if left:  # Python would wait for the threads that compute their answers
        click.echo(f"{left} requests aren't answered", err=True)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


@click.command("deliver")
@click.option(
    "--from",
    "folder",
    metavar="FOLDER",
    default="online",
    show_default=True,
    help="The folder of a gmeta.export.Publisher, or its address, such as s3://bucket/prefix.",
)
@click.option(
    "--to",
    "urls",
    multiple=True,
    required=True,
    metavar="URL",
    help="A server's model, such as http://host:8501/v1/models/my_model or grpc://host:8500/my_model, or a "
    "store of rows, such as redis://host:6379/prefix or rocksdb:///folder; may be repeated.",
)
@click.option("--follow", is_flag=True, help="Wait for more deltas and for servers, until Ctrl-C.")
@click.option(
    "--every", default="1s", show_default=True, metavar="TIME", help="How often to look for deltas."
)
def deliver_command(folder: str, urls: tuple[str, ...], follow: bool, every: str) -> None:
    """Send servers, and stores of rows, the deltas that they lack.

    A server is TensorFlow Serving, started with `--model_base_path=FROM/model`, over REST or gRPC. Its
    version decides which deltas it gets, so new and restarted servers catch up, and the command stores
    nothing. A store gets the rows of external tables (docs/online.md), and has its version too. One that
    hangs doesn't delay the others. Without --follow, an unreachable server or store is an error, raised
    after all others were served.
    """
    from gmeta.export.delivery import deliver

    versions = deliver(
        folder,
        urls,
        follow=follow,
        every=parse_duration(every, "--every"),
        say=lambda line: click.echo(line, err=True),
    )
    for url, version in versions.items():
        click.echo(f"{url}: version {version}")


_OPTIONS = (
    click.option(
        "--follow",
        "followed",
        metavar="SOURCE",
        help="Train on a stream instead, until stopped: a folder that grows, kafka://host:port/topic or "
        "redis://host:port/stream. Settings by --set: label, time, and those of docs/streams.md.",
    ),
    click.option(
        "--publish",
        metavar="FOLDER",
        help="With --follow: the folder to which deltas for servers are published, or its address, such as "
        "s3://bucket/prefix.",
    ),
    click.option(
        "--metrics-port",
        metavar="[HOST:]PORT",
        help="With --follow: where Prometheus reads counters, on this machine alone unless a host is given.",
    ),
    click.option(
        "--from",
        "start",
        type=click.Path(path_type=Path),
        metavar="RUN[/METHOD]",
        help="With --follow: begin with a trained model of a run for ranking.  [default: a new model]",
    ),
    click.option("--until-end", is_flag=True, help="With --follow: stop at the end of the log."),
)


def follow_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of training on a stream."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def refuse_without_follow(
    source: str | None,
    publish: str | None,
    metrics_port: str | None,
    until_end: bool,
    start: Path | None,
) -> None:
    """Refuse options that only training on a stream reads.

    Raises:
      ConfigError: One is given without ``--follow``.
    """
    given = {
        "--publish": publish is not None,
        "--metrics-port": metrics_port is not None,
        "--until-end": until_end,
        "--from": start is not None,
    }
    for option in [name for name, there in given.items() if there]:
        if source is None:
            raise ConfigError(f"{option} is for training on a stream: give --follow SOURCE, or leave it out")
