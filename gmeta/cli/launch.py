"""``gmeta launch``: runs a user's program on several ranks of this machine, or of several."""

from __future__ import annotations

import shlex

import click

from gmeta.cli.rank_options import elastic_of, elastic_options, run_ranks
from gmeta.core.collectives.place import check_alone, launched_size, under_launcher
from gmeta.core.errors import ConfigError
from gmeta.core.launcher.meeting import parse_hosts
from gmeta.core.launcher.rank_processes import SSH


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
def command(
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
