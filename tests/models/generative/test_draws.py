"""Draws of a generative retriever: how often each item comes, and what they are a function of."""

import numpy as np
import pytest
import tensorflow as tf
from scipy.stats import chi2

from gmeta.core.errors import ConfigError
from gmeta.layers import HSTU, EmbeddingCollection, FeatureConfig
from gmeta.models import GenerativeRetriever
from gmeta.preprocess import semantic_ids

ITEMS = 30


@pytest.fixture(scope="module")
def model():
    random = np.random.default_rng(0)
    backbone = HSTU(blocks=1, heads=1, attention_dim=8, value_dim=8, max_length=6, bias_by_time=False)
    ids = semantic_ids(random.normal(size=(ITEMS, 3)), levels=2, codes=3)
    made = GenerativeRetriever(
        EmbeddingCollection([FeatureConfig("item", dim=8)]), backbone, ids, max_length=6, width=8
    )
    for weight in made.trainable_variables:
        weight.assign_add(random.normal(0, 0.3, weight.shape))
    made.repeat.assign(0.0)
    return made


def histories(*rows):
    return {"item": tf.ragged.constant(rows, tf.int64)}


def test_independent_draws_come_by_their_probabilities(model):
    batch, many = histories([3, 8, 1]), 20_000
    items, logs = (each.numpy()[0] for each in model.sample(batch, many, seed=1, step=0))
    exact = model.item_log_probs(batch).numpy()[0]
    np.testing.assert_allclose(logs, exact[items], rtol=1e-4, atol=1e-4)
    expected = np.exp(exact) * many
    often = expected >= 5  # the others make one cell
    seen, cells = np.bincount(items, minlength=ITEMS), expected[often]
    counts = seen[often]
    if not often.all():
        counts, cells = np.append(counts, seen[~often].sum()), np.append(cells, expected[~often].sum())
    assert ((counts - cells) ** 2 / cells).sum() < chi2.ppf(1 - 1e-6, len(cells) - 1)


def test_draws_without_replacement_are_distinct_and_begin_by_the_probabilities(model):
    batch, many = histories([3, 8, 1]), 3000
    alike = {"item": tf.tile(batch["item"].to_tensor(), [many, 1])}
    alike = {"item": tf.RaggedTensor.from_tensor(alike["item"])}
    items, logs = model.sample(alike, 4, seed=1, step=0, method="without_replacement", keys=np.arange(many))
    exact = model.item_log_probs(batch).numpy()[0]
    assert all(len(set(row)) == 4 for row in items.numpy())
    np.testing.assert_allclose(logs, exact[items.numpy()], rtol=1e-4, atol=1e-4)
    first = np.bincount(items.numpy()[:, 0], minlength=ITEMS)
    often = np.exp(exact) * many >= 5
    expected = (np.exp(exact) * many)[often]
    assert ((first[often] - expected) ** 2 / expected).sum() < chi2.ppf(1 - 1e-6, often.sum())
    every = model.sample(batch, ITEMS, seed=1, step=0, method="without_replacement")[0].numpy()
    assert sorted(every[0]) == list(range(ITEMS))


@pytest.mark.parametrize("method", ["sample", "without_replacement"])
def test_draws_are_a_function_of_seed_step_and_user(model, method):
    batch = histories([3, 8, 1], [5], [8, 3, 1])

    def draw(x, seed=1, step=0, **keys):
        return model.sample(x, 8, seed=seed, step=step, method=method, **keys)[0].numpy()

    found = draw(batch)
    for user in range(3):  # alone or among others
        np.testing.assert_array_equal(draw({"item": batch["item"][user : user + 1]})[0], found[user])
    assert (draw(batch) == found).all()
    for other in (draw(batch, seed=2), draw(batch, step=1), draw(batch, keys=[7, 8, 9])):
        assert (other != found).any(axis=1).all()
    same = draw(histories([3, 8, 1], [3, 8, 1]), keys=[4, 5])
    assert (same[0] != same[1]).any()


def test_a_group_of_beams_is_the_likeliest(model):
    batch = histories([3, 8, 1], [5])
    items, logs = model.sample(batch, 5, seed=1, step=0, method="beam")
    expected = model.retrieve(batch, 5, beam=5)
    np.testing.assert_array_equal(items, expected[0])
    np.testing.assert_array_equal(logs, expected[1])


@pytest.mark.parametrize("method", ["sample", "without_replacement", "beam"])
def test_a_mask_is_kept(model, method):
    allow = np.arange(ITEMS) % 7 == 0
    items, logs = model.sample(histories([3, 8], [1]), 9, seed=1, step=0, method=method, allow=allow)
    there = items.numpy() >= 0
    assert allow[items.numpy()[there]].all()
    np.testing.assert_array_equal(there, np.isfinite(logs))
    assert there.sum(axis=1).tolist() == ([9, 9] if method == "sample" else [allow.sum()] * 2)


def test_what_makes_no_sense_is_named(model):
    with pytest.raises(ConfigError, match=r"method must be one of .*, got 'greedy'"):
        model.sample(histories([3]), 4, seed=1, step=0, method="greedy")
    with pytest.raises(ConfigError, match="group must be a whole number from 1 on, got 0"):
        model.sample(histories([3]), 0, seed=1, step=0)
