"""Other processes of a job: its ranks, and workers that read data.

The options ``--np`` and ``--elastic`` run a command on several ranks, and ``gmeta launch`` runs a program on
them. ``gmeta workers`` reads data for processes that train.
"""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import click

from gmeta.core.collectives.place import RankPlace, check_alone, launched_size, under_launcher
from gmeta.core.errors import ConfigError
from gmeta.core.launcher.elastic_ranks import launch_elastic
from gmeta.core.launcher.local_ranks import Write, launch
from gmeta.core.launcher.meeting import parse_hosts
from gmeta.core.launcher.rank_processes import SSH, module_command
from gmeta.core.shares import total_shares

Function = TypeVar("Function", bound=Callable[..., Any])

ranks_option = click.option(
    "--np",
    "size",
    type=click.IntRange(min=1),
    help="Start this many ranks on this machine; over several machines `gmeta launch --hosts` or `horovodrun "
    "-H` starts the command.",
)


@dataclass(frozen=True)
class Elastic:
    """How the number of ranks may vary.

    Attributes:
      min_size: The least number of ranks.
      script: As in `gmeta.core.launcher.elastic_ranks.launch_elastic`.
    """

    min_size: int = 1
    script: str | None = None


def elastic_options(command: Function) -> Function:
    """Add ``--elastic``, ``--min-np`` and ``--host-discovery-script`` to a command, for `elastic_of`."""
    options = (
        click.option(
            "--elastic",
            is_flag=True,
            help="When a rank is lost, resume from the last checkpoint with those left, and with more "
            "when there is room again. A step's data stays that of --np ranks.",
        ),
        click.option(
            "--min-np", type=click.IntRange(min=1), help="End an elastic job with fewer ranks.  [default: 1]"
        ),
        click.option(
            "--host-discovery-script",
            "script",
            metavar="COMMAND",
            help="Prints lines HOST:SLOTS, for how many ranks there is room; asked every second, as "
            "horovodrun's. Without --hosts the host is localhost.  [default: always for --np]",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def elastic_of(size: int | None, elastic: bool, min_np: int | None, script: str | None) -> Elastic | None:
    """Read the elastic options; return None without ``--elastic``.

    Raises:
      ConfigError: An option needs another one that is missing.
    """
    if elastic and size is None and not under_launcher():
        raise ConfigError(
            "--elastic needs --np, the number of ranks to begin with and the most there will be"
        )
    if elastic:
        return Elastic(min_np or 1, script)
    for name, value in (("--min-np", min_np), ("--host-discovery-script", script)):
        if value is not None:
            raise ConfigError(
                f"{name} {value} defines how an elastic job varies: add --elastic, or leave it out"
            )
    return None


def start_ranks(size: int | None, *, elastic: Elastic | None = None, write: Write | None = None) -> bool:
    """Run this process's own command line as `size` ranks, and wait for them.

    The ranks get the same arguments, including ``--np``. In a rank, and without ``--np``, this function only
    calls `gmeta.core.collectives.init`, which does nothing without a launcher. So a command calls this
    function first, and returns if it was the launcher.

    Args:
      size: The value of ``--np``.
      elastic: Whether and how the number of ranks varies.
      write: As in `gmeta.core.launcher.local_ranks.launch`.

    Returns:
      Whether this call started ranks, all of which have succeeded.

    Raises:
      RanksError: A rank failed, and the job can't continue.
      ConfigError: The launcher started a different number of ranks than `size`; or as in `init`.
    """
    if _run_as_ranks(size, elastic, write):
        return True
    from gmeta.core.collectives import init  # imports TensorFlow only if there are other ranks

    init()
    return False


def start_apart(size: int | None) -> RankPlace | None:
    """Run this process's own command line as `size` processes that divide its work, and wait for them.

    Like `start_ranks`, but the processes exchange nothing: each is a world of one rank, which holds all rows
    of its models' tables and works at its own pace. If one fails, the others are stopped.

    Args:
      size: The value of ``--np``.

    Returns:
      This process's place among those that divide the work; None if this call started them and all
      succeeded.

    Raises:
      RanksError: One of them failed.
      ConfigError: The launcher started a different number than `size`, or doesn't state this process's place.
    """
    if _run_as_ranks(size):
        return None
    from gmeta.core.collectives.entry import init_apart

    return init_apart()


def _run_as_ranks(size: int | None, elastic: Elastic | None = None, write: Write | None = None) -> bool:
    """Run the command line as ranks unless this process is one of them, or ``--np`` asks for only one."""
    if under_launcher():
        launched = total_shares(launched_size())  # an elastic job has at most this many
        if size is not None and size != launched:
            raise ConfigError(f"--np {size}, but the launcher started {launched} ranks; leave --np out")
    elif size is not None and (size > 1 or elastic is not None):
        check_alone("start a job of its own")
        run_ranks(module_command("gmeta", *sys.argv[1:]), size, elastic=elastic, write=write)
        return True
    return False


def run_ranks(
    command: Sequence[str],
    size: int,
    *,
    elastic: Elastic | None = None,
    write: Write | None = None,
    **over: Any,
) -> None:
    """Run a command as ranks, which end with this process, even if a scheduler stops it.

    Args:
      command: The program and its arguments.
      size: The number of ranks.
      elastic: Whether and how the number of ranks varies.
      write: As in `gmeta.core.launcher.local_ranks.launch`.
      **over: ``hosts`` and ``ssh``, as for that function.

    Raises:
      RanksError: As in `start_ranks`.
      ConfigError: As in `gmeta.core.launcher.local_ranks.launch`.
    """
    before = signal.signal(signal.SIGTERM, _end)
    try:
        if elastic is None:
            launch(command, size, write=write, **over)
        else:
            least, script = elastic.min_size, elastic.script
            launch_elastic(command, size, min_size=least, script=script, write=write, **over)
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(number: int, frame: FrameType | None) -> Any:
    raise SystemExit(128 + number)


@click.command("launch", context_settings={"allow_interspersed_args": False})
@click.option(
    "--np", "size", type=click.IntRange(min=1), help="How many ranks.  [default: as many as hosts have room]"
)
@click.option(
    "--hosts",
    metavar="HOST:SLOTS,...",
    help="Start ranks on these machines by ssh, in the same folder, with the same environment and Python.",
)
@click.option(
    "--ssh",
    envvar="GMETA_SSH",
    metavar="COMMAND",
    help="With --hosts: the program that runs a command on a machine, such as 'ssh -p 2222'.  "
    f"[default: GMETA_SSH, or {shlex.join(SSH)}]",
)
@elastic_options
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def launch_command(
    ctx: click.Context,
    size: int | None,
    hosts: str | None,
    ssh: str | None,
    elastic: bool,
    min_np: int | None,
    script: str | None,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND, such as `python train.py`, as the ranks of a job on this machine, or on --hosts.

    The program must call gmeta.init(). An elastic program trains with
    gmeta.checkpoint.ShardedCheckpoint(...).fit, which continues from the last checkpoint.

    Ranks of this machine communicate through Horovod if it is installed, unless GMETA_RANKS=gmeta. Ranks of
    --hosts don't use Horovod.
    """
    check_alone("start a job of its own")
    if under_launcher():
        raise ConfigError(
            f"this is one of {launched_size()} ranks already; call gmeta launch outside of them"
        )
    if hosts is None:
        if ssh is not None and ctx.get_parameter_source("ssh") is click.core.ParameterSource.COMMANDLINE:
            raise ConfigError(f"--ssh {ssh!r} is for other machines: add --hosts, or leave it out")
        if size is None:
            raise ConfigError("give --np, the number of ranks, or --hosts, the machines")
        run_ranks(command, size, elastic=elastic_of(size, elastic, min_np, script))
        return
    machines = parse_hosts(hosts)
    room = sum(host.slots for host in machines)
    size = room if size is None else size
    over = SSH if ssh is None else tuple(shlex.split(ssh))
    varies = elastic_of(size, elastic, min_np, script)
    run_ranks(command, size, elastic=varies, hosts=machines, ssh=over)


@click.command("workers")
@click.argument("folder", required=False, type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Where to listen; 127.0.0.1: for processes of this machine; 0.0.0.0: at all its addresses, and it "
    "is announced by its name.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    show_default=True,
    help="The port; 0: any that is free.",
)
@click.option(
    "--idle",
    type=click.FloatRange(min=0, min_open=True),
    help="End after so many seconds without readers.",
)
@click.option(
    "--path",
    "paths",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, resolve_path=True),
    help="A folder with modules that the function imports, searched after those installed; may be repeated.",
)
def workers_command(
    folder: Path | None, host: str, port: int, idle: float | None, paths: tuple[str, ...]
) -> None:
    """Read data for processes that train with gmeta.io.distribute, until Ctrl-C.

    The worker announces itself in FOLDER, which it shares with the training processes: there they find the
    workers and the key that admits them. Start as many workers as you like, on any machine, at any time.
    Without FOLDER, set GMETA_WORKERS_KEY to the same long random text on both sides, and name the printed
    address.

    Whoever has the key can run programs here, so keep it and the folder secret. Nobody else can, because both
    sides prove that they know the key and sign what they send; but nothing is encrypted.
    """
    import gmeta  # noqa: F401  before TensorFlow: it selects Keras 2

    import tensorflow as tf  # isort: skip

    from gmeta.io.service.worker import WorkerServer, key_of

    key = key_of(folder)
    sys.path += paths
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    tf.config.set_visible_devices([], "GPU")  # they are for training
    try:
        server = WorkerServer(host, port, key, folder)
    except OSError as error:
        raise ConfigError(
            f"can't listen at {host}:{port}: {error.strerror or error}; give another --port"
        ) from error
    click.echo(f"a worker at {server.address}" + (f", announced in {folder}" if folder else ""))
    try:
        server.serve(idle)
    except KeyboardInterrupt:
        click.echo("")
    finally:
        server.close()
        click.echo(f"ended; {server.pieces} pieces begun, {server.elements} elements sent")
