"""The bytes of fat rows, and of examples and a store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from harness import Result
from parts.history_store import figure
from parts.history_store.days import Grown
from parts.history_store.reads import Fetched, by_affinity, fetch, fetch_late, shuffled
from parts.history_store.rows import examples, fat_rows, folder_bytes

LONGEST = {"long": 3_000, "middle": 1_000, "short": 100}


@dataclass(frozen=True)
class Sizes:
    """Bytes of a request.

    Attributes:
      fat: Form of fat rows -> its bytes with at most 1,000 events.
      widest: Fat rows with at most 3,000 events.
      examples: A request without its history; and in a record with all requests of its user.
      store: The compacted store, divided by its requests.
      late: Reader -> the bytes that it fetches from the store in the order of `gmeta.io.late`.
      random: The same in random order.
      by_user: The same with all requests of a user in a batch.
    """

    fat: dict[str, float]
    widest: float
    examples: tuple[float, float]
    store: float
    late: dict[str, float]
    random: dict[str, Fetched]
    by_user: dict[str, Fetched]

    def results(self) -> list[Result]:
        """Return the figures of the part ``bytes``."""
        rows, whole = "% of fat rows", self.fat["fat"]
        found = []
        for name, own in zip(("bytes", "bytes/by_user"), self.examples, strict=True):
            found.append(Result(f"history/examples/{name}", 100 * own / whole, rows))
            found.append(Result(f"history/total/{name}", 100 * (own + self.store) / whole, rows))
        for form, size in self.fat.items():
            if form != "fat":
                total = self.examples[form.endswith("by_user")] + self.store
                found.append(Result(f"history/total/of_{form}", 100 * total / size, f"% of {form}"))
        random, by_user = (_bytes(fetched) for fetched in (self.random, self.by_user))
        for name, fetched in (("", self.late), ("/random", random), ("/by_user", by_user)):
            for reader, own in fetched.items():
                share = 100 * (self.examples[0] + own) / self.widest
                found.append(Result(f"history/read/{reader}/bytes{name}", share, rows))
        affinity = 100 * by_user["middle"] / random["middle"]
        found.append(Result("history/affinity/bytes", affinity, "% of random order"))
        parts = {**self.fat, "fat_3000": self.widest, "store": self.store}
        parts |= zip(("examples", "examples_by_user"), self.examples, strict=True)
        return [*found, *(Result(f"history/bytes/{name}", size, "bytes") for name, size in parts.items())]

    def plot(self, path: Path) -> None:
        """Draw the bytes into a PNG."""
        figure.plot(
            path,
            self.fat["fat"],
            self.widest,
            self.examples[0],
            self.store,
            self.late,
            self.by_user["long"].bytes,
        )


def measure(folder: Path, grown: Grown, sample: int) -> Sizes:
    """Write and read both forms.

    Args:
      folder: The folder to write to.
      grown: The store.
      sample: The number of users with fat rows.
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
    shown = examples(folder, grown.requests, lengths)
    # A sample's histories may be longer or shorter than those of all users.
    scale = float(lengths.mean() / fetch(grown, some, LONGEST["middle"]).lengths.mean())
    count = len(grown.requests)
    return Sizes(
        {form: size * scale for form, size in written[0].items()},
        written[1]["fat"] * scale,
        (folder_bytes(shown[0]) / count, folder_bytes(shown[1]) / count),
        grown.compacted / count,
        {reader: fetch_late(grown, shown[0], longest) for reader, longest in LONGEST.items()},
        random,
        by_user,
    )


def _bytes(fetched: dict[str, Fetched]) -> dict[str, float]:
    return {reader: own.bytes for reader, own in fetched.items()}
