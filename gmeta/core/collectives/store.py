"""The values by which ranks find each other without Horovod: a client of the launcher's store.

The launcher keeps a store of small values (`gmeta.core.launcher.meeting`) as long as the job
runs. Every request and every answer is signed by the job's secret (`rendezvous`), and a value is a message of
`wire`, so nothing from the network is run. Ranks use the store when they open a lane, and what starts a rank
on another machine reports its end there. An elastic job has a second store, which outlives its starts
(`elastic`). Tensors and objects travel by lanes.
"""

from __future__ import annotations

import http
import http.client
import os
import time
import urllib.parse
from typing import Any

from gmeta.core.collectives.notes import LOST_PEERS, leave_note
from gmeta.core.collectives.rendezvous import SECRET, ask_server
from gmeta.core.collectives.wire import pack, unpack
from gmeta.core.errors import CollectiveError, ConfigError

STORE = "GMETA_STORE"
"""Environment variable: the address and port of the launcher's store."""

ALL = "all"
"""The key that requests all values of a scope; the answer has a part for each key."""

_SHORTEST, _LONGEST = 0.01, 0.5  # seconds between two questions
_SILENCE = 60.0  # seconds without a word from the store
_FOR_EVER = 10 * 365 * 24 * 3600


class Store:
    """A store of this process's job.

    Args:
      server: Its address and port. None: the environment names them, and the secret.
      secret: The secret that signs what is said.

    Raises:
      ConfigError: The environment names none.
    """

    def __init__(self, server: str | None = None, secret: str = "") -> None:
        if server is None:
            if STORE not in os.environ or SECRET not in os.environ:
                raise ConfigError(f"{STORE} and {SECRET} aren't set: start ranks by `gmeta launch`")
            server, secret = os.environ[STORE], os.environ[SECRET]
        self._server, self._secret = server, secret

    def put(self, scope: str, key: str, value: Any) -> None:
        """Keep a value, of the kinds that `wire.pack` takes.

        Raises:
          CollectiveError: The store can't be reached, or refuses it.
        """
        self._ask("PUT", scope, key, pack(value))

    def values(self, scope: str) -> dict[str, Any]:
        """Return what is kept in a scope, by key.

        Raises:
          CollectiveError: The store can't be reached.
        """
        return {key: unpack(value) for key, value in unpack(self._ask("GET", scope, ALL)).items()}

    def gather(self, scope: str, rank: int, size: int, value: Any, seconds: int) -> list[Any]:
        """Give every rank the values of all ranks.

        Args:
          scope: What it is about; every rank uses it once.
          rank: This rank.
          size: How many ranks there are.
          value: This rank's value.
          seconds: How long to wait for the others; 0: no limit.

        Returns:
          The values by rank.

        Raises:
          CollectiveError: A rank didn't come, or the store can't be reached.
        """
        self.put(scope, str(rank), value)
        deadline, pause = time.monotonic() + (seconds or _FOR_EVER), _SHORTEST
        while True:
            found = self.values(scope)
            missing = [other for other in range(size) if str(other) not in found]
            if not missing:
                return [found[str(other)] for other in range(size)]
            if time.monotonic() > deadline:
                leave_note(LOST_PEERS)
                names = ", ".join(f"rank {other}" for other in missing[:4])
                raise CollectiveError(
                    f"rank {rank} of {size} lost its peers: timed out: {names} did not come to {scope!r} in "
                    f"{seconds} s; see whether every rank has started, and runs the same program"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)

    def _ask(self, method: str, scope: str, key: str, body: bytes = b"") -> bytes:
        path = f"/{urllib.parse.quote(scope, safe='')}/{key}"
        try:
            status, answer = ask_server(self._server, self._secret, method, path, body, _SILENCE)
            if status != http.HTTPStatus.OK:
                raise ValueError(f"it answers {status}")
        except (OSError, ValueError, http.client.HTTPException) as error:
            leave_note(LOST_PEERS)
            raise CollectiveError(
                f"the launcher at {self._server} can't be reached: {error}; see whether it still runs, and "
                "whether this machine reaches that address"
            ) from error
        return answer
