"""One rank that trains on users with all their exposures, and on exposures with a history each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from parts.gpu_grm.ablation import epoch_data
from parts.gpu_grm.data import Users, lengths_of, pairwise
from parts.gpu_grm.in_rank import Limit, Peaks, run
from parts.gpu_grm.model import new_model
from parts.meta.rank import Pace


def measure(settings: Mapping[str, Any], note: Callable[[Any], None]) -> None:
    """Train on ``full`` batches of users, and on the same ``few`` users in either form, in turn."""
    users = Users(0, settings["exposures"], settings["pool"], settings["most"])
    drawn = lengths_of(0, settings)["fixed"]
    count = max(1, settings["sequences"] // settings["exposures"])
    few = [users.batch(one[:count]) for one in drawn]
    batches = {
        "full": [users.batch(one) for one in drawn],
        "few": few,
        "pairwise": [pairwise(batch) for batch in few],
    }
    samples = {
        name: settings["exposures"] * len(drawn) * (settings["sequences"] if name == "full" else count)
        for name in batches
    }
    peaks = Peaks()
    found: dict[str, Any] = {"samples": samples, "peak": peaks.bytes, "seconds": {}}
    model, pace = new_model(settings, merge=True, dedup=True, depth=0), Pace()
    trainings = {
        name: partial(model.fit, epoch_data(of), epochs=1, callbacks=[pace], verbose=0)
        for name, of in batches.items()
    }
    for fit in trainings.values():
        fit()  # the first traces, and rows are made
    limit = Limit(settings["seconds"])
    for _ in range(settings["rounds"]):
        for name, fit in trainings.items():
            peaks.run(name, fit)
            found["seconds"].setdefault(name, []).append(pace.seconds[-1])
        note(found)
        if limit.is_over():
            break


if __name__ == "__main__":
    run(measure)
