"""The command itself."""

from __future__ import annotations

import json
from pathlib import Path

import click

from gmeta.core.errors import ConfigError


@click.command("semantic-ids")
@click.argument("vectors", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--levels", type=click.IntRange(min=1), default=3, show_default=True, help="Digits of a code.")
@click.option(
    "--codes", type=click.IntRange(min=2), default=256, show_default=True, help="Values of a digit at most."
)
@click.option(
    "--method",
    type=click.Choice(["kmeans", "rq-vae"]),
    default="kmeans",
    show_default=True,
    help="Cluster the vectors, or what a trained encoder makes of them.",
)
@click.option("--epochs", type=click.IntRange(min=1), help="Of the RQ-VAE.  [default: 200]")
@click.option("--balanced", is_flag=True, help="Give all codes of a level as many items, up to one.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the first centers.")
@click.option(
    "--add-to",
    "earlier",
    type=click.Path(path_type=Path),
    help="Semantic ids whose codebooks code the items of VECTORS; OUT has both, and no digit changes.",
)
@click.option(
    "--keys", default="keys", show_default=True, help="The column of ids in a Parquet or Arrow file."
)
@click.option("--values", default="values", show_default=True, help="The column of vectors there.")
@click.option("--overwrite", is_flag=True, help="Replace OUT if it holds semantic ids.")
@click.pass_context
def command(
    ctx: click.Context,
    vectors: Path,
    out: Path,
    levels: int,
    codes: int,
    method: str,
    epochs: int | None,
    balanced: bool,
    seed: int,
    earlier: Path | None,
    keys: str,
    values: str,
    overwrite: bool,
) -> None:
    """Write semantic ids of the items in VECTORS into the folder OUT, which appears whole or not at all.

    VECTORS is a .npy file with a row for each of items 0, 1, …; a Parquet or Arrow file with a column of ids
    (numbers, or text, which is hashed as by `gmeta prepare`) and one of lists; or a folder of `gmeta tables
    export`. Items that are alike share their first digits. OUT
    also gets report.json and report.png, which say how well the codes are used.
    """
    from gmeta.cli.semantic_ids.item_vectors import read_vectors
    from gmeta.core.data.semantic_ids import IDS, SemanticIds
    from gmeta.core.staging import stage_folder
    from gmeta.preprocess.semantic.fit import Method, semantic_ids
    from gmeta.preprocess.semantic.picture import draw_codes
    from gmeta.preprocess.semantic.rq_vae import RqVae

    if out.exists() and not (overwrite and (out / IDS).exists()):
        advice = "add --overwrite" if (out / IDS).exists() else "name another folder"
        raise ConfigError(f"{out} is there already: {advice}")
    made = [
        name for name in ("levels", "codes", "method", "epochs", "balanced", "seed") if _is_given(ctx, name)
    ]
    if earlier is not None and made:
        raise ConfigError(f"--{made[0]} is for new codebooks, but those of {earlier} are taken: leave it out")
    if epochs is not None and method != "rq-vae":
        raise ConfigError(f"--epochs {epochs} is for --method rq-vae: add it, or leave --epochs out")
    items, read = read_vectors(vectors, keys, values)
    if earlier is not None:
        ids = SemanticIds.read(earlier).add(items, read)
    else:
        way: Method = "kmeans" if method == "kmeans" else RqVae(epochs=epochs or RqVae.epochs)
        ids = semantic_ids(read, levels, codes, items=items, method=way, balanced=balanced, seed=seed)
    report = ids.report()
    with stage_folder(out) as staging:
        ids.write(staging)
        (staging / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        draw_codes(ids, staging / "report.png")
    for number, level in enumerate(report["levels"], 1):
        click.echo(
            f"level {number}: {level['used']:.1%} of {level['codes']} codes in use, "
            f"{level['entropy']:.2f} bits"
        )
    click.echo(
        f"{report['items']:,} items; {report['alike']:.1%} share all codes with another one, at most "
        f"{report['most_alike']:,}; sizes {' × '.join(map(str, ids.sizes))}; digest {ids.digest[:12]}"
    )


def _is_given(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
