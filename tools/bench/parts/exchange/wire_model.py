"""Time and bytes of a step as a function of the number of ranks, from measured latency and bandwidth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

Figures = Mapping[str, float]
MOST_RANKS = 128


@dataclass(frozen=True)
class WireModel:
    """The cost of an exchange: latency(N) + bytes / bandwidth(N).

    Attributes:
      latency: Seconds of an empty exchange, by number of ranks.
      per_byte: Seconds of a byte that a rank sends to others, by number of ranks.
    """

    latency: Mapping[int, float]
    per_byte: Mapping[int, float]

    @classmethod
    def fit(cls, wire: Mapping[int, Sequence[Sequence[float]]]) -> WireModel:
        """Fit (bytes, seconds) of exchanges: the smallest gives the latency, the largest the bandwidth."""
        latency, per_byte = {}, {}
        for ranks, points in wire.items():
            (few, quick), *_, (many, slow) = points
            per_byte[ranks] = max(slow - quick, 0.0) / (many - few)
            latency[ranks] = quick - per_byte[ranks] * few
        return cls(latency, per_byte)

    def seconds(self, local: float, figures: Figures, ranks: int, cores: int) -> float:
        """Seconds of a step on a measured number of ranks, all on one machine.

        Args:
          local: Seconds on one rank, which exchanges nothing.
          figures: ``collectives`` and ``bytes`` of the step.
          ranks: The number of ranks.
          cores: The machine's cores.
        """
        wire = figures["collectives"] * self.latency[ranks] + figures["bytes"] * self.per_byte[ranks]
        return local * max(1.0, ranks / cores) + wire

    def far(self, local: float, figures: Figures, measured: int, ranks: int) -> tuple[float, float]:
        """Bytes and seconds of a step on any number of ranks, each with its own cores.

        Bytes are those of ``measured`` ranks, with the local share shrinking as 1 / N. Latency is a line
        through the measurements, bandwidth that of the fewest ranks.
        """
        if ranks == 1:
            return 0.0, local
        sent = figures["bytes"] * (1 - 1 / ranks) / (1 - 1 / measured)
        sizes = sorted(self.latency)
        values = [self.latency[size] for size in sizes]
        slope, base = np.polyfit(sizes, values, 1) if len(sizes) > 1 else (0.0, values[0])
        latency = max(base + slope * ranks, min(values))
        return sent, local + figures["collectives"] * latency + sent * self.per_byte[sizes[0]]


def plot(path: Path, case: str, found: Mapping[int, Mapping[str, Figures]], model: WireModel) -> None:
    """Draw bytes and time against the number of ranks: points measured here, lines from the model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (bytes_axis, time_axis) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    sizes = [2**power for power in range(MOST_RANKS.bit_length())]
    fewest = min(size for size in found if size > 1)
    ways = (("none", "no deduplication"), ("both", "both stages"), ("per_feature", "each feature alone"))
    for number, (way, label) in enumerate(ways):
        color = f"C{number}"
        style = "--" if way == "per_feature" else "-"  # as many bytes as both stages
        far = [model.far(found[1][way]["seconds"], found[fewest][way], fewest, size) for size in sizes]
        for axis, curve in ((bytes_axis, [f[0] / 1e6 for f in far]), (time_axis, [1e3 * f[1] for f in far])):
            axis.plot(sizes, curve, style, color=color, label=label)
        measured = [size for size in sorted(found) if size > 1]
        bytes_axis.plot(measured, [found[n][way]["bytes"] / 1e6 for n in measured], "o", color=color)
        measured = sorted(found)
        time_axis.plot(measured, [1e3 * found[n][way]["seconds"] for n in measured], "o", color=color)
    for axis, title in ((bytes_axis, "MB that a rank sends in a step"), (time_axis, "ms a step")):
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.set_xlabel("ranks")
        axis.set_title(title, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    bytes_axis.set_ylim(bottom=0)
    time_axis.set_yscale("log")
    bytes_axis.legend(frameon=False)
    figure.suptitle(
        f"{case}, batches of 4,096: points measured with all ranks on one machine, lines modelled with cores "
        "of their own",
        fontsize=9,
        x=0.01,
        ha="left",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
