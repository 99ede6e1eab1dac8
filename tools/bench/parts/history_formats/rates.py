"""How fast each form answers requests."""

from __future__ import annotations

from typing import Any

from harness import Result, interleave
from parts.history_formats.contenders import Form, assert_same
from parts.history_formats.events import Events, make_requests

LONGEST = {"long": 3_000, "middle": 1_000, "short": 100}
CALL = 256  # requests of random users


def rates(events: Events, forms: dict[str, Form], what: str, rounds: int) -> dict[str, tuple[float, float]]:
    """Time calls in turn, each round with requests of its own.

    Args:
      events: What the forms store.
      forms: Name -> form.
      what: A key of `LONGEST`, followed by ``_in_order`` for users in ascending order.
      rounds: Timed rounds.

    Returns:
      Name -> requests and events a second, by the median round.
    """
    longest, in_order = LONGEST[what.removesuffix("_in_order")], what.endswith("_in_order")
    count, warm_up = len(events.users) if in_order else CALL, 2
    calls = [make_requests(events, count, seed, in_order=in_order) for seed in range(warm_up + rounds)]
    assert_same(forms, calls[0], longest)
    sizes = [int(forms["gmeta"].scan(call, longest).row_splits[-1]) for call in calls[warm_up:]]
    timed = {
        name: (lambda number, form=form: form.scan(calls[number], longest)) for name, form in forms.items()
    }
    seconds = interleave(timed, rounds=rounds, warm_up=warm_up)
    mean = sum(sizes) / len(sizes)
    return {name: (count / each, mean / each) for name, each in seconds.items()}


def compare(events: Events, forms: dict[str, Form], rounds: int) -> list[Result]:
    """Request histories of three lengths from all forms, of random users and of users in order."""
    asked = [f"{length}{order}" for order in ("", "_in_order") for length in LONGEST]
    found = {what: rates(events, forms, what, rounds) for what in asked}
    return results_of(forms, found, len(events))


def results_of(forms: dict[str, Form], found: dict[str, dict[str, Any]], events: int) -> list[Result]:
    """Turn rates into figures.

    Args:
      forms: Name -> form.
      found: The kind of request -> `rates`.
      events: The number of stored events.

    Returns:
      The figures.
    """
    results = [
        Result(f"history/formats/{name}/bytes_per_event", form.size / events, "bytes")
        for name, form in forms.items()
    ]
    peers = [name for name in forms if name != "gmeta"]
    dense = [name for name in peers if forms[name].size <= 2 * forms["gmeta"].size]
    for what, rate in found.items():
        best = max(peers, key=rate.__getitem__)
        for name, (scans, read) in rate.items():
            peer = (best, rate[best][0]) if name == "gmeta" else ()
            results.append(Result(f"history/formats/{name}/scans_{what}", scans, "scans/s", *peer))
            results.append(Result(f"history/formats/{name}/events_{what}", read, "events/s"))
        for kind, names in (("best", peers), ("dense", dense)):
            if names:
                ratio = rate["gmeta"][0] / max(rate[name][0] for name in names)
                results.append(Result(f"history/formats/gmeta_over_{kind}_{what}", ratio, "times"))
    return [*results, Result("history/scan", found["long_in_order"]["gmeta"][1], "events/s")]
