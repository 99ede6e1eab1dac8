"""Ranks of an elastic job: their messages to its driver, and their restart in a new world.

The number of ranks of such a job changes. A rank's embedding rows are only in its memory, so on each change
all ranks restart from the last checkpoint, which any number of ranks can load (`launch_elastic`). The driver
must know whether a start saved a checkpoint. All ranks must learn at the same step that others could join:
the first rank asks after each save, and sends the answer to all. Two drivers start such jobs, gmeta's and
Horovod's; ranks use both through the same interface (`Driver`).

gmeta's driver starts new ranks. Horovod's runs a job over several machines:
``horovodrun --min-np 2 --max-np 8 --host-discovery-script S`` keeps a process for every slot of its hosts.
When a process fails, or hosts join, the driver assigns a place in a new world to each process that asks.
Horovod itself asks inside the process, by `hvd.init` after `hvd.shutdown`. In gmeta, everything restarts from
the last checkpoint, and TensorFlow's graphs depend on the number of ranks. A rank therefore restarts within
its process: it runs its command line again (``execv``; the driver sees the same process), requests its place
like Horovod, and becomes the rank of that place.

The restart happens when the process would end: because its peers failed, or because hosts joined or left and
a checkpoint was saved. The program's exit functions still run.
"""

from __future__ import annotations

import atexit
import hashlib
import http.client
import json
import os
import struct
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from gmeta.core.collectives.rendezvous import LEAVES, SECRET, Store, ask, leave_note, server_name, signature
from gmeta.core.errors import CollectiveError, ConfigError
from gmeta.core.shares import SHARES

ELASTIC = "GMETA_ELASTIC"
"""Environment variable: the address and port of the launcher's store for these messages, and its secret."""

SCOPE = "elastic"
"""The scope of the messages."""

SAVED, CHANGE = "saved", "change"
"""Messages: a checkpoint was saved since this start; other places are wanted for ranks."""

AGAIN = 85  # Linux's ERESTART
"""The exit code of a rank that should be started again with another number of ranks."""


class Driver(Protocol):
    """A rank's interface to the program that starts the ranks of an elastic job."""

    def job(self) -> str:
        """Return the job's name, which is the same for all its starts."""

    def note_checkpoint(self) -> None:
        """Record that a checkpoint was saved since this start."""

    def is_change_wanted(self) -> bool:
        """Return whether ranks should have other places; call it on rank 0."""


class StoreDriver:
    """The driver `launch_elastic`: it keeps a store that outlives its starts.

    Args:
      told: The value of `ELASTIC`.
    """

    def __init__(self, told: str) -> None:
        self._told = told

    def job(self) -> str:
        """Return a name derived from the store's address and secret."""
        return hashlib.sha256(self._told.encode()).hexdigest()[:16]

    def note_checkpoint(self) -> None:
        """Write the message to the store."""
        self._store().put(SCOPE, SAVED, True)

    def is_change_wanted(self) -> bool:
        """Return whether the launcher wrote its message."""
        return CHANGE in self._store().values(SCOPE)

    def _store(self) -> Store:
        return Store(*self._told.split())


class HorovodDriver:
    """Horovod's own elastic driver."""

    def job(self) -> str:
        """Return the address of the driver's server."""
        return server_name()

    def note_checkpoint(self) -> None:
        """Reset the count of starts."""
        note_checkpoint()

    def is_change_wanted(self) -> bool:
        """Return whether hosts joined or left."""
        return have_hosts_changed()


def find_driver() -> Driver | None:
    """Find the driver of this process's job; return None outside an elastic job."""
    if is_driven():
        return HorovodDriver()
    return StoreDriver(os.environ[ELASTIC]) if ELASTIC in os.environ else None


def after_save(from_first: Callable[[Callable[[], bool]], bool]) -> None:
    """Notify the driver of a checkpoint, and exit if the job should continue with another number of ranks.

    All ranks call this when a checkpoint is complete. Outside an elastic job, it does nothing.

    Args:
      from_first: Returns the result of the first rank's function on every rank.

    Raises:
      SystemExit: On all ranks, with the code `AGAIN`: the job resumes from this checkpoint.
    """
    driver = find_driver()
    if driver is None:
        return
    driver.note_checkpoint()
    if from_first(driver.is_change_wanted):
        start_again_at_exit()
        leave_note(LEAVES)
        raise SystemExit(AGAIN)


def job() -> str:
    """Return the elastic job's name, the same for all its starts; empty outside an elastic job."""
    driver = find_driver()
    return "" if driver is None else driver.job()


FRUITLESS = 3
"""The job ends after so many starts in a row that fail before a checkpoint, here and in `launch_elastic`."""

_AGAIN = "GMETA_STARTED_AGAIN"  # number of restarts since the last checkpoint
_NAMES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")  # in the driver's order

WORKER_ADDRESSES = "worker_addresses"  # where the driver learns how to reach a process
_LONGEST = 1 << 16  # bytes of the driver's message

