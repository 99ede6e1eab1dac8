"""Models train a feature of several tables as a feature for each table, fed the same ids, to the last bit."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.initializers import Normal
from gmeta.layers import MLP, EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.meta import InnerLoop
from gmeta.models import GRM, MetaModel, Model
from gmeta.optimizers import Adam
from gmeta.policies import CountAdmission
from support.cells import slow_but
from support.drawn_batches import draw_exposures, task_batch
from support.tables import assert_same_tables

START = Normal(0.0, 0.3)
FORMS = [((3, 5), "concat"), ((4, 4), "concat"), ((4, 4), "sum")]


def make_tables(dims, **policy):
    return [TableConfig(f"of{n}", dim, initializer=START, **policy) for n, dim in enumerate(dims)]


def assert_same(several, alone):
    assert len(several.weights) == len(alone.weights)
    for mine, other in zip(several.weights, alone.weights, strict=True):
        np.testing.assert_array_equal(mine, other)
    for mine, other in zip(several.collection.tables, alone.collection.tables, strict=True):
        assert int(mine.size()) > 0
        assert_same_tables(mine, other)


class Scores(Model):
    """A dense layer over an item and the mean of seen items; the item may be several features."""

    def __init__(self, features, items, join):
        super().__init__()
        self.collection, self.items, self.join = EmbeddingCollection(features), items, join
        self.network = tf.keras.layers.Dense(1, kernel_initializer=tf.keras.initializers.GlorotUniform(3))

    def call(self, x, training=False):
        vectors = self.collection(x, training=training)
        found = [vectors[name] for name in self.items]
        if self.join == "sum":
            found = [sum(found[1:], found[0])]
        if isinstance(found[0], tf.RaggedTensor):
            found = [tf.reduce_sum(each, axis=1) for each in found]
        return self.network(tf.concat([*found, vectors["seen"]], axis=1))


# Quick: each kind in one form, and each form of one kind.
@pytest.mark.parametrize(
    ("kind", "form"),
    slow_but(
        [("lists", 0), ("one", 1), ("ragged", 2)], itertools.product(("one", "ragged", "lists"), range(3))
    ),
)
def test_fit_moves_rows_slots_and_frequencies_alike(kind, form):
    dims, join = FORMS[form]
    random = np.random.default_rng(0)
    lengths = random.integers(0, 5, 40)
    lists = tf.RaggedTensor.from_row_lengths(random.integers(0, 12, lengths.sum()), lengths)
    ids = tf.constant(random.integers(0, 12, 40)) if kind == "one" else lists
    labels = random.normal(size=40)
    of = make_tables(dims, admission=CountAdmission(2))
    seen = FeatureConfig("seen", of[0], combiner="mean")  # it shares rows with the item
    combiner = "sqrtn" if kind == "lists" else None
    both = FeatureConfig("item", of, combiner, join=join)
    alone = [FeatureConfig(f"item{n}", table, combiner) for n, table in enumerate(of)]
    trained = []
    for features in ([both], alone):
        names = [each.name for each in features]
        model = Scores([*features, seen], names, join)
        model.compile("adam", "mse", run_eagerly=True)
        data = {"seen": lists[::-1], **dict.fromkeys(names, ids)}
        model.fit(data, labels, 8, epochs=2, shuffle=False, verbose=0)
        trained.append(model)
    assert_same(*trained)


# Quick: each number of dimensions, and each way to adapt.
@pytest.mark.parametrize(
    ("dims", "adapt"),
    slow_but([((3, 5), "default"), ((4, 4), "all")], itertools.product([(3, 5), (4, 4)], ["default", "all"])),
)
@pytest.mark.shown_by(case="dims0-default")
def test_a_meta_model_trains_and_adapts_alike(dims, adapt):
    inner = InnerLoop(steps=2) if adapt == "default" else InnerLoop(steps=2, adapt=adapt)
    batch = task_batch([3, 1, 4], ids={"user": 4, "item": 6}, pad=2)
    of, user = make_tables(dims), FeatureConfig("user", TableConfig("user", 4, initializer=START))
    trained, answers = [], []
    for features in ([FeatureConfig("item", of)], [FeatureConfig(f"item{n}", t) for n, t in enumerate(of)]):
        names = [each.name for each in features]
        model = MetaModel(
            EmbeddingCollection([user, *features]), MLP({"fc": 5, "out": 1}, seed=1), inner=inner
        )
        model.compile("adam", "mse")
        ids = {"user": batch["features"]["user"], **dict.fromkeys(names, batch["features"]["item"])}
        for _ in range(3):
            model.train_step({**batch, "features": ids})
        task = model.adapt({"user": [1, 1], **dict.fromkeys(names, (2, 3))}, [0.5, -1.0])
        answers.append(model.predict({"user": [1, 1], **dict.fromkeys(names, (2, 9))}, weights=task))
        trained.append(model)
    assert_same(*trained)
    np.testing.assert_array_equal(*answers)


def test_samples_of_a_task_keep_to_the_lowest_limit_of_the_tables():
    features = [FeatureConfig("user", dim=4), FeatureConfig("item", ("item", "by_city"), dim=(4, 8))]
    model = MetaModel(EmbeddingCollection(features), MLP({"out": 1}))
    model.compile("adam", "mse")
    assert [merged.id_limit for merged in model.collection.merged] == [1 << 61, 1 << 62]
    with pytest.raises(ConfigError, match=rf"\['item'\] holds the id {1 << 61}; .* below {1 << 61}"):
        model.adapt({"user": [1], "item": [1 << 61]}, [0.5])


@pytest.mark.parametrize("dims", [pytest.param((3, 5), marks=pytest.mark.slow), (4, 4)])  # quick: (4, 4)
def test_a_model_of_exposures_trains_alike(dims):
    batch = draw_exposures(0, [4, 0, 6], [3, 2, 4])
    of = make_tables(dims)
    trained = []
    for features in ([FeatureConfig("item", of)], [FeatureConfig(f"item{n}", t) for n, t in enumerate(of)]):
        names = [each.name for each in features]
        others = [FeatureConfig(name, TableConfig(name, 4, initializer=START)) for name in ("city", "action")]
        model = GRM.of(
            [*features, *others],
            contexts=["city"],
            history=[*names, "action"],
            targets=names,
            time="time",
            dim=8,
            blocks=1,
            max_length=10,
            expert_units=[8],
            tower_units=[8],
            optimizer=Adam(0.01),
        )
        model.compile(tf.keras.optimizers.Adam(0.01))
        own = {
            part: {**batch[part], **dict.fromkeys(names, batch[part]["item"])}
            for part in ("history", "targets")
        }
        for _ in range(3):
            model.train_step({**batch, **own})
        trained.append(model)
    assert_same(*trained)
