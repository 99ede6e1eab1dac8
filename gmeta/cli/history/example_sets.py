"""``gmeta history examples``: makes sets of examples that point into a store, and says which there are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gmeta.cli.history.store_options import store_argument
from gmeta.cli.options import on_bad_option
from gmeta.core.data.group_index import CODECS, Codec
from gmeta.core.data.on_bad import OnBad
from gmeta.core.errors import ConfigError

if TYPE_CHECKING:
    from gmeta.preprocess import TableSpec


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
    """Make a set of examples that point into a store, or list those that there are.

    With --data, exposures become a data set for `gmeta.io.late`. An example names the generation that it
    reads, and the store keeps that generation until the set is unregistered with --remove. With neither, the
    registered sets are listed.
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
    from gmeta.cli.prepare_output import PrepareProgress, print_summary
    from gmeta.preprocess import PrepareConfig, history_examples
    from gmeta.preprocess.local.memory import parse_bytes

    if out is None:
        raise ConfigError("name the folder to make, with --out")
    config = PrepareConfig(batch_rows=batch_rows, codec=codec)
    with PrepareProgress() as progress:
        done = history_examples(
            store,
            data,
            out,
            _spec(spec_file, user, time, label),
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


def _spec(path: Path | None, user: str | None, time: str | None, label: str | None) -> TableSpec:
    from gmeta.preprocess import TableSpec

    given: dict[str, Any] = {"task": user, "time": time, "label": label}
    own = {name: value for name, value in given.items() if value is not None}
    if path is not None:
        return replace(TableSpec.load(path), **own)
    if user is None or time is None:
        raise ConfigError("name the columns of users and times, with --user and --time, or a --spec")
    return TableSpec(**own)


def _list(store: Path) -> None:
    from gmeta.preprocess import list_examples

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
    from gmeta.preprocess import remove_examples

    remove_examples(store, name)
    click.echo(f"unregistered {name!r} from {store}")


def _generations(numbers: tuple[int, ...]) -> str:
    if len(numbers) > 8:
        return f"{len(numbers)} generations from {numbers[0]} to {numbers[-1]}"
    return f"generation{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
