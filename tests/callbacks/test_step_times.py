"""StepTimes: what it measures, shows and advises, and that training stays what it is."""

import functools
import sys

import pytest
import tensorflow as tf

from gmeta.callbacks import StepTimes, step_times
from gmeta.callbacks.step_clock import PARTS, StepClock, StepSeconds
from gmeta.callbacks.step_times import Setting, advice, summary
from gmeta.core.errors import ConfigError
from gmeta.core.step import begin_span, mark_end, step_context
from gmeta.meta import InnerLoop
from support.fake_time import FakeTime


class Line(tf.keras.Model):
    """A step with the parts' marks, of 1 second's lookup, 4 seconds' gradient and 2 seconds' update."""

    marks_update = True

    def __init__(self, ticks):
        super().__init__()
        self.ticks, self.slope, self.steps_measured = ticks, tf.Variable(0.0), tf.Variable(0)
        self.built = True

    def train_step(self, data):
        measured = step_context().clock is not None
        passing = self.ticks.work if measured else lambda x, _: x
        self.steps_measured.assign_add(int(measured))
        end_lookup = begin_span("lookup", "items", data)
        x = passing(data, 1.0)
        end_lookup(x)
        gradient = passing(tf.reduce_mean(self.slope - x), 4.0)
        mark_end("outer", gradient)
        slope = self.slope.assign_sub(0.1 * passing(gradient, 2.0), read_value=True)
        if self.marks_update:
            mark_end("update", slope)
        return {"loss": gradient}


@pytest.fixture
def ticks(monkeypatch):
    ticks = FakeTime()
    monkeypatch.setattr(step_times, "StepClock", functools.partial(StepClock, ticks.now))
    return ticks


def fit(ticks, callbacks=(), **options):
    model = Line(ticks)
    model.compile(**options)
    batches = tf.data.Dataset.range(10).map(lambda number: tf.cast([number], tf.float32))
    model.fit(batches, epochs=3, callbacks=list(callbacks), verbose=0)
    return model


SETTINGS = [
    {},
    {"run_eagerly": True},
    {"steps_per_execution": 5},
    {"run_eagerly": True, "steps_per_execution": 5},
]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_parts_are_measured_and_shown(ticks, tmp_path, options):
    shown = []
    times = StepTimes(tmp_path, every=2, print_fn=shown.append)
    model = fit(ticks, [times], **options)
    # The first call is left out: one batch, or those of the whole call.
    measured = int(model.steps_measured) - options.get("steps_per_execution", 1)
    assert times.times == StepSeconds(
        {"data": 0.0, "lookup": measured, "outer": 4.0 * measured, "update": 2.0 * measured}, measured
    )
    expected = {"data": 0, "lookup": 1e3, "outer": 4e3, "update": 2e3, "all": 7e3}
    found = scalars(tmp_path)
    assert {tag: set(values) for tag, values in found.items()} == {
        f"step_ms/{part}": {value} for part, value in expected.items()
    }
    # An epoch in which only the first call was measured has nothing to show.
    assert len(found["step_ms/all"]) == (2 if "steps_per_execution" in options else 3)
    (text,) = shown
    assert text.splitlines()[0] == f"step times: 7000.00 ms a step, the mean of {measured} that were measured"
    assert "outer     4000.00 ms   57%" in text
    assert "outer takes longest: recompute=False" in text


def test_what_follows_the_last_mark_belongs_to_the_update(ticks, monkeypatch):
    monkeypatch.setattr(Line, "marks_update", False)
    times = StepTimes(every=2, print_fn=str)
    fit(ticks, [times])
    assert (times.times.seconds["update"], times.times.steps) == (28, 14)


def scalars(folder):
    """TensorBoard's scalars: tag -> values, by epoch."""
    found = {}
    for file in sorted(folder.glob("events*")):
        for record in tf.data.TFRecordDataset(str(file)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                found.setdefault(value.tag, []).append(float(tf.make_ndarray(value.tensor)))
    return found


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_training_is_what_it_is_without(ticks, options):
    plain, measured = fit(ticks, **options), fit(ticks, [StepTimes(every=3, print_fn=str)], **options)
    assert float(measured.slope) == float(plain.slope) != 0
    assert "train_step" not in vars(measured)


def test_every_kth_step_is_measured(ticks):
    model = fit(ticks, [StepTimes(every=7, print_fn=str)])
    assert int(model.steps_measured) == 5  # 1, 7, 14, 21 and 28 of 30


@pytest.mark.parametrize("every", [1, 10])
def test_tensorboard_draws_the_graph_beside_it(ticks, tmp_path, every):
    board = tf.keras.callbacks.TensorBoard(tmp_path)
    fit(ticks, [StepTimes(tmp_path, every=every, print_fn=str), board])
    files = [str(file) for file in (tmp_path / "train").glob("events*")]
    assert any(
        tf.compat.v1.Event.FromString(record.numpy()).graph_def for record in tf.data.TFRecordDataset(files)
    )


def test_a_folder_of_tensorboard_without_tensorboard_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigError, match=r"log_dir='runs' .* pip install tensorboard, or leave log_dir out"):
        StepTimes("runs")


