"""A finished evaluation without training: for tests of the table, the JSON file and the report."""

from __future__ import annotations

from collections.abc import Sequence

from gmeta.experiment.results.evaluation import DataDescription, Evaluation, MethodResult, TrainingRun

METRICS_BY_STEPS = {
    "maml": {
        0: {"mae": 1.001, "rmse": 1.240, "auc": 0.600, "ndcg@1": 0.614, "ndcg@3": 0.655},
        1: {"mae": 0.917, "rmse": 1.131, "auc": 0.640, "ndcg@1": 0.613, "ndcg@3": 0.654},
        5: {"mae": 0.918, "rmse": 1.130, "auc": 0.641, "ndcg@1": 0.610, "ndcg@3": 0.657},
    },
    "joint": {
        0: {"mae": 0.938, "rmse": 1.160, "auc": 0.630, "ndcg@1": 0.627, "ndcg@3": 0.667},
        1: {"mae": 0.929, "rmse": 1.150, "auc": 0.638, "ndcg@1": 0.627, "ndcg@3": 0.668},
        5: {"mae": 0.919, "rmse": 1.140, "auc": 0.641, "ndcg@1": 0.623, "ndcg@3": 0.668},
    },
}


def example_evaluation(seeds: Sequence[int] = (0, 1, 2), *, joint: bool = True) -> Evaluation:
    """An evaluation with every part, its means near those of a real run on MovieLens-100K.

    Args:
      seeds: The seeds; the values of seed ``i`` differ from the mean by ``0.002 * (i - middle)``.
      joint: Whether the evaluation has the method ``"joint"``.
    """
    offsets = [0.002 * (i - (len(seeds) - 1) / 2) for i in range(len(seeds))]

    def spread(mean: float) -> list[float]:
        return [mean + offset for offset in offsets]

    def run(offset: float) -> TrainingRun:
        loss = [9.0, 3.0, 1.5, 1.25 + offset]
        return TrainingRun([1, 2, 3, 4], {"loss": loss, "mae": [1.1, 0.95, 0.93, 0.92 + offset]})

    labels = {"maml": "MAML", "joint": "joint training"} if joint else {"maml": "MAML"}
    methods = {
        name: MethodResult(
            label,
            f"How {label} works.",
            {
                steps: {metric: spread(mean) for metric, mean in metrics.items()}
                for steps, metrics in METRICS_BY_STEPS[name].items()
            },
        )
        for name, label in labels.items()
    }
    baseline = {"mae": [0.974], "rmse": [1.17], "auc": [0.62], "ndcg@1": [0.6], "ndcg@3": [0.65]}
    methods["item_mean"] = MethodResult("item mean", "The item's mean rating.", {0: baseline})
    return Evaluation(
        title="Cold start",
        data=DataDescription("ml-100k", warm_tasks=461, cold_tasks=121, rows=21_034),
        config={"maml": {"alpha": 0.005, "layers": [64, 64]}, "on_bad": "raise"},
        seeds=seeds,
        methods=methods,
        support_curve={
            name: {size: spread(mean) for size, mean in ((1, 0.985), (4, 0.95), (16, 0.922))}
            for name in labels
        },
        support_steps=1,
        training={name: [run(offset) for offset in offsets] for name in labels},
        notes=["3 lines were skipped: <u.data>:17, 93 & 4411."],
        seconds={"train": 184.2},
    )
