"""What the recipe compares: sequences by HSTU or FuXi, and a DNN over the means of what a user did."""

from __future__ import annotations

from typing import Any, Literal, get_args

import tensorflow as tf

from gmeta.initializers import Normal
from gmeta.layers import FeatureConfig, TableConfig
from gmeta.layers.sequence.block import SequenceLayer
from gmeta.layers.sequence.reading import SequenceView
from gmeta.models import GRM
from gmeta.ops import AttentionMask, Jagged, jagged
from gmeta.optimizers import Adam
from gmeta.preprocess.synthetic.exposures import ExposureConfig

Kind = Literal["hstu", "fuxi", "dnn", "dnn-recent"]
KINDS: tuple[str, ...] = get_args(Kind)
RECENT = 10  # events of "dnn-recent"

CONTEXTS = ["city", "age"]
HISTORY = ["item", "category", "style", "action"]
TARGETS = ["item", "category", "style"]
TIME = "timestamp"


@tf.keras.saving.register_keras_serializable("gmeta.recipes")
class MeanOfPast(SequenceLayer):
    """A token beside the means of the contexts and of the history that it sees: no order, no attention.

    What is made of it, the experts and towers that follow, is a DNN ranker's multilayer perceptron.

    Shapes:
      Values (total, dim) -> (total, 3 dim).
    """

    def transform(
        self, values: tf.Tensor, offsets: tf.Tensor, view: SequenceView, training: bool | None
    ) -> tf.Tensor:
        """(total, dim) -> (total, 3 dim)."""
        # Of 100,000 tokens a float32 sum would forget the digits that a mean of ten is made of.
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
    **options: Any,
) -> GRM:
    """A compiled model of the log.

    Args:
      kind: ``"hstu"``, ``"fuxi"``: GRM. ``"dnn"``: means of all of the past; ``"dnn-recent"``: of the last
        ten events. All have the same features, towers, loss and optimizer.
      log: What is learnt from.
      dim: Numbers of a token.
      blocks: Of the backbone.
      rate: Of Adam, for tables and weights.
      seed: Of the initial weights.
      window: Events back that a token sees in each block of HSTU or FuXi; 0: all.
      horizon: As for `gmeta.models.GRM.of`, for HSTU alone; 0: the published start, None: the default.
      length: What HSTU divides by, about the length of histories; None: the mean of the log.
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
        by_time=True,
        optimizer=Adam(learning_rate=None),
        seed=seed,
        **options,
    )
    model.compile(tf.keras.optimizers.Adam(rate))
    return model
