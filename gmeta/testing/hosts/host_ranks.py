"""Runs a command as ranks of which each has a machine of its own, by ``horovodrun -H`` or `gmeta launch`.

    with rack(2, gbit=10) as machines:
        job = start_ranks(machines, command, environment={"GMETA_LANE": "tcp"})
        wait_for_ranks(machines, job, timeout=300)

The launcher runs on the head of a `rack`, as on a cluster's log-in machine, and starts the ranks by ssh, for
which the rack has a substitute. So all that differs between one machine and several takes part: names,
addresses, the choice of the network device, and a wire that is slower than memory.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from gmeta.core.errors import ConfigError, RanksError
from gmeta.testing.hosts.machines import DEVICE, Machine, Rack

_LAUNCHER = "gmeta.core.collectives.launcher.horovodrun"


def start_ranks(
    machines: Rack,
    command: Sequence[str],
    *,
    hosts: Sequence[Machine] | None = None,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    own: bool = False,
) -> subprocess.Popen[str]:
    """Start a command as one rank on each host, from the head.

    Args:
      machines: The rack.
      command: The program and its arguments.
      hosts: Where ranks start; all hosts by default.
      options: ``--host-discovery-script`` and its like, for ``horovodrun`` in place of the fixed hosts.
      environment: What is set besides this process's environment.
      own: Whether ``gmeta launch --hosts`` starts them, without Horovod.

    Returns:
      The launcher's process, which leads a process group; `wait_for_ranks` waits for it.

    Raises:
      ConfigError: There is one host: Horovod can't number the output of a single rank.
    """
    names = [host.name for host in hosts or machines.hosts]
    if len(names) < 2:
        raise ConfigError(f"{len(names)} host: start ranks on at least 2, a single rank without a rack")
    fixed = ["-H", ",".join(f"{name}:1" for name in names)]
    launch = [
        *(sys.executable, "-m", _LAUNCHER, "--network-interface", DEVICE, "--disable-cache"),
        *("-np", str(len(names)), "--output-filename", str(_output(machines)), *(options or fixed)),
    ]
    if own:
        slots = ",".join(f"{name}:1" for name in names)
        launch = [sys.executable, "-m", "gmeta", "launch", "--hosts", slots, *options, "--"]
    path = os.pathsep.join([str(machines.folder), os.environ["PATH"]])  # of the substitute for ssh
    with (machines.folder / "launcher").open("w") as said:
        return machines.head.start(
            [*launch, *command],
            env={**os.environ, **(environment or {}), "PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def wait_for_ranks(machines: Rack, job: subprocess.Popen[str], timeout: float) -> list[str]:
    """Wait for a job of `start_ranks`, and return by rank what it wrote to stdout, if Horovod started it.

    Raises:
      RanksError: It failed or time ran out, after which no process of it runs.
    """
    try:
        code = job.wait(timeout)
        why = f"the launcher ended with exit code {code}" if code else ""
    except subprocess.TimeoutExpired:
        why = f"the ranks had not ended after {timeout:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    if why:
        raise RanksError(f"{why}\n{(machines.folder / 'launcher').read_text()}")
    if not _output(machines).exists():  # gmeta's launcher writes all of it in one place
        return []
    ranks = sorted(_output(machines).iterdir(), key=lambda place: int(place.suffix[1:]))
    return [(place / "stdout").read_text() for place in ranks]


def _output(machines: Rack) -> Path:
    return machines.folder / "output"
