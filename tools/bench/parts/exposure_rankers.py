"""Rankers of exposures: sequences by HSTU or FuXi, and a DNN over the means of what a user did."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal, get_args

from gmeta.initializers import Normal
from gmeta.layers import FeatureConfig, TableConfig
from gmeta.layers.sequence.block import SequenceLayer
from gmeta.layers.sequence.reading import SequenceView
from gmeta.models import GRM
from gmeta.ops import AttentionMask, Jagged, jagged
from gmeta.optimizers import Adam
from gmeta.preprocess.synthetic.exposures import ExposureConfig

import tensorflow as tf

Kind = Literal["hstu", "fuxi", "dnn", "dnn-recent"]
KINDS: tuple[str, ...] = get_args(Kind)
RECENT = 10  # events of "dnn-recent"
PATIENCE = 8  # epochs without improvement in validation before a kind's training ends

Row = dict[str, Any]
"""The figures of an epoch."""

CONTEXTS = ["city", "age"]
HISTORY = ["item", "category", "style", "action"]
TARGETS = ["item", "category", "style"]
TIME = "timestamp"


@tf.keras.saving.register_keras_serializable("gmeta.recipes")
class MeanOfPast(SequenceLayer):
    """A token with the means of the contexts and of the history that it sees: no order, no attention.

    With the experts and towers that follow, this is a DNN ranker's multilayer perceptron.

    Shapes:
      Values (total, dim) -> (total, 3 dim).
    """

    def transform(
        self, values: tf.Tensor, offsets: tf.Tensor, view: SequenceView, training: bool | None
    ) -> tf.Tensor:
        """(total, dim) -> (total, 3 dim)."""
        # A float32 sum of 100,000 tokens would lose the digits that determine a mean of ten.
        sums = tf.cumsum(tf.cast(values, tf.float64))
        sums = tf.concat([tf.zeros_like(sums[:1]), sums], axis=0)
        first = tf.gather(offsets, jagged.row_ids(Jagged(values, offsets)))
        contexts, begin, end = (first + tf.cast(n, tf.int64) for n in tf.unstack(view.visible, axis=1))
        means = [_mean(sums, *span) for span in ((first, contexts), (begin, end))]
        return tf.concat([values, *(tf.cast(mean, values.dtype) for mean in means)], axis=1)


def _mean(sums: tf.Tensor, begin: tf.Tensor, end: tf.Tensor) -> tf.Tensor:
    total = jagged.take(sums, end) - jagged.take(sums, begin)
    return tf.math.divide_no_nan(total, tf.cast(end - begin, total.dtype)[:, tf.newaxis])


def ranker(
    kind: Kind,
    log: ExposureConfig,
    *,
    dim: int,
    blocks: int,
    rate: float,
    seed: int,
    window: int = 0,
    horizon: float | None = None,
    length: int | None = None,
    by_time: bool = True,
    **options: Any,
) -> GRM:
    """A compiled model of the log.

    Args:
      kind: ``"hstu"``, ``"fuxi"``: GRM. ``"dnn"``: means of all of the past; ``"dnn-recent"``: of the last
        ten events. All have the same features, towers, loss and optimizer.
      log: The log to learn from.
      dim: The width of a token.
      blocks: The blocks of the backbone.
      rate: Adam's learning rate, for tables and weights.
      seed: The seed of the initial weights.
      window: Events back that a token sees in each block of HSTU or FuXi; 0: all.
      horizon: As for `gmeta.models.GRM.of`, for HSTU alone; 0: the published start, None: the default.
      length: HSTU's divisor, about the length of histories; None: the mean of the log.
      by_time: Whether an exposure sees only the events before it; False: all of its user.
      **options: As for `gmeta.models.GRM.of`.
    """
    start = Normal(0.0, 0.1)
    widths = {"item": 8, "category": dim // 2, "style": 8, "action": 8, "city": 8, "age": 8}
    if kind in ("dnn", "dnn-recent"):
        mask = AttentionMask(by_time=True, window=RECENT if kind == "dnn-recent" else None)
        options = {
            "backbone": MeanOfPast(mask=mask),
            "experts": 1,
            "expert_units": [4 * dim, 2 * dim],
            **options,
        }
    else:
        options = {
            "backbone": kind,
            "window": window or None,
            "horizon": "auto" if kind == "fuxi" or horizon is None else horizon or None,
            "experts": 4,
            "expert_units": [2 * dim],
            **options,
        }
    model = GRM.of(
        [FeatureConfig(name, TableConfig(name, width, initializer=start)) for name, width in widths.items()],
        contexts=CONTEXTS,
        history=HISTORY,
        targets=TARGETS,
        time=TIME,
        dim=dim,
        blocks=blocks,
        max_length=length or round(log.mean_events),
        by_time=by_time,
        optimizer=Adam(learning_rate=None),
        seed=seed,
        **options,
    )
    model.compile(tf.keras.optimizers.Adam(rate))
    return model


def train(
    kind: Kind,
    log: ExposureConfig,
    data: tuple[tf.data.Dataset, tf.data.Dataset, tf.data.Dataset],
    *,
    epochs: int,
    seconds: float | None,
    keep: Callable[[Row], None],
    **settings: Any,
) -> None:
    """Train on the old users, and measure on the new ones after each epoch.

    Args:
      kind: The model.
      log: The log that the data come from.
      data: Old users, and new ones for validation and for test.
      epochs: The most epochs.
      seconds: The most seconds of training, without measurements; the epoch that exceeds them isn't
        ``in_time``. None: no limit.
      keep: Takes a row after each epoch.
      **settings: Arguments of `ranker`.
    """
    model = ranker(kind, log, seed=log.seed, **settings)
    spent, best, waited = 0.0, 0.0, 0
    for epoch in range(1, epochs + 1):
        begin = time.perf_counter()
        trained = model.fit(data[0], verbose=0).history
        spent += time.perf_counter() - begin
        row: Row = {"kind": kind, "seed": log.seed, "epoch": epoch, "seconds": round(spent, 1)}
        row["loss"] = trained["loss"][0]
        for prefix, users_of in (("validation_", data[1]), ("", data[2])):
            measured = model.evaluate(users_of, verbose=0, return_dict=True)
            kept = {name: value for name, value in measured.items() if name.startswith(("auc", "gauc"))}
            row |= {prefix + name: value for name, value in kept.items()}
        keep(row | {"in_time": seconds is None or spent <= seconds})
        waited = 0 if chosen_by(row) > best else waited + 1
        best = max(best, chosen_by(row))
        if waited == PATIENCE or (seconds is not None and spent >= seconds):
            return


def chosen_by(row: Row) -> float:
    """Return the criterion for epochs, the GAUC of both labels on the validation users; 0 without it."""
    return float(row.get("validation_gauc_ctr", 0.0) + row.get("validation_gauc_ctcvr", 0.0))
