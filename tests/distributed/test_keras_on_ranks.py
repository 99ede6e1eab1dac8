"""Keras' loops on ranks: shares of data, metrics, stopping, accumulation, loss scaling; what is refused."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gmeta.checkpoint.callback import ShardedCheckpoint
from gmeta.core import collectives
from gmeta.core.errors import ConfigError, NotFiniteError
from gmeta.export.saved_model import portable_ops
from gmeta.initializers import Normal
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.layers.exchange import pieces as exchange
from gmeta.metrics import AUC
from gmeta.models import Model
from gmeta.optimizers import Adam, Warmup
from support.process_ranks import run_ranks
from support.tables import sorted_records

pytestmark = pytest.mark.ranks

RANKS = 2
FEATURES = (
    FeatureConfig("user", TableConfig("user", 4, initializer=Normal(0.0, 0.5))),
    FeatureConfig("item", TableConfig("item", 4, initializer=Normal(0.0, 0.5))),
)
AUTO = tf.data.experimental.AutoShardPolicy


def samples(n: int = 47) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    x = {"user": rng.integers(0, 9, n), "item": rng.integers(0, 30, n)}
    return x, (x["user"] % 2 == 0).astype(np.float32), rng.uniform(0.5, 2.0, n).astype(np.float32)


def make(normalize: bool = False, wire_dtype: str = "float32", seed: int = 0, **options: Any) -> Model:
    x = {name: tf.keras.Input([], name=name, dtype=tf.int64) for name in ("user", "item")}
    collection = EmbeddingCollection(
        FEATURES, optimizer=Adam(None), seed=seed, wire_dtype=wire_dtype, name="collection"
    )
    hidden = tf.keras.layers.Concatenate()(list(collection(x).values()))
    if normalize:
        hidden = tf.keras.layers.BatchNormalization(name="normalize")(hidden)
    kernel = tf.keras.initializers.GlorotUniform(seed=1)
    logit = tf.keras.layers.Dense(1, kernel_initializer=kernel, dtype="float32")(hidden)
    model = Model(x, logit)
    settings = {
        "optimizer": tf.keras.optimizers.Adam(0.05),
        "loss": tf.keras.losses.BinaryCrossentropy(from_logits=True),
        "metrics": [tf.keras.metrics.AUC(from_logits=True, name="auc")],
        **options,
    }
    model.compile(settings.pop("optimizer"), **settings)
    return model


def trained(model: Model) -> dict[str, Any]:
    return {
        "tables": [sorted_records(table) for table in model.get_layer("collection").tables],
        "dense": [weight.numpy() for weight in model.trainable_variables],
    }


def rate_of(samples_a_step: int) -> int:
    """The batch size of a rank, for so many samples in a step of all."""
    return samples_a_step // collectives.world().size


def arrays() -> dict[str, Any]:
    """Arrays, sample weights, validation, and callbacks that decide by what was measured."""
    x, y, weight = samples()
    model = make()
    stop = tf.keras.callbacks.EarlyStopping("val_auc", mode="max", patience=3)
    slower = tf.keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, factor=0.5, min_delta=0.02)
    settings = {"batch_size": rate_of(12), "epochs": 8, "shuffle": False, "verbose": 0}
    history = model.fit(
        x, y, sample_weight=weight, validation_data=(x, 1 - y), callbacks=[stop, slower], **settings
    ).history
    return {
        **trained(model),
        "history": history,
        "measured": model.evaluate(x, y, batch_size=rate_of(20), verbose=0),
        "predicted": model.predict(x, batch_size=7, verbose=0),
    }


def dataset() -> dict[str, Any]:
    """A data set that all ranks are given alike, several steps an execution, and a share for validation."""
    x, y, _ = samples(64)
    model = make(steps_per_execution=2, metrics=[AUC()])
    parts = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(64, seed=3).batch(rate_of(8))
    history = model.fit(parts, epochs=2, verbose=0, validation_data=parts).history
    predicted = model.predict(x, verbose=0)
    return {**trained(model), "history": history, "predicted": predicted}


def accumulated() -> dict[str, Any]:
    x, y, _ = samples()
    model = make(accumulate_steps=3)
    with collectives.count_collectives() as counts:
        model.fit(x, y, batch_size=rate_of(8), epochs=2, shuffle=False, verbose=0)
    # 6 batches an epoch, of 3 to a step: 2 steps an epoch.
    return {**trained(model), "steps": int(model.optimizer.iterations), "counts": counts.calls}


def mixed() -> dict[str, Any]:
    x, y, _ = samples()
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        optimizer = tf.keras.mixed_precision.LossScaleOptimizer(
            tf.keras.optimizers.Adam(0.05), initial_scale=1024.0
        )
        model = make(optimizer=optimizer)
        model.fit(x, y, batch_size=rate_of(12), epochs=2, shuffle=False, verbose=0)
        result = trained(model)
        poisoned = y.copy()
        poisoned[collectives.world().size - 1] = 1e30  # overflows in the last rank's first batch
        model.fit(x, poisoned, batch_size=rate_of(200), shuffle=False, verbose=0)
        return {**result, "after": trained(model), "scale": float(optimizer.loss_scale)}
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")


def fit_towers(features: Any, head: Callable[[Any], Any]) -> dict[str, Any]:
    x, y, _ = samples()
    inputs = {name: tf.keras.Input([], name=name, dtype=tf.int64) for name in ("user", "item")}
    vectors = EmbeddingCollection(features, optimizer=Adam(None), name="collection")(inputs)
    model = Model(inputs, head(vectors))
    model.compile(tf.keras.optimizers.Adam(0.05), "mse")
    model.fit(x, y, batch_size=rate_of(4), epochs=2, shuffle=False, verbose=0)
    return trained(model)


def ignored() -> dict[str, Any]:
    """A loss that depends on one of two features, which share ids and a table."""
    table, kernel = FEATURES[0].table, tf.keras.initializers.GlorotUniform(seed=1)
    head = tf.keras.layers.Dense(1, kernel_initializer=kernel)
    return fit_towers([FeatureConfig(name, table) for name in ("user", "item")], lambda v: head(v["user"]))


def rows_alone() -> dict[str, Any]:
    """The product of two towers, behind a frozen dense layer and one of which the loss has no gradient."""
    frozen, other = (tf.keras.layers.Dense(4, kernel_initializer="ones", trainable=t) for t in (False, True))
    product = tf.keras.layers.Dot(axes=1)
    item = tf.keras.layers.Lambda(lambda x: x[0] + tf.stop_gradient(x[1]))
    return fit_towers(FEATURES, lambda v: product([frozen(v["user"]), item([v["item"], other(v["item"])])]))


def eager() -> dict[str, Any]:
    """Without tracing, validation and accumulation included."""
    x, y, _ = samples(23)
    model = make(run_eagerly=True, accumulate_steps=2)
    settings = {"batch_size": rate_of(8), "shuffle": False, "verbose": 0}
    history = model.fit(x, y, epochs=2, validation_data=(x, 1 - y), **settings).history
    return {**trained(model), "history": history, "predicted": model.predict(x, verbose=0)}


def own_part(n: int, batch: int) -> tf.data.Dataset:
    x, y, _ = samples()
    part = tf.data.Dataset.from_tensor_slices(({k: v[:n] for k, v in x.items()}, y[:n])).batch(batch)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = AUTO.OFF
    return part.with_options(options)


def message(error: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(error) as raised:
        call()
    return str(raised.value)


class StopsIn(tf.keras.callbacks.Callback):
    """Wants to stop after a batch, on one rank alone."""

    batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches += 1
        if collectives.world().rank == 1 and batch == 2:
            self.model.stop_training = True


def averages_of(model: Model) -> list[np.ndarray]:
    return [weight.numpy() for weight in model.get_layer("normalize").non_trainable_weights]


class Averages(tf.keras.callbacks.Callback):
    """What moving averages are when a batch begins and when it ends, and at the end of the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.by_batch: list[list[np.ndarray]] = []

    def note(self, *_: Any) -> None:
        self.by_batch.append(averages_of(self.model))

    on_train_batch_begin = on_train_batch_end = on_epoch_end = note


