"""``gmeta doctor``: says what is installed here, and what is wrong with it."""

from __future__ import annotations

import click

from gmeta.cli import installation as core
from gmeta.cli.nccl_log import log_nccl, read_transports
from gmeta.cli.rank_options import ranks_option, start_ranks
from gmeta.core.collectives.place import under_launcher


@click.command("doctor")
@ranks_option
@click.pass_context
def command(ctx: click.Context, size: int | None) -> None:
    """Say what this installation is and what is wrong with it.

    Each line reports one check; a line that starts with BROKEN names a problem, and ends with its remedy. The
    exit code is 1 if anything that gmeta needs is broken.

    With --np the command then starts that many ranks; under horovodrun it uses horovodrun's ranks. There it
    runs every collective that training uses, checks the results, and prints latency, bandwidth, each rank's
    versions, and how tensors in host memory and on GPUs travel.
    """
    if under_launcher():
        log_nccl()
        start_ranks(size)
        _prove_collectives()
        return
    findings = core.examine()
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        text = f"{finding.value}: {finding.remedy}" if finding.remedy else finding.value
        click.echo(f"{finding.status.value:<6}  {finding.subject:<{width}}  {text}")
    broken = sum(finding.status is core.Status.BROKEN for finding in findings)
    click.echo(f"{broken} broken" if broken else "everything that gmeta needs works")
    if not broken and size is not None:

        def write(rank: int, stream: str, line: str) -> None:
            click.echo(
                line if (rank, stream) == (0, "stdout") else f"[{rank}] {line}", err=stream == "stderr"
            )

        if not start_ranks(size, write=write):
            _prove_collectives()
    ctx.exit(1 if broken else 0)


def _prove_collectives() -> None:
    """Test and time the collectives on every rank; rank 0 prints the results."""
    import platform

    from rich.console import Console
    from rich.table import Table

    from gmeta.core.collectives import allgather_objects, world
    from gmeta.core.collectives.entry import versions
    from gmeta.core.collectives.probe import measure, ways

    found = measure()
    by_rank = allgather_objects({"host": platform.node(), **versions()})
    transports = allgather_objects(read_transports())
    if world().rank != 0:
        return
    places = Table("tensors", "lane", "transport", title="A kilobyte, median of 7, slowest rank")
    for heading in ("ms alltoall", "ms allreduce"):
        places.add_column(heading, justify="right")
    for kilobyte in ways(found):
        seen = dict.fromkeys(each for of_rank in transports for each in of_rank)
        on_gpus = kilobyte.place == "gpu"
        way = f"{kilobyte.way}: {', '.join(seen)}" if on_gpus and seen else kilobyte.way
        name = "on GPUs" if on_gpus else "in host memory"
        places.add_row(name, kilobyte.lane, way, *(f"{1e3 * each:.2f}" for each in kilobyte.seconds))
    here = world()
    title = "Ranks" if here.groups == 1 else f"Ranks, in {here.groups} groups of {here.group_size}"
    ranks = Table("rank", *by_rank[0], title=title)
    for rank, values in enumerate(by_rank):
        ranks.add_row(str(rank), *values.values(), end_section=(rank + 1) % here.group_size == 0)
    table = Table(
        "collective", "tensors", title=f"Collectives on {len(by_rank)} ranks, median of 7, slowest rank"
    )
    for heading in ("bytes a rank", "ms", "MB/s a rank"):
        table.add_column(heading, justify="right")
    for one in found:
        speed = f"{one.bandwidth / 1e6:,.1f}" if one.bytes else ""
        table.add_row(one.collective, one.place, f"{one.bytes:,}", f"{one.seconds * 1e3:.2f}", speed)
    console = Console(width=100)
    console.print(ranks)
    console.print(places)
    console.print(table)
