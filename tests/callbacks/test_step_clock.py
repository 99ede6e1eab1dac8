"""The step's clock, on a time that only work moves: it is exact, however slow the machine is."""

import doctest
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from gmeta.callbacks import step_clock
from gmeta.callbacks.step_clock import PARTS, StepClock, StepSeconds
from gmeta.core.errors import ConfigError


class FakeTime:
    """A time that passes where work is done, and nowhere else.

    Ops read and move it outside of what TensorFlow knows, so nothing but a clock's own waiting orders them;
    work takes a moment, so that a clock which doesn't wait reads too early.
    """

    def __init__(self):
        self.seconds, self.readings, self._lock = 0.0, 0, threading.Lock()

    def now(self):
        return tf.ensure_shape(tf.numpy_function(self._read, [], tf.float64), [])

    def work(self, x, seconds):
        """x, after so many seconds."""
        moved = tf.numpy_function(self._move, [x, np.float64(seconds)], x.dtype, stateful=False)
        return tf.ensure_shape(moved, x.shape)

    def _read(self):
        self.readings += 1
        return np.float64(self.seconds)

    def _move(self, x, seconds):
        time.sleep(0.005)
        with self._lock:
            self.seconds += float(seconds)
        return x


@pytest.fixture(params=["host", "gpu"])
def clock(request, monkeypatch):
    """A clock for steps on the host, and one that fetches a number of what it waits for."""
    if request.param == "gpu":
        monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: ["a GPU"])
    time = FakeTime()
    clock = StepClock(time.now)
    clock.time = time
    return clock


def begun(clock, x):
    """x, when the clock runs."""
    with tf.control_dependencies([clock.start()]):
        return tf.identity(x)


def step(clock, x):
    """A step whose parts take 1, 2, 4, 8 and 16 seconds, 31 together."""
    batch = clock.time.work(begun(clock, x), 1)
    clock.mark("data", {"features": batch, "nothing": None})
    rows = clock.time.work(batch, 2)
    clock.mark("lookup", [rows])
    weights = clock.time.work(rows, 4)
    clock.mark("inner", weights)
    gradients = clock.time.work(weights, 8)
    clock.mark("outer", tf.IndexedSlices(gradients, tf.constant([0, 1])))
    updated = clock.time.work(gradients, 16)
    clock.mark("update", updated)
    clock.stop(updated)
    return updated


@pytest.mark.parametrize("run", [lambda f: f, tf.function], ids=["eagerly", "in a graph"])
def test_parts_have_the_time_that_passed_in_them(clock, run):
    steps = run(lambda x: step(clock, x))
    for _ in range(3):
        steps(tf.ones([2]))
        clock.time.seconds += 100  # between the steps
    times = clock.read()
    assert times.seconds == dict(zip(PARTS, (3.0, 6.0, 12.0, 24.0, 48.0), strict=True))
    assert (times.steps, times.slowest, times.milliseconds("inner")) == (3, "update", 4000)
    assert times.share("outer") == 24 / 93
    clock.reset()
    assert clock.read() == StepSeconds(dict.fromkeys(PARTS, 0.0), 0)


def test_a_mark_does_not_hold_up_what_overlaps(clock):
    waiting = threading.Event()

    @tf.function
    def overlapping(x):
        clock.start()
        # This part waits for a later op, which can only be if that one doesn't wait for the mark.
        rows = tf.numpy_function(lambda x: x * np.float32(waiting.wait(300)), [x], tf.float32, stateful=False)
        clock.mark("lookup", rows)
        return tf.numpy_function(lambda x: (waiting.set(), x)[1], [x], tf.float32, stateful=False), rows

    _, rows = overlapping(tf.ones([2]))
    np.testing.assert_array_equal(rows, [1, 1])


def test_a_step_of_several_batches_is_as_many_steps(clock):
    @tf.function
    def several(x):
        x = begun(clock, x)
        for _ in tf.range(4):
            clock.mark("data", clock.time.work(x, 1))
            clock.mark("lookup", clock.time.work(x, 0))
        clock.stop(x)

    several(tf.ones([2]))
    assert (clock.read().steps, clock.read().total) == (4, 4)


def test_a_mark_of_no_tensors_waits_for_what_is_around_it(clock):
    @tf.function
    def update(x):
        gradient = clock.time.work(begun(clock, x), 1)
        clock.mark("outer", gradient)
        with tf.control_dependencies([clock.time.work(gradient, 2)]):
            clock.mark("update")

    update(tf.ones([2]))
    assert (clock.read().seconds["outer"], clock.read().seconds["update"]) == (1, 2)


def test_whatever_a_step_is_made_of_can_be_waited_for(clock):
    clock.start()
    odd = [tf.zeros([0, 3]), tf.constant(["text"]), tf.constant([True]), tf.constant(np.nan)]
    clock.mark("data", odd, tf.ragged.constant([[1, 2], []]), tf.Variable(1.0), None)
    clock.mark("lookup")
    assert clock.read().steps == 1


def test_a_part_that_steps_do_not_have_is_refused(clock):
    with pytest.raises(ConfigError, match="data, lookup, inner, outer, update, got 'forward'"):
        clock.mark("forward")


def test_readings_add_up():
    first, second = StepSeconds({"data": 1.0}, 2), StepSeconds({"data": 2.0, "inner": 1.0}, 3)
    both = first + second
    assert (both.seconds["data"], both.seconds["inner"], both.seconds["outer"], both.steps) == (3, 1, 0, 5)


def test_examples():
    assert doctest.testmod(step_clock).failed == 0
