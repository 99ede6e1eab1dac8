"""The time to adapt a user at serving time: in Python, and by the signatures of an exported model.

    python tools/bench/serving.py
    python tools/bench/serving.py --rounds 51

MeLU with six features 32 wide and layers of 64, 64 and 1. A user has 10 rated samples and 20 to rate, 5 inner
steps; ids are drawn anew for each round. The signatures are those that TensorFlow Serving runs, called here
without a network.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import gmeta  # noqa: F401  before TensorFlow: it selects Keras 2
from gmeta.export import export_model
from gmeta.export.meta_models import meta_signatures
from gmeta.meta import InnerLoop
from gmeta.models import melu
from support.serving import padded

import numpy as np
import tensorflow as tf
from harness import Result, interleave, parser, report

STEPS, RATED, ASKED, TASKS = 5, 10, 20, 256
IDS = {"year": 80, "gender": 2, "age": 7, "occupation": 21, "area": 400}


def samples(count: int, seed: int) -> dict[str, object]:
    """The features of one user's samples."""
    random = np.random.default_rng(seed)
    found: dict[str, object] = {name: random.integers(0, ids, count) for name, ids in IDS.items()}
    lengths = random.integers(1, 4, count)
    found["genre"] = tf.RaggedTensor.from_row_lengths(random.integers(0, 25, lengths.sum()), lengths)
    return found


def measure(what: str, inner: InnerLoop, rounds: int, tasks: int) -> list[Result]:
    """The figures of one inner loop."""
    model = melu(inner=inner)
    model.compile()
    users = [
        (samples(RATED, seed), np.random.default_rng(seed).integers(1, 6, RATED)) for seed in range(tasks)
    ]
    asked = samples(ASKED, tasks)
    fast = model.adapt(*users[0])
    seconds = interleave(
        {
            "adapt": lambda number: model.adapt(*users[number % tasks]),
            "predict": lambda _: model.predict(asked, weights=fast),
            "bytes": lambda _: fast.to_bytes(),
            "many": lambda _: model.adapt_many(users),
        },
        rounds=rounds,
    )
    with tempfile.TemporaryDirectory() as folder:
        export_model(model, Path(folder, "1"), signatures=meta_signatures(model))
        loaded = tf.saved_model.load(str(Path(folder, "1"))).signatures
        sent = [{name: tf.constant(value) for name, value in padded(x).items()} for x, _ in users[:8]]
        query = {name: tf.constant(value) for name, value in padded(asked).items()}
        kept = tf.constant(fast.to_bytes())
        label = tf.constant(users[0][1], tf.float32)
        of_all = {name: tf.concat([x[name] for x, _ in users], 0) for name in asked}
        many = {name: tf.constant(value) for name, value in padded(of_all).items()}
        many["label"] = tf.constant(np.concatenate([y for _, y in users]), tf.float32)
        many["samples_per_user"] = tf.fill([tasks], tf.constant(RATED, tf.int64))
        seconds |= interleave(
            {
                "served/adapt": lambda number: loaded["adapt"](**sent[number % len(sent)], label=label),
                "served/adapt_many": lambda _: loaded["adapt_many"](**many),
                "served/predict": lambda _: loaded["predict"](**query),
                "served/predict_with": lambda _: loaded["predict_with"](**query, weights_bytes=kept),
            },
            rounds=rounds,
        )
    path, served_many = f"serving/{what}", seconds.pop("served/adapt_many")
    return [
        Result(f"{path}/adapt", 1e3 * seconds["adapt"], "ms"),
        Result(
            f"{path}/adapt_many/tasks{tasks}",
            tasks / seconds["many"],
            "tasks/s",
            "one by one",
            1 / seconds["adapt"],
        ),
        Result(
            f"{path}/served/adapt_many/tasks{tasks}",
            tasks / served_many,
            "tasks/s",
            "one by one",
            1 / seconds["served/adapt"],
        ),
        Result(f"{path}/predict", 1e3 * seconds["predict"], "ms"),
        Result(f"{path}/to_bytes", 1e3 * seconds["bytes"], "ms"),
        *(Result(f"{path}/{name}", 1e3 * s, "ms") for name, s in seconds.items() if "/" in name),
        Result(f"{path}/bytes/float32", len(fast.to_bytes()), "B"),
        Result(f"{path}/bytes/float16", len(fast.to_bytes("float16")), "B"),
    ]


def main() -> None:
    """Run the benchmark."""
    options = parser(__doc__).parse_args()
    loops = {
        "melu": InnerLoop(steps=STEPS),
        "melu_head": InnerLoop("anil", steps=STEPS),
        "melu_ridge": InnerLoop("ridge"),
        "melu_rows": InnerLoop(steps=STEPS, adapt="all"),
    }
    results: list[Result] = []
    for what, inner in list(loops.items())[: 1 if options.smoke else None]:
        results += measure(what, inner, options.rounds, 8 if options.smoke else TASKS)
    report(f"adapting {RATED} samples, {STEPS} steps; {ASKED} to rate", results, options.json)


if __name__ == "__main__":
    main()
