"""Tables with rows on a drive: training, checkpoints and failures. The other tests of this folder hold such
tables to what all tables promise (`table_device`).
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from gmeta import optimizers
from gmeta.checkpoint.sharded import save
from gmeta.core.errors import ConfigError
from gmeta.layers import EmbeddingCollection, FeatureConfig
from gmeta.layers.embedding.feature_config import from_config, to_config
from gmeta.ops import HashTable
from gmeta.ops.device import VARIABLE
from gmeta.policies import Tiers
from support import warm
from support.pipeline_runs import differences, take_moves, train_at_depth
from support.tables import assert_same_tables, give_tiers


@pytest.mark.parametrize(
    ("kind", "depth"),
    [
        # Quick: expiring-2, and by chance in tests/models/training/pipeline/test_prefetch.py.
        ("expiring", 2),
        pytest.param("by chance", 1, marks=pytest.mark.slow),
        pytest.param("frequent", 0, marks=pytest.mark.slow),
        *(pytest.param(kind, depth, marks=pytest.mark.slow) for kind in ("rows", "grm") for depth in (0, 1)),
    ],
)
@pytest.mark.shown_by("test_rows_beyond_the_bound_are_in_files_and_come_back")
def test_a_training_is_that_of_tables_in_memory(tmp_path, monkeypatch, kind, depth):
    expected = train_at_depth(kind, depth, epochs=1)
    give_tiers(monkeypatch, Tiers(host_bytes=600, ssd=tmp_path))  # less than a batch needs
    found = train_at_depth(kind, depth, epochs=1)
    assert take_moves(expected) == 0
    assert take_moves(found) > 0
    assert differences(expected, found) == []


def test_rows_beyond_the_bound_are_in_files_and_come_back(tmp_path):
    settings = (32, optimizers.Adam(0.1))
    memory, tiered = HashTable(*settings), HashTable(*settings, tiers=Tiers(host_bytes=400_000, ssd=tmp_path))
    row, random = 8 + 4 * 3 * 32, np.random.default_rng(0)
    for _ in range(40):
        ids = np.unique((60_000 * random.random(3000) ** 3).astype(np.int64))
        np.testing.assert_array_equal(tiered.lookup(ids).rows, memory.lookup(ids).rows)
        gradients = random.normal(size=(len(ids), 32)).astype(np.float32)
        memory.apply_gradients(ids, gradients)
        tiered.apply_gradients(ids, gradients)
    counts = tiered.statistics()
    in_memory = int(counts.size) - int(counts.disk_rows)
    assert 0.9 * 400_000 < in_memory * row <= 400_000
    assert int(counts.disk_bytes) > 64 * 2**18  # each of the 64 shards has written
    assert int(counts.spilled) - int(counts.brought) == int(counts.disk_rows)
    assert_same_tables(memory, tiered)
    before = int(counts.brought)
    some = np.arange(0, 60_000, 7)
    np.testing.assert_array_equal(
        tiered.lookup(some, insert=False).rows, memory.lookup(some, insert=False).rows
    )
    assert int(tiered.statistics().brought) == before  # evaluation moves nothing
    tiered.peek(some)
    assert int(tiered.statistics().brought) > before


def test_rows_of_a_batch_are_brought_where_it_is_made(tmp_path):
    layer = EmbeddingCollection([FeatureConfig("a", dim=4)], tiers=Tiers(host_bytes=300_000, ssd=tmp_path))
    lookup = layer.lookup({"a": np.arange(20_000)})
    layer.apply_gradients(lookup, [tf.ones_like(lookup.rows[0])], 0.1)
    (table,) = layer.tables
    assert int(table.statistics().brought) == 0

    def ahead(ids):
        layer.prefetch({"a": ids})
        return ids

    batches = list(tf.data.Dataset.range(300).batch(100).map(ahead))
    brought = int(table.statistics().brought)
    assert 150 < brought <= 300  # memory had about a quarter of all rows
    for ids in batches:
        layer.lookup({"a": ids})
    assert int(table.statistics().brought) - brought < 10  # but for what the clock took meanwhile
    assert HashTable(4).prefetch([1, 2]) is None


def test_sharded_checkpoints_have_the_same_bytes(tmp_path):
    written = []
    for name, tiers in (("memory", None), ("tiered", Tiers(host_bytes=1, ssd=tmp_path / "rows"))):
        table = HashTable(8, optimizers.Adam(0.1), tiers=tiers)
        for start in (0, 500, 200):
            lookup = table.lookup(np.arange(start, start + 1000))
            table.apply_gradients(lookup.keys, tf.ones_like(lookup.rows))
        save(tmp_path / name, {"item": table})
        files = sorted((tmp_path / name).rglob("*.arrow"))
        written.append([(path.name, path.read_bytes()) for path in files])
    assert written[0]
    assert written[1] == written[0]


def test_a_collection_divides_the_bytes_and_is_made_again_from_its_config(tmp_path):
    features = [FeatureConfig("a", dim=4), FeatureConfig("b", dim=16)]
    tiers = Tiers(host_bytes=1_000, ssd=tmp_path)
    layer = EmbeddingCollection(features, optimizer=optimizers.SGD(1.0), tiers=tiers)
    assert [table.tiers for table in layer.tables] == [Tiers(250, tmp_path), Tiers(750, tmp_path)]
    again = EmbeddingCollection.from_config(layer.get_config())
    assert again.tiers == tiers
    assert again.tables[1].tiers == layer.tables[1].tiers


def test_tables_of_a_gpu_have_as_many_rows_each_and_a_collection_is_made_again():
    tiers = Tiers(hbm_rows=1000, lookahead=3)
    assert tiers.divide([8, 800]) == [tiers, tiers]
    assert from_config(json.loads(json.dumps(to_config(tiers)))) == tiers
    assert repr(tiers) == "Tiers(hbm_rows=1000, lookahead=3)"


def test_tiers_of_before_there_were_others_are_read():
    assert from_config({"kind": "Tiers", "host_bytes": 9, "ssd": "rows"}) == Tiers(9, "rows")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"host_bytes": 0, "ssd": "rows"}, "host_bytes must be an integer of at least 1, got 0"),
        ({"hbm_rows": 0}, "hbm_rows must be an integer from 1 to 9007199254740992, got 0"),
        ({"hbm_rows": 5, "lookahead": -1}, "lookahead must be an integer from 0 to 64, got -1"),
        ({"host_bytes": 5}, "host_bytes and ssd go together, got 5 and None"),
        ({"ssd": "rows", "hbm_rows": 5}, "host_bytes and ssd go together, got None and 'rows'"),
        ({}, "no tier is given: give host_bytes and ssd .* or hbm_rows"),
        (
            {"host_bytes": 5, "ssd": "rows", "lookahead": 3},
            "lookahead=3 goes with hbm_rows, which isn't given",
        ),
    ],
)
def test_tiers_that_mean_nothing_are_refused(settings, said):
    with pytest.raises(ConfigError, match=f"Tiers: {said}"):
        Tiers(**settings)


def test_tiers_of_another_place_are_refused(monkeypatch):
    drive = Tiers(host_bytes=5, ssd="rows")
    with pytest.raises(ConfigError, match=r"'t': a table on a GPU .*ssd='rows'\): add hbm_rows, or keep"):
        HashTable(4, name="t", device="gpu", tiers=drive)
    for device in ("cpu", "auto"):
        monkeypatch.setenv(VARIABLE, "cpu")
        with pytest.raises(
            ConfigError, match=r"'t': hbm_rows=5 is for a table on a GPU.*with device='gpu', or"
        ):
            HashTable(4, name="t", device=device, tiers=Tiers(hbm_rows=5))


def test_a_table_of_three_tiers_has_two_where_there_is_no_gpu(tmp_path):
    tiers = Tiers(host_bytes=500, ssd=tmp_path, hbm_rows=5)
    table = HashTable(4, name="t", device="gpu", tiers=tiers)
    assert table.tiers == (tiers if table.device == "gpu" else Tiers(500, tmp_path))
    assert Tiers(hbm_rows=5).without_gpu() is None
    assert tiers.divide([1, 4]) == [Tiers(100, tmp_path, 5), Tiers(400, tmp_path, 5)]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=rf"table 't': the folder {tmp_path}/file/rows, .* can't be made"):
        HashTable(4, name="t", tiers=Tiers(100, tmp_path / "file" / "rows"))


PROGRAM = """
import resource, signal, sys
import gmeta, numpy as np, tensorflow as tf
from gmeta.ops import HashTable
from gmeta.ops.device import VARIABLE
from gmeta.policies import Tiers
table = HashTable(64, name="items", tiers=Tiers(host_bytes=1, ssd=sys.argv[1]))
ids = np.arange(100_000)
some, others = ids[:50_000], ids[50_000:]
table.apply_gradients(some, table.lookup(some).rows)
rows = table.lookup(some, insert=False).rows
if sys.argv[2] == "wait":
    print("ready", flush=True)
    sys.stdin.read()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
try:
    table.apply_gradients(others, table.lookup(others).rows)
except tf.errors.ResourceExhaustedError as error:
    print(error.message)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
assert (table.lookup(some, insert=False).rows.numpy() == rows.numpy()).all()
table.apply_gradients(others, table.lookup(others).rows)
assert int(table.size()) == len(ids)
"""


def test_a_full_drive_is_told_and_loses_nothing(tmp_path):
    done = warm.run([sys.executable, "-c", PROGRAM, str(tmp_path), "fill"], timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"table 'items': can't write {tmp_path}/gmeta-rows-" in done.stdout
    assert "the rows are still in memory, and earlier checkpoints are whole" in done.stdout


def test_a_killed_process_leaves_no_file(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path), "wait"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout.readline() == "ready\n"
        opened = [str(fd.readlink()) for fd in Path(f"/proc/{process.pid}/fd").iterdir()]
        assert any(name.startswith(f"{tmp_path}/gmeta-rows-") for name in opened)
        process.kill()
    assert list(tmp_path.iterdir()) == []
