"""``gmeta doctor``: describes the installation and its problems."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
from pathlib import Path

import click

from gmeta.cli import doctor_installation as core
from gmeta.cli.rank_options import ranks_option, start_ranks
from gmeta.core.collectives.place import told_place, under_launcher
from gmeta.core.errors import ConfigError

# How NCCL connects this rank's GPU with others, read from its log, because NCCL has no function for this.

_CHANNEL = re.compile(r"Channel \d+(?:/\d+)? ?: \d+\[\w+\] -> \d+\[\w+\](?: \[\w+\])? via (\S+)")
_NEAREST = re.compile(r"\btype (\w+)/")
_MEANING = {"LOC": "itself", "NVL": "NVLink", "NVB": "NVLink", "C2C": "NVLink C2C"}


def log_nccl() -> None:
    """Make NCCL write its log to a file, unless the user chose another; call this before NCCL is loaded."""
    if "NCCL_DEBUG" in os.environ or "NCCL_DEBUG_FILE" in os.environ:
        return
    folder = tempfile.mkdtemp(prefix="gmeta-nccl-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["NCCL_DEBUG"] = "INFO"
    os.environ["NCCL_DEBUG_SUBSYS"] = "INIT,GRAPH,P2P,SHM,NET"
    os.environ["NCCL_DEBUG_FILE"] = f"{folder}/%p.log"


def read_transports() -> list[str]:
    """Return the transports that this rank's NCCL has logged, such as ``P2P/CUMEM over NVLink``."""
    name = os.environ.get("NCCL_DEBUG_FILE", "").replace("%p", str(os.getpid()))
    path = Path(name)
    return parse_transports(path.read_text(errors="replace")) if name and path.is_file() else []


def parse_transports(log: str) -> list[str]:
    r"""Find the transports in NCCL's log.

    Example:
      >>> parse_transports(
      ...     "NCCL INFO Pattern 4, crossNic 0, nChannels 16, bw 20/20, type NVL/PIX, sameChannels 1\n"
      ...     "NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n"
      ...     "NCCL INFO Channel 01/0 : 0[0] -> 1[1] [send] via NET/Socket/0\n"
      ... )
      ['P2P/CUMEM over NVLink', 'NET/Socket']
    """
    links = {_MEANING.get(kind, f"PCI ({kind})") for kind in _NEAREST.findall(log)}
    found = []
    for way in _CHANNEL.findall(log):
        kind = re.sub(r"/\d+(?=/|$)", "", way)  # the number of the card
        over = f" over {', '.join(sorted(links))}" if kind.startswith("P2P") and links else ""
        found.append(kind + over)
    return list(dict.fromkeys(found))


@click.command("doctor")
@ranks_option
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    help="Also check whether this checkpoint's tables fit in memory; of a folder of them, the latest's.",
)
@click.option(
    "--ssd",
    type=click.Path(path_type=Path),
    help="With --checkpoint: a folder on the drive that would hold the rows that don't fit in memory.",
)
@click.option(
    "--gpu-bytes",
    type=click.IntRange(min=1),
    help="With --checkpoint: the free memory of the GPU that would hold rows; else that of nvidia-smi.",
)
@click.pass_context
def command(
    ctx: click.Context,
    size: int | None,
    checkpoint: Path | None,
    ssd: Path | None,
    gpu_bytes: int | None,
) -> None:
    """Describe this installation and its problems.

    Each line reports one check; a line that starts with BROKEN names a problem, and ends with its remedy. The
    exit code is 1 if anything that gmeta needs is broken.

    With --checkpoint it also shows what each table of a model takes, and whether all fit in host memory, or
    which gmeta.policies.Tiers would fit with the drive of --ssd. With a GPU, or with --gpu-bytes, it also
    shows how many rows fit in the GPU's memory if the others are in host memory. If they fit nowhere, that
    is BROKEN too.

    With --np the command then starts that many ranks; under a launcher it uses the launcher's ranks. On them
    it runs every collective that training uses, checks the results, and prints latency, bandwidth, each
    rank's versions, what connects the ranks, and how tensors in host memory and on GPUs are sent.
    """
    for option, value in (("--ssd", ssd), ("--gpu-bytes", gpu_bytes)):
        if value is not None and checkpoint is None:
            raise ConfigError(
                f"{option} {value} is for the rows of a checkpoint: add --checkpoint FOLDER, or leave it out"
            )
    if checkpoint is not None and (size is not None or under_launcher()):
        raise ConfigError(
            f"--checkpoint {checkpoint} is compared with this machine, and needs no ranks: leave out --np "
            "and the launcher"
        )
    if under_launcher():
        log_nccl()
        start_ranks(size)
        _prove_collectives()
        return
    tables: list[core.Finding] = []
    if checkpoint is not None:
        from gmeta.cli.doctor_memory import examine_tables  # its imports may be broken

        tables = examine_tables(checkpoint, ssd, gpu_bytes)  # before TensorFlow takes memory
    findings = [*core.examine(), *tables]
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

    from gmeta.cli.doctor_probe import measure, ways
    from gmeta.core.collectives import allgather_objects, horovod_version, world
    from gmeta.core.collectives.entry import versions

    found = measure()
    by = "gmeta" if told_place() is not None else f"horovod {horovod_version()}"
    by_rank = allgather_objects({"host": platform.node(), **versions(), "met by": by})
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