def only_ranks(folder: str) -> dict[str, Any]:
    """What has no counterpart on one rank; eagerly, as so few steps take less time than to trace one."""
    here = collectives.world()
    x, y, _ = samples()
    seen: dict[str, Any] = {}

    model = make(normalize=True, run_eagerly=True)
    model.fit(own_part(21 if here.rank else 40, 8), epochs=1, verbose=0, callbacks=[averages := Averages()])
    seen["averages"] = averages.by_batch
    saver, saved = ShardedCheckpoint(Path(folder) / "averages", every=2), Averages()
    model.fit(own_part(0 if here.rank else 40, 8), epochs=1, verbose=0, callbacks=[saver, saved])
    seen["no data"] = saved.by_batch  # of rank 1
    middle = saver.store.checkpoints()[0]
    saver.restore(model, middle)
    seen["restored"] = averages_of(model)
    seen["of normalized"] = model.predict(x, verbose=0)

    stops = StopsIn()
    model.fit(own_part(47, 2), epochs=3, verbose=0, callbacks=[stops])
    seen["stopped after"] = stops.batches

    shown = io.StringIO()
    growing = tf.keras.optimizers.Adam(Warmup(0.05, steps=4, start=1 / here.size))
    fresh = make(optimizer=growing, run_eagerly=True)
    rates: list[float] = []
    watch = tf.keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_: rates.append(float(fresh.optimizer.learning_rate))
    )
    with contextlib.redirect_stdout(shown):
        fresh.fit(x, y, batch_size=4, epochs=1, callbacks=[watch])
    seen["shown"], seen["rates"] = shown.getvalue(), rates

    bad = y.copy()
    bad[1] = np.nan
    for name, run_eagerly in (("nan", False), ("eager nan", True)):
        poisoned = make(run_eagerly=run_eagerly)
        settings = {"batch_size": 4, "shuffle": False, "verbose": 0}
        seen[name] = message(NotFiniteError, functools.partial(poisoned.fit, x, bad, **settings))
    seen["seed"] = message(ConfigError, lambda: make(seed=here.rank).fit(x, y, verbose=0))
    seen["epochs"] = message(ConfigError, lambda: make().fit(x, y, epochs=1 + here.rank, verbose=0))
    unlike = tf.data.Dataset.from_tensors(({"user": [here.rank], "item": [1]}, [1.0]))
    seen["unlike"] = message(ConfigError, lambda: make().fit(unlike, verbose=0))
    endless = own_part(47, 4).repeat() if here.rank else own_part(47, 4)
    seen["endless"] = message(ConfigError, lambda: make(run_eagerly=True).fit(endless, verbose=0))
    seen["sum"] = message(ConfigError, lambda: make(loss=tf.keras.losses.MeanSquaredError(reduction="sum")))
    seen["save"] = message(ConfigError, lambda: make().save_weights("weights"))
    with portable_ops():
        seen["export"] = message(ConfigError, lambda: make().get_layer("collection")(x))

    half = make(wire_dtype="bfloat16", run_eagerly=True)
    half.fit(x, y, batch_size=6, epochs=1, shuffle=False, verbose=0)
    seen["half"] = trained(half)

    sent = exchange.send_keys([tf.constant([3, 3, 9, here.rank], tf.int64)], dedup=False)
    seen["no dedup"] = int(tf.size(sent.routed.keys[0]))
    batches = [tf.constant([3, 3, 9, here.rank], tf.int64), tf.constant([7] * here.rank, tf.int64)]
    for device in ("cpu", "gpu"):  # without a GPU TensorFlow computes both on the CPU
        sent = tf.function(exchange.send_keys)(batches, samples=5, device=device, name=device)
        told = (sent.routed.message, sent.owned.wire_keys, sent.owned.counts, sent.owned.notes)
        seen[f"keys by {device}"] = [each.numpy().tolist() for each in tf.nest.flatten(told)]
    return seen


