"""AdaptationCurve: its values are those of measuring the model anew for each number of steps."""

import csv

import numpy as np
import pytest
import tensorflow as tf

from gmeta.callbacks import AdaptationCurve, StepTimes
from gmeta.core.errors import ConfigError
from gmeta.layers import MLP, EmbeddingCollection, FeatureConfig
from gmeta.meta import InnerLoop
from gmeta.metrics import NDCG
from gmeta.models import MetaModel
from gmeta.optimizers import SGD
from support.drawn_batches import dataset, task_batch
from support.process_ranks import run_ranks

STEPS = (0, 1, 4)


class Squared(NDCG):
    """nDCG of labels that are ratings, whatever was drawn."""

    def task_values(self, labels, predictions, real):
        return super().task_values(labels**2, predictions, real)


def make_model(evaluation_steps=None, reduction="sample", rate=0.1, **options):
    model = MetaModel(
        EmbeddingCollection(
            [FeatureConfig("user", dim=4), FeatureConfig("item", dim=4)], optimizer=SGD(learning_rate=None)
        ),
        MLP({"fc": 8, "out": 1}),
        inner=InnerLoop(steps=1, learning_rate=0.1, evaluation_steps=evaluation_steps),
        reduction=reduction,
    )
    model.compile(tf.keras.optimizers.SGD(rate), "mse", metrics=["mae", Squared(2, "rank")], **options)
    return model


def tasks(count, seed, known=True):
    """Batches of different numbers of tasks and samples."""
    sizes = [[3, 1 + number, 2][: 2 + number % 2] for number in range(count)]
    return dataset([task_batch(size, seed=seed + n) for n, size in enumerate(sizes)], known=known)


def fit(model, *callbacks, validation=None, **options):
    options = {"epochs": 2, "verbose": 0, "validation_data": validation, **options}
    return model.fit(tasks(4, seed=0), callbacks=list(callbacks), **options).history


# Quick: data of unknown length, and the mean over tasks, whose weights are the harder ones.
@pytest.mark.parametrize(
    ("known", "reduction"), [pytest.param(True, "sample", marks=pytest.mark.slow), (False, "task")]
)
def test_values_are_those_of_evaluating_for_each_number_of_steps(known, reduction):
    model, cold = make_model(reduction=reduction), tasks(3, seed=9, known=known)
    history = fit(model, AdaptationCurve(cold, STEPS))
    for steps in STEPS:
        other = make_model(evaluation_steps=steps, reduction=reduction, run_eagerly=True)
        for mine, theirs in zip(other.weights, model.weights, strict=True):
            mine.assign(theirs)
        for mine, theirs in zip(other.collection.tables, model.collection.tables, strict=True):
            mine.import_(theirs.export())
        for name, value in other.evaluate(cold, verbose=0, return_dict=True).items():
            assert history[f"val_{name}@{steps}"][-1] == pytest.approx(value, rel=1e-5), (name, steps)
    assert len(history["val_mae@0"]) == 2
    assert history["val_loss@0"][-1] != history["val_loss@4"][-1]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"run_eagerly": True}, {"steps_per_execution": 2}], ids=str)
def test_without_data_it_measures_the_validation_data_of_fit(options):
    cold = tasks(3, seed=9)
    given = fit(make_model(run_eagerly=True), AdaptationCurve(cold, STEPS))
    found = fit(make_model(**options), AdaptationCurve(steps=STEPS), validation=cold)
    for name, values in given.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-4, err_msg=name)
    np.testing.assert_allclose(found["val_mae@1"], found["val_mae"], rtol=1e-5)  # inner.steps is 1


def test_as_many_batches_are_measured_as_fit_measures():
    cold = tasks(3, seed=9)
    model = make_model(run_eagerly=True)
    found = fit(model, AdaptationCurve(steps=(1,)), validation=cold.repeat(), validation_steps=2)
    np.testing.assert_allclose(found["val_mae@1"], found["val_mae"], rtol=1e-5)


