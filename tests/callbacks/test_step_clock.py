"""The step's clock, on a time that only work moves: it is exact, however slow the machine is."""

import doctest
import threading

import numpy as np
import pytest
import tensorflow as tf

from gmeta.callbacks import step_clock
from gmeta.callbacks.step_clock import StepClock, StepSeconds
from gmeta.callbacks.step_trace import seconds_of
from gmeta.core.errors import ConfigError
from gmeta.core.step import SpanKind, mark_end, upstream_of, use_clock
from support.fake_time import FakeTime


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
    """A step whose parts take 1, 4, 8 and 16 seconds, after a lookup of 2: 31 together."""
    batch = clock.time.work(begun(clock, x), 1)
    clock.mark("data", {"features": batch, "nothing": None})
    end_lookup = clock.begin(SpanKind("lookup", "items"), batch)
    rows = clock.time.work(batch, 2)
    end_lookup([rows])
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
    steps, times = run(lambda x: step(clock, x)), StepSeconds({})
    for number in range(3):
        steps(tf.ones([2]))
        clock.time.seconds += 100  # between the steps
        (found,) = clock.read(first=number)
        assert (found.number, found.end - found.begin) == (number, 31)
        times += seconds_of([found])
    assert times.seconds == {"data": 3.0, "lookup": 6.0, "inner": 12.0, "outer": 24.0, "update": 48.0}
    assert (times.steps, times.slowest, times.milliseconds("inner")) == (3, "update", 4000)
    assert times.share("outer") == 24 / 93
    assert clock.read() == []


def test_a_failed_step_is_forgotten(clock):
    @tf.function
    def failing(x, fails):
        x = begun(clock, x)
        clock.mark("data", x)
        tf.debugging.assert_equal(fails, False)
        clock.mark("forward", clock.time.work(x, 1))
        clock.stop(x)

    with pytest.raises(tf.errors.InvalidArgumentError):
        failing(tf.ones([2]), tf.constant(True))
    clock.read()
    failing(tf.ones([2]), tf.constant(False))
    (found,) = clock.read()
    assert [mark.part for mark in found.marks] == ["data", "forward"]


def test_a_mark_does_not_hold_up_what_overlaps(clock):
    waiting = threading.Event()

    @tf.function
    def overlapping(x):
        clock.start()
        # This part waits for a later op, which can only be if that one doesn't wait for the mark. Both have
        # effects, so TensorFlow would run them in turn, but for the first, which is in no order.
        rows = tf.numpy_function(lambda x: x * np.float32(waiting.wait(300)), [x], tf.float32, stateful=False)
        end_lookup = clock.begin(SpanKind("lookup", "items"), rows)
        end_lookup(rows)
        clock.mark("forward", rows)
        return tf.numpy_function(lambda x: (waiting.set(), x)[1], [x], tf.float32), rows

    _, rows = overlapping(tf.ones([2]))
    np.testing.assert_array_equal(rows, [1, 1])


def test_a_span_is_from_what_it_begins_with_to_what_it_ends_with(clock):
    @tf.function
    def several(x):
        x = begun(clock, x)
        clock.mark("data", x)
        end = clock.begin(SpanKind("exchange", "keys", batches_ahead=1), clock.time.work(x, 1))
        first = clock.time.work(x, 1)
        end(clock.time.work(first, 4))
        clock.stop(x)

    several(tf.ones([2]))
    (found,) = clock.read()
    (span,) = found.spans
    assert span.what.batches_ahead == 1
    assert (span.begin - found.begin, span.end - found.begin) == (1, 6)


def test_a_step_of_several_batches_is_as_many_steps(clock):
    @tf.function
    def several(x):
        x = begun(clock, x)
        for _ in tf.range(4):
            x = clock.time.work(x, 1)
            clock.mark("data", x)
            end_lookup = clock.begin(SpanKind("lookup", "items"), x)
            x = clock.time.work(x, 2)
            end_lookup(x)
            clock.mark("forward", x)
        clock.stop(x)

    several(tf.ones([2]))
    found = clock.read(first=8)
    assert [step.number for step in found] == [8, 9, 10, 11]
    assert [(step.begin, step.end) for step in found] == [(0, 3), (3, 6), (6, 9), (9, 12)]
    assert seconds_of([found[3]]).seconds == {"data": 1, "lookup": 2, "forward": 0, "update": 0}


