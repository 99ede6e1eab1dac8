"""Steps of ``EmbeddingCollection``, as a model makes them, of dynamicemb's published shape.

    python tools/bench/gpu_collection.py --json FILE

Ten features of their own tables share 1,048,570 ids a batch, 350,280 of them distinct; rows of 128 weights,
Adam, all in the GPU's memory. Each call is a ``tf.function``:

training      look up the ids, gather the features' vectors, take their gradients back to the rows, Adam
lookup_adam   look up, and Adam with gradients of the rows that are already there: without gathers
evaluation    look up without inserting, and gather; the peer is ten `tf.Variable`s of as many rows, whose
              ids are the numbers of rows: gathers alone
arguments     take ten vectors of ids and return them, which each of the others does too
ahead         a training step, if the next begins before the GPU has ended it

Gradients of vectors are given, so that no loss is computed, and the calls wait for the GPU. ids: where a
batch's ids are when the call begins, in the GPU's memory or the host's. Milliseconds are medians of
interleaved calls; batches change from call to call. Without a GPU, the tables are in host memory.

fit            a step of ``fit`` with ids in host memory, of a model of these features with layers of 512 and
               256, in bfloat16, at each depth of `gmeta.Pipeline`: medians of epochs of 20 steps in
               turn, which begin without anything fetched ahead
fit_content    the same, if each sample has a vector of 128 numbers too
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

import gmeta  # noqa: E402
from gmeta.layers import EmbeddingCollection, FeatureConfig, record_lookups  # noqa: E402
from gmeta.optimizers import Adam  # noqa: E402

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from harness import Result, interleave, parser, report  # noqa: E402
from parts.meta.rank import Pace  # noqa: E402
from parts.notes import gpu  # noqa: E402

FEATURES, BATCHES, AHEAD, STEPS = 10, 4, 8, 20
IDS, DISTINCT = 104_857, 35_028  # of a feature
Batch = dict[str, tf.Tensor]


def draw(ids: int, distinct: int, rows: int) -> list[dict[str, np.ndarray[Any, Any]]]:
    """Batches of ids below ``rows``, in each of which every distinct id occurs at least once."""
    drawn, batches = np.random.default_rng(0), []
    for _ in range(BATCHES):
        batch = {}
        for number in range(FEATURES):
            own = drawn.choice(rows, distinct, replace=False)
            found = np.concatenate([own, drawn.choice(own, ids - distinct)])
            batch[f"f{number}"] = drawn.permutation(found)
        batches.append(batch)
    return batches


class Steps:
    """What is timed, with one collection.

    Args:
      dim: The width of its rows.
      upstream: The gradients of a batch's vectors, by feature.
      place: Where a batch's ids are. A function takes them by tf.identity, since it doesn't show where its
        arguments are.
    """

    def __init__(self, dim: int, upstream: Batch, place: str) -> None:
        features = [FeatureConfig(name, dim=dim) for name in upstream]
        self.collection = EmbeddingCollection(features, optimizer=Adam(1e-3), device="auto", seed=1)
        self.place = place

    def _placed(self, batch: Batch) -> Batch:
        with tf.device(self.place):
            return {name: tf.identity(ids) for name, ids in batch.items()}

    @tf.function(reduce_retracing=True)
    def training(self, batch: Batch, upstream: Batch) -> Any:
        """Look up, gather, take gradients back to the rows, and update them."""
        with tf.GradientTape() as tape, record_lookups(tape) as lookups:
            vectors = self.collection(self._placed(batch), training=True)
            given = [upstream[name] for name in vectors]
            gradients = tape.gradient(list(vectors.values()), lookups.rows, output_gradients=given)
        lookups.apply_gradients(gradients, finite=False)
        return vectors  # which keeps their gathers in the graph

    @tf.function(reduce_retracing=True)
    def lookup_adam(self, batch: Batch, gradient: tf.Tensor) -> Any:
        """Look up, and update the rows by gradients of their own."""
        lookup = self.collection.lookup(self._placed(batch))
        given = [gradient[: tf.shape(rows)[0]] for rows in lookup.rows]
        lookups = self.collection.recording_of(lookup)
        lookups.apply_gradients(given, finite=False)
        return lookup.rows[0][0, 0]

    @tf.function(reduce_retracing=True)
    def evaluation(self, batch: Batch) -> Any:
        """Look up and gather."""
        return self.collection(self._placed(batch))


@tf.function(reduce_retracing=True)
def return_all(batch: Batch) -> Any:
    """Return the arguments."""
    return {name: tf.identity(ids) for name, ids in batch.items()}


@tf.function(reduce_retracing=True)
def gather_all(tables: Batch, batch: Batch) -> Any:
    """What a table of a fixed size does in evaluation."""
    return {name: tf.gather(table, batch[name]) for name, table in tables.items()}


class Scorer(gmeta.models.Model):  # type: ignore[misc]
    """A score of the features' vectors, and of the samples' own vectors if there are any."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        features = [FeatureConfig(f"f{number}", dim=dim) for number in range(FEATURES)]
        self.collection = EmbeddingCollection(features, optimizer=Adam(1e-3), device="auto", seed=1)
        dense, begin = tf.keras.layers.Dense, tf.keras.initializers.GlorotUniform
        self.hidden = [dense(units, "relu", kernel_initializer=begin(units)) for units in (512, 256)]
        self.score = dense(1, dtype="float32", kernel_initializer=begin(1))

    def call(self, inputs: Batch, training: bool | None = None) -> Any:
        """Score a batch."""
        names = [f"f{number}" for number in range(FEATURES)]
        vectors = self.collection({name: inputs[name] for name in names}, training=training)
        content = [tf.cast(inputs["content"], vectors["f0"].dtype)] if "content" in inputs else []
        score = tf.concat([*(vectors[name] for name in names), *content], axis=1)
        for layer in self.hidden:
            score = layer(score)
        return self.score(score)


