"""Draws what the streams of a GPU do, from a profile of TensorFlow, as in docs/images/gpu-streams.png.

    python tools/dev/draw_streams.py FOLDER docs/images/gpu-streams.png --begin 101 --length 9

FOLDER is what `tf.profiler.experimental.start` was given, or `tools/bench/gpu_collection.py --profile`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

from draw_trace import save_lanes

COLORS = {
    "keys": "#5b9bd5",
    "rows of a later batch": "#2f6fae",
    "rows": "#8fd0d6",
    "update of rows": "#8e6bb8",
    "copy": "#c9542b",
    "dense layers and the rest": "#a9cf9c",
}


class Event(NamedTuple):
    """What a stream did: when, in milliseconds, for how long, and the op and kernel."""

    stream: str
    begin: float
    length: float
    op: str
    kernel: str

    @property
    def kind(self) -> str:
        """Its key in `COLORS`."""
        if "memcpy" in self.kernel.lower():
            return "copy"
        for word, kind in (
            ("Peek", "rows of a later batch"),
            ("HashTableUpdate", "update of rows"),
            ("HashTable", "rows"),
            ("Unique", "keys"),
            ("MergeKeys", "keys"),
        ):
            if word in self.op:
                return kind
        return "dense layers and the rest"


def read(folder: Path) -> list[Event]:
    """Return the events of all streams of the first GPU; times from the first event on.

    Raises:
      ValueError: The folder has no profile of a GPU.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    events: list[Event] = []
    for file in sorted(folder.rglob("*.xplane.pb"))[-1:]:
        space = xplane_pb2.XSpace.FromString(file.read_bytes())
        for plane in [each for each in space.planes if "GPU:0" in each.name]:
            names = {number: each.name for number, each in plane.stat_metadata.items()}
            kernels = {number: each.name for number, each in plane.event_metadata.items()}
            for line in [each for each in plane.lines if each.name.startswith("Stream")]:
                for event in line.events:
                    told = {names[one.metadata_id]: one.str_value or names.get(one.ref_value, "")
                            for one in event.stats}  # fmt: skip
                    begin = line.timestamp_ns / 1e6 + event.offset_ps / 1e9
                    op, kernel = told.get("tf_op", ""), kernels[event.metadata_id]
                    events.append(Event(line.name, begin, event.duration_ps / 1e9, op, kernel))
    if not events:
        raise ValueError(f"{folder} has no profile of a GPU: *.xplane.pb, with lines of streams")
    first = min(event.begin for event in events)
    return [event._replace(begin=event.begin - first) for event in events]


def stream_names(events: list[Event]) -> dict[str, str]:
    """Return what to call each stream, the busiest first."""
    busy = {event.stream: 0.0 for event in events}
    for event in events:
        busy[event.stream] += event.length
    names: dict[str, str] = {}
    for stream in sorted(busy, key=lambda each: -busy[each]):
        own = [event.kernel for event in events if event.stream == stream]
        copies = all("memcpy" in kernel.lower() for kernel in own)
        there = "to the GPU" if copies and "H2D" in own[0] else "from the GPU"
        names[stream] = f"copies {there}" if copies else "side stream" if names else "compute stream"
    return names


def draw(events: list[Event], begin: float, length: float, path: Path) -> None:
    """Draw the events within some milliseconds into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = stream_names(events)
    lanes = list(dict.fromkeys(names.values()))
    inside = [each for each in events if begin < each.begin + each.length and each.begin < begin + length]
    _, axis = plt.subplots(figsize=(11, 0.6 * len(lanes) + 1.3), layout="constrained")
    for kind, color in COLORS.items():
        for lane in lanes:
            own = [each for each in inside if each.kind == kind and names[each.stream] == lane]
            spans = [(each.begin - begin, max(each.length, length / 2000)) for each in own]
            axis.broken_barh(spans, (len(lanes) - 1.4 - lanes.index(lane), 0.8), color=color)
    shown = {kind: COLORS[kind] for kind in COLORS if any(each.kind == kind for each in inside)}
    save_lanes(axis, lanes, length, shown, path)


def main() -> None:
    """Read the command line and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--begin", type=float, default=0, help="from which millisecond")
    parser.add_argument("--length", type=float, default=10, help="how many milliseconds")
    given = parser.parse_args()
    draw(read(given.folder), given.begin, given.length, given.picture)


if __name__ == "__main__":
    main()