def test_updates_of_a_loop_within_a_step_are_of_that_step(clock):
    @tf.function
    def looping(x):
        x = begun(clock, x)
        clock.mark("data", x)
        x = clock.time.work(x, 0)  # the time doesn't pass in the loop before it is read here
        for _ in tf.range(3):
            x = clock.time.work(x, 1)
            clock.mark("forward", x)
            x = clock.time.work(x, 2)
            clock.mark("update", x)
        clock.stop(x)

    looping(tf.ones([2]))
    (found,) = clock.read()
    assert [mark.part for mark in found.marks] == ["data", *["forward", "update"] * 3]
    assert seconds_of([found]).seconds == {"data": 0, "forward": 3, "update": 6}


def test_what_is_made_now_and_then_is_of_the_step_that_it_was_in(clock):
    @tf.function
    def several(x):
        x = begun(clock, x)
        for number in tf.range(4):
            clock.mark("data", x)
            if number == 2:
                end = clock.begin(SpanKind("exchange", "dense"), x)
                x = clock.time.work(x, 1)
                end(x)
            x = clock.time.work(x, 2)
            clock.mark("update", x)
        clock.stop(x)

    several(tf.ones([2]))
    assert [len(step.spans) for step in clock.read()] == [0, 0, 1, 0]


def test_more_values_than_there_is_room_for_are_left_out():
    clock = StepClock(FakeTime().now, room=2)

    @tf.function
    def several(x):
        clock.start()
        for _ in tf.range(3):
            clock.mark("data", x)
        clock.stop(x)

    several(tf.ones([2]))
    assert clock.read() == []


def test_a_mark_of_no_tensors_waits_for_what_is_around_it(clock):
    @tf.function
    def update(x):
        clock.mark("data", begun(clock, x))
        gradient = clock.time.work(begun(clock, x), 1)
        clock.mark("outer", gradient)
        updated = clock.time.work(gradient, 2)
        with tf.control_dependencies([updated]):
            clock.mark("update")
        clock.stop(updated)

    update(tf.ones([2]))
    (found,) = clock.read()
    assert seconds_of([found]).seconds == {"data": 0, "outer": 1, "update": 2}


def test_whatever_a_step_is_made_of_can_be_waited_for(clock):
    clock.start()
    odd = [tf.zeros([0, 3]), tf.constant(["text"]), tf.constant([True]), tf.constant(np.nan)]
    clock.mark("data", odd, tf.ragged.constant([[1, 2], []]), tf.Variable(1.0), None)
    clock.mark("forward", np.ones(3), 1.0)
    clock.stop()
    assert len(clock.read()) == 1


def test_a_part_that_steps_do_not_have_is_refused(clock):
    with pytest.raises(ConfigError, match=r"data, lookup, .*, update, step, got 'sideways'"):
        clock.mark("sideways")


def test_examples():
    assert doctest.testmod(step_clock).failed == 0


def test_gradients_come_after_the_loss_while_a_clock_measures(clock):
    @tf.custom_gradient
    def loss_of(x):  # its gradient doesn't need it
        return clock.time.work(x, 5), lambda upstream: clock.time.work(upstream, 7)

    @tf.function
    def step(x):
        x = begun(clock, x)
        clock.mark("data", x)
        with use_clock(clock), tf.GradientTape() as tape:
            tape.watch(x)
            loss = loss_of(x)
            mark_end("forward", loss)
            gradient = tape.gradient(loss, x, upstream_of(loss))
            mark_end("backward", gradient)
        clock.stop(gradient)
        return gradient

    assert step(tf.constant(3.0)) == 1
    found = seconds_of(clock.read(first=0)).seconds
    assert (found["forward"], found["backward"]) == (5, 7)
    assert upstream_of(tf.constant(3.0)) is None
