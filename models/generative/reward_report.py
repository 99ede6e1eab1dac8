"""The table and the picture of rl.py's results: imitation, more of it, and rewards.

python models/generative/reward_report.py runs/generative/rewards/*.jsonl --out runs/generative/rewards
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from gmeta.core.errors import DataError, GmetaError
from gmeta.core.files import write_atomically
from gmeta.experiment.report.style import MUTED, PALETTE, canvas, label_lines
from gmeta.experiment.results.evaluation import Spread

SFT = "sft"
MORE, RL = PARTS = ("more-sft", "rewards")
Run = Sequence[Mapping[str, Any]]
"""The metrics of one part and seed, by epoch."""


def read_runs(paths: Sequence[Path]) -> dict[str, list[Run]]:
    """Return part -> its runs, in the order of seeds.

    Raises:
      DataError: A line isn't from rl.py, a run was measured twice, or the parts have different seeds.
    """
    runs: dict[str, dict[int, dict[int, Mapping[str, Any]]]] = {part: {} for part in PARTS}
    for path in paths:
        for number, text in enumerate(path.read_text().splitlines(), start=1):
            try:
                line = json.loads(text)
                run = runs[line["part"]].setdefault(line["seed"], {})
                again = run.setdefault(line["epoch"], line) is not line
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"not a line of rl.py: {error!r}", path=path, line=number) from error
            if again:
                raise DataError(
                    f"{line['part']}, seed {line['seed']}, epoch {line['epoch']}: measured twice",
                    path=path,
                    line=number,
                    advice="give the files of one experiment",
                )
    if runs[MORE].keys() != runs[RL].keys() or not runs[RL]:
        seeds = {part: ", ".join(map(str, sorted(found))) or "none" for part, found in runs.items()}
        raise DataError(
            f"the seeds of {MORE} are {seeds[MORE]}, and those of {RL} {seeds[RL]}", path=paths[0]
        )
    return {
        part: [[run[epoch] for epoch in sorted(run)] for _, run in sorted(found.items())]
        for part, found in runs.items()
    }


def choose_epoch(run: Run) -> Mapping[str, Any]:
    """Return the metrics of the best epoch in validation, the earliest of several."""
    return max(run, key=lambda line: (line["validation"][f"ndcg@{line['k']}"], -line["epoch"]))


def write_report(paths: Sequence[Path], out: Path) -> str:
    """Write table.md and rewards.png, and return the table with a line for each seed below it.

    Raises:
      DataError: As in `read_runs`.
    """
    runs = read_runs(paths)
    k = runs[RL][0][0]["k"]
    chosen = {SFT: [run[0] for run in runs[RL]]}  # the beginning of all parts
    chosen |= {part: [choose_epoch(run) for run in runs[part]] for part in PARTS}
    lines = [f"| part | HR@{k} | NDCG@{k} | seeds | epoch chosen |", "|---" * 5 + "|"]
    for part, found in chosen.items():
        cells = [
            Spread.of([line["test"][f"{name}@{k}"] for line in found]).format(4) for name in ("hr", "ndcg")
        ]
        epochs = ", ".join(str(line["epoch"]) for line in found)
        lines.append(f"| {part} | {' | '.join(cells)} | {len(found)} | {epochs} |")
    lines.append("")
    for of_seed in zip(*chosen.values(), strict=True):
        each = zip(chosen, (line["test"][f"ndcg@{k}"] for line in of_seed), strict=True)
        values = ", ".join(f"{part} {value:.4f}" for part, value in each)
        lines.append(f"seed {of_seed[0]['seed']}: test NDCG@{k} {values}")
    text = "\n".join(lines)
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "table.md", text + "\n")
    draw(runs, k).savefig(out / "rewards.png", metadata={"Software": None})
    return text


def draw(runs: Mapping[str, list[Run]], k: int) -> Any:
    """Draw NDCG in validation by minutes of training, a line a seed; a mark is at the best epoch."""
    seeds = len(runs[RL])
    figure, (axes,) = canvas(
        f"NDCG@{k} in validation, after imitation",
        f"{seeds} seed{'s' * (seeds > 1)}. Marks: the best epoch; right: the mean of the best",
        3.9,
        label=f"{MORE} 0.0000",
    )
    ends = []
    for (part, of_seeds), colour in zip(runs.items(), PALETTE, strict=False):
        values = []
        for run in of_seeds:
            points = [(line["seconds"] / 60, line["validation"][f"ndcg@{k}"]) for line in run]
            axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.5)
            best = points[run.index(choose_epoch(run))]
            axes.plot(*best, marker="o", markersize=6, color=colour)
            values.append(best[1])
        mean = Spread.of(values).mean
        ends.append((f"{part} {mean:.4f}", colour, mean))
    axes.set_xlabel("minutes of training, without measures", fontsize=10, color=MUTED)
    label_lines(axes, ends)
    return figure


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/rewards"), show_default=True)
def main(files: tuple[Path, ...], out: Path) -> None:
    """Write the table and the picture of FILES, which rl.py wrote, and print the table."""
    try:
        click.echo(write_report(files, out))
    except GmetaError as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
