"""The models whose quality is compared, built as in their recipes, with the data of each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gmeta
from gmeta import io
from gmeta.core import collectives
from gmeta.core.settings import read_toml
from gmeta.experiment.plan.experiment_config import ExperimentConfig
from gmeta.experiment.plan.own_plan import plan_experiment
from gmeta.experiment.plan.task_sets import measured_tasks, training_tasks
from gmeta.experiment.runs.model_choice import build_model
from gmeta.metrics import AUC, GAUC
from gmeta.preprocess.synthetic.exposures import ExposureConfig

import tensorflow as tf
from parts.exposure_logs import Batches, prepare_log
from parts.exposure_rankers import ranker

__all__ = ["GRM", "WAYS", "Trainee", "experiment", "prepare_log", "prepare_trainee"]

RECIPES = Path(__file__).resolve().parents[4] / "models"
GRM = "grm"
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16": {"wire": "bfloat16"},
    "pipeline": {"depth": 1, "micro_batches": 2},
    "balance": {"balance": True},
}
"""How ranks train: rows and gradients in 16 bits, lookups ahead with micro-batches, balanced batches."""


@dataclass(frozen=True)
class Trainee:
    """A compiled model, and this rank's data.

    Attributes:
      model: At its initial weights.
      training: Each iteration is the next epoch.
      measured: New users, for evaluation.
      metrics: The metrics of these users.
    """

    model: tf.keras.Model
    training: tf.data.Dataset
    measured: tf.data.Dataset
    metrics: Sequence[str]


def experiment() -> dict[str, Any]:
    """Return the settings of the recipes on MovieLens-1M: binary labels, and MeLU's inner loop for all."""
    settings = read_toml(RECIPES / "melu" / "ml-1m-binary.toml")
    melu = settings["methods"]["maml"]
    others = {"maml_dlrm": ("dlrm", "dlrm"), "cbml": ("cbml", "cbml")}
    taken = {
        name: read_toml(RECIPES / folder / "ml-1m.toml")["methods"][method]
        for name, (folder, method) in others.items()
    }
    methods = {name: {**method, "inner": melu["inner"]} for name, method in taken.items()}
    return {**settings, "methods": {"melu": melu, **methods}}


def prepare_trainee(name: str, way: str, seed: int, settings: Mapping[str, Any]) -> Trainee:
    """Build a model that trains in one of `WAYS`, on the same global batch for any number of ranks."""
    chosen = WAYS[way]
    pipeline = gmeta.Pipeline(chosen.get("depth", 0), chosen.get("micro_batches", 1))
    make = _grm if name == GRM else _meta
    return make(name, seed, settings, chosen, pipeline)


def _share(batch: int) -> int:
    """Return the part of the global batch in a share; each rank has one or several shares."""
    return batch // collectives.world().shares.total


def _meta(
    name: str, seed: int, settings: Mapping[str, Any], chosen: Mapping[str, Any], pipeline: gmeta.Pipeline
) -> Trainee:
    data, share = Path(settings["tasks"]), _share(settings["tasks_per_batch"])
    given = {**settings["experiment"], "tasks_per_batch": share}
    config = plan_experiment(given, data).config
    built = build_model(config, name, seed)
    model = _with_wire(built, chosen.get("wire", "float32"))
    metrics = [AUC(positive=config.positive), GAUC(positive=config.positive)]
    model.compile(
        tf.keras.optimizers.Adam(config.methods[name].learning_rate),
        built.loss,
        metrics=metrics,
        pipeline=pipeline,
    )
    measured = measured_tasks(config, data, config.test_splits[0])
    training = _training(config, data, seed, chosen.get("balance", False))
    return Trainee(model, training.take(settings["steps"]), measured, ("auc", "gauc"))


def _training(config: ExperimentConfig, data: Path, seed: int, balance: bool) -> tf.data.Dataset:
    options = io.ReadOptions(seed=seed)
    if not balance:
        return training_tasks(config, data, options=options)
    split = data / config.train_split
    return io.tasks(
        split,
        query=config.query,
        label=config.label,
        resample=config.resample,
        balance=io.Balance.of(split, sequences=config.tasks_per_batch),
        options=options,
    )


def _grm(
    name: str, seed: int, settings: Mapping[str, Any], chosen: Mapping[str, Any], pipeline: gmeta.Pipeline
) -> Trainee:
    log = ExposureConfig(seed=seed, **settings["log"])
    data, share = Path(settings["logs"]) / f"data-{seed}", _share(settings["users_per_batch"])
    own = settings["ranker"]
    model = _with_wire(ranker("hstu", log, seed=seed, **own), chosen.get("wire", "float32"))
    model.compile(tf.keras.optimizers.Adam(own["rate"]), pipeline=pipeline)
    tokens = round(io.Balance.of(data / "warm", sequences=share).target)
    batches = Batches(tokens) if chosen.get("balance") else Batches(users=share)
    measured = Batches(users=32).read(data / "cold", shuffle=False)
    training = batches.read(data / "warm", seed=seed).take(settings["steps"])
    return Trainee(model, training, measured, ("auc_ctr", "gauc_ctr", "auc_ctcvr", "gauc_ctcvr"))


def _with_wire(model: Any, dtype: str) -> Any:
    """Return the model at the same initial weights, whose rows and gradients travel in this dtype."""
    if dtype == model.collection.wire_dtype:
        return model
    config = model.get_config()
    config["collection"]["config"]["wire_dtype"] = dtype
    return type(model).from_config(config)
