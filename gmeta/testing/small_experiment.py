"""An experiment that trains in seconds: a few tasks of synthetic ratings, a narrow network."""

from __future__ import annotations

from pathlib import Path

from gmeta.experiment.plan.experiment_config import ExperimentConfig, MethodConfig
from gmeta.meta import InnerLoop
from gmeta.preprocess import prepare
from gmeta.testing.data.movielens_files import small_100k


def small_data(folder: Path) -> Path:
    """Prepare a small synthetic data set below ``folder``."""
    prepare(small_100k(folder / "raw"), folder / "data")
    return folder / "data"


def small_config(epochs: int = 3, seeds: tuple[int, ...] = (0,)) -> ExperimentConfig:
    """Both methods of the default experiment, made small."""
    return ExperimentConfig(
        seeds=seeds,
        tasks_per_batch=8,
        query=4,
        embedding_dim=4,
        hidden=(8,),
        support_sizes=(1, 4),
        support_steps=1,
        methods={
            "maml": MethodConfig(
                "MAML", "Adapts.", InnerLoop(steps=1, learning_rate=0.01), learning_rate=1e-2, epochs=epochs
            ),
            "joint": MethodConfig(
                "joint training",
                "Doesn't adapt.",
                InnerLoop(steps=0, learning_rate=0.01),
                outer_samples="all",
                learning_rate=1e-2,
                epochs=epochs,
            ),
        },
    )


def small_toml(*, epochs: int, tasks: int = 8) -> str:
    """Settings for ``gmeta train``: the first of these methods, with ``tasks`` a batch."""
    return _TOML.format(epochs=epochs, tasks=tasks)


_TOML = """
seeds = [0]
tasks_per_batch = {tasks}
query = 4
embedding_dim = 4
hidden = [8]
support_sizes = [1, 4]
support_steps = 1
[methods.maml]
label = "MAML"
description = "Adapts."
inner = {{ steps = 1 }}
learning_rate = 1e-2
epochs = {epochs}
"""
