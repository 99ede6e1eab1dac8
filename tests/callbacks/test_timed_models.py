"""StepTimes with a model of every family: the parts that it has, and what it leaves as it was."""

import json
from collections import Counter

import numpy as np
import pytest
import tensorflow as tf

from gmeta.callbacks import StepTimes
from gmeta.core.errors import ConfigError
from gmeta.layers import EmbeddingCollection, FeatureConfig
from gmeta.models import Model
from support.cells import slow_but
from support.timed_fits import FAMILIES, fit_timed


# Quick: a family for each list of parts; the others' steps are those of their own tests.
@pytest.mark.parametrize("family", slow_but(["ctr", "maml", "flat"], FAMILIES))
@pytest.mark.shown_by(case="flat")
def test_a_model_of_each_family_has_its_parts(family):
    shown = []
    times = StepTimes(every=2, print_fn=shown.append)
    fit_timed(family, times)
    found = times.times
    assert list(found.seconds) == ["data", *FAMILIES[family], "update"]
    assert found.steps >= 3
    assert all(seconds >= 0 for seconds in found.seconds.values())
    assert found.seconds[FAMILIES[family][-1]] > 0
    assert f"{found.slowest} takes longest: " in shown[0]


# Quick: 1-2 for either of them alone.
@pytest.mark.parametrize(
    ("depth", "micro_batches"), slow_but([(1, 2), (2, 1)], [(1, 1), (2, 1), (0, 2), (1, 2)])
)
@pytest.mark.shown_by(case="2-1")
def test_what_a_pipeline_fetches_is_drawn_beside_the_step(tmp_path, depth, micro_batches):
    times = StepTimes(every=1, trace=tmp_path / "trace.json", print_fn=str)
    fit_timed("ctr", times, depth=depth, micro_batches=micro_batches)
    assert set(times.times.seconds) == {"data", "lookup", "forward", "backward", "update"}
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    ahead = [event for event in events if event.get("cat", "").startswith("ahead: ")]
    steps = {event["args"]["batch"] for event in events if event.get("cat") == "step"}
    for event in ahead:
        own = event["args"]["batch"] - (1 if event["name"].endswith("/rows") else depth)
        inside = [e for e in events if e.get("cat") == "step" and e["args"]["batch"] == own]
        assert own in steps
        assert min(e["ts"] for e in inside) <= event["ts"]
        assert event["ts"] + event["dur"] <= max(e["ts"] + e["dur"] for e in inside) + 0.01
    assert {event["name"] for event in ahead} == (
        {"next batch", "keys", "collection/rows"} if depth else set()
    )


def functional():
    user = tf.keras.Input([], name="user", dtype=tf.int64)
    vectors = EmbeddingCollection([FeatureConfig("user", dim=4)])({"user": user})
    return Model({"user": user}, tf.keras.layers.Dense(1)(vectors["user"]))


def samples():
    users = np.arange(40) % 7
    return tf.data.Dataset.from_tensor_slices(({"user": users}, users.astype(np.float32))).batch(4)


def ops_of_step(callbacks):
    """How many ops of each type the graph has that steps which aren't measured run."""
    model = functional()
    model.compile("sgd", "mse")
    model.fit(samples(), verbose=0, callbacks=callbacks)
    traced = model.train_tf_function._list_all_concrete_functions()
    return [Counter(op.type for op in each.graph.get_operations()) for each in traced]


def test_the_graph_of_steps_that_are_not_measured_is_the_same():
    plain, beside = ops_of_step([]), ops_of_step([StepTimes(every=2, print_fn=str)])
    assert len(plain) >= 1
    assert plain == beside
    assert "Timestamp" not in beside[0]


def test_a_model_of_another_library_has_one_part_beside_its_data():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    times = StepTimes(every=2, print_fn=str)
    x = np.ones([20, 2], np.float32)
    model.fit(x, x[:, :1], batch_size=2, callbacks=[times], verbose=0)
    assert list(times.times.seconds) == ["data", "step"]
    assert times.times.steps == 4


def test_a_step_that_xla_compiles_is_refused():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=True)
    with pytest.raises(ConfigError, match="jit_compile=True, and XLA has no op that reads the time"):
        model.fit(np.ones([4, 2]), np.ones([4, 1]), callbacks=[StepTimes()], verbose=0)


# Quick: 1; without a pipeline, test_step_times.py, test_training_is_what_it_is_without.
@pytest.mark.parametrize("depth", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.shown_by("callbacks/test_step_times.py::test_training_is_what_it_is_without")
def test_losses_are_those_of_a_training_that_is_not_measured(depth):
    class Nobody(tf.keras.callbacks.Callback):
        pass

    plain = fit_timed("ctr", Nobody(), depth=depth)
    assert plain == fit_timed("ctr", StepTimes(every=1, print_fn=str), depth=depth)


@pytest.mark.shown_by("test_what_a_pipeline_fetches_is_drawn_beside_the_step")
def test_accumulated_steps_are_measured():
    times = StepTimes(every=1, print_fn=str)
    fit_timed("ctr", times, accumulate_steps=3)
    assert set(times.times.seconds) == {"data", "lookup", "forward", "backward", "update"}
    assert times.times.steps > 5