def test_callbacks_behind_it_have_its_values(tmp_path):
    stop = tf.keras.callbacks.EarlyStopping("val_mae@4", mode="max", patience=1, min_delta=1e9)
    log = tf.keras.callbacks.CSVLogger(tmp_path / "log.csv")
    curve = AdaptationCurve(tasks(2, seed=9), STEPS)
    history = fit(make_model(run_eagerly=True), curve, stop, log, epochs=9)
    assert len(history["val_mae@4"]) == 2  # stopped: nothing is better by a billion
    with (tmp_path / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    np.testing.assert_allclose([float(row["val_rank@1"]) for row in rows], history["val_rank@1"])
    assert curve.values[4]["mae"] == history["val_mae@4"][-1]


def test_every_nth_epoch_is_measured():
    history = fit(make_model(run_eagerly=True), AdaptationCurve(tasks(1, seed=9), (0,), every=2), epochs=5)
    assert (len(history["mae"]), len(history["val_mae@0"])) == (5, 2)


def test_measuring_changes_neither_the_model_nor_its_metrics():
    plain, measured = make_model(run_eagerly=True), make_model(run_eagerly=True)
    history = fit(measured, AdaptationCurve(tasks(3, seed=9), STEPS))
    assert fit(plain) == {name: values for name, values in history.items() if "@" not in name}
    assert int(plain.collection.tables[0].size()) == int(measured.collection.tables[0].size())


def test_no_data_is_refused_with_what_to_pass():
    with pytest.raises(ConfigError, match="has nothing to measure"):
        fit(make_model(run_eagerly=True), AdaptationCurve())


def test_a_model_without_inner_steps_is_refused():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ConfigError, match="Sequential takes no inner steps"):
        model.fit(np.ones((4, 2)), np.ones(4), callbacks=[AdaptationCurve()], verbose=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": ()}, "steps must be different numbers"),
        ({"steps": (0, -1)}, "from 0 on, got"),
        ({"steps": (1, 1)}, "steps must be different numbers"),
        ({"every": 0}, "every must be a whole number from 1 on, got 0"),
        ({"steps": 5}, "steps must be different numbers from 0 on, got 5"),
        ({"steps": (0, 1.5)}, "each of steps must be a whole number from 0 on, got 1.5"),
        ({"data": [1, 2]}, "must be a tf.data.Dataset of task batches, got list"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        AdaptationCurve(**settings)


def on_a_rank():
    """Runs on every rank, at a rate of 0: ranks make larger steps, which would train other weights."""
    shown = []
    given, found = AdaptationCurve(tasks(5, seed=9, known=False), STEPS), AdaptationCurve(steps=STEPS)
    times = StepTimes(every=1, print_fn=shown.append)
    model = make_model(rate=0.0, run_eagerly=True)
    fit(model, given, found, times, epochs=2, validation=tasks(5, seed=9))
    return given.values, found.values, times.times, shown


@pytest.mark.ranks
@pytest.mark.shown_by("test_values_are_those_of_evaluating_for_each_number_of_steps")
def test_values_on_ranks_are_those_of_one():
    ranks, (one, again, _, _) = run_ranks(on_a_rank, 2), on_a_rank()
    assert sorted(one) == list(STEPS)
    for curve in (again, *(curve for rank in ranks for curve in rank[:2])):
        for steps in STEPS:
            assert curve[steps] == pytest.approx(one[steps], rel=1e-5)
    # 4 batches, twice, are 4 steps of 2 ranks, of which each leaves out the first and forgets the second.
    # Times are of both, and shown by one.
    (*_, times, shown), (*_, other, hidden) = ranks
    assert times == other
    assert (times.steps, min(times.seconds.values()) > 0) == (4, True)
    assert (len(shown), len(hidden)) == (1, 0)
    assert "the mean of 4 that were measured" in shown[0]
