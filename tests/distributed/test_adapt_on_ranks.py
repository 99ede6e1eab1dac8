"""Ranks adapt tasks of their own together, and each task's weights are those that one rank gives."""

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core import collectives
from gmeta.initializers import Normal
from gmeta.layers import MLP, EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.meta import InnerLoop
from gmeta.models import MetaModel
from gmeta.optimizers import SGD
from support.process_ranks import run_ranks

pytestmark = pytest.mark.ranks


def adapted(owner_of_tasks):
    """Task -> what its owner's adaptation predicts, and the bytes; of this rank's tasks."""
    here = collectives.world()
    features = [
        FeatureConfig("item", TableConfig("item", 4, initializer=Normal(0, 1))),
        FeatureConfig("tags", dim=4, combiner="mean"),
    ]
    model = MetaModel(
        EmbeddingCollection(features, seed=1, optimizer=SGD(0.5)),
        MLP({"fc": 6, "out": 1}),
        inner=InnerLoop("maml", steps=2, learning_rate=0.1, adapt="all"),
    )
    model.compile("adam", "mse")
    # Rows of ids 0 to 9 are trained, each by its owner; those from 10 on are cold.
    warm = tf.range(10 if here.rank == 0 else 0, dtype=tf.int64)
    lookup = model.collection.lookup(
        {"item": warm, "tags": tf.RaggedTensor.from_row_lengths(warm, [len(warm)])}
    )
    model.collection.apply_gradients(
        lookup,
        [
            tf.cast(keys, tf.float32)[:, None] * 0.01 + rows
            for keys, rows in zip(lookup.keys, lookup.rows, strict=True)
        ],
    )
    rng = np.random.default_rng(0)
    tasks = []
    for size in (4, 2, 0, 3):
        tags = [list(rng.integers(0, 15, rng.integers(0, 4))) for _ in range(size)]
        tasks.append(({"item": rng.integers(0, 15, size), "tags": tags}, rng.normal(size=size)))
    query = {"item": np.arange(15), "tags": [[each, 3] for each in range(15)]}
    own = [number for number, owner in enumerate(owner_of_tasks) if owner % here.size == here.rank]
    found = dict(zip(own, model.adapt_many([tasks[number] for number in own]), strict=True))
    answers = {}
    for number in range(4):  # all ranks ask equally often
        fast = found.get(number)
        some = query if fast is not None else {"item": [], "tags": []}
        answer = model.predict(some, weights=fast)
        if fast is not None:
            answers[number] = answer
    return answers


@pytest.mark.parametrize("owners", ["0101", "1111"])
@pytest.mark.shown_by(case="1111")
def test_each_rank_gets_the_weights_of_its_own_tasks(owners):
    owners = [int(owner) for owner in owners]
    alone = adapted([0] * 4)
    assert np.std([alone[number] for number in alone], axis=0).max() > 0.01
    parts = run_ranks(adapted, 2, owners)
    assert [sorted(part) for part in parts] == [
        [n for n, owner in enumerate(owners) if owner == rank] for rank in (0, 1)
    ]
    for part in parts:
        for number, answer in part.items():
            np.testing.assert_allclose(answer, alone[number], rtol=1e-5, atol=1e-6)
