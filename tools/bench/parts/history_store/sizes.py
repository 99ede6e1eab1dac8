"""Where bytes go: fat rows beside examples and a store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from harness import Result
from parts.history_store import figure
from parts.history_store.days import Grown
from parts.history_store.reads import Fetched, by_affinity, fetch, shuffled
from parts.history_store.rows import examples, fat_rows, folder_bytes

LONGEST = {"long": 3_000, "middle": 1_000, "short": 100}


@dataclass(frozen=True)
class Sizes:
    """Bytes of a request.

    Attributes:
      fat: Form of fat rows -> with at most 1,000 events.
      widest: Fat rows with at most 3,000 events.
      examples: A request without its history.
      store: The compacted store, divided by its requests.
      random: Reader -> what it fetches from the store, in random order.
      by_user: The same with all requests of a user in a batch.
    """

    fat: dict[str, float]
    widest: float
    examples: float
    store: float
    random: dict[str, Fetched]
    by_user: dict[str, Fetched]

    def results(self) -> list[Result]:
        """Return the figures of the part ``bytes``."""
        rows, total = "% of fat rows", self.examples + self.store
        found = [
            Result("history/examples/bytes", 100 * self.examples / self.fat["fat"], rows),
            Result("history/total/bytes", 100 * total / self.fat["fat"], rows),
        ]
        for form, size in self.fat.items():
            if form != "fat":
                found.append(Result(f"history/total/of_{form}", 100 * total / size, f"% of {form}"))
        for name, fetched in (("", self.random), ("/by_user", self.by_user)):
            for reader, own in fetched.items():
                share = 100 * (self.examples + own.bytes) / self.widest
                found.append(Result(f"history/read/{reader}/bytes{name}", share, rows))
        affinity = 100 * self.by_user["middle"].bytes / self.random["middle"].bytes
        found.append(Result("history/affinity/bytes", affinity, "% of random order"))
        parts = {**self.fat, "fat_3000": self.widest, "examples": self.examples, "store": self.store}
        return [*found, *(Result(f"history/bytes/{name}", size, "bytes") for name, size in parts.items())]

    def plot(self, path: Path) -> None:
        """Draw the bytes into a PNG."""
        fetched = {reader: own.bytes for reader, own in self.random.items()}
        figure.plot(path, self.fat["fat"], self.widest, self.examples, self.store, fetched)


def measure(folder: Path, grown: Grown, sample: int) -> Sizes:
    """Write and read both forms.

    Args:
      folder: Where to.
      grown: The store.
      sample: How many users have fat rows.
    """
    chosen = np.random.default_rng(3).choice(np.unique(grown.requests.user), sample, replace=False)
    some = grown.requests[np.flatnonzero(np.isin(grown.requests.user, chosen))]
    written = []
    for longest in (LONGEST["middle"], LONGEST["long"]):
        rows = folder / f"rows-{longest}"
        rows.mkdir()
        written.append(fat_rows(rows, grown, some, longest))
    random, by_user = (
        {reader: fetch(grown, order, longest) for reader, longest in LONGEST.items()}
        for order in (shuffled(grown.requests), by_affinity(grown.requests))
    )
    lengths = fetch(grown, grown.requests, LONGEST["middle"]).lengths
    shown = folder_bytes(examples(folder, grown.requests, lengths))
    # A sample's histories may be longer or shorter than all users' are.
    scale = float(lengths.mean() / fetch(grown, some, LONGEST["middle"]).lengths.mean())
    count = len(grown.requests)
    return Sizes(
        {form: size * scale for form, size in written[0].items()},
        written[1]["fat"] * scale,
        shown / count,
        grown.compacted / count,
        random,
        by_user,
    )
