"""``gmeta history``: makes, grows, checks and shows a store of users' histories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from gmeta.cli.options import engine_options, on_bad_option
from gmeta.core.errors import ConfigError
from gmeta.core.group_index import CODECS, Codec
from gmeta.core.schema import OnBad
from gmeta.preprocess.config import Engine
from gmeta.preprocess.history.generation import Generation
from gmeta.preprocess.history.spec import HistorySpec

if TYPE_CHECKING:
    from gmeta.preprocess import TableSpec
    from gmeta.preprocess.history.rebuild import RebuildSummary

# The arguments that the subcommands of ``gmeta history`` share.

store_argument = click.argument("store", type=click.Path(path_type=Path))
generation_option = click.option(
    "--generation", type=int, help="Number of the generation.  [default: the newest]"
)
user_option = click.option("--user", "users", multiple=True, help="A user; may be repeated.")
users_option = click.option(
    "--users", "users_file", type=click.File(), help="A file with a user in each line; `-` is the input."
)


def find_users(store: Path, users: Sequence[str], users_file: TextIO | None) -> list[int]:
    """Return the numbers by which a store identifies the users that the two options name.

    Raises:
      ConfigError: The store's users are numbers, and a given user isn't.
      DataError: There is no store.
    """
    spec = HistorySpec.from_json(Generation(store).manifest.spec)
    lines = [] if users_file is None else users_file.read().splitlines()
    return [spec.user_number(each.strip()) for each in (*users, *lines) if each.strip()]


# Subcommands of ``gmeta history`` that change a store.


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

    The first append needs --user and --time, or a --spec; later ones read columns as the first one did. A
    prepared data set also works as events; its rows need neither option.
    """
    from gmeta.cli.prepare import PrepareProgress, parse_settings, refuse_foreign
    from gmeta.preprocess.history.append import append_history
    from gmeta.preprocess.history.cluster_append import append_history_on_spark
    from gmeta.preprocess.history.streaming_append import plan_jobs
    from gmeta.preprocess.local.duckdb_engine import parse_bytes

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
    """Make a new store's spec from its file and the options, which override it; None without either."""
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
    """Rewrite all events as the next generation, so that one read returns a history.

    Histories don't change, unless --start shortens them. Earlier generations stay until `drop` removes them.
    """
    from gmeta.cli.prepare import PrepareProgress
    from gmeta.preprocess import HistorySpec
    from gmeta.preprocess.history.rebuild import compact_history

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
    from gmeta.cli.prepare import PrepareProgress
    from gmeta.preprocess.history.generation import generations
    from gmeta.preprocess.history.rebuild import scrub_history

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
    """Remove generations that no other generation reads."""
    from gmeta.preprocess.history.example_sets import drop_generations

    drop_generations(store, generations)
    click.echo(f"removed generation {', '.join(map(str, sorted(set(generations))))} of {store}")


def _say(done: RebuildSummary) -> None:
    less = f", {done.events_before - done.events:,} fewer" if done.events < done.events_before else ""
    click.echo(
        f"generation {done.generation}: {done.events:,} events{less} in {done.stripes:,} stripes, which were "
        f"{done.stripes_before:,}; {done.bytes:,} bytes, in {done.seconds:.1f} s"
    )


# ``gmeta history examples``: makes sets of examples that point into a store, and lists them.


@click.command()
@store_argument
@click.option(
    "--data",
    multiple=True,
    help="Exposures, as CSV, Parquet or JSON lines: a file, a folder or a pattern; may be repeated.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Folder to make.")
