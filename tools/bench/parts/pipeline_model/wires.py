"""Seconds of collectives on ranks that share nodes, from latency and bandwidth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Wires:
    """The connections between ranks: a network between nodes, and a faster one within each.

    Attributes:
      latency: Seconds of an empty exchange between two ranks.
      gbit: 10^9 bits a second that a rank sends to other nodes, while it receives as many.
      per_peer: Additional seconds for each further rank.
      node: The number of ranks that share a node.
      inside_gbit: 10^9 bits a second that a rank sends to ranks of its node, at the same time.
    """

    latency: float
    gbit: float
    per_peer: float = 0.0
    node: int = 1
    inside_gbit: float = 1e3

    @classmethod
    def fit(cls, few: tuple[float, float], many: tuple[float, float]) -> Wires:
        """Return the wires of two measured all-to-alls of two ranks: (bytes that a rank sends, seconds)."""
        per_byte = (many[1] - few[1]) / (many[0] - few[0])
        return cls(latency=max(few[1] - few[0] * per_byte, 0.0), gbit=8e-9 / per_byte)

    def start(self, ranks: int) -> float:
        """Return the seconds of an empty exchange."""
        return self.latency + self.per_peer * max(ranks - 2, 0) if ranks > 1 else 0.0

    def carry(self, size: float, ranks: int) -> float:
        """Return the seconds of an all-to-all besides `start`; of its `size` bytes a rank keeps its part."""
        inside = min(self.node, ranks)
        near, far = size * (inside - 1) / ranks, size * (ranks - inside) / ranks
        return 8e-9 * max(near / self.inside_gbit, far / self.gbit)

    def reduce(self, size: float, ranks: int) -> float:
        """Return the seconds of an all-reduce of `size` bytes, by a ring that the network slows down."""
        if ranks == 1:
            return 0.0
        gbit = self.gbit if ranks > self.node else self.inside_gbit
        return self.start(ranks) + 8e-9 * 2 * size * (ranks - 1) / ranks / gbit


def measured_wires(results: list[Mapping[str, float]], name: str, ranks: int = 2) -> Wires:
    """Read wires from what ``tools/bench/exchange.py --lane --gbit`` wrote.

    Args:
      results: The JSON.
      name: The end of the results' names, such as ``tcp/np2/10Gbit``.
      ranks: The number of ranks of these results.
    """
    found = {str(one["name"]): one["value"] for one in results if "name" in one}
    few, many = (found[f"pipeline/alltoall{size}/{name}"] / 1e3 for size in ("", "/16MB"))
    away = (ranks - 1) / ranks
    return Wires.fit((1024 * away, few), ((1 << 24) * away, many))
