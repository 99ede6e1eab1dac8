"""Compaction of a store, and what can be dropped then."""

from __future__ import annotations

import numpy as np
import pytest
from click.testing import CliRunner

from gmeta.cli import main
from gmeta.core.errors import ConfigError, DataError
from gmeta.core.history_manifest import generation_folder
from gmeta.preprocess import HistorySpec
from gmeta.preprocess.history.append import append_history
from gmeta.preprocess.history.example_sets import drop_generations
from gmeta.preprocess.history.generation import Generation, generations
from gmeta.preprocess.history.reading import read_histories, verify_history
from gmeta.preprocess.history.rebuild import compact_history
from support.reference.history import draw_day, write_day

SPEC = HistorySpec("user", "ts", groups={"what": ("item",), "cost": ("price",)}, shards=2, stripe_events=4)
USERS = range(30)


def append(folder, number, day):
    return append_history(folder / "store", write_day(folder / f"{number}.parquet", day), SPEC)


def items_of(store, **moment):
    found = read_histories(Generation(store), USERS, ["ts", "born", "item"], **moment)
    rows = list(zip(*(found.columns[name].tolist() for name in ("ts", "born", "item")), strict=True))
    return [rows[a:b] for a, b in zip(found.row_splits, found.row_splits[1:], strict=False)]


def test_a_compacted_history_is_one_read_of_full_stripes(tmp_path):
    for number in range(1, 6):
        append(tmp_path, number, draw_day(number, 40, day=number))
    before = Generation(tmp_path / "store").manifest
    done = compact_history(tmp_path / "store")
    opened = Generation(tmp_path / "store")
    assert (done.generation, done.events, opened.manifest.reads) == (6, 200, (6,))
    assert done.stripes_before == sum(shard.stripes for shard in before.shards) > done.stripes
    assert done.bytes == sum(shard.bytes for shard in opened.manifest.shards)
    for shard in (0, 1):
        index = opened.open(shard).index()
        per_user = np.diff(index.ends, prepend=0)
        partly = index.places["events"] < 4
        assert (np.add.reduceat(partly, index.ends - per_user) <= 2).all()  # one in each group
    assert append(tmp_path, 7, draw_day(7, 20)).generation == 7
    assert verify_history(tmp_path / "store").faults == ()


def test_generations_that_are_needed_are_not_dropped(tmp_path):
    for number in (1, 2, 3):
        append(tmp_path, number, draw_day(number, 50, day=number))
    store = tmp_path / "store"
    with pytest.raises(
        ConfigError, match=r"generation 2 of .* reads stripes of generation 1: run `gmeta history"
    ):
        drop_generations(store, [1])
    with pytest.raises(ConfigError, match="generation 3 is the newest"):
        drop_generations(store, [1, 2, 3])
    with pytest.raises(ConfigError, match="has no generation 9; it has 1, 2, 3"):
        drop_generations(store, [9])
    before = items_of(store)
    compact_history(store)
    drop_generations(store, [1, 2, 3])
    assert generations(store) == [4]
    assert sorted(path.name for path in (store / "generations").iterdir()) == ["00000004"]
    assert items_of(store) == before
    with pytest.raises(DataError, match="there is no generation 2; it has 4"):
        Generation(store, 2)
    with pytest.raises(DataError, match=r"generation 4 holds the events of 2.parquet already"):
        append_history(store, tmp_path / "2.parquet")
    assert not generation_folder(store, 5).exists()


def test_the_commands(tmp_path):
    append(tmp_path, 1, draw_day(1, 50))
    append(tmp_path, 2, draw_day(2, 50))
    compacted = CliRunner().invoke(main, ["history", "compact", str(tmp_path / "store")])
    assert compacted.output.count("generation 3: 100 events in ") == 1
    refused = CliRunner().invoke(main, ["history", "drop", str(tmp_path / "store"), "3"])
    assert refused.exit_code == 2
    dropped = CliRunner().invoke(main, ["history", "drop", str(tmp_path / "store"), "1", "2"])
    assert "removed generation 1, 2 of " in dropped.output
    missing = CliRunner().invoke(main, ["history", "compact", str(tmp_path / "nothing")])
    assert missing.exit_code == 2
    assert "there is no store of histories here" in missing.stderr
    assert not (tmp_path / "nothing").exists()
