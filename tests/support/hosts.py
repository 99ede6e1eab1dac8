"""A rack of machines that are namespaces of this one: a head, and hosts wired to a switch at a given rate.

Each machine has its own network, name, process numbers, boot id and file of names, so it looks like a
separate machine to programs. The wires are pairs of veth devices; a token bucket (``tc tbf``) at both ends
limits each direction to the rate. The switch is a bridge, which is also the head's network device.

Nothing has a name outside the rack, so nothing can be left behind. The first process of a machine reads from
a pipe that this process holds. If this process ends, in any way, the pipe closes, the first process
ends, Linux kills all others of that machine, and with the last process devices and namespaces are gone.

The delay of a real network is missing: a transfer takes the time of its bytes, and of switching processes.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from gmeta.core.errors import ConfigError, RanksError

DEVICE = "eth0"
"""The network device of every machine."""

HEAD = "head"
"""The machine that has no wire: jobs start there."""

_NETWORK = "10.77.0"
_NEW = ("unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_BOOT = """
set -e
mount --bind "$2" /etc/hosts
mount --bind "$3" /proc/sys/kernel/random/boot_id
echo "$1" > /proc/sys/kernel/hostname
ip link set lo up
echo up
# Linux itself then buries those who have lost their parent: no rank can leave while one of them isn't buried.
exec env --ignore-signal=CHLD cat
"""
_SSH = """#!/bin/sh
# Does for Horovod what ssh does: runs a command on another machine of the rack.
host=
while :; do
  case $1 in
    -o | -p | -i) shift 2 ;;
    *)
      [ -z "$host" ] || break
      host=$1
      shift
      ;;
  esac
done
exec nsenter --target "$(cat '{folder}'/"$host.pid")" --net --uts --mount --pid -- sh -c "$*"
"""


def why_no_rack() -> str:
    """Return why this machine can't make a rack, or an empty text if it can."""
    if os.geteuid() != 0:
        return "namespaces and their wires need root"
    absent = [program for program in ("ip", "tc", "unshare", "nsenter") if shutil.which(program) is None]
    if absent:
        return f"{', '.join(absent)} not found; install iproute2 and util-linux"
    steps = (
        "ip link add name one type veth peer name other",
        "tc qdisc add dev one root tbf rate 1gbit burst 64kb latency 1ms",
        "ip link add name switch type bridge",
        "mount --bind /etc/hosts /etc/hosts",
        "env --ignore-signal=CHLD true",
    )
    tried = subprocess.run(
        [*_NEW, "sh", "-c", " && ".join(steps)], capture_output=True, text=True, check=False
    )
    return f"no namespaces, wires or mounts of one's own: {tried.stderr.strip()}" if tried.returncode else ""