def test_a_step_that_fails_leaves_the_model_as_it_was(ticks):
    model = Line(ticks)
    model.compile()
    bad = tf.data.Dataset.from_tensor_slices([[1.0], [0.0]])  # the second step is the first to be measured
    bad = bad.map(lambda x: tf.debugging.check_numerics(1 / x, "broken"))
    with pytest.raises(tf.errors.InvalidArgumentError, match="broken"):
        model.fit(bad, callbacks=[StepTimes(every=1)], verbose=0)
    assert "train_step" not in vars(model)
    begun = int(model.steps_measured)
    model.fit(tf.data.Dataset.from_tensors([1.0]), verbose=0)
    assert int(model.steps_measured) == begun


def test_a_training_too_short_to_measure_says_so():
    assert "no step was measured" in summary(StepSeconds({}))


def test_each_part_has_an_advice():
    assert all(advice(part) for part in PARTS)
    assert "derive the model from gmeta.models.Model" in advice("step")
    assert "gmeta.io.Balance" in advice("wait")
    assert advice("inner", Setting(ranks=2)) == advice("inner")


def test_what_is_set_already_is_not_advised():
    plain = Setting(inner=InnerLoop(steps=1, order=1))
    assert not any(word in advice("outer", plain) for word in ("order", "recompute", "steps"))
    assert "recompute=False" in advice("outer", Setting(inner=InnerLoop(recompute=True)))
    assert "steps=" in advice("inner", Setting(inner=InnerLoop(steps=5)))
    assert "HOROVOD_CYCLE_TIME=0.1" in advice("exchange", Setting(ranks=2))
    assert "half precision" in advice("forward")
    assert "half precision" not in advice("backward", Setting(half=True))
    assert "groups=2" in advice("exchange", Setting(ranks=4))
    lane = Setting(ranks=4, groups=2, through_horovod=False, depth=1, micro_batches=2)
    assert not any(word in advice("exchange", lane) for word in ("HOROVOD", "Pipeline", "groups="))
    assert "Pipeline(depth=2)" in advice("lookup", lane)
    assert "Pipeline" in advice("data")
    assert "Pipeline" not in advice("data", lane)


def test_the_rank_that_others_wait_for_is_named():
    times = StepSeconds({"data": 1.0, "exchange": 1.0, "wait": 6.0}, 4, (2.0, 4.0))
    text = summary(times, Setting(ranks=2, through_horovod=False))
    assert "rank 0 waits least, 1000.00 ms a step, and rank 1 most, 2000.00 ms" in text
    assert "wait      1500.00 ms   75%" in text
    assert "wait takes longest: give ranks batches of equal cost" in text


def test_without_a_clock_nothing_is_added_to_a_graph():
    @tf.function
    def step(x, marks=False):
        if marks:
            end = begin_span("lookup", "items", x)
            end(x)
            mark_end("forward", x)
        return x + 1

    graphs = [step.get_concrete_function(tf.constant(1.0), marks=marks).graph for marks in (False, True)]
    plain, marked = ([op.type for op in graph.get_operations()] for graph in graphs)
    assert plain == marked


def test_settings_that_make_no_sense_are_refused(tmp_path):
    for settings, told in {
        "every": ({"every": 0}, "every must be at least 1, got 0"),
        "folder": ({"trace": tmp_path}, "is a folder: name a file in it"),
        "name": ({"trace": tmp_path / "trace.txt"}, "must end in .json"),
        "missing": ({"trace": tmp_path / "no" / "trace.json"}, "no' doesn't exist: make it first"),
    }.values():
        with pytest.raises(ConfigError, match=told) as caught:
            StepTimes(**settings)
        assert "\n" not in str(caught.value)
