"""``gmeta semantic-ids``: makes codes of items from their vectors."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from numpy.typing import NDArray

from gmeta.core.errors import ConfigError, DataError, first_line
from gmeta.core.files import write_atomically
from gmeta.core.semantic_ids import SemanticIds

if TYPE_CHECKING:
    import pyarrow as pa

# The command itself.


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
    help="Cluster the vectors, or a trained encoder's output for them.",
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
    export`. Similar items share their first digits. OUT also gets report.json and report.png, which show how
    well the codes are used.
    """
    from gmeta.core.files import stage_folder
    from gmeta.core.semantic_ids import IDS, SemanticIds
    from gmeta.preprocess.item_codes import Method, RqVae, semantic_ids

    if out.exists() and not (overwrite and (out / IDS).exists()):
        advice = "add --overwrite" if (out / IDS).exists() else "name another folder"
        raise ConfigError(f"{out} exists already: {advice}")
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


__all__ = ["command"]


# Reads the vectors of items for ``gmeta semantic-ids``.


def read_vectors(path: Path, keys: str, values: str) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Read ids and vectors of items.

    Args:
      path: A ``.npy`` file (n, dim), whose rows are of items 0 to n - 1; a Parquet or Arrow file with a
        column of ids and one of lists; or a folder of `gmeta tables export`.
      keys: The column of ids: whole numbers, or text, which is hashed as `gmeta prepare` hashes it.
      values: The column of vectors.

    Returns:
      The ids, int64 (n,), and the vectors, (n, dim).

    Raises:
      DataError: There is no such file or column; an id is null, invalid or repeated; or vectors have
        different widths.
    """
    from gmeta.checkpoint.column_files import open_source

    if path.suffix == ".npy" and path.is_file():
        vectors = _load(path)
        return np.arange(len(vectors), dtype=np.int64), vectors
    parquet = path.suffix in (".parquet", ".pq")
    # In a file it only looks for the columns: it reads no text.
    source = None if parquet and path.is_file() else open_source(path, {"keys": keys, "values": values})
    if source is None or path.is_file():
        table = _read_table(path, parquet, keys, values)
        return _ids(table.column(keys), keys, path), _vectors(table.column(values), values, path)
    pieces = [piece.columns for piece in source.pieces(("keys", "values"))]
    if not pieces:
        raise DataError("it holds no rows", path=path)
    joined = {name: np.concatenate([piece[name] for piece in pieces]) for name in ("keys", "values")}
    return _ids(joined["keys"], keys, path), joined["values"]


def _load(path: Path) -> NDArray[Any]:
    try:
        array: NDArray[Any] = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DataError(f"not a whole .npy file of numbers: {error}", path=path) from error
    if array.ndim != 2:
        raise DataError(f"it must hold (items, dim) numbers, but its shape is {array.shape}", path=path)
    return array


def _read_table(path: Path, parquet: bool, keys: str, values: str) -> pa.Table:
    import pyarrow as pa
    import pyarrow.feather
    import pyarrow.parquet as pq

    try:
        if parquet:
            return pq.read_table(path, columns=[keys, values])
        return pa.feather.read_table(path, columns=[keys, values])
    except (pa.ArrowException, OSError) as error:
        reason = f"can't read columns {keys!r} and {values!r}: {first_line(error)}"
        raise DataError(reason, path=path) from error


def _ids(keys: Any, name: str, path: Path) -> NDArray[np.int64]:
    """Return ids as `gmeta prepare` stores them: integers unchanged, and text hashed."""
    import pyarrow as pa

    from gmeta.preprocess.plan.column_values import is_text, numbers
    from gmeta.preprocess.table_spec import ColumnSpec

    given = keys.combine_chunks() if isinstance(keys, pa.ChunkedArray) else pa.array(keys)
    if pa.types.is_dictionary(given.type):
        given = given.dictionary_decode()
    column = ColumnSpec(hash=True) if is_text(given.type) else ColumnSpec(dtype="int64")
    parsed = numbers(given, column, hashed=False)
    for _, wrong, expected in parsed.faults:
        row = int(np.argmax(wrong))
        raise DataError(f"row {row + 1}: {name} must be {expected}, got {given[row].as_py()!r}", path=path)
    order = np.argsort(parsed.values, kind="stable")
    again = np.flatnonzero(np.diff(parsed.values[order]) == 0)
    if len(again):
        first, second = sorted(order[again[0] : again[0] + 2].tolist())
        raise DataError(
            f"rows {first + 1} and {second + 1} are both of {name} {given[first].as_py()!r}",
            path=path,
            advice="give each item once",
        )
    ids: NDArray[np.int64] = parsed.values
    return ids


def _vectors(lists: pa.ChunkedArray, name: str, path: Path) -> NDArray[np.float32]:
    import pyarrow as pa
    import pyarrow.compute as pc

    array = lists.combine_chunks()
    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    if not any(is_kind(array.type) for is_kind in kinds):
        raise DataError(f"column {name!r} must hold lists of numbers, but holds {array.type}", path=path)
    widths = pc.unique(pc.list_value_length(array)).to_pylist()
    if len(widths) != 1 or not widths[0]:
        raise DataError(
            f"the lists of column {name!r} must have one length, and there must be some", path=path
        )
    with _readable(path):
        flat = np.asarray(array.flatten(), np.float32)
    return flat.reshape(len(array), -1)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError) as error:
        raise DataError(f"its vectors aren't lists of numbers: {first_line(error)}", path=path) from error


# Draws how well the codes of semantic ids are used.

_BAR, _EVEN, _INK, _MUTED = "#2f6db5", "#c9542b", "#222222", "#666666"


def draw_codes(ids: SemanticIds, path: Path) -> Path:
    """Draw for each level how many items each code has, the most used first, and write it as a PNG.

    Args:
      ids: The semantic ids.
      path: The file to write.

    Returns:
      ``path``.

    Raises:
      OSError: The file can't be written.
    """
    from matplotlib.figure import Figure

    report = ids.report()
    levels = report["levels"]
    figure = Figure(figsize=(2.6 * len(levels) + 1.2, 3.2), dpi=150, facecolor="white", layout="constrained")
    every = figure.subplots(1, len(levels), sharey=True, squeeze=False)[0]
    for number, (axes, level) in enumerate(zip(every, levels, strict=True)):
        counts = np.sort(np.bincount(ids.digits[:, number], minlength=level["codes"]))[::-1]
        axes.bar(np.arange(len(counts)), counts, width=1.0, color=_BAR)
        axes.axhline(len(ids.items) / level["codes"], color=_EVEN, linewidth=1, label="if all had as many")
        axes.set_title(
            f"level {number + 1}: {level['used']:.0%} of {level['codes']} in use\n"
            f"{level['entropy']:.2f} of {np.log2(level['codes']):.2f} bits",
            fontsize=9.5,
            color=_INK,
        )
        axes.set_xlabel("codes, most used first", fontsize=9, color=_MUTED)
        axes.tick_params(colors=_MUTED, labelsize=8.5, length=0)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    every[0].set_ylabel("items", fontsize=9, color=_MUTED)
    every[0].legend(frameon=False, fontsize=8)
    figure.suptitle(
        f"{report['items']:,} items: {report['alike']:.1%} share all codes with another one, at most "
        f"{report['most_alike']:,}",
        fontsize=10.5,
        color=_INK,
    )
    picture = io.BytesIO()
    figure.savefig(picture, format="png", metadata={"Software": None})
    return write_atomically(path, picture.getvalue())
