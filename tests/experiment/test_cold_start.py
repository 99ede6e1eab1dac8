import numpy as np
import pytest
import tensorflow as tf

from gmeta.experiment.measurement.split import predict_after, query_rows
from gmeta.experiment.plan.task_sets import measured_tasks
from gmeta.experiment.runs.model_choice import build_model
from gmeta.testing import small_config, small_data


@pytest.fixture(scope="module")
def model_and_batches(tmp_path_factory):
    config = small_config()
    data = small_data(tmp_path_factory.mktemp("small"))
    return build_model(config, "maml", 0), list(measured_tasks(config, data, "cold"))


def test_query_rows_are_the_last_of_each_task(model_and_batches):
    _, batches = model_and_batches
    rows = query_rows(batches)
    tasks = sum(len(batch["task"]) for batch in batches)
    assert np.array_equal(np.diff(rows.row_splits), np.full(tasks, 4))
    first = batches[0]
    np.testing.assert_array_equal(
        rows.labels[:4], tf.gather(first["label"], first["query"]["index"][0]).numpy()
    )


def test_predictions_after_steps_are_those_of_a_model_that_takes_so_many(model_and_batches):
    model, batches = model_and_batches
    trajectory = predict_after(model, batches, [3, 0, 1])
    assert list(trajectory) == [0, 1, 3]
    for steps, predictions in trajectory.items():
        expected = []
        for batch in batches:
            view = model.learner.view(batch, model.collection.lookup(batch["features"], insert=False))
            weights = model.learner.adapt(view, steps=steps).parameters
            expected.append(np.ravel(model.learner.task_outputs(view, "query", weights)))
        np.testing.assert_allclose(predictions, np.concatenate(expected), rtol=1e-5)
    assert not np.allclose(trajectory[0], trajectory[1])


def test_a_graph_predicts_what_ops_run_at_once_do(model_and_batches, monkeypatch):
    model, batches = model_and_batches
    at_once = predict_after(model, batches, [0, 2], support_size=3)
    monkeypatch.setattr("gmeta.experiment.measurement.split.WORTH_A_GRAPH", 0)
    from_a_graph = predict_after(model, batches, [0, 2], support_size=3)
    for steps, expected in at_once.items():
        np.testing.assert_allclose(from_a_graph[steps], expected, rtol=1e-5, atol=1e-6)


def test_a_limited_support_set_is_the_latest_samples(model_and_batches):
    model, batches = model_and_batches
    limited = predict_after(model, batches, [2], support_size=3)[2]
    for batch in batches:  # mask out by hand what is older than the last three
        mask = batch["support"]["mask"].numpy()
        for row in mask:
            row[: max(int(row.sum()) - 3, 0)] = 0
        batch["support"] = {**batch["support"], "mask": tf.constant(mask)}
    np.testing.assert_allclose(predict_after(model, batches, [2])[2], limited, rtol=1e-6)


def test_predicting_stores_nothing(model_and_batches):
    model, batches = model_and_batches
    predict_after(model, batches, [1])
    assert int(model.collection.tables[0].size()) == 0
