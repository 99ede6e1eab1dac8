"""The table and the picture of what rl.py measured: imitation, more of it, and rewards.

python models/generative/reward_report.py runs/rl/beauty/*.jsonl --out runs/rl/beauty
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "hstu"))  # runs are read as there

import click
from report import CHOSEN_BY, Run, choose_epoch, read_runs, table

from gmeta.core.errors import DataError, GmetaError
from gmeta.core.files import write_atomically
from gmeta.experiment.report.style import MUTED, PALETTE, canvas, label_lines
from gmeta.experiment.results.evaluation import Spread

SFT, MORE, RL = PARTS = ("sft", "more-sft", "rewards")


def write_report(paths: Sequence[Path], out: Path) -> str:
    """Write table.md and rewards.png, and return the table with a line a seed below it.

    Raises:
      DataError: As `read_runs`.
    """
    found = read_runs(paths)
    if lacks := [name for name in PARTS if len(found.get(name, [])) != len(found[next(iter(found))])]:
        raise DataError(
            f"not as many seeds of {' and '.join(lacks)} as of {next(iter(found))}", path=paths[0]
        )
    runs = {name: found[name] for name in PARTS}
    text = "\n\n".join([table(runs), "\n".join(seed_lines(runs))])
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "table.md", text + "\n")
    draw(runs).savefig(out / "rewards.png", metadata={"Software": None})
    return text


def seed_lines(runs: Mapping[str, list[Run]]) -> list[str]:
    """Tell each seed's test NDCG@10 at the chosen epochs."""
    lines = []
    for place, of_seed in enumerate(zip(*runs.values(), strict=True)):
        told = [f"{run[0]['model']} {choose_epoch(run)['test'][CHOSEN_BY]:.4f}" for run in of_seed]
        lines.append(f"seed {of_seed[0][0].get('seed', place)}: test NDCG@10 {', '.join(told)}")
    return lines


def draw(runs: Mapping[str, list[Run]]) -> Any:
    """Validation NDCG@10 by minutes of training, a line a seed; marks: test items at the chosen epochs."""
    tests = {name: Spread.of([_test(run) for run in of_seeds]) for name, of_seeds in runs.items()}
    seeds = len(next(iter(runs.values())))
    title = ", ".join(f"{name} {spread.format(4)}" for name, spread in tests.items())
    title = f"{runs[SFT][0][0]['data'].replace('_', ' ').capitalize()}, test NDCG@10: {title}"
    told = f"{seeds} seeds" if seeds > 1 else "One seed"
    subtitle = (
        f"{told}. Lines: validation NDCG@10 by training time, right: the best; marks: test where it is best"
    )
    figure, (axes,) = canvas(title, subtitle, 3.9, label=f"{MORE} 0.0000")
    ends = []
    for (name, of_seeds), colour in zip(runs.items(), PALETTE, strict=False):
        for run in of_seeds:
            minutes = [_minutes(line) for line in run]
            axes.plot(minutes, [line["validation"][CHOSEN_BY] for line in run], color=colour, linewidth=1.5)
            best = choose_epoch(run)
            axes.plot([_minutes(best)], [_test(run)], marker="o", markersize=6, color=colour)
        last = Spread.of([choose_epoch(run)["validation"][CHOSEN_BY] for run in of_seeds]).mean
        ends.append((f"{name} {last:.4f}", colour, last))
    axes.set_xlabel("minutes of training; measures are left out", fontsize=10, color=MUTED)
    label_lines(axes, ends)
    return figure


def _test(run: Run) -> float:
    return float(choose_epoch(run)["test"][CHOSEN_BY])


def _minutes(line: Mapping[str, Any]) -> float:
    return float((line.get("began", 0.0) + line["seconds"]) / 60)


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/rl"), show_default=True)
def main(files: tuple[Path, ...], out: Path) -> None:
    """Write the table and the picture of FILES, which rl.py wrote, and print the table."""
    try:
        click.echo(write_report(files, out))
    except GmetaError as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