@click.option(
    "--spec", "spec_file", type=click.Path(path_type=Path), help="TOML file, as of `gmeta prepare`."
)
@click.option("--user", help="Column of users.")
@click.option("--time", help="Column of times, in the store's unit.")
@click.option("--label", help="Column to predict.")
@click.option("--longest", type=int, help="Most events of a history.  [default: 1000]")
@click.option(
    "--check",
    type=click.Choice(["length", "crc", "none"]),
    help="What examples keep of a history, to compare it with: its length, a checksum too, or nothing.  "
    "[default: length]",
)
@click.option(
    "--columns", help="With --check crc: the history's columns, with commas, in the reader's order."
)
@click.option("--generation", help="Column with the generation that was read.  [default: the newest now]")
@click.option("--name", help="The set's name in the store.  [default: the folder's]")
@click.option("--batch-rows", type=int, help="Exposures of a record.  [default: all of a user's]")
@click.option("--shards", type=int, help="Files.  [default: 2]")
@click.option("--codec", type=click.Choice(CODECS), help="Compress each record.")
@on_bad_option
@click.option("--overwrite", is_flag=True, help="Replace a data set that was made otherwise.")
@click.option("--memory-limit", help="Memory to keep to, such as 2GB.  [default: half of what there is]")
@click.option("--remove", metavar="NAME", help="Unregister a set; its folder stays.")
def examples(store: Path, data: tuple[str, ...], remove: str | None, **options: Any) -> None:
    """Make a set of examples that point into a store, or list the existing ones.

    With --data, exposures become a data set for `gmeta.io.late`. An example names the generation that it
    reads, and the store keeps that generation until --remove unregisters the set. With neither option, the
    command lists the registered sets.
    """
    if not data or remove is not None:
        given = {"on_bad": "raise", "overwrite": False}
        foreign = [name for name, value in options.items() if value != given.get(name)]
        if data or foreign:
            option = "data" if data else foreign[0].removesuffix("_file").replace("_", "-")
            why = "doesn't go with --remove" if remove is not None else "is of a new set: name its --data too"
            raise ConfigError(f"--{option} {why}")
        _remove(store, remove) if remove is not None else _list(store)
        return
    _make(store, data, **options)


def _make(
    store: Path,
    data: tuple[str, ...],
    *,
    out: Path | None,
    spec_file: Path | None,
    user: str | None,
    time: str | None,
    label: str | None,
    columns: str | None,
    batch_rows: int | None,
    shards: int | None,
    codec: Codec | None,
    on_bad: OnBad,
    overwrite: bool,
    memory_limit: str | None,
    **pointers: Any,
) -> None:
    from gmeta.cli.prepare import PrepareProgress, print_summary
    from gmeta.preprocess import PrepareConfig
    from gmeta.preprocess.history.example_writer import history_examples
    from gmeta.preprocess.local.duckdb_engine import parse_bytes

    if out is None:
        raise ConfigError("name the folder to make, with --out")
    config = PrepareConfig(batch_rows=batch_rows, codec=codec)
    with PrepareProgress() as progress:
        done = history_examples(
            store,
            data,
            out,
            _example_spec(spec_file, user, time, label),
            config if shards is None else replace(config, shards=shards),
            on_bad,
            columns=() if columns is None else [name.strip() for name in columns.split(",")],
            overwrite=overwrite,
            memory_limit=None if memory_limit is None else parse_bytes(memory_limit),
            progress=progress,
            **{name: value for name, value in pointers.items() if value is not None},
        )
    print_summary(done.prepared)
    if done.empty:
        click.echo(
            f"{done.empty:,} of {done.prepared.rows_read:,} rows have no event in the store before them"
        )
    click.echo(
        f"{done.bytes / max(done.prepared.rows, 1):.1f} bytes a row; registered in {store} as "
        f"{done.examples.name!r}, which keeps {_generations(done.examples.generations)}"
    )


def _example_spec(path: Path | None, user: str | None, time: str | None, label: str | None) -> TableSpec:
    from gmeta.preprocess import TableSpec

    given: dict[str, Any] = {"task": user, "time": time, "label": label}
    own = {name: value for name, value in given.items() if value is not None}
    if path is not None:
        return replace(TableSpec.load(path), **own)
    if user is None or time is None:
        raise ConfigError("name the columns of users and times, with --user and --time, or a --spec")
    return TableSpec(**own)


def _list(store: Path) -> None:
    from gmeta.preprocess.history.example_sets import list_examples

    found = list_examples(store)
    if not found:
        click.echo(f"{store} has no sets of examples")
    for each in found:
        gone = "" if each.exists else ", which isn't there"
        click.echo(
            f"{each.name}: {each.rows:,} rows at {each.folder}{gone}; keeps "
            f"{_generations(each.generations)}, longest {each.longest:,}"
        )


def _remove(store: Path, name: str) -> None:
    from gmeta.preprocess.history.example_sets import remove_examples

    remove_examples(store, name)
    click.echo(f"unregistered {name!r} from {store}")


def _generations(numbers: tuple[int, ...]) -> str:
    if len(numbers) > 8:
        return f"{len(numbers)} generations from {numbers[0]} to {numbers[-1]}"
    return f"generation{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


# Subcommands of ``gmeta history`` that read a store.


