"""The table and the learning curves of what train.py measured.

python models/hstu/report.py runs/next-item.jsonl --out runs/report
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from gmeta.core.errors import DataError, GmetaError
from gmeta.core.files import write_atomically
from gmeta.experiment.report.style import MUTED, PALETTE, canvas, label_lines, whole_numbers
from gmeta.experiment.results.evaluation import Spread

CHOSEN_BY = "ndcg@10"
COLUMNS = {"hr@10": "HR@10", "hr@50": "HR@50", "ndcg@10": "NDCG@10", "mrr": "MRR"}
ORDER = ("popularity", "sasrec", "esasrec", "hstu", "fuxi", "hstu-2", "hstu-8", "fuxi-2")

PUBLISHED: dict[str, dict[str, tuple[float, float]]] = {
    "beauty": {
        "sasrec": (0.0921, 0.0531),
        "esasrec": (0.0928, 0.0523),
        "hstu": (0.0788, 0.0439),
        "fuxi": (0.0809, 0.0451),
    },
    "toys_and_games": {
        "sasrec": (0.0970, 0.0580),
        "esasrec": (0.0939, 0.0538),
        "hstu": (0.0778, 0.0450),
        "fuxi": (0.0765, 0.0437),
    },
}
"""Data -> model -> HR@10 and NDCG@10 of the test items in the eSASRec benchmark (arXiv 2508.06450)."""

Run = Sequence[Mapping[str, Any]]
"""The measures of one model and seed, by epoch."""


def read_runs(paths: Sequence[Path]) -> dict[str, list[Run]]:
    """Model -> its runs, a run a seed.

    Raises:
      DataError: A line isn't what train.py writes, a run was measured twice at an epoch, or runs are of
        different data or settings.
    """
    runs: dict[str, dict[int, dict[int, Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    alike: dict[tuple[str, str], str] = {}
    for path in paths:
        for number, text in enumerate(path.read_text().splitlines(), start=1):
            try:
                line = json.loads(text)
                run, epoch = runs[line["model"]][line.get("seed", 0)], line["epoch"]
                same = {"data": line["data"]} | ({"settings": line["settings"]} if "settings" in line else {})
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"not a line of train.py: {error!r}", path=path, line=number) from error
            if run.setdefault(epoch, line) is not line:
                raise DataError(
                    f"{line['model']}, seed {line.get('seed', 0)}, epoch {epoch}: measured twice",
                    path=path,
                    line=number,
                    advice="give the files of one experiment",
                )
            for name, value in same.items():
                of = (name, "" if name == "data" else line["model"])
                if alike.setdefault(of, json.dumps(value)) != json.dumps(value):
                    raise DataError(
                        f"{name} differ between runs: {alike[of]} and {value}", path=path, line=number
                    )
    return {
        name: [[run[epoch] for epoch in sorted(run)] for _, run in sorted(runs[name].items())]
        for name in sorted(runs, key=lambda name: (*(name != each for each in ORDER), name))
    }


def choose_epoch(run: Run) -> Mapping[str, Any]:
    """The measure of the epoch that is best by validation, the earliest of several."""
    return max(run, key=lambda line: (line["validation"][CHOSEN_BY], -line["epoch"]))


def published_table(runs: Mapping[str, list[Run]], data: str) -> str:
    """Our HR@10 and NDCG@10 beside the published ones, as Markdown; empty if none are published."""
    known = PUBLISHED.get(data, {})
    lines = ["| model | HR@10 | published | NDCG@10 | published |", "|---|---|---|---|---|"]
    for name in [each for each in runs if each in known]:
        best = [choose_epoch(run) for run in runs[name]]
        cells = []
        for column, value in zip(("hr@10", "ndcg@10"), known[name], strict=True):
            cells += [Spread.of([line["test"][column] for line in best]).format(4), f"{value:.4f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def write_report(runs: Mapping[str, list[Run]], out: Path) -> str:
    """Write table.md and learning-curves.png, and return the table, with the published one below it."""
    data = next(iter(runs.values()))[0][0]["data"]
    text = "\n\n".join(filter(None, (table(runs), published_table(runs, data))))
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "table.md", text + "\n")
    if any(len(run) > 1 for of_seeds in runs.values() for run in of_seeds):
        curves(runs).savefig(out / "learning-curves.png", metadata={"Software": None})
    return text


def table(runs: Mapping[str, list[Run]]) -> str:
    """Test measures at the chosen epochs, mean ± sample standard deviation over seeds, as Markdown."""
    lines = [
        "| model | " + " | ".join(COLUMNS.values()) + " | seeds | epoch chosen | s an epoch |",
        "|---" * (len(COLUMNS) + 4) + "|",
    ]
    for name, of_seeds in runs.items():
        best = [choose_epoch(run) for run in of_seeds]
        cells = [Spread.of([line["test"][column] for line in best]).format(4) for column in COLUMNS]
        if all("seconds" in line for line in best):
            took = Spread.of([run[-1]["seconds"] / run[-1]["epoch"] for run in of_seeds])
            cells += [str(len(best)), ", ".join(str(line["epoch"]) for line in best), f"{took.mean:.2f}"]
        else:
            cells += ["–", "–", "–"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def curves(runs: Mapping[str, list[Run]]) -> Any:
    """Validation NDCG@10 by epoch: each seed thin, their mean thick where all seeds were measured."""
    trained = {name: of_seeds for name, of_seeds in runs.items() if len(of_seeds[0]) > 1}
    seeds = max(map(len, trained.values()))
    subtitle = "NDCG@10 on each user's second last item, among all items; " + (
        f"thin: each of {seeds} seeds, thick: their mean" if seeds > 1 else "one seed"
    )
    name, best = max(
        (
            (name, Spread.of([choose_epoch(run)["validation"][CHOSEN_BY] for run in r]))
            for name, r in trained.items()
        ),
        key=lambda each: each[1].mean,
    )
    title = f"{name} reaches the highest NDCG@10 in validation, {best.mean:.3f}"
    figure, (axes,) = canvas(title, subtitle, 3.9, label=max(runs, key=len) + " 0.000")
    ends = []
    for (name, of_seeds), colour in zip(trained.items(), PALETTE * len(trained), strict=False):
        lines = [{line["epoch"]: line["validation"][CHOSEN_BY] for line in run} for run in of_seeds]
        for line in lines if len(lines) > 1 else []:
            axes.plot([*line], [*line.values()], color=colour, linewidth=0.7, alpha=0.5)
        common = sorted(set.intersection(*(set(line) for line in lines)))
        means = [sum(line[epoch] for line in lines) / len(lines) for epoch in common]
        axes.plot(common, means, color=colour, linewidth=2)
        ends.append((f"{name} {means[-1]:.3f}", colour, means[-1]))
    for name, of_seeds in runs.items():
        if name not in trained:
            level = of_seeds[0][0]["validation"][CHOSEN_BY]
            axes.axhline(level, color=MUTED, linewidth=1, linestyle=(0, (5, 3)))
            ends.append((f"{name} {level:.3f}", MUTED, level))
    axes.set_xlabel("epoch", fontsize=10, color=MUTED)
    axes.set_ylim(bottom=0)
    whole_numbers(axes)
    label_lines(axes, ends)
    return figure


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/next-item"), show_default=True)
def main(files: tuple[Path, ...], out: Path) -> None:
    """Write the table and the picture of FILES, which train.py wrote, and print the table."""
    try:
        runs = read_runs(files)
    except GmetaError as error:
        raise click.ClickException(str(error)) from error
    click.echo(write_report(runs, out))


if __name__ == "__main__":
    main()
