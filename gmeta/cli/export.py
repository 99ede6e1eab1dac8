"""``gmeta export``: writes a trained model for TensorFlow Serving."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import click

from gmeta.cli.options import refuse_options, run_option, seen_option
from gmeta.core.row_formats import RowDtype


@click.command("export")
@run_option
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("serving"),
    show_default=True,
    help="The model's folder, as TensorFlow Serving's --model_base_path names it.",
)
@click.option(
    "--method",
    help="Which method of the run; of a run for next-item, retrieval or ranking, a baseline too.  [default: "
    "for cold start the first; else the best in validation]",
)
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
@click.option(
    "--steps", type=click.IntRange(0), help="Inner steps of `adapt`.  [default: the method's, for serving]"
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16"]),
    default="float32",
    show_default=True,
    help="Of the deltas that `adapt` answers; float16 is half the bytes.",
)
@click.option(
    "--row-dtype",
    type=click.Choice(["float32", "bfloat16", "int8"]),
    default="float32",
    show_default=True,
    help="Of the model's rows: bfloat16 takes half the bytes; int8, with a scale a row, about a quarter.",
)
@click.option(
    "--stale",
    type=click.Choice(["refuse", "apply"]),
    default="refuse",
    show_default=True,
    help="What `predict_with` does with deltas that another version answered.",
)
@click.option(
    "-k",
    "k",
    type=click.IntRange(1),
    default=20,
    show_default=True,
    help="Items of an answer, for next-item and retrieval.",
)
@seen_option
@click.pass_context
def command(
    context: click.Context,
    run_path: Path,
    out: Path,
    method: str | None,
    seed: int | None,
    model_version: int | None,
    unknown: Literal["initial", "zeros"],
    steps: int | None,
    dtype: Literal["float32", "float16"],
    row_dtype: RowDtype,
    stale: Literal["refuse", "apply"],
    k: int,
    seen: bool | None,
) -> None:
    """Write a trained model as a SavedModel that stock TensorFlow Serving loads.

    The SavedModel has TensorFlow's own ops only. For a run for next-item or retrieval it has one signature,
    `recommend`: it takes histories, a matrix of ids padded with -1, or of the texts that gmeta prepare
    hashed, and returns the likeliest items with their scores, texts and titles. For a run for ranking it
    has one, `predict`: it takes the columns of rows and returns their scores. For a run for cold start it
    has three: `predict` takes the features of samples and predicts with the shared weights; `adapt` takes a
    new task's samples with their labels and returns the adapted weights, as bytes to store; `predict_with`
    takes features and those bytes. Clients send a feature with several ids per sample as a matrix whose
    rows are padded with -1. OUT/VERSION appears whole or not at all.
    """
    from gmeta.experiment.runs.all_runs import export_run
    from gmeta.experiment.runs.run_folder import RunFolder

    run = RunFolder(run_path)
    family = run.family
    refuse_options(context, _OF_FAMILY, family)
    if family == "ranking":
        from gmeta.experiment.ranking.served import export_ranking

        exported = export_ranking(
            run, out, method=method, seed=seed, version=model_version, row_dtype=row_dtype
        )
    elif family in ("next-item", "retrieval"):
        from gmeta.experiment.next_item.served import export_catalogue

        exported = export_catalogue(
            run,
            out,
            method=method,
            seed=seed,
            version=model_version,
            k=k,
            leave_out_seen=None if seen is None else not seen,
            row_dtype=row_dtype,
        )
    else:
        exported = export_run(
            run,
            out,
            method=method,
            seed=seed,
            version=model_version,
            unknown=unknown,
            steps=steps,
            dtype=dtype,
            stale=stale,
            row_dtype=row_dtype,
        )
    for signature, inputs in exported.signatures.items():
        click.echo(f"{signature}: {_list(inputs)} -> {_list(exported.answers[signature])}")
    for note in exported.notes:
        click.echo(f"note: {note}")
    click.echo(f"exported: {exported.folder}, {exported.rows:,} embedding rows")


def _list(tensors: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {form}" for name, form in tensors.items())


_OF_FAMILY = {
    "cold-start": ("unknown", "steps", "dtype", "stale"),
    "next-item": ("k", "seen"),
    "retrieval": ("k", "seen"),
}
"""Family of runs -> the options that it takes and not every family does."""