LONGER = (accumulated, ignored)
SLOWLY = (dataset, mixed, eager, rows_alone)


def work(folder: str) -> dict[str, Any]:
    """Runs on every rank."""
    return {"arrays": arrays(), "only": only_ranks(folder)}


def train_longer() -> dict[str, Any]:
    """Runs on every rank, and alone."""
    return {function.__name__: function() for function in LONGER}


def work_longer() -> dict[str, Any]:
    """Runs on every rank."""
    return {**train_longer(), "again": arrays()}


def train_slowly() -> dict[str, Any]:
    """Runs on every rank, and alone."""
    return {function.__name__: function() for function in SLOWLY}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> str:
    return str(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def ranks(folder: str) -> list[dict[str, Any]]:
    return run_ranks(work, RANKS, folder, timeout=400)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return arrays()


@pytest.fixture(scope="module")
def longer_ranks() -> list[dict[str, Any]]:
    return run_ranks(work_longer, RANKS, timeout=400)


@pytest.fixture(scope="module")
def longer_alone() -> dict[str, Any]:
    return train_longer()


@pytest.fixture(scope="module")
def slow_ranks() -> list[dict[str, Any]]:
    return run_ranks(train_slowly, RANKS, timeout=400)


@pytest.fixture(scope="module")
def slow_alone() -> dict[str, Any]:
    return train_slowly()


def assert_trained_alike(ranks: list[dict[str, Any]], alone: dict[str, Any], tolerance: float = 1e-5) -> None:
    for table, expected in enumerate(alone["tables"]):
        order = np.argsort(np.concatenate([rank["tables"][table]["keys"] for rank in ranks]))
        for name in ("keys", "rows", "slots"):
            found = np.concatenate([rank["tables"][table][name] for rank in ranks])[order]
            size = np.abs(expected[name]).max()
            np.testing.assert_allclose(found, expected[name], rtol=tolerance, atol=tolerance * size)
    for rank in ranks:
        for found, expected in zip(rank["dense"], alone["dense"], strict=True):
            np.testing.assert_allclose(
                found, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max()
            )


def test_trains_what_one_rank_trains(ranks: Any, alone: Any) -> None:
    assert_trained_alike([rank["arrays"] for rank in ranks], alone)


@pytest.mark.slow  # quick: of one rank, test_without_dense_gradients_rows_train_... in test_model.py
def test_rows_alone_train_as_on_one_rank(slow_ranks: Any, slow_alone: Any) -> None:
    assert_trained_alike([rank["rows_alone"] for rank in slow_ranks], slow_alone["rows_alone"])


@pytest.mark.shown_by(
    "distributed/test_groups_on_ranks.py::test_rows_travel_within_a_group_and_sums_once_between_groups"
)
def test_rows_that_the_loss_ignores_stay_as_they_are(longer_ranks: Any, longer_alone: Any) -> None:
    """Those of 21 items at all times, of the others in batches that have them as items alone."""
    assert_trained_alike([rank["ignored"] for rank in longer_ranks], longer_alone["ignored"])
    for parts in ([longer_alone["ignored"]], [rank["ignored"] for rank in longer_ranks]):
        for table in (part["tables"][0] for part in parts):
            items = table["keys"] >= 9
            assert items.any()
            assert not table["slots"][items].any()
            assert table["slots"][~items].any()


def test_what_is_measured_and_predicted_is_one_ranks_and_decides_alike(ranks: Any, alone: Any) -> None:
    assert len(alone["history"]["loss"]) < 8  # early stopping has something to decide
    assert alone["history"]["lr"][-1] < 0.05  # and so has the plateau
    for rank in ranks:
        found = rank["arrays"]
        assert found["history"].keys() == alone["history"].keys()
        for name, values in alone["history"].items():
            np.testing.assert_allclose(found["history"][name], values, rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(found["measured"], alone["measured"], rtol=1e-5)
        np.testing.assert_allclose(found["predicted"], alone["predicted"], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dataset", "eager"])
def test_data_sets_and_eager_steps_do_as_arrays(slow_ranks: Any, slow_alone: Any, name: str) -> None:
    expected = slow_alone[name]
    assert_trained_alike([rank[name] for rank in slow_ranks], expected)
    for rank in slow_ranks:
        found = rank[name]
        for metric, values in expected["history"].items():
            np.testing.assert_allclose(found["history"][metric], values, rtol=1e-5, err_msg=metric)
        np.testing.assert_allclose(found["predicted"], expected["predicted"], rtol=1e-4, atol=1e-5)


@pytest.mark.shown_by(
    "distributed/test_windows_on_ranks.py::test_a_step_of_micro_batches_is_the_step_of_the_batch"
)
def test_a_window_of_batches_makes_one_step_and_one_all_reduce(longer_ranks: Any, longer_alone: Any) -> None:
    assert_trained_alike([rank["accumulated"] for rank in longer_ranks], longer_alone["accumulated"])
    assert longer_alone["accumulated"]["steps"] == 4
    for rank in longer_ranks:
        found = rank["accumulated"]
        assert found["steps"] == 4
        assert found["counts"]["allreduce"] == 4 + 2  # the metrics of two epochs
        assert found["counts"]["alltoall"] == 3 * 12


@pytest.mark.slow
def test_mixed_precision_trains_and_all_ranks_leave_out_a_bad_step(slow_ranks: Any, slow_alone: Any) -> None:
    assert_trained_alike([rank["mixed"] for rank in slow_ranks], slow_alone["mixed"], tolerance=2e-2)
    for rank in slow_ranks:
        assert rank["mixed"]["scale"] == 512.0
        before, after = rank["mixed"], rank["mixed"]["after"]
        np.testing.assert_equal(after["dense"], before["dense"])
        for mine, other in zip(before["tables"], after["tables"], strict=True):
            for name in ("rows", "slots", "step"):
                np.testing.assert_array_equal(other[name], mine[name])


@pytest.mark.shown_by("distributed/test_lane.py::test_steps_of_late_ranks_end_with_equal_bits")
def test_two_runs_are_the_same_to_the_last_bit(ranks: Any, longer_ranks: Any) -> None:
    for rank, again in zip(ranks, longer_ranks, strict=True):
        np.testing.assert_equal(again["again"], rank["arrays"])


def test_moving_averages_become_those_of_all_samples_when_an_epoch_ends(ranks: Any) -> None:
    first, second = (rank["only"]["averages"] for rank in ranks)
    np.testing.assert_equal(second[-1], first[-1])
    for one, other, merged in zip(first[-2], second[-2], first[-1], strict=True):
        assert not np.allclose(one, other)
        np.testing.assert_allclose(merged, (40 * one + 21 * other) / 61, rtol=1e-6)


def test_a_checkpoint_has_the_averages_of_all_ranks_that_have_data(ranks: Any) -> None:
    worked, idle = (rank["only"]["no data"] for rank in ranks)
    assert len(worked) == len(idle) == 2 * 5 + 1
    np.testing.assert_equal(idle[:4], [idle[0]] * 4)
    np.testing.assert_equal([worked[4], idle[4]], [worked[3], worked[3]])
    np.testing.assert_equal(idle[-1], worked[-1])
    for rank in ranks:
        np.testing.assert_equal(rank["only"]["restored"], worked[4])
        np.testing.assert_array_equal(rank["only"]["of normalized"], ranks[0]["only"]["of normalized"])


def test_all_ranks_stop_in_the_step_after_one_asks(ranks: Any) -> None:
    assert [rank["only"]["stopped after"] for rank in ranks] == [4, 4]


def test_rank_0_alone_shows_progress(ranks: Any) -> None:
    first, second = (rank["only"]["shown"] for rank in ranks)
    assert "loss" in first
    assert second == ""


def test_the_rate_grows_to_what_was_compiled(ranks: Any) -> None:
    expected = 0.05 * np.array([0.5, 0.625, 0.75, 0.875, 1.0, 1.0])
    for rank in ranks:
        np.testing.assert_allclose(rank["only"]["rates"], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nan", ["the gradient of rank 1 of 2 isn't finite"]),
        ("eager nan", ["the gradient of rank 1 of 2 isn't finite"]),
        ("seed", ["ranks disagree", "collection's seed", "rank 1"]),
        ("epochs", ["ranks disagree", "epochs", "rank 1"]),
        ("unlike", ["ranks disagree", "first element of the training data", "auto_shard_policy", "seed"]),
        ("endless", ["the data of rank 1 has no end", "steps_per_epoch"]),
        ("sum", ["training on 2 ranks", "SUM"]),
        ("save", ["has only the rows that it owns", "ShardedCheckpoint"]),
        ("export", ["can't be exported", "of 2 ranks"]),
    ],
)
def test_every_rank_refuses_what_cannot_be(ranks: Any, name: str, words: list[str]) -> None:
    for rank in ranks:
        assert [word for word in words if word not in rank["only"][name]] == []


def test_half_the_bytes_on_the_wire_round_what_is_trained(ranks: Any) -> None:
    model = make(run_eagerly=True)
    x, y, _ = samples()
    model.fit(x, y, batch_size=12, epochs=1, shuffle=False, verbose=0)
    assert_trained_alike([rank["only"]["half"] for rank in ranks], trained(model), tolerance=0.1)


def test_without_deduplication_every_key_travels(ranks: Any) -> None:
    assert [rank["only"]["no dedup"] for rank in ranks] == [4, 4]


def test_messages_put_together_on_a_gpu_are_those_of_the_native_ops(ranks: Any) -> None:
    for rank in ranks:
        assert rank["only"]["keys by gpu"] == rank["only"]["keys by cpu"]
        assert rank["only"]["keys by gpu"][-1] == [[5], [5]]
