"""Draws some steps of a trace of `gmeta.callbacks.StepTimes`, as in docs/images/step-trace.png.

    python tools/dev/draw_trace.py trace.json docs/images/step-trace.png --first 50 --steps 2

An event of an exchange, or ahead of the step, has the number of its batch.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

COLORS = {
    "data": "#8c8c8c",
    "lookup": "#5b9bd5",
    "exchange": "#c9542b",
    "wait": "#f6d5c5",
    "forward": "#7fbf7b",
    "inner": "#b5d99c",
    "backward": "#3f8f4f",
    "outer": "#3f8f4f",
    "update": "#8e6bb8",
    "step": "#7fbf7b",
}
LANES = ("step", "exchange", "ahead: lookup", "ahead: data")


def chosen_events(trace: dict[str, Any], first: int, steps: int) -> list[dict[str, Any]]:
    """Return the events that lie within some steps of rank 0, cut to their time; times in milliseconds.

    Args:
      trace: The content of the file.
      first: The number of the first step's batch.
      steps: The number of steps.

    Raises:
      ValueError: The trace has none of these steps.
    """
    drawn = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    wanted = range(first, first + steps)
    of_steps = [e for e in drawn if e["cat"] == "step" and e["args"]["batch"] in wanted]
    if not of_steps:
        held = sorted({e["args"]["batch"] for e in drawn if e["cat"] == "step"})
        raise ValueError(f"the trace has no step of the batches {first} to {wanted[-1]}; it has {held}")
    begin = min(event["ts"] for event in of_steps)
    end = max(event["ts"] + event["dur"] for event in of_steps)
    inside = [
        (event, max(event["ts"], begin), min(event["ts"] + event["dur"], end))
        for event in drawn
        if event["ts"] < end and event["ts"] + event["dur"] > begin
    ]
    return [{**e, "ts": (one - begin) / 1e3, "dur": (other - one) / 1e3} for e, one, other in inside]


def draw(events: list[dict[str, Any]], path: Path) -> None:
    """Draw the events that `chosen_events` returned into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ranks = sorted({event["pid"] for event in events})
    used = [lane for lane in LANES if any(event["cat"] == lane for event in events)]
    rows = [(rank, lane) for rank in ranks for lane in used]
    whole = max(event["ts"] + event["dur"] for event in events)
    _, axis = plt.subplots(figsize=(11, 0.55 * len(rows) + 1.3), layout="constrained")
    for event in events:
        height = len(rows) - 1 - rows.index((event["pid"], event["cat"]))
        kind = event["name"] if event["name"] in COLORS else event["cat"].removeprefix("ahead: ")
        look = {"color": COLORS[kind], "edgecolor": "white", "linewidth": 0.3}
        axis.barh(height, event["dur"], 0.8, event["ts"], **look)
        if event["dur"] > 0.045 * whole:
            text = event["name"].rpartition("/")[2]
            number = f" {event['args']['batch']}" if event["cat"] != "step" else ""
            middle = event["ts"] + event["dur"] / 2
            axis.text(middle, height, text + number, ha="center", va="center", fontsize=7)
    labels = [f"rank {rank}  {lane}" for rank, lane in rows]
    shown = {part: COLORS[part] for part in COLORS if any(event["name"] == part for event in events)}
    save_lanes(axis, labels, whole, shown, path)


def save_lanes(axis: Any, labels: list[str], whole: float, colors: dict[str, str], path: Path) -> None:
    """Write the figure of an axis whose lanes are at 0, 1, … from below.

    Args:
      axis: The axis.
      labels: The lanes' names, from above.
      whole: The milliseconds that it shows.
      colors: What the legend explains.
      path: The PNG.
    """
    import matplotlib.pyplot as plt

    axis.set_yticks(range(len(labels)), labels[::-1], fontsize=8)
    axis.set_xlabel("ms")
    axis.set_xlim(0, whole)
    axis.spines[["top", "right"]].set_visible(False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in colors.values()]
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1)}
    axis.legend(handles, [*colors], ncols=len(colors), frameon=False, fontsize=8, **place)
    path.parent.mkdir(parents=True, exist_ok=True)
    axis.figure.savefig(path, dpi=120)
    plt.close(axis.figure)


def main() -> None:
    """Read the command line and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--first", type=int, required=True, help="the number of the first step's batch")
    parser.add_argument("--steps", type=int, default=2, help="how many steps")
    given = parser.parse_args()
    draw(chosen_events(json.loads(given.trace.read_text()), given.first, given.steps), given.picture)


if __name__ == "__main__":
    main()
