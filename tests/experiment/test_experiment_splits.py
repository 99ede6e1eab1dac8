"""Experiments on several splits: MeLU's features, rows drawn by the task, ratings as a yes or no."""

from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.experiment.measurement.run_pool import evaluate
from gmeta.experiment.plan.experiment_config import ExperimentConfig, MethodConfig
from gmeta.experiment.plan.task_sets import measured_tasks, training_tasks
from gmeta.experiment.report.page import write_report
from gmeta.experiment.results.metrics import auc
from gmeta.experiment.runs.all_runs import TrainingProgress, run_training
from gmeta.experiment.runs.model_choice import RatedAtLeast, RatedAtLeastAUC, build_model
from gmeta.experiment.runs.run_folder import RunFolder
from gmeta.meta import InnerLoop
from gmeta.preprocess import prepare
from gmeta.testing import small_config
from support.data_files import small_melu
from support.drawn_batches import sides_by_task

SPLITS = ("user_cold", "item_cold", "warm")
BASELINES = ("item_mean", "biases", "neighbours", "kriging", "factors", "attributes")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("melu")
    prepare(small_melu(folder / "raw"), folder / "data")
    return folder / "data"


def config(**options):
    given = {"rows": "random", "resample": True, "features": "melu", "test_splits": SPLITS, **options}
    return replace(small_config(epochs=2), evaluation_steps=(0, 1), **given)


def evaluated(settings, data, folder):
    run = RunFolder(folder)
    with TrainingProgress() as progress:
        run_training(settings, run, data, progress=progress)
    return evaluate(run)


# Quick: test_experiment.py, test_the_evaluation_has_every_cell, and tests/cli/test_main_job.py for the
# report.
@pytest.mark.slow
def test_every_split_is_measured_and_shown(data, tmp_path):
    evaluation = evaluated(config(), data, tmp_path)
    assert [one.data.split for one in evaluation.sections] == list(SPLITS)
    for one in evaluation.sections:
        assert list(one.methods) == ["maml", "joint", *BASELINES]
        assert one.data.cold_tasks == 40
        assert np.isfinite(one.spread("maml", 1, "mae").mean)
    means = [one.spread("item_mean", 0, "mae").mean for one in evaluation.sections]
    assert len(set(means)) == 3
    new = evaluation.sections[1]  # only attributes tell new items apart
    assert new.spread("biases", 0, "mae").mean != new.spread("attributes", 0, "mae").mean
    *cold, warm = evaluation.sections
    assert all(one.bootstrap.find("joint", 1, "kriging", "mae") for one in cold)
    assert warm.bootstrap is None  # methods were trained on these tasks
    assert any("baselines predict each of these tasks from the rows of others" in n for n in evaluation.notes)
    assert sorted(evaluation.support_curve["maml"]) == [1, 4]
    page = write_report(evaluation, tmp_path).read_text()
    assert page.index("Results on user_cold tasks") < page.index("Results on warm tasks")
    assert (tmp_path / "figures" / "error-by-support.png").exists()


@pytest.mark.slow
def test_a_yes_or_no_is_measured_by_order_alone(data, tmp_path):
    settings = config(loss="binary_crossentropy", support_sizes=())
    settings = replace(settings, methods={"maml": settings.methods["maml"]})
    evaluation = evaluated(settings, data, tmp_path)
    assert evaluation.metrics == ["auc", "ndcg@1", "ndcg@3"]
    assert evaluation.spread("item_mean", 0, "auc").mean > 0.6  # movies differ in how they are liked
    [course] = evaluation.training["maml"]
    assert set(course.curves) == {"loss", "auc"}
    assert course.curves["loss"][-1] < 1
    assert "Results on item_cold tasks" in write_report(evaluation, tmp_path).read_text()


@pytest.mark.shown_by("io/cuts/test_task_split.py::test_rows_are_drawn_anew_or_once")
def test_training_rows_are_drawn_anew_and_measured_rows_once(data):
    def sides(dataset):
        return sides_by_task(dataset, "item")

    settings = config()
    anew = [sides(training_tasks(settings, data, start=epoch)) for epoch in range(2)]
    assert anew[0] != anew[1]
    fixed = replace(settings, resample=False)
    once = [sides(training_tasks(fixed, data, start=epoch)) for epoch in range(2)]
    assert once[0] == once[1]
    measured = measured_tasks(settings, data, "user_cold")
    assert sides(measured) == sides(measured)
    latest = sides(measured_tasks(replace(settings, rows="latest"), data, "user_cold"))
    assert latest != sides(measured)


