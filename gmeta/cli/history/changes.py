"""Subcommands of ``gmeta history`` that change a store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from gmeta.cli.history.store_options import find_users, store_argument, user_option, users_option
from gmeta.cli.options import engine_options, on_bad_option
from gmeta.core.data.on_bad import OnBad
from gmeta.core.errors import ConfigError
from gmeta.preprocess.config import Engine
from gmeta.preprocess.history.spec import HistorySpec

if TYPE_CHECKING:
    from gmeta.preprocess import RebuildSummary


@click.command()
@store_argument
@click.option(
    "--data",
    multiple=True,
    required=True,
    help="CSV, Parquet or JSON lines: a file, a folder or a pattern; or a prepared data set, or a split "
    "of it. May be repeated.",
)
@click.option("--spec", "spec_file", type=click.Path(path_type=Path), help="TOML file: columns and groups.")
@click.option("--user", help="Column of users.")
@click.option("--time", help="Column of times.")
@click.option("--shards", type=int, help="Files of a generation.  [default: 16]")
@click.option("--watermark", type=int, help="Time before which all has arrived.  [default: the latest event]")
@on_bad_option
@click.option("--memory-limit", help="Memory for reading, such as 2GB.  [default: half of what there is]")
@engine_options
def append(
    store: Path,
    data: tuple[str, ...],
    spec_file: Path | None,
    user: str | None,
    time: str | None,
    shards: int | None,
    watermark: int | None,
    on_bad: OnBad,
    memory_limit: str | None,
    engine: Engine,
    job: Path | None,
    spark_master: str | None,
    spark_conf: tuple[str, ...],
) -> None:
    """Add events to a store, as its next generation; the first append makes the store.

    The first append needs --user and --time, or a --spec; later ones read columns as the first one did. The
    rows of a prepared data set are events too, and it knows these two itself.
    """
    from gmeta.cli.prepare_jobs import parse_settings, refuse_foreign
    from gmeta.cli.prepare_output import PrepareProgress
    from gmeta.preprocess import append_history, append_history_on_spark
    from gmeta.preprocess.history.cluster.streaming_append import plan_jobs
    from gmeta.preprocess.local.memory import parse_bytes

    refuse_foreign(
        engine, memory_limit=memory_limit, job=job, spark_master=spark_master, spark_conf=spark_conf
    )
    spec = _spec(data, spec_file, user=user, time=time, shards=shards)
    limit = None if memory_limit is None else parse_bytes(memory_limit)
    given: dict[str, Any] = {"watermark": watermark, "on_bad": on_bad}
    if engine == "streaming":
        if job is None:
            raise ConfigError("--engine streaming needs --job, a folder for the job")
        plan = plan_jobs(job, store, data, spec, **given)
        click.echo(
            f"{job}: files {len(plan.files)}, shards {plan.plan.spec.shards}; run the job "
            f"(docs/histories.md), then: gmeta-append finish --job {job}"
        )
        return
    with PrepareProgress() as progress:
        if engine == "spark":
            conf = parse_settings(spark_conf)
            done = append_history_on_spark(
                store, data, spec, master=spark_master, conf=conf, progress=progress, **given
            )
        else:
            done = append_history(store, data, spec, memory_limit=limit, progress=progress, **given)
    left_out = f", {done.left_out:,} bad records left out" if done.left_out else ""
    click.echo(
        f"generation {done.generation}: {done.events:,} events in {done.seconds:.1f} s{left_out}\n"
        f"wrote {done.bytes:,} bytes of events and {done.index_bytes:,} of index; watermark "
        f"{done.watermark}\n{store} has {done.total_events:,} events of {done.users:,} users"
    )


def _spec(data: Sequence[str], path: Path | None, **options: Any) -> HistorySpec | None:
    """Make the spec of a new store from its file and the options, which override it; None: there is none."""
    from gmeta.preprocess.tables.prepared_source import is_prepared

    own = {name: value for name, value in options.items() if value is not None}
    if path is not None:
        return replace(HistorySpec.load(path), **own)
    if own and is_prepared(data[0]) and not {"user", "time"} <= own.keys():
        return HistorySpec.of_prepared(data[0], **own)
    if not own or {"user", "time"} <= own.keys():
        return HistorySpec(**own) if own else None
    raise ConfigError(f"--{next(iter(own))} is of a new store, which needs --user and --time too")


@click.command()
@store_argument
@click.option("--start", type=int, help="Leave out events before this time.  [default: keep all]")
@click.option(
    "--spec",
    "spec_file",
    type=click.Path(path_type=Path),
    help="TOML file: other columns, groups or shards.  [default: the store's]",
)
def compact(store: Path, start: int | None, spec_file: Path | None) -> None:
    """Write all events anew, as the next generation, so that each history is one read.

    No history changes, unless --start shortens it, and earlier generations stay; `drop` removes them.
    """
    from gmeta.cli.prepare_output import PrepareProgress
    from gmeta.preprocess import HistorySpec, compact_history

    spec = None if spec_file is None else HistorySpec.load(spec_file)
    with PrepareProgress() as progress:
        done = compact_history(store, start=start, spec=spec, progress=progress)
    _say(done)


@click.command()
@store_argument
@user_option
@users_option
def scrub(store: Path, users: tuple[str, ...], users_file: TextIO | None) -> None:
    """Delete all events of users: write the next generation without them.

    Earlier generations still hold these events until `drop` removes them.
    """
    from gmeta.cli.prepare_output import PrepareProgress
    from gmeta.preprocess import scrub_history
    from gmeta.preprocess.history.files.generation import generations

    named = find_users(store, users, users_file)
    if not named:
        raise ConfigError("no user is named: pass --user, or --users with a file")
    with PrepareProgress() as progress:
        done = scrub_history(store, named, progress=progress)
    _say(done)
    earlier = " ".join(str(number) for number in generations(store)[:-1])
    click.echo(
        f"{done.events_before - done.events:,} events of {done.deleted:,} users are deleted; "
        f"earlier generations still hold them: gmeta history drop {store} {earlier}"
    )


@click.command()
@store_argument
@click.argument("generations", type=int, nargs=-1, required=True)
def drop(store: Path, generations: tuple[int, ...]) -> None:
    """Remove generations that no other one reads."""
    from gmeta.preprocess import drop_generations

    drop_generations(store, generations)
    click.echo(f"removed generation {', '.join(map(str, sorted(set(generations))))} of {store}")


def _say(done: RebuildSummary) -> None:
    less = f", {done.events_before - done.events:,} fewer" if done.events < done.events_before else ""
    click.echo(
        f"generation {done.generation}: {done.events:,} events{less} in {done.stripes:,} stripes, which were "
        f"{done.stripes_before:,}; {done.bytes:,} bytes, in {done.seconds:.1f} s"
    )
