"""Horovod's launcher for ranks with a secret: ``python -m gmeta.core.launcher.horovodrun``.

It takes ``horovodrun``'s arguments and does the same, but its rendezvous server answers only the ranks of
this job (`rendezvous`), and it unpickles no data from the network. Each job has a new secret, which Horovod
passes to the ranks in their environment. Without ``gmeta.init()``, a rank can't sign its requests, and the
server refuses it.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from gmeta.core.collectives.elastic import WORKER_ADDRESSES, safe_wire, worker_key
from gmeta.core.collectives.rendezvous import SECRET, guard, new_secret
from gmeta.core.errors import ConfigError

_NICS = ("--network-interface", "--network-interfaces")


def protect(secret: str) -> None:
    """Make Horovod's launcher in this process require a secret from ranks, and unpickle none of their data.

    Args:
      secret: The job's secret.
    """
    from horovod.runner.elastic import driver as drivers
    from horovod.runner.http import http_server

    start = http_server.RendezvousServer.start

    def start_guarded(self: Any, handler_cls: type[Any] = http_server.RendezvousHandler) -> int:
        port: int = start(self, _of_json(handler_cls, secret))
        return port

    class Client(drivers.WorkerNotificationClient):
        _wire: Any

        def _probe(self, addresses: Any) -> Any:
            self._wire = safe_wire(self._wire._key)
            return super()._probe(addresses)

    http_server.RendezvousServer.start = start_guarded
    drivers.WorkerNotificationClient = Client


def _of_json(base: type[Any], secret: str) -> type[Any]:
    class Handler(guard(base, secret, signed=True)):  # type: ignore[misc]
        def _put_value(self, scope: str, key: str, value: bytes) -> None:
            if scope != WORKER_ADDRESSES:
                super()._put_value(scope, key, value)
                return
            host, local_rank = key.split(":")
            addresses = {
                str(nic): [(str(address), int(port)) for address, port in places]
                for nic, places in json.loads(value).items()
            }
            self._put_worker_addresses(host, int(local_rank), addresses, worker_key(secret, key))

    return Handler


def main(arguments: list[str]) -> None:
    """Run Horovod's launcher.

    Raises:
      ConfigError: The arguments don't name the network interface by which machines reach each other. To find
        it, Horovod would start services that unpickle the data they receive.
    """
    from horovod.runner import launch

    if not any(argument.partition("=")[0] in _NICS for argument in arguments):
        raise ConfigError(
            f"name the network interface by which the machines reach each other, {_NICS[0]} eth0 (lo on one "
            "machine)"
        )
    os.environ[SECRET] = new_secret()
    protect(os.environ[SECRET])
    sys.argv = ["horovodrun", *arguments]
    launch.run_commandline()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"gmeta: error: {error}")
