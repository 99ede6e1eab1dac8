"""The semantic ids of a file's items: of their neighbours in training, attributes, or a trained model.

python models/generative/item_codes.py beauty runs/ids/beauty-0 --seed 0   # for --ids runs/ids/beauty-0
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "hstu"))  # histories are read as there

import gmeta  # noqa: F401 - before TensorFlow: it selects Keras 2

# isort: split
import click
import numpy as np
from histories import LeaveLastOut
from retriever_settings import RetrieverSettings
from sequences import find_file, read_attributes, read_sequences
from settings import options_of

from gmeta.core.errors import ConfigError, DataError, GmetaError
from gmeta.core.files import stage_folder
from gmeta.preprocess import SemanticIds, cooccurrence_vectors, semantic_ids

SOURCES = ("attributes", "cooccurrence", "items", "random")


def make_ids(data: LeaveLastOut, file: Path, settings: RetrieverSettings, seed: int) -> SemanticIds:
    """Make the ids of a catalogue, or read them. Of histories only what models are trained on is read.

    Args:
      data: The histories.
      file: Their file, beside which the attributes are.
      settings: ``ids`` names the source. ``"random"``: the codes of ``"attributes"``, each of another item,
        so that they have the same shape and say nothing. Or a folder that has ids of these items, in whose
        name ``{seed}`` stands for the seed.
      seed: Of SVD, clusters and the shuffle.

    Raises:
      ConfigError: There is no such source.
      DataError: The folder has other ids.
    """
    if settings.ids not in SOURCES:
        return read_ids(data, Path(settings.ids.replace("{seed}", str(seed))))
    if settings.ids == "items":
        vectors = train_item_vectors(data, settings, seed)
    else:
        vectors = cooccurrence_vectors(
            data.train["item"].to_list(),
            data.items,
            dim=settings.vectors,
            attributes=None if settings.ids == "cooccurrence" else read_attributes(file),
            seed=seed,
        )
    ids = semantic_ids(
        vectors, levels=settings.levels, codes=settings.codes, balanced=settings.balanced, seed=seed
    )
    if settings.ids == "random":
        return replace(ids, digits=np.random.default_rng(seed).permutation(ids.digits))
    return ids


def read_ids(data: LeaveLastOut, folder: Path) -> SemanticIds:
    """Read ids that `main` or `gmeta semantic-ids` wrote, of the items as they are numbered here.

    Raises:
      ConfigError: There is no such folder.
      DataError: It has no ids, or those of other items.
    """
    if not folder.is_dir():
        raise ConfigError(f"ids must be one of {', '.join(SOURCES)}, or a folder of ids, got {str(folder)!r}")
    ids = SemanticIds.read(folder)
    if not np.array_equal(ids.items, np.arange(data.items)):
        raise DataError(
            f"these ids aren't of the items 0 to {data.items - 1} of {data.name}",
            path=folder,
            advice="make them of these data with item_codes.py",
        )
    return ids


def train_item_vectors(data: LeaveLastOut, settings: RetrieverSettings, seed: int) -> np.ndarray:
    """Train the recipe of the next item on the same histories, and return its items' vectors, (V, d)."""
    from histories import batches
    from settings import OF_SEQUENCES, Settings, make_model

    own = Settings(dim=settings.dim, max_length=settings.max_length, batch=settings.batch)
    model = make_model("sasrec", OF_SEQUENCES, data.items, own, seed)
    model.fit(batches(data.train, own.batch, shuffle=seed), epochs=settings.item_epochs, verbose=0)
    return np.asarray(model.item_vectors())


@click.command()
@click.argument("data", metavar="DATA")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--folder", type=click.Path(path_type=Path), envvar="GMETA_SEQUENCES", help="Of text files.")
@click.option("--seed", type=int, default=0, show_default=True)
@options_of(RetrieverSettings)
def main(data: str, out: Path, folder: Path | None, seed: int, **own: Any) -> None:
    """Write the ids of DATA's items into the folder OUT, for a machine that has no scikit-learn.

    There, --ids OUT and the same --seed train as if the ids had been made there.
    """
    settings = RetrieverSettings(**{name: value for name, value in own.items() if value is not None})
    try:
        file = find_file(data, folder) or Path(data)
        ids = make_ids(read_sequences(file), file, settings, seed)
        if out.exists():
            raise ConfigError(f"{out} is there already: name another folder")
        with stage_folder(out) as staging:
            ids.write(staging)
    except (GmetaError, OSError) as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
