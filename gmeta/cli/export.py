"""``gmeta export``: a trained model for TensorFlow Serving."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from gmeta.cli.options import run_option


@click.command("export")
@run_option
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    help="The model's folder, as TensorFlow Serving's --model_base_path names it.",
)
@click.option("--method", help="Which method of the run.  [default: the first]")
@click.option("--seed", type=int, help="Which of its seeds.  [default: the first]")
@click.option(
    "--model-version", type=click.IntRange(1), help="Subfolder of OUT to make.  [default: the next number]"
)
@click.option(
    "--unknown",
    type=click.Choice(["initial", "zeros"]),
    default="initial",
    show_default=True,
    help="What an id reads that was never trained: the row that training would start it with, or zeros.",
)
def export(
    run_path: Path,
    out: Path,
    method: str | None,
    seed: int | None,
    model_version: int | None,
    unknown: Literal["initial", "zeros"],
) -> None:
    """Write a trained model as a SavedModel that stock TensorFlow Serving loads.

    It has TensorFlow's own ops only. Its signature `predict` takes the features of samples and gives their
    ratings by the shared weights; a feature with several ids a sample is sent as a matrix, its rows filled up
    with -1. OUT/VERSION appears whole or not at all.
    """
    from gmeta.training.export_run import export_run
    from gmeta.training.run_folder import RunFolder

    exported = export_run(
        RunFolder(run_path), out, method=method, seed=seed, version=model_version, unknown=unknown
    )
    for signature, inputs in exported.signatures.items():
        click.echo(f"{signature}: " + ", ".join(f"{name} {form}" for name, form in inputs.items()))
    click.echo(f"exported: {exported.folder}, {exported.rows:,} embedding rows")
