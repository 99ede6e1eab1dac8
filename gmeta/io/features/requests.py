"""One request to a store: no longer than it may take, and again when the connection fails."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from gmeta.core.errors import StoreUnavailableError
from gmeta.io.features.fetch_policy import FetchPolicy

T = TypeVar("T")


class _LateError(Exception):
    pass


def request(make: Callable[[], T], policy: FetchPolicy, counted: Counter[str], what: str) -> T:
    """What ``make()`` returns.

    Args:
      make: Makes the request; raises `StoreUnavailableError` where another attempt makes sense.
      policy: How long and how often.
      counted: Is added to: ``requests``, ``retries``, ``timeouts``.
      what: Whose request, for the error.

    Raises:
      StoreUnavailableError: The last attempt failed too. Other errors come through at once.
    """
    began = time.monotonic()
    for attempt in range(1, policy.attempts + 1):
        counted["requests"] += 1
        counted["retries"] += attempt > 1
        try:
            return make() if policy.timeout is None else _within(policy.timeout, make)
        except _LateError:
            counted["timeouts"] += 1
            cause = StoreUnavailableError(f"no answer within {policy.timeout:g} s")
        except StoreUnavailableError as error:
            cause = error
        if attempt < policy.attempts:
            time.sleep(policy.backoff * 2 ** (attempt - 1) * random.uniform(0.5, 1.0))
    raise StoreUnavailableError(
        f"{what}: {cause}; tried {policy.attempts} times in {time.monotonic() - began:.1f} s: see whether "
        "the store is running and reached from here, or allow more with FetchPolicy(timeout=, attempts=)"
    ) from cause


def _within(seconds: float, make: Callable[[], T]) -> T:
    """What ``make()`` returns in a thread of its own, which is left to itself when time has run out.

    Nothing can end a thread. A source whose requests wait for others ends them itself, by a limit on its
    sockets; this is the limit that holds whatever a store does.
    """
    outcome: list[tuple[bool, Any, float]] = []
    began = time.monotonic()

    def run() -> None:
        try:
            outcome.append((True, make(), 0.0))
        except BaseException as error:
            outcome.append((False, error, time.monotonic() - began))

    thread = threading.Thread(target=run, name="gmeta-fetch", daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise _LateError
    done, value, took = outcome[0]
    if not done:
        # On a busy machine the socket's limit may have run out too before this thread goes on.
        raise value if took < seconds else _LateError from value
    return value
