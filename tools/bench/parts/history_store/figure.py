"""Draws the bytes of a request."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_FAT, _EXAMPLES, _STORE = "#b0b7c3", "#e8871e", "#2f6db5"


def plot(
    path: Path,
    fat: float,
    widest: float,
    examples: float,
    store: float,
    fetched: Mapping[str, float],
    by_user: float,
) -> None:
    """Draw the bytes of a request that are written and read, into a PNG.

    Args:
      path: The file to write.
      fat: Bytes of a fat row of 1,000 events.
      widest: Bytes of one of 3,000.
      examples: Bytes of an example.
      store: Bytes of the store.
      fetched: Reader -> the bytes that it fetches from the store, in random order.
      by_user: Those of the first reader with all requests of a user in a batch.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    bars = [
        ("written: fat rows, 1,000 events", fat, None),
        ("written: examples + store", examples, store),
        ("read: fat rows, 3,000 events", widest, None),
        *(
            (f"read: {reader} reader, {LONGEST[reader]} events", examples, own)
            for reader, own in fetched.items()
        ),
        ("read: long reader, a user's requests together", examples, by_user),
    ]
    figure, axis = plt.subplots(figsize=(9, 3.6), layout="constrained")
    for place, (_, first, second) in enumerate(bars):
        whole, of = first + (second or 0), fat if place < 2 else widest
        axis.barh(place, first / 1e3, color=_FAT if second is None else _EXAMPLES)
        if second is not None:
            axis.barh(place, second / 1e3, left=first / 1e3, color=_STORE)
        share = "" if second is None else f" = {100 * whole / of:.1f}%"
        axis.text(whole / 1e3, place, f"  {whole / 1e3:.2f} kB{share}", va="center", fontsize=9)
    axis.set_yticks(range(len(bars)), [name for name, _, _ in bars])
    axis.invert_yaxis()
    axis.set_xlabel("kB of a request")
    axis.set_xlim(right=1.15 * max(fat, widest) / 1e3)
    axis.spines[["top", "right"]].set_visible(False)
    colors = {"fat rows": _FAT, "examples": _EXAMPLES, "store": _STORE}
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in colors.values()]
    axis.legend(handles, colors, frameon=False, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


LONGEST = {"long": "3,000", "middle": "1,000", "short": "100"}
