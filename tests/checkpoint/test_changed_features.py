"""What was saved loads after features were reordered, added or left out, or their policies have changed."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gmeta import optimizers
from gmeta.checkpoint.callback import tables_by_name
from gmeta.checkpoint.sharded import load, save
from gmeta.checkpoint.table_part import refuse_foreign
from gmeta.core.errors import ConfigError, DataError
from gmeta.core.merged_tables import Fold, tables_by_full_name
from gmeta.core.shares import owned_shards
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.policies import LRU, Bloom, CountAdmission

WIDTHS = {"user": 4, "item": 4, "city": 4, "shop": 2, "age": 4}
NAMES = ("user", "item", "city", "shop")
BOUND = LRU(max_rows=1000)


def collection(
    names: Sequence[str] = NAMES, optimizer: Any = None, name: str = "tables", **policies: Any
) -> EmbeddingCollection:
    features = [
        FeatureConfig(
            each,
            TableConfig(each, WIDTHS[each], **policies.get(each, {})),
            hash=each == "shop",
        )
        for each in names
    ]
    return EmbeddingCollection(features, optimizer=optimizer or optimizers.Adam(0.1), name=name)


def ids(names: Sequence[str], seed: int = 0) -> dict[str, tf.Tensor]:
    found = {n: tf.constant(np.random.default_rng([seed, *n.encode()]).integers(0, 40, 30)) for n in names}
    return {n: tf.strings.as_string(v) if n == "shop" else v for n, v in found.items()}


def train(tables: EmbeddingCollection, steps: int = 3) -> EmbeddingCollection:
    names = [feature.name for feature in tables.features]
    for step in range(steps):
        found = tables.lookup(ids(names, step))
        tables.apply_gradients(found, [tf.ones_like(rows) * (step + 1) for rows in found.rows])
    return tables


def records(tables: EmbeddingCollection, without: Sequence[str] = ()) -> dict[str, dict[int, Any]]:
    """Table -> id -> its row, slots, frequency and age."""
    found: dict[str, dict[int, Any]] = {}
    by_name = {table.name: table for table in tables.tables}
    for full, named in tables_by_full_name(
        {name: table.merged_keys for name, table in by_name.items()}
    ).items():
        exported = {f: v.numpy() for f, v in by_name[named.physical].export()._asdict().items()}
        step = exported.pop("step")
        own = named.own(exported)
        found[full.removeprefix("tables/")] = {
            key: [*row, *slots, frequency, step - last]
            for key, row, slots, frequency, last in zip(
                *(own[each].tolist() for each in ("keys", "rows", "slots", "frequency", "last_step")),
                strict=True,
            )
        }
    return {name: rows for name, rows in found.items() if name not in without}


def sharded(saved: EmbeddingCollection, to: EmbeddingCollection, path: Any) -> None:
    save(path / "ck", tables_by_name(saved))
    load(path / "ck", tables_by_name(to))


def tensorflow(saved: EmbeddingCollection, to: EmbeddingCollection, path: Any) -> None:
    written = tf.train.Checkpoint(layer=saved).write(str(path / "tf"))
    tf.train.Checkpoint(layer=to).read(written).assert_consumed()


def keras(saved: EmbeddingCollection, to: EmbeddingCollection, path: Any) -> None:
    store: dict[str, Any] = {}
    saved.save_own_variables(store)
    to.load_own_variables(store)


def weights(saved: EmbeddingCollection, to: EmbeddingCollection, path: Any) -> None:
    to.set_weights(saved.get_weights())


class Earlier(tf.__internal__.tracking.AutoTrackable):
    """The objects of a collection in TensorFlow's checkpoints of earlier versions."""

    class Plan(tf.train.experimental.PythonState):
        def __init__(self, plan: Any) -> None:
            self.plan = plan

        def serialize(self) -> str:
            return json.dumps(self.plan)

        def deserialize(self, string_value: str) -> None:
            raise AssertionError

    def __init__(self, tables: EmbeddingCollection) -> None:
        super().__init__()
        self.tables = list(tables.tables)
        self._plan_check = self.Plan(earlier_plan(tables))


def earlier_plan(tables: EmbeddingCollection) -> list[dict[str, Any]]:
    return [{"dim": table.dim, **table.merged_keys.to_json()} for table in tables.tables]


def earlier_tensorflow(saved: EmbeddingCollection, to: EmbeddingCollection, path: Any) -> None:
    written = tf.train.Checkpoint(layer=Earlier(saved)).write(str(path / "tf"))
    status = tf.train.Checkpoint(layer=to).read(written)
    status.assert_existing_objects_matched()
    status.assert_consumed()


