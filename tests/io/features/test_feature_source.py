"""What every store does alike, against a dict of what was put."""

import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError, DataError, StoreError
from gmeta.core.schema import Column
from gmeta.io import ArrowSource, HBaseSource, RocksDBSource
from gmeta.io.features import FetchPolicy
from gmeta.io.features.cells import arrow_type
from gmeta.io.features.feature_source import NEWEST
from support.hbase_server import HBaseServer

COLUMNS = [
    Column("price", "float32"),
    Column("shop"),
    Column("tags", is_list=True),
    Column("weights", "float32", is_list=True),
]
NAMES = [column.name for column in COLUMNS]
STORES = ["arrow", "rocksdb", "hbase"]
# Each makes an empty table of a new name in one store, which all examples of a test share.
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def server():
    with HBaseServer() as server:
        yield server


@pytest.fixture(scope="module", params=STORES)
def make(request, server, tmp_path_factory):
    """Makes a source with one empty table, and gives the table's name too."""
    folder, opened = tmp_path_factory.mktemp("rocksdb"), []

    def make_one(policy):
        name = f"table{next(NUMBERS)}"
        if request.param == "arrow":
            fields = {"key": pa.int64(), "version": pa.int64(), **{c.name: arrow_type(c) for c in COLUMNS}}
            empty = pa.table({field: pa.array([], kind) for field, kind in fields.items()})
            return ArrowSource({name: empty}, version="version", policy=policy), name
        if request.param == "rocksdb":
            for source in opened:
                source.close()
            opened[:] = [RocksDBSource(folder / name, writable=True, policy=policy)]
            opened[0].create_table(name, COLUMNS)
            return opened[0], name
        source = HBaseSource("127.0.0.1", server.port, tables={name: COLUMNS}, policy=policy)
        source.create_table(name, versions=1000)
        return source, name

    yield make_one
    for source in opened:
        source.close()


INTS, FLOATS = st.integers(-(2**63), 2**63 - 1), st.floats(width=32, allow_nan=False)
VALUES = st.fixed_dictionaries(
    {
        "price": st.none() | FLOATS,
        "shop": st.none() | INTS,
        "tags": st.none() | st.lists(INTS, max_size=3),
        "weights": st.none() | st.lists(FLOATS, max_size=3),
    }
)
KEYS = st.sampled_from([-(2**63), -7, -1, 0, 1, 2, 255, 256, 2**63 - 1])  # few, so that puts and gets meet
VERSIONS = st.integers(0, 6) | st.sampled_from([2**40, NEWEST])
PUTS = st.lists(st.tuples(VERSIONS, st.dictionaries(KEYS, VALUES, min_size=1, max_size=6)), max_size=6)
ASKED = st.lists(KEYS | st.integers(-3, 3), max_size=20)


def expected(puts, key, name, as_of):
    """The newest value that was put; None for none."""
    known = {}
    for version, rows in puts:
        if key in rows and rows[key][name] is not None and version <= as_of:
            known[version] = rows[key][name]
    return known[max(known)] if known else None


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), puts=PUTS, asked=ASKED, names=st.permutations(NAMES).map(lambda p: p[:3]))
@pytest.mark.parametrize("cache_rows", [0, 3])
@pytest.mark.shown_by(case=["arrow-3", "rocksdb-3"])
def test_a_value_is_the_newest_one_not_after_as_of(make, cache_rows, data, puts, asked, names):
    source, table = make(FetchPolicy(missing="null", batch_rows=4, cache_rows=cache_rows))
    for version, rows in puts:
        columns = {name: [row[name] for row in rows.values()] for name in NAMES}
        source.put(table, list(rows), columns, version)
    each = st.lists(VERSIONS, min_size=len(asked), max_size=len(asked)).map(lambda v: np.array(v, np.int64))
    for _ in range(2):  # the second time from the cache, in part
        as_of = data.draw(st.none() | VERSIONS | each)
        times = [NEWEST] * len(asked) if as_of is None else np.broadcast_to(as_of, len(asked)).tolist()
        batch = source.multi_get(table, asked, names, as_of)
        assert batch.schema.names == names
        assert [field.type for field in batch.schema] == [arrow_type(COLUMNS[NAMES.index(n)]) for n in names]
        assert batch.to_pylist() == [
            {name: expected(puts, key, name, time) for name in names}
            for key, time in zip(asked, times, strict=True)
        ]


