"""Support for ranks of a job that Horovod's own elastic driver runs over several machines.

``horovodrun --min-np 2 --max-np 8 --host-discovery-script S`` keeps a process for every slot of its hosts.
When a process fails, or hosts come, the driver gives a place in a new world to each process that asks.
Horovod itself asks inside the process, by `hvd.init` after `hvd.shutdown`. In gmeta everything starts
again from the last checkpoint, and TensorFlow's graphs depend on the number of ranks. So a rank restarts
in its own process: it runs its command line again (``execv``; the driver sees the same process), requests its
place as Horovod would, and becomes the rank of that place.

The restart happens when the process would end: because its peers failed, or because hosts have come or gone
and a checkpoint has been saved. The program's exit functions still run.
"""

from __future__ import annotations

import atexit
import http.client
import json
import os
import struct
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from gmeta.core.collectives.rendezvous import SECRET, ask, server_name, signature
from gmeta.core.errors import CollectiveError, ConfigError
from gmeta.core.shares import SHARES

FRUITLESS = 3
"""The job ends after so many starts in a row that fail before a checkpoint, here and in `launch_elastic`."""

_AGAIN = "GMETA_STARTED_AGAIN"  # how many restarts since the last checkpoint
_NAMES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")  # in the driver's order

WORKER_ADDRESSES = "worker_addresses"  # where the driver learns how to reach a process
_LONGEST = 1 << 16  # bytes of the driver's message

_again = threading.Event()
_hosts_changed = threading.Event()


def is_driven() -> bool:
    """Return whether Horovod's elastic driver runs this process."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def find_place() -> None:
    """Take the place that the driver has for a restarted process, before Horovod starts.

    Raises:
      ConfigError: The number of shares of a step's data isn't set.
      CollectiveError: The driver can't be reached.
      SystemExit: There is no place for this process any more.
    """
    if SHARES not in os.environ:
        raise ConfigError(
            f"horovodrun varies the number of ranks: set {SHARES} to its --max-np, so that a step has the "
            "same samples on however many there are"
        )
    atexit.register(start_again)  # registered before Horovod's exit function, so it runs after that
    if _AGAIN in os.environ:
        place = _place()
        if place[0] < 0:
            raise SystemExit(0)  # the driver ends processes that have no place
        os.environ.update({f"HOROVOD_{name}": str(value) for name, value in zip(_NAMES, place, strict=True)})


def watch_hosts() -> None:
    """Watch for hosts that come or go; the driver notifies rank 0 of them.

    Horovod's own service would unpickle its messages, and it sends its key to the driver readable by all.
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
    """Make a Horovod wire for objects that unpickles nothing: the name of a signed message suffices."""
    from horovod.runner.common.util import network, secret
    from horovod.runner.elastic.worker import HostsUpdatedRequest, WorkerNotificationService

    class Ping(network.PingRequest):
        service_name = WorkerNotificationService.NAME  # the name that it has in an answer

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
    """Return whether hosts have come or gone since this process began."""
    return _hosts_changed.is_set()


def note_checkpoint() -> None:
    """Note that this start has saved a checkpoint."""
    os.environ.pop(_AGAIN, None)


def start_again_at_exit() -> None:
    """Let this process restart when it ends, if Horovod's elastic driver runs it."""
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
    """Get the place that the driver answers with when all processes have asked or failed."""
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