def earlier_keras(saved: EmbeddingCollection, to: EmbeddingCollection, path: Any) -> None:
    store: dict[str, Any] = {}
    saved.save_own_variables(store)
    store["plan"] = np.frombuffer(json.dumps(earlier_plan(saved)).encode(), np.uint8)
    to.load_own_variables(store)


DOORS = {
    each.__name__: each for each in (sharded, tensorflow, keras, weights, earlier_tensorflow, earlier_keras)
}
CHANGES = {
    "nothing": {},
    "another order": {"names": ("shop", "city", "item", "user")},
    "a policy of one table": {"city": {"eviction": BOUND}},
    "policies that merge other tables": {
        "names": ("city", "user", "shop", "item"),
        "user": {"eviction": BOUND},
    }
    | {"city": {"eviction": BOUND}},
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("change", CHANGES)
def test_rows_find_the_tables_of_their_names(tmp_path, change, door):
    saved, to = train(collection()), collection(**CHANGES[change])
    train(to, 1)  # what it held goes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of an order that earlier versions haven't noted
        DOORS[door](saved, to, tmp_path)
    assert records(to) == records(saved)
    assert {int(table.step()) for table in to.tables} == {3}
    # Training goes on as it would have.
    for tables in (saved, to):
        train(tables, 1)
    for name, rows in records(saved).items():
        for key, record in records(to)[name].items():
            np.testing.assert_allclose(record, rows[key], rtol=1e-6)


@pytest.mark.parametrize("door", ["tensorflow", "keras", "weights", "earlier_tensorflow", "earlier_keras"])
def test_tables_of_one_side_alone_are_refused_by_name(tmp_path, door):
    more, fewer = collection((*NAMES, "age"), age={"eviction": BOUND}), collection(("user", "item", "shop"))
    for to, said in ((more, r"/age is reinitialized"), (fewer, r"the rows of \w+/city are left out")):
        with pytest.raises(ConfigError, match=said):
            DOORS[door](train(collection()), to, tmp_path)
        assert all(int(table.size()) == 0 for table in to.tables)


def test_a_sharded_checkpoint_loads_what_fits(tmp_path):
    saved = train(collection())
    save(tmp_path / "ck", tables_by_name(saved))
    to = collection(("item", "age", "shop", "user"), age={"eviction": BOUND})
    with pytest.raises(DataError, match=r"no table 'tables/age' in this checkpoint; it has .*partial=True"):
        load(tmp_path / "ck", tables_by_name(to))
    info = load(tmp_path / "ck", tables_by_name(to), partial=True)
    assert (info.left, info.without_slots) == (("tables/city",), ())
    assert info.new == {"tables/age": "it was not saved"}
    assert records(to) == {**records(saved, without=["city"]), "age": {}}


def test_a_table_of_another_width_or_optimizer_starts_anew_or_without_slots(tmp_path):
    saved = train(collection())
    save(tmp_path / "ck", tables_by_name(saved))
    wide = {**WIDTHS, "shop": 3}
    features = [FeatureConfig(n, TableConfig(n, wide[n]), hash=n == "shop") for n in NAMES if n != "city"]
    city = TableConfig("city", 4, optimizer=optimizers.Adagrad(0.1))
    to = EmbeddingCollection(
        [*features, FeatureConfig("city", city)], optimizer=optimizers.Adam(0.1), name="tables"
    )
    with pytest.raises(ConfigError, match=r"'tables/shop' was saved with dim 2, .* partial=True"):
        load(tmp_path / "ck", tables_by_name(to))
    info = load(tmp_path / "ck", tables_by_name(to), partial=True)
    assert info.left == ("tables/shop",)
    assert info.new == {"tables/shop": "its rows were 2 wide, and are 3 wide now"}
    assert info.without_slots == ("tables/city",)
    found, expected = records(to), records(saved)
    assert found["user"] == expected["user"]
    assert {key: record[:4] for key, record in found["city"].items()} == {
        key: record[:4] for key, record in expected["city"].items()
    }
    fresh = optimizers.Adagrad(0.1).initial_slot
    assert all(record[4:8] == pytest.approx([fresh] * 4) for record in found["city"].values())


def test_ranks_share_rows_whose_keys_have_changed(tmp_path):
    saved = train(collection())
    save(tmp_path / "ck", tables_by_name(saved))
    parts = [collection(("shop", "city", "item", "user")) for _ in range(3)]
    for rank, to in enumerate(parts):
        load(tmp_path / "ck", tables_by_name(to), rank=rank, world_size=3)
    found = [records(to) for to in parts]
    for name, expected in records(saved).items():
        assert sum(len(each[name]) for each in found) == len(expected)
        assert {key: record for each in found for key, record in each[name].items()} == expected
    for rank, to in enumerate(parts):
        for name, table in tables_by_name(to).items():
            refuse_foreign(name, table, rank, owned_shards(rank, 3))


def test_the_save_after_keys_have_changed_is_full_and_increments_follow(tmp_path):
    saved = train(collection())
    save(tmp_path / "a", tables_by_name(saved), journal=1000)
    to = collection(city={"eviction": BOUND})
    load(tmp_path / "a", tables_by_name(to), journal=1000)
    train(to, 1)
    info = save(tmp_path / "b", tables_by_name(to), base=tmp_path / "a", journal=1000)
    assert info.kinds == {"tables/user+item": "full", "tables/city": "full", "tables/shop": "increment"}
    train(to, 1)
    info = save(tmp_path / "c", tables_by_name(to), base=tmp_path / "b", journal=1000)
    assert set(info.kinds.values()) == {"increment"}
    again = collection(NAMES[::-1])
    load(tmp_path / "c", tables_by_name(again))
    assert records(again) == records(to)


def test_ages_stay_where_tables_of_unequal_steps_are_merged(tmp_path):
    saved = collection(("user", "city"), city={"eviction": BOUND})
    train(saved, 2)
    lookup = saved.lookup({"user": tf.constant([1, 2]), "city": tf.constant([], tf.int64)})
    saved.tables[0].apply_gradients(lookup.keys[0], tf.ones_like(lookup.rows[0]))
    assert [int(table.step()) for table in saved.tables] == [3, 2]
    to = collection(("city", "user"))
    sharded(saved, to, tmp_path)
    assert int(to.tables[0].step()) == 3
    assert records(to) == records(saved)


def test_counts_of_admission_follow_their_ids_and_a_filter_is_forgotten_with_a_warning(tmp_path):
    counted = {"admission": CountAdmission(3)}
    saved = collection(("user", "city"), user=counted, city=counted)
    saved.lookup({"user": tf.constant([7, 8]), "city": tf.constant([7])})
    to = collection(("city", "user"), user=counted, city=counted)
    sharded(saved, to, tmp_path)
    for _ in range(2):
        to.lookup({"user": tf.constant([7]), "city": tf.constant([8])})
    assert {name: sorted(rows) for name, rows in records(to).items()} == {"user": [7], "city": []}

    filtered = {"admission": CountAdmission(3, filter=Bloom(1000))}
    saved = collection(("user", "city"), user=filtered, city=filtered)
    saved.lookup({"user": tf.constant([7]), "city": tf.constant([7])})
    to = collection(("city", "user"), user=filtered, city=filtered)
    for door in (sharded, tensorflow, weights):
        (tmp_path / door.__name__).mkdir()
        with pytest.warns(
            UserWarning, match=r"filter of '.*user\+city' has counted keys, which have changed"
        ):
            door(saved, to, tmp_path / door.__name__)
    # A copy of the same tables has what the filter has counted.
    copy = collection(("user", "city"), user=filtered, city=filtered)
    weights(saved, copy, tmp_path)
    for _ in range(2):
        copy.lookup({"user": tf.constant([7]), "city": tf.constant([], tf.int64)})
    assert list(records(copy)["user"]) == [7]


@pytest.mark.parametrize("door", DOORS)
def test_the_fold_of_hashed_ids_follows_their_rows(tmp_path, door):
    def make(*names: str, fold: Fold = "mix") -> EmbeddingCollection:
        features = [FeatureConfig(name, dim=4, hash=True) for name in names]
        return EmbeddingCollection(features, optimizer=optimizers.Adam(0.1), name="tables", fold=fold)

    far = np.random.default_rng(0).integers(2**62, 2**63 - 1, 30)
    earlier, to = make("user", "item", fold="xor"), make("item", "user")
    for saved, policy in ((earlier, "xor"), (make("user", "item"), "mix")):
        saved.lookup({"user": far, "item": far + 1})
        (tmp_path / policy).mkdir()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of an order that earlier versions haven't noted
            DOORS[door](saved, to, tmp_path / policy)
        assert to.fold == policy
        assert records(to) == records(saved)
        to.lookup({"user": far, "item": far + 1})
        assert int(to.tables[0].size()) == 60  # it found them all
    with pytest.raises(ConfigError, match=r"to 61 bits by the fold 'xor' with 2 merged tables, and the 4 "):
        DOORS[door](earlier, make("user", "item", "city", "age"), tmp_path)


def test_an_id_above_the_limit_of_now_is_named(tmp_path):
    saved = collection(("user",))
    saved.lookup({"user": tf.constant([2**61 + 5])})
    save(tmp_path / "ck", tables_by_name(saved))
    with pytest.raises(
        DataError, match=rf"'user' was saved with the id {2**61 + 5}, but .* below 2\^61 now that 2"
    ):
        load(tmp_path / "ck", tables_by_name(collection(("user", "city"))), partial=True)
