"""StepTimes: what it measures, shows and advises, and that training stays what it is."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from gmeta.callbacks import StepTimes, step_times
from gmeta.callbacks.step_advice import advice, summary
from gmeta.callbacks.step_clock import PARTS, StepClock, StepSeconds
from gmeta.core.errors import ConfigError
from gmeta.meta import InnerLoop


class Ticks:
    """A time that moves by so many seconds when a part's op runs."""

    def __init__(self):
        self.seconds, self.starts = 0.0, 0

    def now(self):
        return tf.ensure_shape(tf.numpy_function(lambda: np.float64(self.seconds), [], tf.float64), [])

    def passing(self, x, seconds):
        def move(x):
            self.seconds += seconds
            return x

        return tf.ensure_shape(tf.numpy_function(move, [x], x.dtype), x.shape)


class Line(tf.keras.Model):
    """A step with the parts' marks, of 1 second's lookup, 4 seconds' gradient and 2 seconds' update."""

    step_clock = None
    marks_update = True

    def __init__(self, ticks):
        super().__init__()
        self.ticks, self.slope, self.steps_measured = ticks, tf.Variable(0.0), tf.Variable(0)
        self.built = True

    def train_step(self, data):
        x = data
        clock = self.step_clock
        if clock is not None:
            self.steps_measured.assign_add(1)
            x = self.ticks.passing(x, 1.0)
            clock.mark("lookup", x)
        gradient = tf.reduce_mean(self.slope - x)
        if clock is not None:
            gradient = self.ticks.passing(gradient, 4.0)
            clock.mark("outer", gradient)
        step = self.ticks.passing(gradient, 2.0) if clock is not None else gradient
        slope = self.slope.assign_sub(0.1 * step, read_value=True)
        if clock is not None and self.marks_update:
            clock.mark("update", slope)
        return {"loss": gradient}


@pytest.fixture
def ticks(monkeypatch):
    ticks = Ticks()
    monkeypatch.setattr(step_times, "StepClock", functools.partial(StepClock, ticks.now))
    return ticks


def fit(ticks, callbacks=(), **options):
    model = Line(ticks)
    model.compile(**options)
    batches = tf.data.Dataset.range(10).map(lambda number: tf.cast([number], tf.float32))
    model.fit(batches, epochs=3, callbacks=list(callbacks), verbose=0)
    return model


SETTINGS = [{}, {"run_eagerly": True}, {"steps_per_execution": 5}]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_parts_are_measured_and_shown(ticks, tmp_path, options):
    shown = []
    times = StepTimes(tmp_path, every=2, print_fn=shown.append)
    model = fit(ticks, [times], **options)
    # The first call is left out: one batch, or those of the whole call.
    measured = int(model.steps_measured) - options.get("steps_per_execution", 1)
    assert times.times == StepSeconds(
        {"data": 0.0, "lookup": measured, "inner": 0.0, "outer": 4.0 * measured, "update": 2.0 * measured},
        measured,
    )
    expected = {**dict.fromkeys(PARTS, 0), "lookup": 1e3, "outer": 4e3, "update": 2e3, "all": 7e3}
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
    assert measured.step_clock is None


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


def test_a_step_that_fails_leaves_the_model_as_it_was(ticks):
    model = Line(ticks)
    model.compile()
    bad = tf.data.Dataset.from_tensor_slices([[1.0], [0.0]])  # the second step is the first to be measured
    bad = bad.map(lambda x: tf.debugging.check_numerics(1 / x, "broken"))
    with pytest.raises(tf.errors.InvalidArgumentError, match="broken"):
        model.fit(bad, callbacks=[StepTimes(every=1)], verbose=0)
    assert "train_step" not in vars(model)
    assert model.step_clock is None
    begun = int(model.steps_measured)
    model.fit(tf.data.Dataset.from_tensors([1.0]), verbose=0)
    assert int(model.steps_measured) == begun


def test_a_training_too_short_to_measure_says_so():
    assert "no step was measured" in summary(StepSeconds(dict.fromkeys(PARTS, 0.0)))


def test_advice_is_that_of_one_rank_or_of_several():
    assert all(advice(part) for part in PARTS)
    assert "HOROVOD_CYCLE_TIME" not in advice("lookup")
    assert "HOROVOD_CYCLE_TIME=0.1" in advice("lookup", ranks=2)
    assert advice("inner", ranks=2) == advice("inner")


def test_what_is_set_already_is_not_advised():
    plain = InnerLoop(steps=1, order=1)
    assert not any(word in advice("outer", inner=plain) for word in ("order", "recompute", "steps"))
    assert "recompute=False" in advice("outer", inner=InnerLoop(recompute=True))
    assert "steps=" in advice("inner", inner=InnerLoop(steps=5))


def test_every_below_one_is_refused():
    with pytest.raises(ConfigError, match="every must be at least 1, got 0"):
        StepTimes(every=0)
