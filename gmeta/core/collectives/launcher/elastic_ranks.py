"""Starts a job whose number of ranks changes: it survives lost ranks and takes in new ones.

A job is a sequence of starts (`launch`), each with as many ranks as there is room for. A lost rank takes its
embedding rows with it, so the remaining ranks can't just go on: all start again from the last checkpoint.
Every start divides the data of a step into the same number of shares (`shares`), so the steps are those of a
job that was never interrupted.

* If ranks fail or hang, the next start has that many ranks fewer. A failure that would happen again ends the
  job: all ranks failed alike, or `FRUITLESS` starts in a row have saved nothing.
* If there is room for another number of ranks, or none any more where some run, the launcher tells the ranks
  (`gmeta.core.collectives.driver.elastic`), and they leave together after their next save.

The messages go through a store that outlives the starts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from gmeta.core.collectives.driver.addresses import choose_addresses
from gmeta.core.collectives.driver.elastic import AGAIN, ELASTIC
from gmeta.core.collectives.driver.horovod_elastic import FRUITLESS
from gmeta.core.collectives.driver.notes import LEAVES
from gmeta.core.collectives.launcher.hosts import Host, host_of_each
from gmeta.core.collectives.launcher.local_ranks import Write, launch
from gmeta.core.collectives.launcher.meeting import run_store
from gmeta.core.collectives.launcher.rank_processes import SSH
from gmeta.core.collectives.launcher.room import Room, hosts_for
from gmeta.core.collectives.launcher.verdicts import Verdict, verdict
from gmeta.core.errors import ConfigError, RanksError
from gmeta.core.shares import SHARES


def launch_elastic(
    command: Sequence[str],
    size: int,
    *,
    min_size: int = 1,
    script: str | None = None,
    environment: Mapping[str, str] | None = None,
    write: Write | None = None,
    say: Callable[[str], None] | None = None,
    hosts: Sequence[Host] | None = None,
    ssh: Sequence[str] = SSH,
) -> None:
    """Run a command as the ranks of an elastic job, and return when those of its last start have succeeded.

    The command must save checkpoints with `gmeta.checkpoint.CheckpointStore` or code that uses it,
    and restore the last one when it begins.

    Args:
      command: The program and its arguments.
      size: The number of ranks that the job begins with, the most that it ever has, and the number of shares
        of the data.
      min_size: The least number of ranks; with fewer the job ends.
      script: A shell command that prints how many ranks there is room for, in lines ``host:slots``; it runs
        every second. None: there is always room for `size`.
      environment: Variables to set besides this process's environment.
      write: As in `launch`.
      say: Receives a line when the number of ranks changes; by default the line goes to stderr.
      hosts: The machines that the job begins with, unless there is a script; it may then name others too.
        None: this machine, which is the only one that a script may name.
      ssh: As in `launch`.

    Raises:
      RanksError: As in `launch`, when the job can't go on.
      ConfigError: The numbers or the script make no sense; or as in `launch`.
    """
    if not 1 <= min_size <= size:
        raise ConfigError(
            f"{min_size} to {size} ranks: give at least 1, and a least number that isn't above the other"
        )
    say = say or _print
    with run_store(*choose_addresses(local=hosts is None)) as (server, secret, values):
        room = Room(size, min_size, hosts, script, values)
        own = {**(environment or {}), SHARES: str(size), ELASTIC: f"{server} {secret}"}
        running, fruitless = room.wanted(), 0
        if len(running) < min_size:
            raise ConfigError(
                f"{script or 'the hosts'}: room for {len(running)} ranks, "
                f"fewer than the least number, {min_size}"
            )
        while True:
            over = None if hosts is None else hosts_for(running)
            running = host_of_each(over, len(running))  # by rank
            try:
                with room.watch(running):
                    launch(command, len(running), environment=own, write=write, hosts=over, ssh=ssh)
                return
            except RanksError as error:
                if all(end.code == AGAIN or end.ended_here for end in error.ends):
                    before, wanted = len(running), room.wanted()
                    running = wanted if len(wanted) >= min_size else running
                    say(f"{_why(before, len(running))}; {_goes_on(len(running), size)}")
                    continue
                found, saved = _judge(error), room.saved
                fruitless = 0 if saved else fruitless + 1
                gone = [end.lost_host for end in error.ends if end.lost_host]
                failed = {end.rank for end in found.lost}
                lost = [name for rank, name in enumerate(running) if rank in failed or name in gone]
                left = len(running) - len(lost)
                if found.hopeless or left < min_size or fruitless == FRUITLESS:
                    raise RanksError(
                        f"{_last_word(found, left, min_size, fruitless)}{error}", ends=error.ends
                    ) from None
                room.lose(lost, gone, saved)
                running = room.without(running, lost)
                say(f"{found.reason}; {_goes_on(len(running), size)}")


def _why(before: int, after: int) -> str:
    if before == after:
        return "ranks have other places"
    return f"there is room for {after} ranks in place of {before}"


def _goes_on(ranks: int, size: int) -> str:
    return f"the job goes on with {ranks} of {size} from the last checkpoint"


def _judge(error: RanksError) -> Verdict:
    """Find the cause of a failed start; ranks that left to let others join have neither failed nor hung."""
    leaving = frozenset([LEAVES])
    return verdict(
        [replace(end, told=end.told | leaving) if end.code == AGAIN else end for end in error.ends]
    )


def _last_word(found: Verdict, left: int, least: int, fruitless: int) -> str:
    if found.hopeless:
        return ""
    if left < least:
        return f"too few ranks are left, {left} where {least} is the least number: "
    return f"{fruitless} starts in a row failed before they had saved a checkpoint: "


def _print(text: str) -> None:
    print(f"gmeta: {text}", file=sys.stderr, flush=True)  # noqa: T201
