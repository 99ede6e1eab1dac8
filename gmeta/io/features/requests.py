"""One request to a store, with a time limit, and repeated when the connection fails."""

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
    """Make a request, with as many attempts as the policy allows, and return its result.

    Args:
      make: Makes the request; raises `StoreUnavailableError` if another attempt makes sense.
      policy: The time limit and the number of attempts.
      counted: Counters; ``requests``, ``retries`` and ``timeouts`` are increased.
      what: The source, table and keys, for the error.

    Raises:
      StoreUnavailableError: The last attempt failed too. Other errors are raised at once.
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
    """Run ``make()`` in a thread of its own, and abandon the thread when the time has run out.

    Nothing can end a thread from outside. A source that waits on a network ends its requests itself, by a
    limit on its sockets; the limit here holds whatever the store does.
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
        # On a busy machine the socket's limit may also have run out before this thread resumes.
        raise value if took < seconds else _LateError from value
    return value
