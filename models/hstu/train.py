"""The next item of MovieLens: HSTU and FuXi-α beside SASRec and popularity, over the whole catalogue.

python models/hstu/train.py path/to/ml-100k --model all --json runs/next-item.jsonl
python models/hstu/report.py runs/next-item.jsonl
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gmeta  # noqa: F401 - before TensorFlow: it selects Keras 2

# isort: split
import click
import tensorflow as tf
from histories import Histories, LeaveLastOut, batches, read_histories
from report import choose_epoch
from sasrec import SASRec

from gmeta.core.errors import GmetaError
from gmeta.initializers import Normal
from gmeta.layers import HSTU, EmbeddingCollection, FeatureConfig, FuXi, TableConfig
from gmeta.losses import SampledSoftmax
from gmeta.metrics import NextItem, catalogue_ranks
from gmeta.models import NextItemModel
from gmeta.optimizers import Adam

KS = (10, 50)


@dataclass(frozen=True)
class Settings:
    """Of all models alike: what HSTU and SASRec were published with on MovieLens-1M, but for two numbers."""

    dim: int = 50
    max_length: int = 200
    batch: int = 32  # 128 there: 48 steps an epoch; of MovieLens-100K's users, 32 make 30
    negatives: int = 512  # for all tokens of a step; there 128 for each token
    temperature: float = 0.05
    dropout: float = 0.2
    learning_rate: float = 1e-3
    beta_2: float = 0.98


def _small(s: Settings, seed: int) -> dict[str, Any]:
    return _heads(1, s) | {"blocks": 2, "max_length": s.max_length, "dropout": s.dropout, "seed": seed}


def _heads(heads: int, s: Settings) -> dict[str, Any]:
    return {"heads": heads, "attention_dim": s.dim // heads, "value_dim": s.dim // heads}


BACKBONES: dict[str, Callable[[Settings, int], tf.keras.layers.Layer]] = {
    "sasrec": lambda s, seed: SASRec(**_small(s, seed)),
    "hstu-2": lambda s, seed: HSTU(**_small(s, seed)),
    "hstu-8": lambda s, seed: HSTU(**{**_small(s, seed), **_heads(2, s), "blocks": 8}),
    "fuxi-2": lambda s, seed: FuXi(**_small(s, seed)),
}
POPULARITY = "popularity"
MODELS = (POPULARITY, *BACKBONES)


def make_model(name: str, items: int, settings: Settings, seed: int) -> NextItemModel:
    """A model, compiled."""
    adam = {"beta_2": settings.beta_2}
    collection = EmbeddingCollection(
        [FeatureConfig("item", TableConfig("item", settings.dim, initializer=Normal(0.0, 0.02)))],
        optimizer=Adam(settings.learning_rate, **adam),
        seed=seed,
    )
    model = NextItemModel(
        collection,
        BACKBONES[name](settings, seed),
        items=items,
        max_length=settings.max_length,
        time=None if name == "sasrec" else "time",
        negatives=settings.negatives,
        loss=SampledSoftmax(temperature=settings.temperature, in_batch=False),
        dropout=settings.dropout,
        seed=seed,
        ks=KS,
    )
    model.compile(tf.keras.optimizers.Adam(settings.learning_rate, **adam))
    return model


def train(
    name: str, data: LeaveLastOut, settings: Settings, seed: int, epochs: int, every: int
) -> Iterator[dict[str, Any]]:
    """Train a model, and measure it after every so many epochs."""
    random.seed(seed)  # what Keras' layers take their seeds from
    tf.random.set_seed(seed)
    model = make_model(name, data.items, settings, seed)
    histories = batches(data.train, settings.batch, shuffle=seed)
    seconds = 0.0
    for done in range(0, epochs, every):
        until = min(done + every, epochs)
        begin = time.perf_counter()
        losses = model.fit(histories, initial_epoch=done, epochs=until, verbose=0).history["loss"]
        seconds += time.perf_counter() - begin
        found = {
            cut: model.evaluate(batches(getattr(data, cut), settings.batch), verbose=0, return_dict=True)
            for cut in ("validation", "test")
        }
        yield {"epoch": until, "seconds": round(seconds, 1), "loss": losses[-1], **found}


def popularity(data: LeaveLastOut) -> dict[str, Any]:
    """Rank items by how often they occur in what models are trained on; ties count against it."""
    counts = tf.math.bincount(tf.cast(data.train["item"].values, tf.int32), minlength=data.items)

    def measured(histories: Histories) -> dict[str, float]:
        last = histories["item"][:, -1:].values
        metric = NextItem(KS)
        metric.update_state(catalogue_ranks(tf.ones([tf.size(last), 1]), counts[:, tf.newaxis], last))
        return {name: float(value) for name, value in metric.result().items()}

    return {"epoch": 0, "validation": measured(data.validation), "test": measured(data.test)}


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--model",
    "models",
    multiple=True,
    type=click.Choice(["all", *MODELS]),
    default=["hstu-2"],
    show_default=True,
)
@click.option("--seed", "seeds", multiple=True, type=int, default=[0], show_default=True)
@click.option("--epochs", type=click.IntRange(1), default=100, show_default=True)
@click.option(
    "--every", type=click.IntRange(1), default=5, show_default=True, help="Epochs between measures."
)
@click.option("--batch", type=int, default=Settings.batch, show_default=True, help="Users a step.")
@click.option("--negatives", type=int, default=Settings.negatives, show_default=True, help="Drawn a step.")
@click.option("--dropout", type=float, default=Settings.dropout, show_default=True)
@click.option("--learning-rate", type=float, default=Settings.learning_rate, show_default=True)
@click.option("--threads", type=click.IntRange(1), help="Of TensorFlow's; as many as cores by default.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Where measures go, a line each.")
def main(
    folder: Path,
    models: tuple[str, ...],
    seeds: tuple[int, ...],
    epochs: int,
    every: int,
    threads: int | None,
    path: Path | None,
    **own: Any,
) -> None:
    """Train models on FOLDER, MovieLens-100K or -1M, to tell each user's next item.

    A user's last item is for testing, the one before it for choosing the number of epochs. --model and --seed
    may be given several times; runs of several processes may write to one file.
    """
    if threads is not None:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(threads)
    try:
        data, settings = read_histories(folder), Settings(**own)
    except GmetaError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{data.name}: {data.users} users, {data.items} items")
    for name in MODELS if "all" in models else dict.fromkeys(models):
        if name == POPULARITY:
            runs = [({}, iter([popularity(data)]))]
        else:
            runs = [
                (
                    {"seed": seed, "settings": asdict(settings)},
                    train(name, data, settings, seed, epochs, every),
                )
                for seed in seeds
            ]
        for facts, measures in runs:
            lines = []
            for found in measures:
                lines.append({"data": data.name, "model": name, **facts, **found})
                if path is not None:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with path.open("a") as file:
                        file.write(json.dumps(lines[-1]) + "\n")
                _say(lines[-1], "validation")
            _say(choose_epoch(lines), "test")


def _say(line: dict[str, Any], cut: str) -> None:
    who = f"{line['model']}, seed {line['seed']}" if "seed" in line else line["model"]
    numbers = ", ".join(f"{name} {value:.4f}" for name, value in line[cut].items() if name in _SHOWN)
    took = f" ({line['seconds']:.0f} s)" if "seconds" in line and cut == "validation" else ""
    click.echo(f"{who}, epoch {line['epoch']}{took}: {cut} {numbers}")


_SHOWN = ("hr@10", "hr@50", "ndcg@10")

if __name__ == "__main__":
    main()