_again = threading.Event()
_hosts_changed = threading.Event()


def is_driven() -> bool:
    """Return whether Horovod's elastic driver runs this process."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def find_place() -> None:
    """Take the place that the driver assigns to a restarted process, before Horovod starts.

    Raises:
      ConfigError: The number of shares of a step's data isn't set.
      CollectiveError: The driver can't be reached.
      SystemExit: There is no longer a place for this process.
    """
    if SHARES not in os.environ:
        raise ConfigError(
            f"horovodrun varies the number of ranks: set {SHARES} to its --max-np, so that a step has the "
            "same samples on however many there are"
        )
    atexit.register(start_again)  # registered before Horovod's exit function, so it runs after it
    if _AGAIN in os.environ:
        place = _place()
        if place[0] < 0:
            raise SystemExit(0)  # the driver ends processes without a place
        os.environ.update({f"HOROVOD_{name}": str(value) for name, value in zip(_NAMES, place, strict=True)})


def watch_hosts() -> None:
    """Watch for hosts that join or leave; the driver notifies rank 0.

    Horovod's own service would unpickle its messages, and sends its key to the driver unencrypted.
    """
    from horovod.runner.common.util import codec, secret
    from horovod.runner.elastic.worker import WorkerNotificationService

    own = os.environ.get(SECRET)
    name = f"{os.environ['HOROVOD_HOSTNAME']}:{os.environ['HOROVOD_LOCAL_RANK']}"
    key = secret.make_secret_key() if own is None else worker_key(own, name)
    service = WorkerNotificationService(key, os.environ.get("HOROVOD_GLOO_IFACE"), _Listener())
    service._wire = safe_wire(key)  # the key is secret until it is sent
    told = json.dumps(service.addresses()).encode()
    if own is None:  # `horovodrun` itself
        told = codec.dumps_base64((service.addresses(), key), to_ascii=False)
    try:
        ask("PUT", f"/{WORKER_ADDRESSES}/{name}", told)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise CollectiveError(
            f"horovodrun at {server_name()} doesn't accept the address of {name}: {error}; its own output "
            "has the reason"
        ) from error


def worker_key(secret: str, name: str) -> bytes:
    """Derive the key that signs the driver's messages to a process, in a job with a secret."""
    return signature(secret, b"worker", name.encode()).encode()


def safe_wire(key: bytes) -> Any:
    """Make a Horovod wire for objects without unpickling: the name of a signed message suffices."""
    from horovod.runner.common.util import network, secret
    from horovod.runner.elastic.worker import HostsUpdatedRequest, WorkerNotificationService

    class Ping(network.PingRequest):
        service_name = WorkerNotificationService.NAME  # its name in an answer

    class Wire(network.Wire):
        def read(self, rfile: Any) -> Any:
            digest = rfile.read(secret.DIGEST_LENGTH)
            (size,) = struct.unpack("i", rfile.read(4))
            message = rfile.read(size) if 0 <= size <= _LONGEST else b""
            if not secret.check_digest(key, message, digest):
                raise ValueError("a message without this job's signature")
            return HostsUpdatedRequest(0) if HostsUpdatedRequest.__name__.encode() in message else Ping()

    return Wire(key)


def have_hosts_changed() -> bool:
    """Return whether hosts joined or left since this process started."""
    return _hosts_changed.is_set()


def note_checkpoint() -> None:
    """Record that this start saved a checkpoint."""
    os.environ.pop(_AGAIN, None)


def start_again_at_exit() -> None:
    """Make this process restart when it ends, if Horovod's elastic driver runs it."""
    if is_driven():
        _again.set()


def start_again() -> None:
    """Run this process's command line again if `start_again_at_exit` was called, up to a limit."""
    times = int(os.environ.get(_AGAIN, "0")) + 1
    if not _again.is_set() or times > FRUITLESS:
        return
    os.environ[_AGAIN] = str(times)
    sys.stdout.flush()
    sys.stderr.flush()
    for entry in Path("/proc/self/fd").iterdir():
        if int(entry.name) > 2:
            with suppress(OSError):  # the folder's own descriptor is closed by now
                os.set_inheritable(int(entry.name), False)  # C++ libraries leave their files open
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


class _Listener:
    def handle_hosts_updated(self, timestamp: int, update: int) -> None:
        _hosts_changed.set()


def _place() -> list[int]:
    """Return the place that the driver sends once all processes have asked or failed."""
    slot = f"{os.environ['HOROVOD_HOSTNAME']}:{os.environ['HOROVOD_LOCAL_RANK']}"
    try:
        status, answer = ask("GET", f"/rank_and_size/{slot}")
        if status != http.HTTPStatus.OK:
            raise ValueError(f"it answers {status}")
        return [int(number) for number in answer.decode().split(",")]
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise CollectiveError(
            f"horovodrun at {server_name()} has no place for {slot}: {error}; its own output says why it "
            "ended"
        ) from error
