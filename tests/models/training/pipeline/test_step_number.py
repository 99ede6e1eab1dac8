"""What a step looks up may depend on its number, which a pipeline predicts and corrects."""

from __future__ import annotations

import functools
import random

import pytest
import tensorflow as tf

import gmeta
from gmeta.callbacks import StepTimes
from gmeta.checkpoint import ShardedCheckpoint
from gmeta.core.errors import ConfigError
from gmeta.training.steps_ahead import StepsAhead
from support.pipeline_runs import STEPS, Drawn, differences, distances, make_model, own_data, train_at_depth
from support.tables import sorted_records


class Renumber(tf.keras.callbacks.Callback):
    """Sets the number of the next step, now and then."""

    def on_train_batch_end(self, batch, logs=None):
        if batch % 4 == 1:
            self.model.optimizer.iterations.assign_add(100 * (batch + 1))


def overflow():
    """A loss scale that grows every other step, so that gradients overflow and steps are skipped."""
    return tf.keras.mixed_precision.LossScaleOptimizer(
        tf.keras.optimizers.SGD(0.05), initial_scale=2.0**126, dynamic_growth_steps=2
    )


# The last batches of an epoch make a step of their own, and the next epoch goes on in the data.
FLUSHES = {"accumulate_steps": 3, "fit": {"steps_per_epoch": 5}, "epochs": 2}
SURPRISES = {
    "a callback": lambda: {"callbacks": [Renumber()]},
    "an epoch's end": lambda: FLUSHES,
    "both": lambda: {**FLUSHES, "callbacks": [Renumber()]},
}
OTHERS = {
    "skipped steps": lambda: {**FLUSHES, "optimizer": overflow()},  # Keras counts them
    "eager": lambda: {"run_eagerly": True, "epochs": 1, "callbacks": [Renumber()]},
    "several steps a call": lambda: {"steps_per_execution": 4, "fit": {"steps_per_epoch": 8}},
    "measured": lambda: {"callbacks": [Renumber(), StepTimes(every=3, print_fn=lambda text: None)]},
}
EVERY = {**SURPRISES, **OTHERS}
# What others of them show, together or in another way of running.
ALIKE = ("both", "eager", "measured", "several steps a call")


@functools.cache
def at_depth_0(name, kind="drawn"):
    return train_at_depth(kind, 0, **EVERY[name]())


@pytest.mark.parametrize(
    ("name", "depth"),
    [
        pytest.param(name, depth, marks=[pytest.mark.slow] if (number + depth) % 2 or name in ALIKE else [])
        for number, name in enumerate(EVERY)
        for depth in (1, 2)
    ],
)
@pytest.mark.shown_by(case="an epoch's end-1")
def test_a_wrong_prediction_changes_no_number(name, depth):
    assert differences(at_depth_0(name), train_at_depth("drawn", depth, **EVERY[name]())) == []


@pytest.mark.parametrize("name", ["a callback", "an epoch's end"])
@pytest.mark.shown_by(case="an epoch's end")
def test_a_prediction_that_is_not_corrected_is_noticed(name, monkeypatch):
    monkeypatch.setattr(StepsAhead, "_is_next", lambda self, number: True)
    assert differences(at_depth_0(name), train_at_depth("drawn", 1, **SURPRISES[name]())) != []


def test_the_loss_scale_skips_some_steps():
    assert 0 < at_depth_0("skipped steps")["records"][0]["step"] < 4  # of two epochs' 5 batches each


def corrections(monkeypatch, depth, **settings):
    """Train, and return for each step whether its number was predicted."""
    right = []
    plain = StepsAhead._is_next
    monkeypatch.setattr(
        StepsAhead, "_is_next", lambda self, number: right.append(plain(self, number)) or right[-1]
    )
    train_at_depth("drawn", depth, **settings)
    return [not each for each in right]


@pytest.mark.parametrize(("depth", "accumulate_steps"), [(1, 1), (2, 3)])
@pytest.mark.shown_by(case="2-3")
def test_the_usual_path_needs_no_correction(monkeypatch, depth, accumulate_steps):
    found = corrections(monkeypatch, depth, accumulate_steps=accumulate_steps)
    assert found == [False] * 2 * STEPS


def test_only_batches_that_were_foreseen_under_another_number_are_fetched_anew(monkeypatch):
    found = corrections(monkeypatch, 2, callbacks=[Renumber()], epochs=1)
    # Two batches wait when a callback sets the number.
    assert [step for step, wrong in enumerate(found) if wrong] == [2, 3, 6, 7, 10, 11]


def test_numbers_that_nobody_reads_are_not_compared(monkeypatch):
    monkeypatch.setattr(StepsAhead, "_is_next", lambda *_: pytest.fail("compared"))
    train_at_depth("recent", 1, epochs=1)


@pytest.mark.parametrize("name", ["an epoch's end", pytest.param("a callback", marks=pytest.mark.slow)])
@pytest.mark.shown_by("test_micro_batches_of_a_step_have_its_number")
def test_micro_batches_see_the_right_number_at_any_depth(name):
    plain, ahead = (train_at_depth("drawn", d, micro_batches=2, **SURPRISES[name]()) for d in (0, 1))
    assert differences(plain, ahead) == []


def test_micro_batches_of_a_step_have_its_number():
    def train(depth, micro_batches):
        optimizer = tf.keras.optimizers.SGD(0.05)
        return train_at_depth("drawn", depth, micro_batches=micro_batches, epochs=1, optimizer=optimizer)

    found = distances(train(0, 1), train(1, 3))
    assert {name: apart for name, apart in found.items() if not apart <= 1e-6} == {}


class Interrupt(tf.keras.callbacks.Callback):
    """Ends training like a killed process, after some batches of the second epoch."""

    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.iterations == STEPS + 7:
            raise KeyboardInterrupt


@pytest.mark.parametrize("kind", ["drawn", pytest.param("next item", marks=pytest.mark.slow)])
def test_a_training_that_a_checkpoint_continues_draws_as_one_without_a_break(tmp_path, kind):
    def fit(folder, depth, *callbacks):
        random.seed(5)  # Keras draws seeds from it
        tf.random.set_seed(5)
        model, batches = make_model(kind, dropout=0.0)
        loss = [] if kind == "next item" else ["mse"]
        model.compile("adam", *loss, pipeline=gmeta.Pipeline(depth=depth))
        saves = ShardedCheckpoint(folder, every=5)
        saves.fit(model, own_data(batches), epochs=2, verbose=0, callbacks=list(callbacks))
        return [weight.numpy() for weight in model.weights], sorted_records(model.collection.tables[0])

    plain = fit(tmp_path / "plain", 0)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "ahead", 2, Interrupt())
    assert differences(list(plain), list(fit(tmp_path / "ahead", 2))) == []


def test_a_model_that_reads_the_optimizers_own_count_is_told_what_to_read():
    class Counting(Drawn):
        step_number = property(lambda self: tf.convert_to_tensor(self.optimizer.iterations))

    model, (_, batches) = Counting(), make_model("drawn")
    model.compile("adam", "mse", pipeline=gmeta.Pipeline())
    with pytest.raises(ConfigError, match=r"depend on the variable 'iteration.*model's step_number"):
        model.fit(own_data(batches), verbose=0)
