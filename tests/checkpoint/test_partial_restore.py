"""Models whose features were reordered, added or left out load what was saved of them, or what fits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gmeta.checkpoint.callback import ShardedCheckpoint
from gmeta.core.errors import ConfigError, DataError
from gmeta.layers import EmbeddingCollection, FeatureConfig
from gmeta.models import MetaModel, Model
from support.cells import slow_but
from support.process_ranks import run_ranks

WIDTHS = {"user": 4, "item": 4, "city": 4, "shop": 2, "age": 4}
NAMES = ("user", "item", "city", "shop")
NAMES_NOW = ("user", "shop", "item", "age")


def ids(names: Sequence[str], seed: int = 0) -> dict[str, tf.Tensor]:
    found = {n: tf.constant(np.random.default_rng([seed, *n.encode()]).integers(0, 40, 30)) for n in names}
    return {n: tf.strings.as_string(v) if n == "shop" else v for n, v in found.items()}


class Net(Model):
    """Embeddings side by side, or by name, below a dense layer."""

    def __init__(self, names: Sequence[str], by_name: bool = False) -> None:
        super().__init__()
        self.embeddings = EmbeddingCollection(
            [FeatureConfig(n, dim=WIDTHS[n], hash=n == "shop") for n in names]
        )
        self.out = tf.keras.layers.Dense(1)
        self.by_name = by_name
        self.compile(tf.keras.optimizers.Adam(0.05), "mse")

    def call(self, x: Any, training: bool = False) -> tf.Tensor:
        vectors = self.embeddings(x, training=training)
        parts = [vectors[name] for name in sorted(vectors)] if self.by_name else list(vectors.values())
        return self.out(tf.concat(parts, axis=-1))


class Concat(Net):
    """The same, by the collection's own concat."""

    def call(self, x: Any, training: bool = False) -> tf.Tensor:
        lookup = self.embeddings.lookup(x, insert=training)
        return self.out(self.embeddings.concat(lookup))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model, its checkpoints, and what it predicts."""
    folder, x = tmp_path_factory.mktemp("runs"), ids((*NAMES, "age"))
    model = Net(NAMES)
    data = tf.data.Dataset.from_tensors((x, tf.range(30.0)[:, tf.newaxis]))
    ShardedCheckpoint(folder).fit(model, data.repeat(3), epochs=1, verbose=0)
    return folder, x, model.predict(x, verbose=0)


# Quick: each model, in one state.
@pytest.mark.parametrize(
    ("make", "is_built"),
    slow_but([(Net, False), (Concat, True)], itertools.product([Net, Concat], [False, True])),
)
@pytest.mark.shown_by(case="Concat-True")
def test_a_model_with_features_in_another_order_predicts_the_same(trained, make, is_built):
    folder, x, expected = trained
    model = make(NAMES[::-1])
    if is_built:
        model(x)
    with pytest.warns(
        UserWarning, match="side by side in the order user, item, city, shop from now on"
    ) as told:
        assert ShardedCheckpoint(folder).restore(model) == 1
    assert told[0].filename == __file__
    np.testing.assert_array_equal(model.predict(x, verbose=0), expected)
    assert [feature.name for feature in model.embeddings.in_order("a test")] == list(NAMES)


def test_an_order_that_a_graph_has_used_is_not_changed(trained):
    folder, x, _ = trained
    model = Concat(NAMES[::-1])
    model.predict(x, verbose=0)
    with pytest.raises(
        ConfigError, match="a graph that is traced already has put their vectors side by side in"
    ):
        ShardedCheckpoint(folder).restore(model)
    # By name there is nothing to change; whether the network does so can't be known.
    model = Net(NAMES[::-1])
    model.predict(x, verbose=0)
    with pytest.warns(UserWarning, match="its dense weights may belong to other vectors") as told:
        ShardedCheckpoint(folder).restore(model)
    assert told[0].filename == __file__


def test_a_functional_model_is_warned_that_its_order_is_fixed(tmp_path):
    def make(names: Sequence[str]) -> Model:
        inputs = {name: tf.keras.Input([], name=name, dtype=tf.int64) for name in names}
        vectors = EmbeddingCollection([FeatureConfig(name, dim=4) for name in names])(inputs)
        return Model(inputs, tf.keras.layers.Concatenate()(list(vectors.values())))

    make(("user", "city")).save_weights(tmp_path / "w.weights.h5")
    with pytest.warns(UserWarning, match="saved with the features in the order user, city") as told:
        make(("city", "user")).load_weights(tmp_path / "w.weights.h5")
    assert told[0].filename == __file__


def test_models_that_compute_positions_keep_their_order():
    features = [FeatureConfig(name, dim=4) for name in ("user", "item")]
    tables, other = EmbeddingCollection(features), EmbeddingCollection(features[::-1])
    store: dict[str, Any] = {}
    other.save_own_variables(store)
    assert [feature.name for feature in tables.in_order("CBML")] == ["user", "item"]
    with pytest.raises(
        ConfigError, match="but CBML has put their vectors side by side in the order user, item"
    ):
        tables.load_own_variables(store)


@pytest.mark.parametrize("is_built", [pytest.param(False, marks=pytest.mark.slow), True])  # quick: True
def test_a_partial_restore_loads_what_fits_and_prints_the_rest(trained, tmp_path, is_built):
    folder, x, expected = trained
    model, said = Net(NAMES_NOW, by_name=True), []
    if is_built:
        model(x)
    checkpoints = ShardedCheckpoint(folder)
    with pytest.raises(DataError, match=r"no table 'embeddings/age'.*load what fits with partial=True"):
        checkpoints.restore(model)
    assert checkpoints.restore(model, partial=True, print_fn=said.append) == 1
    left = checkpoints.left_out
    cities = len(set(x["city"].numpy().tolist()))
    assert dict(left.tables_left) == {"embeddings/city": cities}
    assert tuple(left.tables_new) == ("embeddings/age",)
    assert said == [str(left)]
    assert f"left out: table embeddings/city, {cities} rows\n  stays new: table embeddings/age (it" in said[0]
    assert left.dense.new == left.dense.left == ()
    assert left.dense.later is not is_built
    # The kernel has as many inputs as before; only those of age are of another feature now.
    assert model.predict(x, verbose=0).shape == expected.shape
    # It trains on, and what it saves is a checkpoint of its own features.
    again, data = Net(NAMES_NOW, by_name=True), tf.data.Dataset.from_tensors((x, x["age"]))
    ShardedCheckpoint(tmp_path).fit(model, data, epochs=2, verbose=0)
    ShardedCheckpoint(tmp_path).restore(again)
    np.testing.assert_array_equal(again.predict(x, verbose=0), model.predict(x, verbose=0))


def test_a_partial_restore_without_a_checkpoint_is_reported(tmp_path):
    said = []
    assert ShardedCheckpoint(tmp_path / "typo").restore(Net(NAMES), partial=True, print_fn=said.append) == 0
    assert said == [f"{tmp_path / 'typo'}: no checkpoint is here, so nothing was loaded"]


def test_dense_weights_of_another_shape_stay_new_with_their_slots(trained):
    folder, x, _ = trained
    model, late = Net((*NAMES, "age")), Net((*NAMES, "age"))
    model(x)
    before = model.out.kernel.numpy()
    checkpoints = ShardedCheckpoint(folder)
    checkpoints.restore(model, partial=True, print_fn=lambda _: None)
    (new,) = checkpoints.left_out.dense.new
    assert "kernel (its shape is (18, 1), and was (14, 1))" in new
    assert checkpoints.left_out.dense.slots == 2
    np.testing.assert_array_equal(model.out.kernel, before)
    assert np.abs(model.out.bias).max() > 0
    momentum = {
        v.name.rpartition("/")[2]: v.numpy() for v in model.optimizer.variables if v.name.startswith("m/")
    }
    assert not momentum["kernel:0"].any()
    assert momentum["bias:0"].any()
    # Weights that are created later are compared then.
    checkpoints.restore(late, partial=True, print_fn=lambda _: None)
    assert checkpoints.left_out.dense.later
    with pytest.warns(UserWarning, match=r"kernel stays new: its shape is \(18, 1\), and was \(14, 1\)"):
        late(x)
    np.testing.assert_array_equal(late.out.bias, model.out.bias)


def test_dense_layers_with_names_are_found_by_them(tmp_path):
    def make(*layers: str) -> Model:
        ids = tf.keras.Input([], name="user", dtype=tf.int64)
        x = EmbeddingCollection([FeatureConfig("user", dim=4)])({"user": ids})["user"]
        for number, name in enumerate(layers):
            x = tf.keras.layers.Dense(
                4, name=name, kernel_initializer=tf.keras.initializers.Constant(number)
            )(x)
        model = Model({"user": ids}, x)
        model.compile("adam", "mse")
        return model

    data = tf.data.Dataset.from_tensors(({"user": tf.range(3)}, tf.zeros([3, 4])))
    model = make("first", "second")
    ShardedCheckpoint(tmp_path).fit(model, data, epochs=1, verbose=0)
    longer = make("zeroth", "first", "second")
    checkpoints = ShardedCheckpoint(tmp_path)
    checkpoints.restore(longer, partial=True, print_fn=lambda _: None)
    assert [each.partition(" ")[0] for each in checkpoints.left_out.dense.new] == [
        "zeroth/kernel",
        "zeroth/bias",
    ]
    for name in ("first", "second"):
        for mine, saved in zip(longer.get_layer(name).weights, model.get_layer(name).weights, strict=True):
            np.testing.assert_array_equal(mine, saved)
    slots = {variable.name: variable.numpy() for variable in longer.optimizer.variables}
    for variable in model.optimizer.variables:
        np.testing.assert_array_equal(slots[variable.name], variable)
    assert checkpoints.left_out.dense.slots == 4


def test_a_dropped_table_is_refused_where_all_else_fits(tmp_path):
    class Sum(Model):
        def __init__(self, names: Sequence[str]) -> None:
            super().__init__()
            self.embeddings = EmbeddingCollection([FeatureConfig(name, dim=4) for name in names])
            self.compile("adam", "mse")

        def call(self, x: Any, training: bool = False) -> tf.Tensor:
            return tf.add_n(list(self.embeddings(x, training=training).values()))

    x = {name: tf.range(5) for name in ("user", "city")}
    data = tf.data.Dataset.from_tensors((x, tf.zeros([5, 4])))
    ShardedCheckpoint(tmp_path).fit(Sum(("user", "city")), data, epochs=1, verbose=0)
    with pytest.raises(
        ConfigError, match=r"doesn't have the tables embeddings/city .*restore\(model, partial=True\)"
    ):
        ShardedCheckpoint(tmp_path).restore(Sum(("user",)))
    assert ShardedCheckpoint(tmp_path).restore(Sum(("user",)), partial=True, print_fn=lambda _: None) == 1


def test_weights_without_the_rows_of_a_collection_are_refused(tmp_path):
    def make(*more: Any) -> Model:
        user = user_input = tf.keras.Input([], name="user", dtype=tf.int64)
        for layer in more:
            user = layer(user)
        vectors = EmbeddingCollection([FeatureConfig("user", dim=4)])({"user": user})
        return Model(user_input, tf.keras.layers.Dense(1)(vectors["user"]))

    make().save_weights(tmp_path / "w")
    with pytest.raises(
        ConfigError, match="dense weights were loaded, but the rows of embeddings weren't found"
    ):
        make(tf.keras.layers.Reshape([])).load_weights(tmp_path / "w")
    make().load_weights(tmp_path / "w")


def test_a_keras_file_skips_tables_that_mismatch_with_a_warning(tmp_path):
    model = Net(("user", "shop"))
    model(ids(("user", "shop")))
    model.embeddings.lookup(ids(("user", "shop")))
    model.save_weights(tmp_path / "w.weights.h5")
    to = Net(("shop", "age"))
    to(ids(("shop", "age")))
    with pytest.warns(
        UserWarning,
        match="embeddings/age is reinitialized: it was not saved; the rows of embeddings/user are left out",
    ):
        to.load_weights(tmp_path / "w.weights.h5", skip_mismatch=True)
    sizes = {table.name: int(table.size()) for table in to.embeddings.tables}
    assert sizes == {"embeddings/shop": len(set(ids(("shop",))["shop"].numpy())), "embeddings/age": 0}
    of_shop = {"shop": ids(("shop",))["shop"]}
    np.testing.assert_array_equal(
        to.embeddings({**of_shop, "age": [0] * 30}, training=False)["shop"],
        model.embeddings({**of_shop, "user": [0] * 30}, training=False)["shop"],
    )


def test_a_meta_model_predicts_the_same_with_features_in_another_order(tmp_path):
    def make(*names: str) -> MetaModel:
        network = tf.keras.Sequential([tf.keras.layers.Dense(1, name="out")])
        return MetaModel(EmbeddingCollection([FeatureConfig(name, dim=4) for name in names]), network)

    x = {"user": np.arange(5), "item": np.arange(5) + 3}
    model, other = make("user", "item"), make("item", "user")
    model.collection.lookup({name: tf.constant(each) for name, each in x.items()})
    model.compile("adam", "mse")
    other.compile("adam", "mse")
    model.save_weights(tmp_path / "w")
    with pytest.warns(UserWarning, match="in the order user, item from now on"):
        other.load_weights(tmp_path / "w")
    np.testing.assert_array_equal(other.predict(x, verbose=0), model.predict(x, verbose=0))


def test_set_weights_takes_over_the_order_of_the_features():
    x, online, target = ids(NAMES), Net(NAMES), Net(NAMES[::-1])
    online.fit(x, np.arange(30.0), verbose=0)
    target(x)
    with pytest.warns(UserWarning, match="in the order user, item, city, shop from now on"):
        target.set_weights(online.get_weights())
    np.testing.assert_array_equal(target.predict(x, verbose=0), online.predict(x, verbose=0))


def test_vectors_that_begin_elsewhere_in_as_wide_an_input_are_named(tmp_path, monkeypatch):
    x = ids((*NAMES, "age"))
    ShardedCheckpoint(tmp_path).fit(
        Net(NAMES), tf.data.Dataset.from_tensors((x, tf.range(30.0))), epochs=1, verbose=0
    )
    monkeypatch.setitem(WIDTHS, "user", 2)
    monkeypatch.setitem(WIDTHS, "age", 2)
    model = Net((*NAMES, "age"))
    model(x)
    with pytest.warns(
        UserWarning, match="the vectors of item, city, shop begin at other places than in what"
    ):
        ShardedCheckpoint(tmp_path).restore(model, partial=True, print_fn=lambda text: None)


def on_rank(net: Any, folder: str, names: Sequence[str], weights: str, turned: Sequence[str]) -> Any:
    from gmeta.checkpoint import ShardedCheckpoint
    from gmeta.core import collectives
    from gmeta.core.errors import ConfigError

    model, said = net(names, by_name=True), []
    checkpoints = ShardedCheckpoint(folder)
    checkpoints.restore(model, partial=True, print_fn=said.append)
    sizes = {table.name: int(table.size()) for table in model.embeddings.tables}
    of_file = net(turned, by_name=True)  # what one rank has saved, with other keys
    of_file.load_weights(weights)
    sizes |= {f"file/{table.name}": int(table.size()) for table in of_file.embeddings.tables}
    own, other = net(turned, by_name=True), net(turned[::-1], by_name=True)
    for each in (of_file, own, other):
        each(ids(turned))
    own.set_weights(of_file.get_weights())
    refused = ""
    try:
        other.set_weights(of_file.get_weights())
    except ConfigError as error:
        refused = str(error)
    assert "whose ids have other keys, which other ranks own" in refused
    return collectives.world().rank, said, dict(checkpoints.left_out.tables_left), sizes


@pytest.mark.ranks
def test_ranks_restore_what_fits_together_and_one_prints(trained, tmp_path):
    folder, x, _ = trained
    whole = Net(NAMES, by_name=True)
    ShardedCheckpoint(folder).restore(whole)
    whole.save_weights(tmp_path / "w")
    found = run_ranks(on_rank, 2, Net, str(folder), NAMES_NOW, str(tmp_path / "w"), NAMES[::-1])
    ids_of = {name: len(set(x[name].numpy().tolist())) for name in NAMES}
    for rank, said, left, _ in found:
        assert left == {"embeddings/city": ids_of["city"]}
        assert len(said) == (rank == 0)
    total = {name: sum(sizes[name] for *_, sizes in found) for name in found[0][3]}
    assert total == {"embeddings/user+item+age": ids_of["user"] + ids_of["item"]} | {
        "embeddings/shop": ids_of["shop"],
        "file/embeddings/shop": ids_of["shop"],
        "file/embeddings/city+item+user": sum(ids_of[name] for name in ("city", "item", "user")),
    }
    assert all(sizes["embeddings/user+item+age"] > 0 for *_, sizes in found)