def measure_fit(
    ids: int, distinct: int, dim: int, rows: int, rounds: int, profile: Path | None, content: int = 0
) -> list[Result]:
    """Milliseconds of a step of ``fit``, at each depth, with ``content`` numbers a sample.

    ``profile`` is a folder for a profile of depth 1.
    """
    tf.keras.mixed_precision.set_global_policy("mixed_bfloat16")
    labels = np.random.default_rng(1).integers(0, 2, (ids, 1)).astype(np.float32)
    drawn = draw(ids, distinct, rows)
    if content:
        numbers = np.random.default_rng(2).normal(size=(ids, content)).astype(np.float32)
        drawn = [{**batch, "content": numbers} for batch in drawn]
    batches = [(batch, labels) for batch in drawn]
    spec = tf.nest.map_structure(lambda one: tf.TensorSpec(one.shape, one.dtype), batches[0])
    data = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec)
    data = data.cache().repeat(STEPS // BATCHES)
    loss = tf.keras.losses.BinaryCrossentropy(from_logits=True)
    models, seconds = {}, {}
    for depth in range(3):
        models[depth] = Scorer(dim)
        models[depth].compile("adam", loss, pipeline=gmeta.Pipeline(depth=depth))
        models[depth].fit(data, epochs=2, verbose=0)
        seconds[depth] = Pace()
    for _ in range(max(1, rounds // 8)):
        for depth, model in models.items():
            model.fit(data, epochs=2, verbose=0, callbacks=[seconds[depth]])
    if profile is not None:
        with tf.profiler.experimental.Profile(str(profile)):
            models[1].fit(data, epochs=1, verbose=0)
    name = "fit_content" if content else "fit"
    step = {depth: 1e3 * float(np.median(own.seconds)) / STEPS for depth, own in seconds.items()}
    return [
        Result(f"gpu_collection/{name}/depth={depth}", own, "ms", *(("depth 0", step[0]) if depth else ()))
        for depth, own in step.items()
    ]


def _wait() -> None:
    if tf.config.list_logical_devices("GPU"):
        tf.test.experimental.sync_devices()


def measure(ids: int, distinct: int, dim: int, rows: int, rounds: int) -> list[Result]:
    """Milliseconds of each call."""
    place = "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"
    drawn = draw(ids, distinct, rows)
    placed = {}
    for name, device in (("gpu", place), ("host", "CPU:0")):
        with tf.device(device):
            placed[name] = [
                {key: tf.identity(tf.constant(own)) for key, own in batch.items()} for batch in drawn
            ]
    with tf.device(place):
        upstream = {name: tf.random.normal([ids, dim]) for name in drawn[0]}
        gradient = tf.random.normal([FEATURES * distinct, dim])
        static = {name: tf.Variable(tf.random.normal([rows, dim])) for name in drawn[0]}
    steps = {name: Steps(dim, upstream, device) for name, device in (("gpu", place), ("host", "CPU:0"))}
    for name, batches in placed.items():
        for batch in batches:
            steps[name].lookup_adam(batch, gradient)

    def timed(call: Any, batches: list[Batch], *given: Any) -> Any:
        def run(number: int) -> None:
            kept = call(batches[number % BATCHES], *given)
            _wait()
            del kept

        return run

    def timed_ahead(call: Any, batches: list[Batch], *given: Any) -> Any:
        def run(_: int) -> None:
            for ahead in range(AHEAD):
                call(batches[ahead % BATCHES], *given)
            _wait()

        return run

    calls = {"static": timed(lambda batch: gather_all(static, batch), placed["gpu"])}
    for where, batches in placed.items():
        own = steps[where]
        calls[f"arguments/ids={where}"] = timed(return_all, batches)
        calls[f"ahead/ids={where}"] = timed_ahead(own.training, batches, upstream)
        calls[f"training/ids={where}"] = timed(own.training, batches, upstream)
        calls[f"lookup_adam/ids={where}"] = timed(own.lookup_adam, batches, gradient)
        calls[f"evaluation/ids={where}"] = timed(own.evaluation, batches)
    seconds = interleave(calls, rounds=rounds, warm_up=2 * BATCHES)
    peer = ("ten tf.gather", 1e3 * seconds.pop("static"))
    each = {name: 1e3 * own / (AHEAD if name.startswith("ahead") else 1) for name, own in seconds.items()}
    return [
        Result(f"gpu_collection/{name}", own, "ms", *(peer if name.startswith("evaluation") else ()))
        for name, own in each.items()
    ]


def main() -> None:
    """Measure, and report."""
    options = parser(__doc__)
    options.set_defaults(rounds=40)
    options.add_argument("--profile", type=Path, metavar="FOLDER", help="profile fit_content at depth 1")
    given = options.parse_args()
    sizes = (500, 200, 16, 1_000, 2) if given.smoke else (IDS, DISTINCT, 128, 1_000_000, given.rounds)
    os.environ.setdefault("GMETA_TABLE_DEVICE", "gpu")
    results = [*measure(*sizes), *measure_fit(*sizes, None), *measure_fit(*sizes, given.profile, content=128)]
    report("EmbeddingCollection on a GPU", results, given.json, gpu=gpu())


if __name__ == "__main__":
    main()
