"""`max_tokens`: training steps of growing batches, by an invented measure of memory, that leave no trace."""

import random

import numpy as np
import pytest
import tensorflow as tf

from gmeta import Pipeline
from gmeta.core.errors import ConfigError
from gmeta.initializers import Normal
from gmeta.layers import MLP, EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.meta import InnerLoop
from gmeta.models import MetaModel, Model, max_tokens
from gmeta.policies import LRU
from support.drawn_batches import make_batch as task_batch
from support.process_ranks import run_ranks

SIZES = (16, 32, 64)


class Reader:
    """Makes batches, and measures memory as a function of the tokens of the last one."""

    def __init__(self, peak=lambda tokens: 1000 + 10 * tokens):
        self._peak, self.sizes, self.steps = peak, [], 0

    def batch(self, tokens):
        self.sizes.append(tokens)
        users = np.random.default_rng(tokens).integers(0, 50, tokens)
        return {"user": users, "story": tf.ragged.constant([[1, 2]] * tokens, dtype=tf.int64)}, users % 2.0

    def memory(self, run):
        run()
        return self._peak(self.sizes[-1])


def make(built=True, optimizer=tf.keras.optimizers.Adam, run_eagerly=True, **compiled):
    """A model that runs eagerly: a step of each size takes less time than its graph."""
    random.seed(3)
    tf.random.set_seed(3)
    collection = EmbeddingCollection(
        [
            FeatureConfig(
                "user", TableConfig("user", 4, initializer=Normal(0.0, 0.5), eviction=LRU(max_rows=30))
            ),
            FeatureConfig("story", TableConfig("story", 4, initializer=Normal(0.0, 0.5)), combiner="mean"),
        ]
    )

    class Small(Model):
        def __init__(self):
            super().__init__()
            self.collection = collection
            self.norm, self.drop = tf.keras.layers.BatchNormalization(), tf.keras.layers.Dropout(0.1)
            self.dense = tf.keras.layers.Dense(1)

        def call(self, inputs, training=None):
            vectors = self.collection(inputs)
            return self.dense(self.drop(self.norm(vectors["user"] + vectors["story"]), training=training))

    model = Small()
    model.compile(optimizer(0.1), "mse", metrics=["mae"], run_eagerly=run_eagerly, **compiled)
    if built:
        model.train_on_batch(*Reader().batch(24))
    return model


def state(model):
    of_optimizer = model.optimizer.variables
    of_optimizer = of_optimizer() if callable(of_optimizer) else of_optimizer
    found = {str(n): v.numpy() for n, v in enumerate([*model.variables, *of_optimizer])}
    found |= {f"metric{n}": v.numpy() for n, m in enumerate(model.metrics) for v in m.variables}
    for number, table in enumerate(model.collection.tables):
        records = table.export()
        order = np.argsort(records.keys.numpy())
        for name, part in zip(records._fields, records, strict=True):
            found[f"{number}/{name}"] = part.numpy()[order] if part.shape.rank else part.numpy()
        found[f"{number}/step"] = table.step().numpy()
    return found


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


# Quick: the other two; of a plain model, test_it_shrinks_and_says_so.
@pytest.mark.parametrize(
    "compiled",
    [pytest.param({}, marks=pytest.mark.slow), {"pipeline": Pipeline(depth=2)}, {"accumulate_steps": 3}],
)
@pytest.mark.shown_by(case="compiled1")
def test_it_finds_the_limit_and_leaves_the_model_as_it_was(compiled):
    model, reader = make(run_eagerly=False, **compiled), Reader()
    model.apply_accumulated()
    before = state(model)
    assert max(np.abs(v).max() for v in before.values()) > 0
    assert max_tokens(model, reader.batch, 0.5, tokens=SIZES, memory=reader.memory, limit=10_010) == 400
    assert reader.sizes == [16, *SIZES, 400]
    assert_same(state(model), before)


@pytest.mark.shown_by("test_it_finds_the_limit_and_leaves_the_model_as_it_was")
def test_training_after_it_is_training_without_it():
    data = Reader().batch(40)
    models = [make(), make()]
    reader = Reader()
    max_tokens(models[0], reader.batch, tokens=SIZES, memory=reader.memory, limit=5_000)
    for model in models:
        model.drop.rate = 0.0
        model.fit(*data, batch_size=40, epochs=3, shuffle=False, verbose=0)
    assert_same(state(models[0]), state(models[1]))


def test_a_model_without_weights_gets_its_initial_ones_and_empty_tables():
    model, reader = make(built=False), Reader()
    max_tokens(model, reader.batch, tokens=SIZES, memory=reader.memory, limit=5_000)
    assert [int(table.size()) for table in model.collection.tables] == [0, 0]
    assert int(model.optimizer.iterations) == 0
    moments = [v for v in model.optimizer.variables if v.shape.rank > 0]
    assert moments
    assert not any(np.any(v.numpy()) for v in moments)
    np.testing.assert_array_equal(model.norm.moving_mean, np.zeros(4))
    model.fit(*reader.batch(8), verbose=0)
    assert int(model.optimizer.iterations) == 1


