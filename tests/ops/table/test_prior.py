"""A prior on rows: what a row pays, when, and that SGD of rows that are always there is the dense penalty."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta import initializers, optimizers
from gmeta.core.errors import ConfigError
from gmeta.ops import HashTable
from gmeta.optimizers import RowPrior
from support.reference.table import ReferenceHashTable

pytestmark = pytest.mark.usefixtures("table_device")

KINDS = [
    *(optimizers.SGD, optimizers.Momentum, optimizers.Adagrad, optimizers.RowWiseAdagrad),
    *(optimizers.Adam, optimizers.AdamW, optimizers.Ftrl),
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
@settings(max_examples=settings().max_examples // 3)
@given(st.integers(1, 9), st.booleans(), st.integers(0, 2**31))
def test_rows_pay_for_the_steps_that_they_missed_as_the_reference_says(kind, dim, by_column, seed):
    rng = np.random.default_rng(seed)
    variance = rng.uniform(0.01, 2, dim).tolist() if by_column else 0.3
    optimizer = kind(0.05, prior=RowPrior(variance, samples=20, scale=1.5))
    settings = (dim, optimizer, initializers.Normal(0.0, 1.0), seed % 1000)
    table, model = HashTable(*settings), ReferenceHashTable(*settings)
    for _ in range(12):
        ids = rng.integers(0, 15, 6)
        for each in (table, model):
            each.lookup(ids)
        keys = rng.permutation(15)[:4]  # some of them not looked up in this step, some not there
        gradients = rng.normal(size=(4, dim)).astype(np.float32)
        table.apply_gradients(keys, gradients)
        model.apply_gradients(keys, gradients, 0.05)
    found = table.export()
    for key, row, slots, frequency, last_step in zip(*(each.numpy() for each in found[:5]), strict=True):
        record = model.records[key]
        assert (frequency, last_step) == (record.frequency, record.last_step)
        np.testing.assert_allclose(row, record.row, rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(slots, record.slots, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("kind", [optimizers.SGD, optimizers.Adam, optimizers.Adagrad])
@pytest.mark.shown_by(case="cpu-Adam")
def test_a_prior_is_the_dense_penalty_where_every_row_has_a_gradient(kind):
    rng = np.random.default_rng(0)
    prior = RowPrior([0.5, 0.1, 2.0], samples=40)
    table = HashTable(3, kind(0.05, prior=prior), initializers.Normal(0.0, 1.0))
    keys = np.arange(6)
    dense = tf.Variable(table.lookup(keys).rows)
    keras = getattr(tf.keras.optimizers, kind.__name__)(0.05)
    variances = tf.constant(prior.variance)
    for _ in range(100):
        pull = tf.constant(rng.normal(size=(6, 3)), tf.float32)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(pull * dense) + tf.reduce_sum(dense**2 / (2 * variances * 40))
        keras.apply_gradients([(tape.gradient(loss, dense), dense)])
        table.apply_gradients(keys, pull)
    # Adam divides by the root of a mean of squares, so roundings of small gradients count.
    np.testing.assert_allclose(table.lookup(keys).rows, dense, rtol=0, atol=2e-5)


def test_a_row_that_comes_every_third_step_pays_three_steps_at_once():
    table = HashTable(1, optimizers.SGD(0.1, prior=RowPrior(0.5, samples=20)), initializers.Constant(2.0))
    table.lookup([1, 2])
    for key in (2, 2, 1):
        table.lookup([1])  # uses without a gradient don't forgive anything
        table.apply_gradients([key], [[0.0]])
    row = table.lookup([1]).rows.numpy().item()
    assert row == pytest.approx(2.0 - 0.1 * (1 / (0.5 * 20)) * 3 * 2.0, abs=1e-6)


def test_a_row_that_missed_very_many_steps_ends_at_0_and_not_beyond():
    table = HashTable(1, optimizers.SGD(0.5, prior=RowPrior(0.001, samples=10)), initializers.Constant(2.0))
    table.lookup([1])
    for _ in range(50):
        table.apply_gradients([9], [[0.0]])
    table.apply_gradients([1], [[0.25]])
    assert table.lookup([1]).rows.numpy().item() == pytest.approx(-0.125, abs=1e-6)


def test_what_a_row_owes_survives_a_checkpoint():
    def make() -> HashTable:
        optimizer = optimizers.SGD(0.1, prior=RowPrior(0.5, samples=20))
        return HashTable(1, optimizer, initializers.Constant(2.0))

    first, second = make(), make()
    first.lookup([1])
    for _ in range(5):
        first.apply_gradients([9], [[0.0]])
    second.import_(first.export(), replace=True)
    for table in (first, second):
        table.apply_gradients([1], [[0.0]])
    np.testing.assert_array_equal(first.lookup([1]).rows, second.lookup([1]).rows)
    assert float(first.lookup([1]).rows[0, 0]) < 1.9


@pytest.mark.parametrize("given", [0.0, -1.0, [], [0.1, 0.0], True, "0.3", float("nan")])
def test_a_variance_must_be_above_0(given):
    with pytest.raises(ConfigError, match="RowPrior: variance must be above 0"):
        RowPrior(given, samples=10)


def test_a_prior_of_other_columns_is_refused_by_the_table():
    optimizer = optimizers.Adam(prior=RowPrior([0.1, 0.2], samples=10))
    with pytest.raises(ConfigError, match="table 'item': its prior has 2 variances, and a row has 3 columns"):
        HashTable(3, optimizer, name="item")


def test_an_optimizer_takes_no_other_prior():
    with pytest.raises(ConfigError, match=r"Adam: prior must be a gmeta.optimizers.RowPrior or None"):
        optimizers.Adam(prior=0.1)