@click.command()
@store_argument
@generation_option
def verify(store: Path, generation: int | None) -> None:
    """Read all of a generation and compare it with its checksums; exit with 1 if it is damaged.

    The command first finishes a deletion that a killed process began. It names files that can't be removed
    or don't belong to the store, and then exits with 1 too. It also checks that the registered sets of
    examples, and the generations that they read, exist unchanged.
    """
    from gmeta.preprocess.history.example_sets import find_faults
    from gmeta.preprocess.history.reading import verify_history

    found = verify_history(store, generation)
    examples = list(find_faults(store))
    for fault in found.faults:
        click.echo(f"damaged: {fault}")
    click.echo(
        f"generation {found.generation}: {found.stripes:,} stripes with {found.events:,} events, "
        f"{len(found.faults):,} of them damaged"
    )
    for line in (*found.left, *found.uncommitted):
        click.echo(f"left: {line}")
    for fault in examples:
        click.echo(f"not as registered: {fault}")
    click.get_current_context().exit(1 if found.faults or found.left or examples else 0)


@click.command()
@store_argument
@click.option("--user", required=True, help="The user.")
@click.option("--until", type=int, help="Show only events before this time.")
@click.option("--longest", default=20, show_default=True, help="Most events, the newest.")
@click.option(
    "--texts",
    "data",
    type=click.Path(path_type=Path),
    help="A prepared data set with columns of the same names, whose texts and titles are shown for numbers.",
)
@generation_option
def show(
    store: Path, user: str, until: int | None, longest: int, data: Path | None, generation: int | None
) -> None:
    """Print a user's history, oldest event first, as the store or one of its generations holds it.

    A store keeps only hashes of text; --texts reads the texts from the data set of the same events.
    """
    from gmeta.core.data_manifest import Texts
    from gmeta.core.history_manifest import BIRTH
    from gmeta.preprocess import HistorySpec
    from gmeta.preprocess.history.generation import Generation, settle_or_warn
    from gmeta.preprocess.history.reading import read_histories

    settle_or_warn(store)
    opened = Generation(store)
    texts = None if data is None else Texts.of(data)
    if longest < 0:
        raise ConfigError(f"--longest must be 0 or more, got {longest}")
    number = HistorySpec.from_json(opened.manifest.spec).user_number(user)
    if opened.is_deleted(number, generation):
        click.echo(f"events of user {user} were deleted")
    for group, columns in opened.manifest.groups.items():
        names = [opened.manifest.spec["time"], BIRTH, *(column.name for column in columns)]
        found = read_histories(
            opened, [number], names, until=until, generation=generation, longest=longest
        ).columns
        shown = [
            texts.name(name, found[name]) if texts and texts.kinds(name) else found[name] for name in names
        ]
        rows = zip(*shown, strict=True)
        click.echo(f"{group}: {len(found[BIRTH]):,} events")
        for row in [names, *rows]:
            click.echo("  ".join(f"{value!s:>12}" for value in row))


@click.command("export")
@store_argument
@click.argument("out", type=click.Path(path_type=Path))
@generation_option
@click.option("--until", type=int, help="Write only events before this time.")
@user_option
@users_option
def export_events(
    store: Path,
    out: Path,
    generation: int | None,
    until: int | None,
    users: tuple[str, ...],
    users_file: TextIO | None,
) -> None:
    """Write events as Parquet into the folder OUT, which appears whole or not at all.

    OUT holds a file for each shard that has events, and a spec with which `append` reads the files. With
    --user or --users, the command writes only the events of these users.
    """
    from gmeta.cli.prepare import PrepareProgress
    from gmeta.preprocess.history.reading import export_history

    named = find_users(store, users, users_file) if users or users_file else None
    with PrepareProgress() as progress:
        done = export_history(store, out, generation=generation, until=until, users=named, progress=progress)
    absent = f"; {done.absent:,} of the requested users have none" if done.absent else ""
    click.echo(
        f"generation {done.generation}: {done.events:,} events of {done.users:,} users in {done.files:,} "
        f"files, {done.bytes:,} bytes, in {done.seconds:.1f} s{absent}"
    )


__all__ = ["command"]


@click.group("history")
def command() -> None:
    """Keep users' histories in a store, and show them.

    A store is a folder of generations. Each append adds one and leaves those before it unchanged, so the
    state of a history at any time can be rebuilt.
    """


for each in (
    *(append, compact, scrub, drop),
    examples,
    *(verify, show, export_events),
):
    command.add_command(each)