def test_the_features_are_those_that_are_named(data):
    [batch] = measured_tasks(replace(config(), tasks_per_batch=40), data, "warm")
    names = [feature.name for feature in build_model(config(), "maml", 0).collection.features]
    assert names == ["rate", "genre", "director", "actor", "gender", "age", "occupation", "zipcode"]
    assert set(names) < set(batch["features"])
    for added in (["year"], ["year", "writer"]):
        wider = replace(config(), features="+".join(["melu", *added]))
        names_of = [feature.name for feature in build_model(wider, "maml", 0).collection.features]
        assert names_of == [*names, *added]
        assert set(added) < set(batch["features"])
    assert "area" in [f.name for f in build_model(small_config(), "maml", 0).collection.features]


def test_the_loss_of_a_yes_or_no_and_its_area():
    ratings, logits = (
        np.array([[5.0], [3.0], [4.0]], np.float32),
        np.array([[2.0], [1.0], [-1.0]], np.float32),
    )
    expected = np.log1p(np.exp([-2.0, 1.0, 1.0]))
    np.testing.assert_allclose(
        RatedAtLeast(4.0).call(tf.constant(ratings), tf.constant(logits)), expected, 1e-5
    )
    draw = np.random.default_rng(0)
    ratings, logits = draw.integers(1, 6, 500).astype(np.float32), draw.normal(size=500).astype(np.float32)
    assert np.isnan(RatedAtLeast(4.0).call(tf.constant([[np.nan]]), tf.constant([[0.5]])))
    metric = RatedAtLeastAUC(4.0)
    metric.update_state(tf.constant(ratings[:, None]), tf.constant((logits + ratings)[:, None]))
    assert float(metric.result()) == pytest.approx(auc(ratings, logits + ratings), abs=0.02)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"test_splits": ()}, "test_splits must be given"),
        ({"test_splits": ("cold", "cold")}, "each once"),
        ({"loss": "binary_crossentropy"}, "give support_sizes"),
    ],
)
def test_settings_that_make_no_sense(options, says):
    with pytest.raises(ConfigError, match=says):
        ExperimentConfig(**options)


def test_a_model_that_there_isnt():
    method = MethodConfig("x", "x", inner=InnerLoop(steps=1), model="fm")
    with pytest.raises(ConfigError, match="method 'x': no model 'fm'; there are melu, cbml, dlrm"):
        build_model(replace(small_config(), methods={"x": method}), "x", 0)


@pytest.mark.parametrize("model", [pytest.param("cbml", marks=pytest.mark.slow), "dlrm"])
@pytest.mark.shown_by("models/meta")
def test_other_models_train_and_adapt_on_the_same_split(data, model):
    method = replace(small_config().methods["maml"], model=model)
    settings = replace(config(), methods={model: method})
    built = build_model(settings, model, 0)
    course = built.fit(training_tasks(settings, data), epochs=4, verbose=0).history["loss"]
    assert course[-1] < course[0]
    [batch] = measured_tasks(replace(settings, tasks_per_batch=40), data, "user_cold")
    before, after = built.predict_after(batch, (0, 2)).values()
    assert before.shape == after.shape == (40, 4)
    assert not np.allclose(before, after)


def test_rows_may_learn_at_a_rate_of_their_own(data):
    def moved(**options):
        method = replace(small_config().methods["maml"], **options)
        model = build_model(config(methods={"maml": method}), "maml", 0)
        batch = next(iter(training_tasks(config(), data)))
        before = model.collection.lookup(batch["features"], insert=False).rows
        model.train_step(batch)
        after = model.collection.lookup(batch["features"], insert=False).rows
        return max(float(tf.reduce_max(tf.abs(a - b))) for a, b in zip(after, before, strict=True))

    assert moved() == pytest.approx(1e-2, rel=0.01)  # Adam's first step is its rate
    assert moved(row_learning_rate=0.03) == pytest.approx(0.03, rel=0.01)
    with pytest.raises(ConfigError, match=r"learning rates above 0, got 3 and \[0.01, 0.0\]"):
        moved(row_learning_rate=0.0)
