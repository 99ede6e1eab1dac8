"""Starts a job whose number of ranks changes: it survives lost ranks and takes in new ones.

A job is a sequence of starts (`launch`), each with as many ranks as there is room for. A lost rank takes its
embedding rows with it, so the remaining ranks can't just go on: all start again from the last checkpoint.
Every start divides the data of a step into the same number of shares (`shares`), so the steps are those of a
job that was never interrupted.

* If ranks fail or hang, the next start has that many ranks fewer. A failure that would happen again ends the
  job: all ranks failed alike, or `FRUITLESS` starts in a row have saved nothing.
* If there is room for another number of ranks, the launcher tells the ranks (`elastic`), and they leave
  together after their next save.

The place of a lost rank counts as free again at once if its start had saved a checkpoint; otherwise only when
the number of places changes. So a rank that the system has killed comes back at the next save, and a broken
GPU doesn't end every other start.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from gmeta.core.collectives.driver.elastic import AGAIN, CHANGE, ELASTIC, SAVED
from gmeta.core.collectives.driver.horovod_elastic import FRUITLESS
from gmeta.core.collectives.driver.notes import LEAVES
from gmeta.core.collectives.launcher.hosts import is_here
from gmeta.core.collectives.launcher.local_ranks import Write, launch
from gmeta.core.collectives.launcher.verdicts import Verdict, verdict
from gmeta.core.errors import ConfigError, RanksError
from gmeta.core.shares import SHARES

EVERY = 1.0
"""Seconds between two checks of the number of places, the same as Horovod's."""

_SCRIPT_TIME = 60.0  # seconds that the script may take


def launch_elastic(
    command: Sequence[str],
    size: int,
    *,
    min_size: int = 1,
    script: str | None = None,
    environment: Mapping[str, str] | None = None,
    write: Write | None = None,
    say: Callable[[str], None] | None = None,
) -> None:
    """Run a command as the ranks of an elastic job, and return when those of its last start have succeeded.

    The command must save checkpoints with `gmeta.checkpoint.CheckpointStore` or code that uses it,
    and restore the last one when it begins.

    Args:
      command: The program and its arguments.
      size: The number of ranks that the job begins with, the most that it ever has, and the number of shares
        of the data.
      min_size: The least number of ranks; with fewer the job ends.
      script: A shell command that prints how many ranks there is room for, as a line ``localhost:slots``; it
        runs every second. None: there is always room for `size`.
      environment: Variables to set besides this process's environment.
      write: As in `launch`.
      say: Receives a line when the number of ranks changes; by default the line goes to stderr.

    Raises:
      RanksError: As in `launch`, when the job can't go on.
      ConfigError: The numbers or the script make no sense; or as in `launch`.
    """
    if not 1 <= min_size <= size:
        raise ConfigError(
            f"{min_size} to {size} ranks: give at least 1, and a least number that isn't above the other"
        )
    say = say or _print
    with tempfile.TemporaryDirectory(prefix="gmeta-elastic-") as folder:
        places = _Places(Path(folder), size, min_size, script)
        own = {**(environment or {}), SHARES: str(size), ELASTIC: folder}
        ranks, fruitless = places.count_wanted(), 0
        if ranks < min_size:
            raise ConfigError(f"{script}: room for {ranks} ranks, fewer than the least number, {min_size}")
        while True:
            try:
                with places.watch(ranks):
                    launch(command, ranks, environment=own, write=write)
                return
            except RanksError as error:
                if all(end.code == AGAIN or end.ended_here for end in error.ends):
                    before, ranks = ranks, max(min_size, places.count_wanted())
                    say(f"there is room for {ranks} ranks in place of {before}; {_goes_on(ranks, size)}")
                    continue
                found, saved = _judge(error), places.saved
                fruitless = 0 if saved else fruitless + 1
                left = ranks - len(found.lost)
                if found.hopeless or left < min_size or fruitless == FRUITLESS:
                    raise RanksError(
                        f"{_last_word(found, left, min_size, fruitless)}{error}", ends=error.ends
                    ) from None
                places.lose(len(found.lost), saved)
                ranks = max(min_size, min(left, places.count_wanted()))
                say(f"{found.reason}; {_goes_on(ranks, size)}")


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


class _Places:
    """The number of ranks that there is room for, and the folder that tells ranks about changes."""

    def __init__(self, folder: Path, most: int, least: int, script: str | None) -> None:
        self._folder, self._most, self._least, self._script = folder, most, least, script
        self._number = most if script is None else slots_here(script)
        self._bad, self._bad_of = 0, self._number
        self._lock = threading.Lock()

    @property
    def saved(self) -> bool:
        """Whether a checkpoint was saved since the start of the ranks."""
        return (self._folder / SAVED).exists()

    def count_wanted(self) -> int:
        """Return how many ranks there should be."""
        bad = self._bad if self._number == self._bad_of else 0
        return max(0, min(self._most, self._number - bad))

    def lose(self, ranks: int, saved: bool) -> None:
        """Note the number of lost ranks, and whether their start had saved a checkpoint."""
        bad = self._bad if self._number == self._bad_of else 0
        self._bad, self._bad_of = 0 if saved else bad + ranks, self._number

    @contextmanager
    def watch(self, ranks: int) -> Iterator[None]:
        """Forget the previous start, and tell the running ranks when another number is wanted."""
        for name in (SAVED, CHANGE):
            (self._folder / name).unlink(missing_ok=True)
        over = threading.Event()
        thread = threading.Thread(target=self._watch, args=(ranks, over), name="gmeta-places", daemon=True)
        thread.start()
        try:
            yield
        finally:
            with self._lock:
                over.set()

    def _watch(self, ranks: int, over: threading.Event) -> None:
        while True:
            number = self._number
            if self._script is not None:
                with suppress(ConfigError):  # it may work again
                    number = slots_here(self._script)
            with self._lock:
                if over.is_set():  # the script may have taken long: another start owns folder and number
                    return
                self._number = number
                change = self._folder / CHANGE
                if self._least <= self.count_wanted() != ranks:
                    change.touch()
                else:
                    change.unlink(missing_ok=True)
            over.wait(EVERY)


def slots_here(script: str) -> int:
    """Run a host discovery script and return how many ranks there is room for on this machine.

    Args:
      script: A shell command that prints lines ``host:slots``, as for ``horovodrun --host-discovery-script``.

    Raises:
      ConfigError: The script fails, prints something else, or names another machine.
    """
    try:
        done = subprocess.run(
            script, shell=True, capture_output=True, text=True, timeout=_SCRIPT_TIME, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{script}: no answer in {_SCRIPT_TIME:.0f} s; it must print lines host:slots"
        ) from None
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] or ["nothing"]
        raise ConfigError(f"{script}: exit code {done.returncode}, it said: {said[0]}")
    number = 0
    for line in filter(None, map(str.strip, done.stdout.splitlines())):
        host, _, slots = line.rpartition(":")
        if not host or not slots.isdecimal():
            raise ConfigError(
                f"{script}: it printed {line!r}; each line must be host:slots, such as localhost:8"
            )
        if not is_here(host):
            raise ConfigError(
                f"{script}: {host} is another machine, and this launcher starts ranks on its own; several "
                "machines are what `horovodrun --host-discovery-script` is for"
            )
        number += int(slots)
    return number


def _print(text: str) -> None:
    print(f"gmeta: {text}", file=sys.stderr, flush=True)  # noqa: T201