def test_slots_of_a_legacy_optimizer_start_at_their_beginning():
    model, reader = make(built=False, optimizer=tf.keras.optimizers.legacy.Adagrad), Reader()
    max_tokens(model, reader.batch, tokens=SIZES, memory=reader.memory, limit=5_000)
    slots = model.optimizer.variables()[1:]
    assert slots
    assert all(np.all(slot.numpy() == np.float32(0.1)) for slot in slots)  # Adagrad's first sums
    assert int(model.optimizer.iterations) == 0


def test_a_meta_model_is_measured_too():
    features = [
        FeatureConfig(name, TableConfig(name, 4, initializer=Normal(0.0, 1.0))) for name in ("user", "item")
    ]
    model = MetaModel(EmbeddingCollection(features), MLP({"fc": 6, "out": 1}, seed=3), inner=InnerLoop())
    model.compile("adam", "mse")
    reader = Reader()

    def batch(tokens):
        reader.sizes.append(tokens)
        return task_batch([4] * (tokens // 4))

    assert max_tokens(model, batch, 1.0, tokens=SIZES, memory=reader.memory, limit=2005) == 100
    assert int(model.collection.tables[0].size()) == 0


def test_it_shrinks_and_says_so():
    model, reader = make(), Reader(lambda tokens: 1000 + tokens**2)
    before = state(model)
    with pytest.warns(
        UserWarning, match=r"batches of \d+.* tokens take more than 50,000 bytes; \d+ tokens take"
    ):
        found = max_tokens(model, reader.batch, 0.5, tokens=SIZES, memory=reader.memory, limit=100_000)
    assert 64 < found <= 221
    assert_same(state(model), before)


def test_memory_that_runs_out_is_no_error():
    model, reader = make(), Reader()

    def memory(run):
        if reader.sizes[-1] > 300:
            raise tf.errors.ResourceExhaustedError(None, None, "out of memory")
        return reader.memory(run)

    with pytest.warns(UserWarning, match="take more"):
        assert max_tokens(model, reader.batch, 0.5, tokens=SIZES, memory=memory, limit=10_010) == 232


def test_an_error_in_a_step_leaves_the_model_as_it_was():
    model, reader = make(), Reader()
    before = state(model)

    def memory(run):
        run()
        raise OSError("no such counter")

    with pytest.raises(OSError, match="no such counter"):
        max_tokens(model, reader.batch, tokens=SIZES, memory=memory, limit=1e9)
    assert_same(state(model), before)


def test_a_cpu_has_no_statistics_and_the_error_says_what_to_do():
    with pytest.raises(ConfigError, match=r"counts no memory of CPU:0 \(GPUs: none\): pass memory=.*limit="):
        max_tokens(make(built=False), Reader().batch, device="CPU:0")
    with pytest.raises(ConfigError, match="counts no memory of GPU:7"):
        max_tokens(make(built=False), Reader().batch, device="GPU:7", memory=Reader().memory)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"share": 0.0}, "share=0.0 must be above 0"),
        ({"share": 1.5}, "share=1.5 must be"),
        ({"tokens": (16,)}, r"tokens=\[16\] must be two rising"),
        ({"tokens": (16, 8)}, r"tokens=\[16, 8\] must be two rising"),
        ({"tokens": (0, 8)}, "must be a whole number from 1 on, got 0"),
        ({"limit": 0}, "limit=0 must be above 0 bytes"),
    ],
)
def test_arguments_that_make_no_sense(options, says):
    reader = Reader()
    with pytest.raises(ConfigError, match=says):
        max_tokens(make(built=False), reader.batch, **{"memory": reader.memory, "limit": 1e6, **options})
    assert reader.sizes == []


def test_accumulated_gradients_are_not_lost():
    model, reader = make(accumulate_steps=3), Reader()
    with pytest.raises(ConfigError, match="has accumulated gradients"):
        max_tokens(model, reader.batch, tokens=SIZES, memory=reader.memory, limit=1e6)


def on_rank(make, state, assert_same, reader_of, sizes):
    from gmeta.core.collectives import world
    from gmeta.models import max_tokens

    model, reader = make(), reader_of(lambda tokens: 1000 + 10 * tokens * (1 + world().rank))
    before = state(model)
    found = max_tokens(
        model, reader.batch, tokens=sizes, memory=reader.memory, limit=20_000 - 10_000 * (1 - world().rank)
    )
    assert_same(state(model), before)
    return found, reader.sizes


@pytest.mark.ranks
def test_the_rank_with_least_room_decides():
    found = run_ranks(on_rank, 2, make, state, assert_same, Reader, SIZES)
    assert found[0] == found[1]
    assert found[0][0] == 425  # of the larger peak, 20 bytes a token, in the smaller limit
