"""Draws a metric of new users after each epoch, for each model, number of ranks and seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TITLES = {
    "maml_dlrm": ("MAML-DLRM", "auc", "AUC"),
    "melu": ("MeLU", "auc", "AUC"),
    "cbml": ("CBML", "auc", "AUC"),
    "grm": ("GRM", "gauc_ctr", "GAUC of clicks"),
}
"""Model -> its title, the metric to draw, and the metric's name."""


def plot(path: Path, rows: dict[str, list[dict[str, Any]]]) -> None:
    """Draw plain training in all jobs: thick lines for one rank, markers for others on the same batches."""
    from gmeta.experiment.report.style import MUTED, PALETTE, canvas, whole_numbers

    from matplotlib.ticker import MultipleLocator

    jobs = [job for job, of_job in rows.items() if of_job and job != "own"]
    plain = {job: [row for row in rows[job] if row["case"]["way"] == "plain"] for job in jobs}
    models = [name for name in TITLES if any(row["case"]["model"] == name for row in plain[jobs[0]])]
    seeds = sorted({row["case"]["seed"] for of_job in plain.values() for row in of_job})
    several = ", ".join(job.removeprefix("np") for job in jobs[1:])
    figure, panels = canvas(
        "Ranks learn what one rank learns from the same batches",
        f"New users after each epoch; lines: 1 rank, marks: {several} ranks, a colour a seed",
        3.2,
        panels=len(models),
        headings=True,
    )
    for axes, model in zip(panels, models, strict=True):
        title, metric, unit = TITLES[model]
        axes.set_title(f"{title}, {unit}", fontsize=9.5, color=MUTED, loc="left")
        for number, of_job in enumerate(plain.values()):
            for row in of_job:
                if row["case"]["model"] != model:
                    continue
                values = row["metrics"][metric]
                axes.plot(
                    range(1, len(values) + 1),
                    values,
                    color=PALETTE[seeds.index(row["case"]["seed"]) % len(PALETTE)],
                    markersize=7,
                    fillstyle="none",
                    **({"linewidth": 1.6} if number == 0 else {"linestyle": "", "marker": "o+x"[number % 3]}),
                )
        axes.set_xlabel("epoch", fontsize=9.5, color=MUTED)
        axes.tick_params(labelsize=8)
        low, high = axes.get_ylim()
        if high - low > 0.04:  # short labels, or they overlap the next panel
            axes.yaxis.set_major_locator(MultipleLocator(0.02 if high - low < 0.1 else 0.05))
            axes.yaxis.set_major_formatter("{x:.2f}")
        whole_numbers(axes)
    figure.savefig(path)
