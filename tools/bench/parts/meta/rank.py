"""One rank of the scaling benchmark: trains a meta-model under `fit`, and reports its pace and weights."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import gmeta
from gmeta.core import collectives
from gmeta.initializers import Normal
from gmeta.layers import MLP, EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.meta import InnerLoop
from gmeta.models import MetaModel
from gmeta.optimizers import Adam
from gmeta.training.steps_ahead import Queue, StepsAhead

import numpy as np
import tensorflow as tf
from parts.jobs import job_arguments
from parts.meta.outer_rules import outer_rule
from parts.meta.task_files import read, task_rows

_ADAPTS = {"dense": None, "all": "all"}
"""What adapts: the layers; or the embedding rows too, as in G-Meta's algorithm 1."""


class Pace(tf.keras.callbacks.Callback):
    """Seconds of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Start."""
        self._start = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stop."""
        self.seconds.append(time.perf_counter() - self._start)


def task_batch(settings: dict[str, Any], step: int, tasks: range) -> dict[str, Any]:
    """Some of the tasks of a global step, whichever rank makes them."""
    support, query = settings["support"], settings["query"]
    each = support + query
    made = [task_rows(settings, step, task) for task in tasks]
    ids = np.concatenate([ids for ids, _ in made], axis=1)
    index = np.arange(len(tasks) * each).reshape(len(tasks), each)
    return {
        "features": {f"f{feature}": tf.constant(ids[feature]) for feature in range(len(ids))},
        "label": tf.constant(np.concatenate([label for _, label in made])),
        "task": tf.range(len(tasks), dtype=tf.int64),
        "support": {"index": tf.constant(index[:, :support]), "mask": tf.ones([len(tasks), support])},
        "query": {"index": tf.constant(index[:, support:]), "mask": tf.ones([len(tasks), query])},
    }


def dataset(settings: dict[str, Any], world_tasks: int) -> tf.data.Dataset:
    """This rank's batches of an epoch, made beforehand, or read from files by ``settings["read"]``."""
    here, distinct = collectives.world(), settings["distinct_steps"]
    if settings.get("read", "memory") == "memory":
        share = world_tasks // here.size
        mine = range(here.rank * share, (here.rank + 1) * share)
        batches = [task_batch(settings, step, mine) for step in range(distinct)]
        stacked = tf.nest.map_structure(lambda *parts: tf.stack(parts), *batches)
        data = tf.data.Dataset.from_tensor_slices(stacked)
    else:
        own = {**settings, "tasks": world_tasks // here.size}
        data = read(Path(settings["data"]), own)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return data.repeat(settings["steps"] // distinct).map(_of_open_size).prefetch(4).with_options(options)


def _of_open_size(batch: dict[str, Any]) -> dict[str, Any]:
    """The types of a batch, as in `gmeta.io.tasks`: sizes are known only when it arrives."""
    return tf.nest.map_structure(
        lambda part: tf.raw_ops.PlaceholderWithDefault(input=part, shape=[None] * part.shape.rank), batch
    )


def meta_model(settings: dict[str, Any]) -> MetaModel:
    """A model like DLRM: concatenated embeddings into layers, which adapt; rows adapt too if requested."""
    features = [
        FeatureConfig(f"f{number}", TableConfig(f"f{number}", settings["dim"], initializer=Normal(0.0, 0.05)))
        for number in range(settings["features"])
    ]
    layers = {f"fc{number}": width for number, width in enumerate(settings["hidden"])}
    model = MetaModel(
        EmbeddingCollection(
            features,
            optimizer=Adam(1e-3),
            wire_dtype=settings["wire_dtype"],
            device=settings.get("tables", "cpu"),
        ),
        MLP({**layers, "out": 1}, seed=1),
        inner=InnerLoop(
            steps=settings["inner_steps"],
            learning_rate=0.01,
            order=2,
            adapt=_ADAPTS[settings.get("adapt", "dense")],
        ),
    )
    pipeline = gmeta.Pipeline(
        settings.get("depth", 0), settings.get("micro_batches", 1), settings.get("cluster", False)
    )
    shard = settings.get("shard", False)
    model.compile(tf.keras.optimizers.Adam(1e-3), "mse", pipeline=pipeline, shard_optimizer=shard)
    if settings.get("stand_still"):
        model.train_function = StandStill(model, pipeline.depth, Queue())
    return model


class StandStill(StepsAhead):
    """Repeats steps on one batch, whose keys and rows were fetched once.

    Its pace is that of steps whose fetch ahead costs nothing.
    """

    def _advance(self, iterator: Any, request: Any, number: Any, waiting: list[Any]) -> list[Any]:
        return waiting


def main() -> None:
    """Train; rank 0 writes the pace, every rank its rows."""
    out, settings = job_arguments()
    here = gmeta.init()
    if settings["keep_rows"]:  # compared to 1e-4, for which TensorFloat-32 is too coarse
        tf.config.experimental.enable_tensor_float_32_execution(False)
    model, pace = meta_model(settings), Pace()
    world_tasks = settings["tasks"] * (1 if settings["keep_rows"] else here.size)
    data = dataset(settings, world_tasks)
    with outer_rule(settings["outer"]):
        model.fit(data, epochs=settings["epochs"], callbacks=[pace], verbose=0)
    if settings["keep_rows"]:
        parts: dict[str, np.ndarray] = {}
        for number, table in enumerate(model.collection.tables):
            records = table.export()
            parts |= {f"keys{number}": records.keys.numpy(), f"rows{number}": records.rows.numpy()}
        dense = {f"dense{n}": weight.numpy() for n, weight in enumerate(model.trainable_variables)}
        np.savez(out.with_name(f"rank{here.rank}.npz"), **parts, **dense)
    if here.rank == 0:
        samples = world_tasks * (settings["support"] + settings["query"]) * settings["steps"]
        gpus = tf.config.get_visible_devices("GPU")
        found = {"seconds": pace.seconds, "samples_an_epoch": samples, "gpus": len(gpus)}
        out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
