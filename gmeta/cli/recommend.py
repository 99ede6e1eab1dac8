"""``gmeta recommend``: writes the likeliest items of users."""

from __future__ import annotations

from pathlib import Path

import click

from gmeta.cli.options import run_option, seen_option
from gmeta.cli.rank_options import ranks_option, start_apart
from gmeta.core.errors import ConfigError


@click.command("recommend")
@run_option
@click.option(
    "--users",
    "users_path",
    type=click.Path(path_type=Path),
    help="A text file with a user in each line, or a Parquet file whose first column has the users: ids, or "
    "the texts that gmeta prepare hashed.  [default: all users of the data set]",
)
@click.option("-k", "k", type=click.IntRange(1), default=20, show_default=True, help="Items of each user.")
@click.option("--method", help="Which method or baseline of the run.  [default: the best in validation]")
@click.option("--seed", type=int, help="Which of its seeds.  [default: the first]")
@seen_option
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("top.parquet"),
    show_default=True,
    help="The Parquet file to write.",
)
@click.option(
    "--users-per-part",
    type=click.IntRange(1),
    default=4096,
    show_default=True,
    help="Users in a file of the folder OUT.parts, whose files are joined in the end.",
)
@ranks_option
def command(
    run_path: Path,
    users_path: Path | None,
    k: int,
    method: str | None,
    seed: int | None,
    seen: bool | None,
    out: Path,
    users_per_part: int,
    size: int | None,
) -> None:
    """Write the likeliest items of users, from all their rows in the data set.

    The Parquet file has a row for each user: its id, in a column named as in the data set; items, a list of
    ids, the likeliest first; and scores. If the data set keeps texts, the user's text and the items' texts
    and titles follow. The file appears whole or not at all. After an interruption the same command
    continues with the parts in OUT.parts. With --np, ranks divide the parts among them.
    """
    place = start_apart(size)
    from gmeta.experiment.next_item.recommendations import join_recommendations, write_recommendations
    from gmeta.experiment.runs.run_folder import RunFolder

    if place is None:  # the ranks that this call started are done
        click.echo(f"{join_recommendations(out):,} users: {out}")
        return
    run = RunFolder(run_path)
    if run.family not in ("next-item", "retrieval"):
        raise ConfigError(
            f"{run_path} is a run of {run.family}: train one with gmeta train --for next-item or retrieval"
        )
    name, users = write_recommendations(
        run,
        out,
        users=users_path,
        k=k,
        method=method,
        seed=seed,
        leave_out_seen=None if seen is None else not seen,
        users_per_part=users_per_part,
        place=place,
    )
    if place.size == 1:
        click.echo(f"{users:,} users, by {name}: {out}")
    else:
        click.echo(f"{users:,} users, by {name}, in {out}.parts")
        if size is None and place.rank == 0:
            click.echo(f"when all {place.size} ranks are done, the same command in one process writes {out}")
