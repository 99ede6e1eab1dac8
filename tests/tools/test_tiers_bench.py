"""What the benchmarks of tiers stand on: Che's approximation, draws by Zipf's law, and parts in processes."""

from __future__ import annotations

import importlib
import json
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCH = Path(__file__).resolve().parents[2] / "tools" / "bench"


@pytest.fixture(scope="module")
def modules() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(BENCH))
        names = {"zipf": "parts.tiers.zipf", "bench": "gpu_tiers", "harness": "harness"}
        yield type("Modules", (), {name: importlib.import_module(path) for name, path in names.items()})
    for name in [each for each in sys.modules if each.split(".")[0] in ("gpu_tiers", "harness", "parts")]:
        sys.modules.pop(name)


@pytest.mark.parametrize("skew", [0.0, 0.9, 1.2])
def test_che_approximates_a_least_recently_used_cache(modules, skew):
    rows, cached, size = 5_000, 500, 300
    expected = modules.zipf.che(rows, cached, skew, size)
    held: OrderedDict[int, None] = OrderedDict()
    drawn = modules.zipf.batches(rows, size, skew, 3)
    warm, asked, hits = int(3 * expected.batches) + 1, 0, 0
    for number in range(warm + 200):
        ids = next(drawn).tolist()
        if number >= warm:
            asked += len(ids)
            hits += sum(key in held for key in ids)
        for key in ids:
            held[key] = None
            held.move_to_end(key)
        while len(held) > cached:
            held.popitem(last=False)
    assert hits / asked == pytest.approx(expected.hits, abs=0.03)


@pytest.mark.parametrize("skew", [0.0, 1.05])
def test_ranks_that_go_together_change_nothing(modules, skew, monkeypatch):
    alike = [modules.zipf.che(30_000, 3_000, skew, 500)]
    monkeypatch.setattr(modules.zipf, "_ALONE", 300)
    monkeypatch.setattr(modules.zipf, "_GROUPS", 500)
    alike.append(modules.zipf.che(30_000, 3_000, skew, 500))
    assert alike[0] == pytest.approx(alike[1], rel=1e-4)


def test_a_cache_that_holds_everything_is_never_missed(modules):
    assert modules.zipf.che(1_000, 1_000, 1.05, 200).hits == pytest.approx(1.0)


def test_draws_have_zipfs_shares(modules):
    draw = modules.zipf.Zipf(50, 1.05, 0)
    counts = np.bincount(draw.ids(200_000), minlength=50)
    shares = np.arange(1, 51) ** -1.05
    np.testing.assert_allclose(np.sort(counts)[::-1] / counts.sum(), shares / shares.sum(), rtol=0.1)


def test_a_part_is_asked_for_without_the_others(modules):
    words = ["--smoke", "--part", "hits", "step", "--rounds", "1", "--json", "hits"]
    assert modules.bench._without_parts(words) == ["--smoke", "--rounds", "1", "--json", "hits"]


def test_each_figure_is_in_the_file_at_once_and_the_last_of_a_name_counts(modules, tmp_path):
    file = tmp_path / "found.json"
    notes = modules.bench.Notes(file, {"gpu": "none"})
    result = modules.harness.Result
    notes(result("tiers/a", 1.0, "ms"))
    assert [each["value"] for each in json.loads(file.read_text())[1:]] == [1.0]
    notes(result("tiers/b", 2.0, "ms", "a peer", 4.0), result("tiers/a", 3.0, "ms"))
    about, *found = json.loads(file.read_text())
    assert about["gpu"] == "none"
    assert {each["name"]: each["value"] for each in found} == {"tiers/a": 3.0, "tiers/b": 2.0}