class Machine:
    """A machine of a rack; `rack` makes them.

    Attributes:
      name: Its host name, by which the others reach it.
      address: Its IPv4 address.
    """

    def __init__(self, name: str, number: int, folder: Path, over: Machine | None = None) -> None:
        self.name, self.address = name, f"{_NETWORK}.{number}"
        boot_id = folder / f"{name}.boot"
        boot_id.write_text(f"{uuid.uuid4()}\n")
        # Of `over`'s processes, so that `over` can start others here, and takes this one with it.
        self._first = subprocess.Popen(
            [
                *(over.enter() if over else ()),
                *_NEW,
                "sh",
                "-c",
                _BOOT,
                name,
                name,
                folder / "hosts",
                boot_id,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._first.stdout is not None
        assert self._first.stderr is not None
        if self._first.stdout.readline() != "up\n":
            raise OSError(f"{name} didn't come up: {self._first.stderr.read().strip()}")
        self.process = _last_child(self._first.pid)
        # Its number among the processes of this machine, of `over`'s, and of its own.
        self.numbers = _numbers(self.process)

    def enter(self) -> list[str]:
        """Return the words before a command that run it on this machine."""
        return ["nsenter", "--target", str(self.process), "--net", "--uts", "--mount", "--pid", "--"]

    def run(self, *command: str | int | Path) -> str:
        """Run a command here and return its output.

        Raises:
          OSError: It failed.
        """
        words = [*self.enter(), *map(str, command)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"{' '.join(words[7:])} on {self.name}: {done.stderr.strip()}")
        return done.stdout

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command here, in the folder of this process; `options` are those of `subprocess.Popen`."""
        there = ["sh", "-c", 'cd "$0" && exec "$@"', str(Path.cwd()), *command]
        return subprocess.Popen([*self.enter(), *there], **options)

    def power_off(self) -> None:
        """End all processes of this machine at once, and its wire with them."""
        assert self._first.stdin is not None
        self._first.stdin.close()
        self._first.wait()
        for stream in (self._first.stdout, self._first.stderr):
            assert stream is not None
            stream.close()


class Rack:
    """The machines; `rack` makes it.

    Attributes:
      head: The machine on which jobs start.
      hosts: The machines for ranks, ``host0`` and so on.
      folder: Files that the machines share: all of this machine's files are theirs too.
    """

    def __init__(self, head: Machine, hosts: Sequence[Machine], folder: Path) -> None:
        self.head, self.hosts, self.folder = head, tuple(hosts), folder

    def unplug(self, host: Machine) -> None:
        """Unplug a host's wire from the switch without notice, as when a machine loses power."""
        self.head.run("ip", "link", "set", _port(host), "down")

    def plug(self, host: Machine) -> None:
        """Plug a host's wire into the switch again."""
        self.head.run("ip", "link", "set", _port(host), "up")


@contextmanager
def rack(size: int, gbit: float | None = None) -> Iterator[Rack]:
    """Make machines that reach each other by name and address while the block runs.

    Args:
      size: The number of hosts besides the head, 1 to 200.
      gbit: 10^9 bits a second that each host's wire carries in each direction; None: as many as the
        processors can.

    Yields:
      The rack.

    Raises:
      OSError: This machine can't make one; `why_no_rack` returns the reason.

    Example:
      >>> with rack(2, gbit=1) as found:  # doctest: +SKIP
      ...     found.hosts[0].run("ping", "-c", 1, "host1")
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gmeta-rack-")))
        names = [HEAD, *(f"host{number}" for number in range(size))]
        lines = ["127.0.0.1 localhost", *(f"{_NETWORK}.{at} {name}" for at, name in enumerate(names, 1))]
        (folder / "hosts").write_text("\n".join(lines) + "\n")
        (folder / "ssh").write_text(_SSH.format(folder=folder))
        (folder / "ssh").chmod(0o755)
        head = Machine(HEAD, 1, folder)
        stack.callback(head.power_off)
        head.run("ip", "link", "add", DEVICE, "type", "bridge")
        _address(head)
        hosts = []
        for number in range(size):
            host = Machine(names[1 + number], 2 + number, folder, over=head)
            stack.callback(host.power_off)
            (folder / f"{host.name}.pid").write_text(str(host.numbers[-2]))
            _join(head, host, gbit)
            hosts.append(host)
        yield Rack(head, hosts, folder)


def _join(head: Machine, host: Machine, gbit: float | None) -> None:
    port, peer = _port(host), host.numbers[-2]
    head.run("ip", "link", "add", port, "type", "veth", "peer", "name", DEVICE, "netns", peer)
    head.run("ip", "link", "set", port, "master", DEVICE, "up")
    _address(host)
    if gbit is None:
        return
    # The bucket holds what the wire carries in .1 ms, and at least one packet of the largest size.
    rate, bucket = int(1e9 * gbit), max(70_000, int(1e9 * gbit * 1e-4 / 8))
    queue = bucket + int(rate / 8 * 0.02)  # bytes of 20 ms wait at a full port, more are dropped
    for machine, device in ((head, port), (host, DEVICE)):
        shape = ("tbf", "rate", f"{rate}bit", "burst", bucket, "limit", queue)
        machine.run("tc", "qdisc", "add", "dev", device, "root", *shape)


def _address(machine: Machine) -> None:
    machine.run("ip", "address", "add", f"{machine.address}/24", "dev", DEVICE)
    machine.run("ip", "link", "set", DEVICE, "up")


def _port(host: Machine) -> str:
    """Return the name of the switch's end of a host's wire."""
    return f"to-{host.name}"


def _last_child(process: int) -> int:
    """Follow a chain of processes, each of which waits for its only child, to its end."""
    while children := Path(f"/proc/{process}/task/{process}/children").read_text().split():
        process = int(children[0])
    return process


def _numbers(process: int) -> list[int]:
    """Return a process's numbers, from this process's namespace to its own."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return [int(word) for word in next(line for line in lines if line.startswith("NSpid:")).split()[1:]]


# Runs a command as ranks that each have their own machine, by ``horovodrun -H`` or `gmeta launch`.
#
#     with rack(2, gbit=10) as machines:
#         job = start_ranks(machines, command, environment={"GMETA_LANE": "tcp"})
#         wait_for_ranks(machines, job, timeout=300)
#
# The launcher runs on the head of a `rack`, as on a cluster's log-in machine, and starts the ranks by ssh,
# for which the rack has a substitute. So this includes everything that differs between one machine and
# several: names, addresses, the choice of the network device, and a wire that is slower than memory.

_LAUNCHER = "gmeta.core.launcher.horovodrun"


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
      hosts: The hosts of the ranks; all by default.
      options: Options such as ``--host-discovery-script``, for ``horovodrun`` instead of the fixed hosts.
      environment: Variables in addition to this process's environment.
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
    path = os.pathsep.join([str(machines.folder), os.environ["PATH"]])  # for the substitute for ssh
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
    """Wait for a job of `start_ranks`, and return its stdout by rank, if Horovod started it.

    Raises:
      RanksError: It failed or time ran out; none of its processes is left.
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
    if not _output(machines).exists():  # gmeta's launcher writes all output to one place
        return []
    ranks = sorted(_output(machines).iterdir(), key=lambda place: int(place.suffix[1:]))
    return [(place / "stdout").read_text() for place in ranks]


def _output(machines: Rack) -> Path:
    return machines.folder / "output"