@pytest.fixture
def prices(make):
    """What makes a source of a given rule, with prices and tags of keys 1 and 2."""

    def make_one(**policy):
        source, table = make(FetchPolicy(**policy))
        source.put(table, [1, 2], {"price": [1.5, 2.5], "tags": [[4, 5], None]}, 10)
        return source, table

    return make_one


def test_a_missing_value_is_named(prices):
    source, table = prices(missing="raise")
    assert source.multi_get(table, [2, 1, 2], ["price"])["price"].to_pylist() == [2.5, 1.5, 2.5]
    with pytest.raises(DataError) as raised:
        source.multi_get(table, [3, 2, 1, 2], ["price", "tags"], as_of=11)
    line = str(raised.value)
    assert line.startswith(
        f"{source.name}: table '{table}': 2 of 3 keys lack a value: key 2 as of 11 (tags), "
    )
    assert "key 3 as of 11 (price, tags); put it into the store" in line
    with pytest.raises(DataError, match=r"20 of 20 keys lack .*key 4 .*, and 15 more; "):
        source.multi_get(table, range(20), ["price"], as_of=9)


def test_missing_values_are_null_and_counted(prices):
    source, table = prices(missing="null")
    rows = source.multi_get(table, [3, 2, 1, 2, 3], ["price", "tags"])
    assert rows["price"].to_pylist() == [None, 2.5, 1.5, 2.5, None]
    assert rows["tags"].to_pylist() == [None, None, [4, 5], None, None]
    counts = source.counts()
    assert (counts.missing_keys, counts.missing_values) == (1, 3)


def test_missing_values_are_the_defaults(prices):
    source, table = prices(missing="default", defaults={"price": -1, "tags": [9]})
    rows = source.multi_get(table, [3, 2, 1], ["price", "tags", "weights", "shop"])
    assert rows["price"].to_pylist() == [-1.0, 2.5, 1.5]
    assert rows["tags"].to_pylist() == [[9], [9], [4, 5]]
    assert rows["weights"].to_pylist() == [[], [], []]
    assert rows["shop"].to_pylist() == [0, 0, 0]
    assert source.counts().missing_keys == 1


def test_a_default_of_another_type_is_refused(prices):
    source, table = prices(missing="default", defaults={"shop": "none"})
    with pytest.raises(ConfigError, match="the default 'none' of column 'shop' is not one int64"):
        source.multi_get(table, [1], ["shop"])


def test_what_makes_no_sense_is_refused(prices):
    source, table = prices()
    refused = [
        (("other", [1], ["price"]), f"has no table 'other'; it has {table}"),
        ((table, [1], ["cost"]), "has no column 'cost'; it has price, shop, tags, weights"),
        ((table, [1], []), "request some columns"),
        ((table, [1], ["price", "price"]), "each once"),
        ((table, [[1]], ["price"]), r"keys must be \(n,\) int64, got int64 of shape \(1, 1\)"),
        ((table, [1.5], ["price"]), "got float64"),
        ((table, [1], ["price"], -1), r"as_of must be one version, in \[0, 2\^63\).* from -1 to -1"),
        ((table, [1], ["price"], [1, 2]), r"for each of 1 keys, got int64 of shape \(2,\)"),
        ((table, [1], ["price"], np.array([2**63], np.uint64)), f"from {2**63} to {2**63}"),
    ]
    for arguments, says in refused:
        with pytest.raises((ConfigError, DataError), match=says):
            source.multi_get(*arguments)
    for arguments, says in [
        ((table, [1, 1], {"price": [1, 2]}, 0), "twice in one put"),
        ((table, [1], {"price": [1, 2]}, 0), "'price' has 2 values for 1 keys"),
        ((table, [1], {"price": [1]}, -1), "version=-1 must be from 0"),
    ]:
        with pytest.raises(ConfigError, match=says):
            source.put(*arguments)


