"""Where a table is: what may be asked for, what comes of it without a GPU, and moving between the two."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

from gmeta import initializers, ops, optimizers, policies
from gmeta.core.errors import ConfigError
from gmeta.layers import EmbeddingCollection, FeatureConfig
from gmeta.layers.embedding.feature_config import from_config, to_config
from gmeta.ops import device as devices
from support.tables import assert_same_tables

needs_gpu = pytest.mark.skipif("why_no_gpu()", reason="needs a GPU and a build with CUDA")
needs_no_gpu = pytest.mark.skipif("not why_no_gpu()", reason="there is a GPU")


def why_no_gpu():
    return devices.why_no_gpu()


@pytest.fixture(autouse=True)
def _nothing_was_said(monkeypatch):
    monkeypatch.delenv(devices.VARIABLE, raising=False)
    devices.warn_once.cache_clear()


def test_a_device_is_one_of_three_words(monkeypatch):
    with pytest.raises(ConfigError, match="table 'x': device must be one of auto, cpu, gpu, got 'cuda'"):
        ops.HashTable(2, name="x", device="cuda")
    monkeypatch.setenv(devices.VARIABLE, "tpu")
    with pytest.raises(ConfigError, match=r"GMETA_TABLE_DEVICE, table 'x': device must be one of .* 'tpu'"):
        ops.HashTable(2, name="x")
    assert ops.HashTable(2, name="x", device="cpu").device == "cpu"


def test_a_table_that_says_nothing_is_in_host_memory():
    table = ops.HashTable(2)
    assert (table.device, EmbeddingCollection([FeatureConfig("a", dim=2)]).tables[0].device) == ("cpu", "cpu")
    assert table.lookup([1]).rows.device.endswith("CPU:0")


@pytest.mark.parametrize(
    ("cuda", "gpus", "reason"),
    [
        ("0", ["GPU:0"], "gmeta was built without CUDA"),
        ("1", [], "TensorFlow sees no GPU"),
        ("0", [], "TensorFlow sees no GPU"),
    ],
)
def test_without_a_gpu_it_is_kept_in_host_memory_with_one_warning(monkeypatch, cuda, gpus, reason):
    monkeypatch.setattr(devices, "build_info", lambda _: {"cuda": cuda})
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda _: gpus)
    devices.why_no_gpu.cache_clear()
    try:
        with pytest.warns(UserWarning, match=f"device='gpu': {reason}.*kept in host memory") as said:
            tables = [
                ops.HashTable(2, optimizers.SGD(1.0), initializers.Zeros(), device="gpu") for _ in range(3)
            ]
    finally:
        devices.why_no_gpu.cache_clear()
    assert len(said) == 1
    assert said[0].filename == __file__
    tables[0].lookup([5])
    tables[0].apply_gradients([5], tf.ones([1, 2]))
    assert tables[0].device == "cpu"
    np.testing.assert_array_equal(tables[0].lookup([5], insert=False).rows, [[-1, -1]])


def test_the_layer_hands_it_on_and_remembers_it():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        layer = EmbeddingCollection([FeatureConfig("a", dim=2), FeatureConfig("b", dim=3)], device="gpu")
    assert len(said) == bool(why_no_gpu())
    assert {table.device for table in layer.tables} == {"cpu" if why_no_gpu() else "gpu"}
    assert layer.get_config()["device"] == "gpu"
    assert EmbeddingCollection.from_config(layer.get_config()).device == "gpu"


@needs_gpu
def test_rows_stay_on_the_gpu_and_records_go_either_way(tmp_path):
    tables = {
        place: ops.HashTable(4, optimizers.Adam(), initializers.Normal(), 3, device=place)
        for place in ("cpu", "gpu")
    }
    ids = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 1000)
    for table in tables.values():
        found = table.lookup(np.tile(ids, 2))
        table.apply_gradients(found.keys, tf.ones_like(found.rows))
    found = tables["gpu"].lookup(ids)
    assert {each.device[-5:] for each in found} == {"GPU:0"}
    np.testing.assert_array_equal(found.keys, ids)
    np.testing.assert_allclose(found.rows, tables["cpu"].lookup(ids).rows, rtol=2e-6, atol=1e-7)
    for here, there in (("cpu", "gpu"), ("gpu", "cpu")):
        fresh = ops.HashTable(4, optimizers.Adam(), initializers.Normal(), 3, device=there)
        path = tf.train.Checkpoint(table=tables[here]).save(str(tmp_path / here))
        tf.train.Checkpoint(table=fresh).restore(path).assert_consumed()
        assert_same_tables(fresh, tables[here])


@needs_no_gpu
def test_without_a_gpu_its_tiers_are_left_out_and_remembered():
    tiers = policies.Tiers(hbm_rows=1)
    with pytest.warns(UserWarning, match="Tables are kept in host memory"):
        layer = EmbeddingCollection([FeatureConfig("a", dim=2)], device="gpu", tiers=tiers)
    (table,) = layer.tables
    assert (table.device, table.tiers) == ("cpu", None)
    assert table.lookup([1, 2, 3]).rows.shape == (3, 2)
    assert EmbeddingCollection.from_config(layer.get_config()).tiers == tiers


@pytest.mark.parametrize("written", ["tiers", "device_rows"])
def test_a_layer_saved_with_tiers_on_a_gpu_loads_where_tables_are_in_host_memory(written):
    plain = EmbeddingCollection([FeatureConfig("a", dim=2)], name="mine").get_config()
    changed = (
        {"device_rows": 7} if written == "device_rows" else {"tiers": to_config(policies.Tiers(hbm_rows=7))}
    )
    with pytest.warns(UserWarning, match=r"'mine' was saved with Tiers\(hbm_rows=7\), for tables on a GPU"):
        layer = EmbeddingCollection.from_config({**plain, **changed})
    assert (layer.tables[0].device, layer.tables[0].tiers) == ("cpu", None)
    assert from_config(layer.get_config()["tiers"]) == policies.Tiers(hbm_rows=7)


@pytest.mark.parametrize("rows", [None, 7])
def test_a_layer_of_before_tiers_had_hbm_rows_loads(rows, recwarn):
    plain = EmbeddingCollection([FeatureConfig("a", dim=2)], device="cpu").get_config()
    del plain["tiers"]
    layer = EmbeddingCollection.from_config({**plain, "device_rows": rows})  # which such tables ignored
    assert layer.tiers is None
    assert "device_rows" not in layer.get_config()
    assert not recwarn.list


@needs_gpu
@pytest.mark.parametrize("precision", [None, policies.TwoPrecisions(2)], ids=["float32", "two"])
def test_rows_beyond_those_of_the_gpu_are_in_host_memory_and_the_same(precision):
    tables = [
        ops.HashTable(64, optimizers.Adam(), seed=1, device="gpu", tiers=tiers, precision=precision)
        for tiers in (None, policies.Tiers(hbm_rows=1000))
    ]
    for table in tables:
        for start in (0, 20_000, 10_000, 25_000):
            ids = np.arange(start, start + 40_000)
            table.prefetch(ids[::40])
            found = table.lookup(ids)
            table.apply_gradients(found.keys, tf.sin(found.rows))
    assert_same_tables(*tables)


@needs_gpu
@pytest.mark.parametrize(
    "optimizer",
    [
        optimizers.SGD(0.1),
        optimizers.Adagrad(0.1),
        optimizers.RowWiseAdagrad(0.1),
        optimizers.Momentum(0.1),
        optimizers.Adam(0.1),
        optimizers.AdamW(0.1),
    ],
    ids=lambda optimizer: optimizer.kind,
)
@pytest.mark.parametrize("dim", [1, 6, 8, 64])
def test_half_rows_of_a_gpu_are_the_cpus_to_the_last_bit(optimizer, dim):
    settings = (dim, optimizer, initializers.Uniform(-1.0, 1.0), 7)
    tables = [
        ops.HashTable(*settings, precision=policies.TwoPrecisions(3), device=place)
        for place in ("cpu", "gpu")
    ]
    random = np.random.default_rng()
    for _ in range(12):
        keys = random.integers(0, 3000, 2000)
        distinct = np.unique(keys)
        grads = random.normal(0, 1, (len(distinct), dim)).astype(np.float32)
        gone = random.integers(0, 3000, 100)
        found = []
        for table in tables:
            rows = [
                table.lookup_keys(keys, insert=False),
                table.lookup_keys(keys),
                table.lookup(keys[:900]).rows,
            ]
            table.apply_gradients(distinct, grads)
            found.append((*rows, table.remove(gone), table.statistics().half_rows))
        for mine, other in zip(*found, strict=True):
            np.testing.assert_array_equal(mine, other)
        assert_same_tables(*tables)
    assert 0 < int(tables[0].statistics().half_rows) < int(tables[0].size())


@needs_gpu
def test_what_a_gpu_cannot_is_done_in_host_memory_with_one_warning(monkeypatch):
    make = ops.HashTable._make

    def refuse_on_gpu(table):
        if table.device == "gpu":
            raise tf.errors.UnimplementedError(None, None, "it has no such kernel")
        return make(table)

    monkeypatch.setattr(ops.HashTable, "_make", refuse_on_gpu)
    with pytest.warns(UserWarning, match="device='gpu': it has no such kernel") as said:
        table = ops.HashTable(2, device="gpu")
    assert len(said) == 1
    assert table.device == "cpu"
    assert table.lookup([1]).rows.shape == (1, 2)


@needs_gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "graph"])
def test_a_layer_learns_the_same_on_either(compiled):
    features = [
        FeatureConfig("a", dim=4),
        FeatureConfig("b", dim=4),
        FeatureConfig("tags", dim=4, combiner="mean"),
    ]
    random = np.random.default_rng(1)
    batches = [
        {
            "a": tf.constant(random.integers(0, 20, 64)),
            "b": tf.constant(random.integers(0, 20, 64)),
            "tags": tf.RaggedTensor.from_row_lengths(random.integers(0, 9, 128), np.full(64, 2)),
        }
        for _ in range(5)
    ]

    def trained(device):
        layer = EmbeddingCollection(features, optimizer=optimizers.Adagrad(0.1), device=device)

        def step(ids):
            lookup = layer.lookup(ids)
            with tf.GradientTape() as tape:
                tape.watch(lookup.rows)
                loss = tf.reduce_sum(layer.concat(lookup) ** 2)
            layer.apply_gradients(lookup, tape.gradient(loss, lookup.rows))
            return loss

        step = tf.function(step) if compiled else step
        losses = [float(step(batch)) for batch in batches]
        keys = np.sort(layer.tables[0].export().keys.numpy())
        return losses, keys, layer.tables[0].lookup_keys(keys, insert=False).numpy()

    for mine, other in zip(trained("gpu"), trained("cpu"), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_numbers_that_are_split_keep_their_bits(device):
    """Also those of float64's NaNs, as which a GPU splits them."""
    numbers = np.array([-1, 0x7FF0_0000_0000_0001, -(2**63), 2**63 - 1, 7, 0], np.int64)
    split = tf.function(lambda sizes: devices.split_numbers(tf.constant(numbers), sizes, 3, device=device))
    parts = [part.numpy().tolist() for part in split(tf.constant([2, 0, 4]))]
    assert parts == [numbers[:2].tolist(), [], numbers[2:].tolist()]


def test_tensors_are_on_a_gpu_only_if_all_are_known_to_be():
    with tf.Graph().as_default():
        here, there = tf.compat.v1.placeholder(tf.int64, [None]), tf.compat.v1.placeholder(tf.int64, [None])
        with tf.device("GPU:0"):
            there = tf.identity(there)
        assert [devices.shared_place(each) for each in ([], [here], [here, there])] == ["cpu"] * 3
        assert devices.shared_place([there, there]) == "gpu"
