"""The process of a rank, on this machine or, by ssh, on another one.

On another machine a helper starts the rank, ``python -m gmeta.core.launcher.rank_processes``. It receives the
command through ssh's stdin, so the environment and the job's secret appear in no command line: the first line
is the command, and each other line a signal for it. When stdin ends, the launcher or the connection is gone,
and the helper ends the rank. It reports to the job's store how a rank ended on its own or by a forwarded
signal. Without a report, the machine counts as lost.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from gmeta.core.collectives.place import LAUNCHER, OWN
from gmeta.core.collectives.rendezvous import NOTES, Store, notes_at
from gmeta.core.collectives.wire import unpack
from gmeta.core.errors import CollectiveError
from gmeta.core.launcher.meeting import Values

SSH = (
    *("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=30"),
    *("-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3"),
)
"""The program that starts commands on other machines; it never prompts, and notices a lost machine."""

ENDED = "ended"
"""The scope of the store in which helpers report how ranks ended."""

_LAST_WAIT = 5.0  # seconds to wait for a helper's answer to the last signal
# Variables that describe a machine or a session, and would be wrong on another one.
_NOT_PASSED = ("SSH_", "XDG_", "DBUS_", "BASH_FUNC_", "LC_")
_NOT_PASSED_NAMES = {"HOSTNAME", "PWD", "OLDPWD", "SHLVL", "_", "TERM", "DISPLAY", "TMPDIR", "MAIL", NOTES}


class HowEnded(NamedTuple):
    """How a rank's process ended.

    Attributes:
      code: Its exit code, or minus the number of the signal that ended it.
      told: The notes that it left.
      lost_host: The machine that was lost with it, or "".
    """

    code: int
    told: frozenset[str]
    lost_host: str = ""


class LocalProcess:
    """A rank on this machine.

    Args:
      command: The program and its arguments.
      environment: All its environment variables.

    Attributes:
      process: The process, once it is started.
    """

    process: subprocess.Popen[bytes]

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command, self._environment = list(command), environment

    def start(self) -> None:
        """Start it."""
        self.process = self._start(self._command, subprocess.DEVNULL)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it and the processes that it started, some of which may outlive it."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def how_ended(self, rank: int) -> HowEnded:
        """Return how it ended, as rank number ``rank``."""
        return HowEnded(self.process.returncode, notes_at(self._environment[NOTES]))

    def _start(self, command: Sequence[str], stdin: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            env=self._environment,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a separate group, to end it with its child processes
        )


class RemoteProcess(LocalProcess):
    """A rank on another machine; `process` is that of ssh.

    Args:
      command: As for `LocalProcess`; it runs in this process's folder.
      environment: As for `LocalProcess`; variables that describe this machine aren't passed on.
      host: The machine.
      ssh: The program that starts commands there, and its options.
      values: The values of the job's store.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        host: str,
        ssh: Sequence[str],
        values: Values,
    ) -> None:
        super().__init__(command, environment)
        self._host, self._ssh, self._values = host, ssh, values

    def start(self) -> None:
        """Start it by its helper, with the rank's ``PYTHONPATH``."""
        given = self._environment.get("PYTHONPATH", "").split(os.pathsep)
        helper = shlex.join(module_command(f"{__package__}.rank_processes", paths=[*filter(None, given)]))
        there = f"cd {shlex.quote(str(Path.cwd()))} && PYTHONPATH= exec {helper}"
        self.process = self._start([*self._ssh, self._host, there], subprocess.PIPE)
        passed = {name: text for name, text in self._environment.items() if _is_passed(name)}
        self._say(json.dumps({"command": self._command, "environment": passed}))

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal through its helper; after the last one the connection ends too."""
        self._say(str(int(number)))
        if number == signal.SIGKILL and self.process.poll() is None:
            end = threading.Timer(_LAST_WAIT, super().signal, [number])
            end.daemon = True
            end.start()

    def how_ended(self, rank: int) -> HowEnded:
        """Return how it ended, as reported by its helper."""
        assert self.process.stdin is not None
        with suppress(OSError):  # unsent data
            self.process.stdin.close()
        told = self._values.of(ENDED).get(str(rank))
        if told is None:
            return HowEnded(self.process.returncode or 1, frozenset(), self._host)
        said = unpack(told)
        return HowEnded(int(said["code"]), frozenset(said["told"]))

    def _say(self, line: str) -> None:
        assert self.process.stdin is not None
        with suppress(OSError, ValueError):  # it has already ended
            self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()


def module_command(module: str, *words: str, paths: Sequence[str] = ()) -> list[str]:
    """Return the command that runs a gmeta module, even if the current folder has a module of that name.

    ``python -m`` searches the current folder first: a user's ``secrets.py`` or ``types.py`` there would
    replace Python's own. ``-P`` prevents that, but only from Python 3.11 on.

    Args:
      module: The module.
      *words: Its arguments.
      paths: Additional folders of modules, searched after Python's own and installed ones.
    """
    root = str(Path(__file__).resolve().parents[3])
    return [sys.executable, "-c", _RUN_MODULE, os.pathsep.join([root, *paths]), module, *words]


_RUN_MODULE = (
    "import sys; sys.path = [path for path in sys.path if path] + sys.argv.pop(1).split(':'); "
    "import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def _is_passed(name: str) -> bool:
    return name not in _NOT_PASSED_NAMES and not name.startswith(_NOT_PASSED)


_GRACE = 5.0  # seconds between SIGTERM and SIGKILL


def main() -> int:
    """Run the rank and report its end; return the exit code for ssh."""
    # Unbuffered: the reading thread would hold a buffer's lock while this process ends.
    orders = io.FileIO(sys.stdin.fileno(), closefd=False)
    order = json.loads(orders.readline())
    os.environ.update(order["environment"])
    os.environ[LAUNCHER] = str(os.getpid())  # the rank ends with this process
    with tempfile.TemporaryDirectory(prefix="gmeta-notes-") as folder:
        os.environ[NOTES] = f"{folder}/rank"
        rank = subprocess.Popen(order["command"], stdin=subprocess.DEVNULL, start_new_session=True)
        cut = threading.Event()
        threading.Thread(target=_pass_signals, args=[orders, rank, cut], daemon=True).start()
        code = rank.wait()
        _signal(rank, signal.SIGKILL)  # processes that it left running
        told = sorted(notes_at(os.environ[NOTES]))
    del os.environ[NOTES]
    if not cut.is_set():  # otherwise, the launcher has lost this machine, and reports that
        with suppress(CollectiveError):  # the launcher is gone
            Store().put(ENDED, os.environ[f"{OWN}RANK"], {"code": code, "told": told})
    return code if code >= 0 else 128 - code


def _pass_signals(orders: io.FileIO, rank: subprocess.Popen[bytes], cut: threading.Event) -> None:
    for line in orders:
        _signal(rank, signal.Signals(int(line)))
    cut.set()
    _signal(rank, signal.SIGTERM)
    time.sleep(_GRACE)
    _signal(rank, signal.SIGKILL)


def _signal(rank: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(rank.pid, number)


if __name__ == "__main__":
    sys.exit(main())
