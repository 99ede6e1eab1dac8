"""``gmeta doctor``: examines an installation and describes its problems.

Every check returns its result as a `Finding` and never raises, so one fault doesn't hide the next.
Checks that need TensorFlow import it themselves, so this module does not.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.metadata
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import click
from packaging.requirements import Requirement

from gmeta.cli.rank_options import ranks_option, start_ranks
from gmeta.core import collectives, native
from gmeta.core.collectives.place import (
    ONE,
    RANKS,
    check_alone,
    choice,
    told_place,
    under_launcher,
    uses_horovod,
)
from gmeta.core.errors import ConfigError, NativeLibraryError
from gmeta.core.terminal import Finding, Status
from gmeta.core.version import DISTRIBUTIONS, WANTED, __version__, find_tensorflow

_REINSTALL = "run `make setup` in a checkout, or `pip install .` in gmeta's source"


def examine() -> list[Finding]:
    """Run all checks, each after the checks that it depends on.

    Returns:
      At least one finding per check; `Status.BROKEN` where gmeta can't work.
    """
    findings = [
        Finding("python", f"{platform.python_version()} on {platform.platform()}"),
        Finding("gmeta", __version__),
        *_requirements(),
    ]
    try:
        import tensorflow as tf
    except Exception as error:  # a broken TensorFlow may raise any error
        return [
            *findings,
            Finding("tensorflow", f"import fails: {error}", Status.BROKEN, _REINSTALL),
            _records_library(),
            _ranks(),
        ]
    return [
        *findings,
        _keras(tf),
        *(_op_library(name) for name in native.LIBRARIES if name != "records"),
        _records_library(),
        _ranks(),
        _remote_paths(),
        _gpus(tf),
    ]


def _requirements() -> Iterator[Finding]:
    """Compare each package that pyproject.toml requires with the installed one."""
    try:
        lines = importlib.metadata.requires("gmeta") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            "packages", "gmeta runs from its source without being installed", Status.NOTE, _REINSTALL
        )
        lines = [*WANTED, "numpy"]
    for requirement in map(Requirement, lines):
        # Extras are optional; their packages carry the marker `extra == "..."`.
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield _requirement(requirement)


def _requirement(requirement: Requirement) -> Finding:
    install = f"pip install '{requirement.name}{requirement.specifier}'"
    version = _version(requirement.name)
    if version is None:
        return Finding(requirement.name, "not installed", Status.BROKEN, install)
    if not requirement.specifier.contains(version, prereleases=True):
        value = f"{version}, but gmeta needs {requirement.specifier}"
        return Finding(requirement.name, value, Status.BROKEN, install)
    return Finding(requirement.name, version)


def _version(name: str) -> str | None:
    """Return the version of a package; for TensorFlow, of whichever distribution is installed."""
    if name == DISTRIBUTIONS[0]:
        found = find_tensorflow()
        return found[1] if found else None
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _keras(tf: ModuleType) -> Finding:
    package = tf.keras.Model.__module__.split(".")[0]  # tf.keras itself is a lazy loader without a name
    value = f"{package} {importlib.metadata.version(package)}"
    if package == "tf_keras":
        return Finding("keras in use", value)
    remedy = "export TF_USE_LEGACY_KERAS=1, or put `import gmeta` above `import tensorflow`"
    return Finding("keras in use", f"{value}, but gmeta needs tf_keras", Status.BROKEN, remedy)


def _library(name: str, load: Callable[[], str]) -> Finding:
    try:
        return Finding(f"library {name}", load())
    except NativeLibraryError as error:  # its message ends with the remedy
        return Finding(f"library {name}", str(error), Status.BROKEN)


def _op_library(name: str) -> Finding:
    def load() -> str:
        native.load_op_library(name)
        info = native.build_info(native.library_path(name))
        cuda = "CUDA" if info["cuda"] == "1" else "no CUDA (GMETA_CUDA=ON make setup compiles its kernels)"
        return f"loads; built against TensorFlow {info['tensorflow']}, compiler {info['compiler']}, {cuda}"

    return _library(name, load)


def _records_library() -> Finding:
    def load() -> str:
        path = native.library_path("records")
        try:
            ctypes.CDLL(str(path))
        except OSError as error:
            raise NativeLibraryError(f"{path} doesn't load: {error}; rebuild it with `make setup`") from error
        return "loads; needs no TensorFlow"

    return _library("records", load)


def _ranks() -> Finding:
    version = collectives.horovod_version()
    try:
        if choice() == ONE:
            return Finding("ranks", f"this process alone, as {RANKS} says")
        check_alone("do the same work")
        used = uses_horovod()
    except ConfigError as error:  # its message ends with the remedy
        return Finding("ranks", str(error), Status.BROKEN)
    if version is None:
        value = "gmeta brings them together and its lanes carry all; Horovod is not installed"
        return Finding(
            "ranks", value, Status.NOTE, f"for horovodrun or mpirun: {collectives.horovod_advice()}"
        )
    if not used:
        return Finding("ranks", f"gmeta brings them together, as {RANKS} says; its lanes carry all")
    try:
        backends = collectives.built_backends()
    except ConfigError as error:
        remedy = f"or do without it: {RANKS}=gmeta"
        return Finding("ranks", str(error), Status.BROKEN, remedy)
    built = ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in backends.items())
    return Finding("ranks", f"Horovod {version} brings them together; backends: {built}")


def _remote_paths() -> Finding:
    from gmeta.io.readers.remote import readable

    by = readable()
    listed = "; ".join(f"{', '.join(f'{name}://' for name in by[each])} by {each}" for each in by if by[each])
    if "fsspec" in by:
        return Finding("remote paths", f"{listed}; others by fsspec")
    return Finding("remote paths", f"{listed}; others need fsspec", Status.NOTE, "pip install fsspec")


def _gpus(tf: ModuleType) -> Finding:
    names = [
        tf.config.experimental.get_device_details(gpu).get("device_name", gpu.name)
        for gpu in tf.config.list_physical_devices("GPU")
    ]
    if names:
        return Finding("gpus", f"{len(names)}: {', '.join(names)}")
    return Finding("gpus", "none that TensorFlow can use; training runs on the CPU")


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
    tables: list[Finding] = []
    if checkpoint is not None:
        from gmeta.cli.doctor_memory import examine_tables  # its imports may be broken

        tables = examine_tables(checkpoint, ssd, gpu_bytes)  # before TensorFlow takes memory
    findings = [*examine(), *tables]
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        text = f"{finding.value}: {finding.remedy}" if finding.remedy else finding.value
        click.echo(f"{finding.status.value:<6}  {finding.subject:<{width}}  {text}")
    broken = sum(finding.status is Status.BROKEN for finding in findings)
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