def test_keys_of_uint64_are_those_of_int64_of_the_same_bits():
    keys = np.array([2**63 + 1, 3], np.uint64)
    prices = pa.array([3.0, 1.0], pa.float32())
    source = ArrowSource({"x": pa.table({"item": keys, "price": prices})}, key="item")
    for asked in (keys, keys.view(np.int64)):
        assert source.multi_get("x", asked, ["price"])["price"].to_pylist() == [3.0, 1.0]
    table = pa.table({"item": [1], "at": np.array([2**63], np.uint64), "price": prices[:1]})
    with pytest.raises(DataError, match="column 'at'"):
        ArrowSource({"x": table}, key="item", version="at")


def test_tables_without_versions_hold_each_key_once():
    table = pa.table({"item": [3, 1], "price": pa.array([3.0, 1.0], pa.float32())})
    assert ArrowSource({"x": table}, key="item").multi_get("x", [1, 3], ["price"])["price"].to_pylist() == [
        1,
        3,
    ]
    with pytest.raises(DataError, match="has key 1 twice and no column of versions"):
        ArrowSource({"x": pa.table({"key": [1, 1], "price": [1, 1]})})
    with pytest.raises(DataError, match="'name' is of type string"):
        ArrowSource({"x": pa.table({"key": [1], "name": ["a"]})})
    with pytest.raises(ConfigError, match="no column 'item'"):
        ArrowSource({"x": pa.table({"key": [1]})}, key="item")


def test_a_folder_of_rocksdb_has_one_writer_and_keeps_its_tables(tmp_path):
    columns = [Column("price", "float32")]
    with RocksDBSource(tmp_path / "a", writable=True) as source:
        source.create_table("item", columns)
        source.create_table("item", columns)
        source.put("item", range(1000), {"price": np.arange(1000, dtype=np.float32)}, 0)
        with pytest.raises(StoreError, match=r"can't be opened: .*[Ll]ock.* one writer"):
            RocksDBSource(tmp_path / "a", writable=True)
        with pytest.raises(ConfigError, match="'item' exists with other columns"):
            source.create_table("item", [Column("price")])
    with RocksDBSource(tmp_path / "a") as one, RocksDBSource(tmp_path / "a") as other:
        for reader in (one, other):
            assert list(reader.tables) == ["item"]
            assert reader.multi_get("item", [999, 7], ["price"])["price"].to_pylist() == [999.0, 7.0]
        with pytest.raises(ConfigError, match="open it with writable=True"):
            one.put("item", [1], {"price": [1]}, 1)
    with pytest.raises(StoreError, match=r"can't be opened: .* give the folder that"):
        RocksDBSource(tmp_path / "nowhere")


def test_values_of_another_type_are_noticed(server):
    name = f"table{next(NUMBERS)}"
    as_written = HBaseSource("127.0.0.1", server.port, tables={name: [Column("price", "float32")]})
    as_written.create_table(name, versions=1)
    as_written.put(name, [5], {"price": [1.0]}, 0)
    as_read = HBaseSource("127.0.0.1", server.port, tables={name: [Column("price")]})
    with pytest.raises(DataError, match=f"table '{name}': key 5 has 4 bytes in column 'price'; .* be 8;"):
        as_read.multi_get(name, [5], ["price"])


def test_values_of_java_are_read(server):
    name = f"table{next(NUMBERS)}"
    java = HBaseSource("127.0.0.1", server.port, tables={name: COLUMNS}, byte_order="big")
    java.create_table(name, versions=1)
    java.put(name, [5], {"shop": [258], "weights": [[1.0, 2.0]]}, 0)
    rows = java.multi_get(name, [5], ["shop", "weights"])
    assert rows.to_pylist() == [{"shop": 258, "weights": [1.0, 2.0]}]
    [row] = server._tables[name.encode()]
    cells = server._tables[name.encode()][row]
    assert (row, cells[b"f:shop"][0]) == (b"\0" * 7 + b"\5", b"\0" * 6 + b"\1\2")  # Bytes.toBytes(long)
