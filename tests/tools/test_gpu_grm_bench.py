"""What the benchmark of a GRM on GPU ranks stands on: its batches, counts of operations, and lookups."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core.errors import RanksError
from gmeta.ops import AttentionMask

BENCH = Path(__file__).resolve().parents[2] / "tools" / "bench"
SETTINGS = {
    "dim": 16,
    "blocks": 1,
    "heads": 2,
    "sequences": 6,
    "mean": 30,
    "longest": 60,
    "exposures": 4,
    "batches": 20,
}


@pytest.fixture(scope="module")
def modules() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(BENCH))
        names = {name: f"parts.gpu_grm.{name}" for name in ("data", "model", "operations", "replay")}
        yield type(
            "Modules", (), {n: importlib.import_module(p) for n, p in {**names, "bench": "gpu_grm"}.items()}
        )
    mine = ("gpu_grm", "gpu_hstu", "harness", "parts")
    for name in [each for each in sys.modules if each.split(".")[0] in mine]:
        sys.modules.pop(name)


@pytest.fixture(scope="module")
def users(modules):
    return modules.data.Users(0, exposures=4, pool=2000, most=50)


def test_pairs_are_those_that_the_mask_lets_see_each_other(modules):
    tokens = np.array([7, 30, 12])
    offsets = np.concatenate([[0], np.cumsum(tokens)])
    visible = AttentionMask().visible(offsets, contexts=[2] * 3, targets=[4] * 3).numpy()
    place = np.concatenate([np.arange(each) for each in tokens])
    first, begin, end = visible.T
    seen = first + end - begin + ((place >= first) & ((place < begin) | (place >= end)))
    assert modules.operations.pairs(tokens, 4) == seen.sum()


def test_products_besides_hstu_are_those_of_the_models_weights(modules):
    model = modules.model.new_model(SETTINGS, merge=True, dedup=True, depth=0)
    tokens = np.array([20, 33])
    sizes = [
        sum(w.shape.num_elements() for w in each.weights if w.shape.rank > 1)
        for each in model.trunk.projections
    ]
    of_exposure = [w for part in (model.mixture, model.heads) for w in part.weights if "bias" not in w.name]
    rows = [2, 2, int(tokens.sum()) - 2 * (2 + 4), 2 * 4]  # users for each context, events, exposures
    products = sum(size * count for size, count in zip(sizes, rows, strict=True))
    products += rows[-1] * sum(weight.shape.num_elements() for weight in of_exposure)
    found = modules.operations.operations(SETTINGS, tokens)
    hstu = modules.operations.gpu_hstu.operations(
        16, 1, int(tokens.sum()), modules.operations.pairs(tokens, 4)
    )
    assert found - hstu == 3 * 2 * products


def test_balanced_batches_have_more_even_tokens_and_as_many(modules):
    drawn = modules.data.lengths_of(3, SETTINGS)
    fixed, balanced = ([int(one.sum()) for one in drawn[way]] for way in ("fixed", "balanced"))
    assert len(fixed) == len(balanced) == 20
    assert np.std(balanced) < 0.5 * np.std(fixed)
    assert np.mean(balanced) == pytest.approx(np.mean(fixed), rel=0.1)


def test_the_pairwise_form_gives_each_exposure_the_same_logits(modules, users):
    model = modules.model.new_model(SETTINGS, merge=True, dedup=True, depth=0)
    batch = users.batch(np.array([12, 25, 9]))
    alone = modules.data.pairwise(batch)
    assert alone["history"]["item"].nrows() == alone["task"].shape[0] == 12
    together, apart = (model(each, training=False) for each in (batch, alone))
    for name, logits in together.items():
        np.testing.assert_allclose(apart[name].flat_values, logits.flat_values, atol=1e-5)


def test_lookups_without_deduplication_learn_the_same(modules, users):
    batches = [users.batch(np.array([12, 25, 9])) for _ in range(2)]
    losses, rows = [], []
    for dedup in (False, True):
        model = modules.model.new_model(SETTINGS, merge=True, dedup=dedup, depth=0)
        model.run_eagerly = True  # two steps are fewer than a trace
        losses.append([model.train_on_batch(batch) for batch in batches])
        records = [table.export() for table in model.collection.tables]
        rows.append([each.rows.numpy()[np.argsort(each.keys.numpy())] for each in records])
    np.testing.assert_allclose(*losses, rtol=1e-5)
    for raw, distinct in zip(*rows, strict=True):
        np.testing.assert_allclose(raw, distinct, atol=1e-4)


def test_separate_tables_are_one_for_each_feature(modules, users):
    model = modules.model.new_model(SETTINGS, merge=False, dedup=False, depth=0)
    model.run_eagerly = True
    model.train_on_batch(users.batch(np.array([12, 25, 9])))
    tables = [table for part in model.collection.parts for table in part.tables]
    assert len(tables) == 6
    assert all(int(table.statistics().updates) > 0 for table in tables)
    merged = modules.model.new_model(SETTINGS, merge=True, dedup=False, depth=0)
    assert len(merged.collection.tables) == 2


def test_the_slowest_of_a_jobs_ranks_counts(modules):
    found = modules.replay.spread([[1.0, 3.0, 2.0, 2.0, 9.0]], 2)  # jobs of two: 1 and 3, 2 and 2
    assert found == {"uneven": pytest.approx((3 / 2 + 1) / 2), "slowest": 2.5, "fastest": 1.5}


def test_a_job_whose_memory_ends_starts_again_with_fewer_sequences(modules, monkeypatch, capsys):
    asked = []

    def run_job(module: str, ranks: int, settings: Any, *_: Any, **__: Any) -> Any:
        asked.append(settings["sequences"])
        if settings["sequences"] > 50:
            raise RanksError("rank 0 ended: memory ended: OOM when allocating", ends=[])
        return {"found": settings["sequences"]}

    monkeypatch.setattr(modules.bench, "run_job", run_job)
    found, used = modules.bench.job("ablation", 2, {"sequences": 80, "timeout": 1}, "cpu")
    assert asked == [80, 60, 45]
    assert found == {"found": 45}
    assert used["sequences"] == 45
    assert "memory ended with 80 sequences; again with 60" in capsys.readouterr().out


@pytest.mark.parametrize("network", ["nvlink", "socket"])
def test_a_slow_network_is_the_jobs_and_in_the_figures_names(modules, monkeypatch, network):
    environments = []
    monkeypatch.setattr(modules.bench, "run_job", lambda *arguments, **_: environments.append(arguments[4]))
    settings = {"sequences": 80, "timeout": 1, "network": network}
    modules.bench.job("ablation", 2, settings, "gpu")
    assert ("NCCL_P2P_DISABLE" in environments[0]) == (network == "socket")
    given = {"models": ["d512x3"], "sequences": None, "heads": None, "smoke": False, "network": network}
    ((path, _),) = modules.bench.models(type("Given", (), given))
    assert path == "gpu_grm/d512x3" + "/socket" * (network == "socket")


def test_what_a_failed_job_had_found_counts(modules, monkeypatch):
    def run_job(module: str, ranks: int, settings: Any, out: Path, *_: Any, **__: Any) -> Any:
        out.write_text(json.dumps({"fixed": [[1.0]]}))
        raise RanksError("time ran out", ends=[])

    monkeypatch.setattr(modules.bench, "run_job", run_job)
    found, _ = modules.bench.job("replay", 1, {"sequences": 80, "timeout": 1}, "cpu")
    assert found == {"fixed": [[1.0]]}


def test_heads_that_kernels_lack_are_left_out(modules, capsys):
    given = type(
        "Given",
        (),
        {
            "models": ["d512x3"],
            "sequences": [100],
            "heads": [2, 3, 4, 16],
            "smoke": False,
            "network": "nvlink",
        },
    )
    found = dict(modules.bench.models(given))
    assert {path: each["heads"] for path, each in found.items()} == {
        "gpu_grm/d512x3": 2,
        "gpu_grm/d512x3/heads4": 4,
    }
    assert all(each["sequences"] == 100 for each in found.values())
    told = capsys.readouterr().out
    assert "d512x3 with 3 heads is left out" in told
    assert "d512x3 with 16 heads is left out" in told


def test_a_pool_too_small_for_a_batch_is_told(modules):
    small = modules.data.Users(0, exposures=4, pool=10, most=50)
    with pytest.raises(ValueError, match="a batch has 17 ids of 'item', and the pool 10"):
        small.batch(np.array([23]))


def test_batches_are_of_users_with_times_that_do_not_decrease(users):
    batch = users.batch(np.array([12, 25]))
    assert batch["history"]["item"].row_lengths().numpy().tolist() == [6, 19]
    for history, shown in zip(batch["history"]["time"], batch["targets"]["time"], strict=True):
        times = tf.concat([history, shown], axis=0).numpy()
        assert (np.diff(times) >= 0).all()
    click, buy = (batch["labels"][name].flat_values.numpy() for name in ("click", "buy"))
    assert (buy <= click).all()


def test_a_speed_up_is_of_batches_of_one_size(modules, capsys):
    ways = dict.fromkeys(modules.bench.WAYS, 0)
    found = {
        ranks: {
            "tokens": dict.fromkeys(ways, 100 * ranks),
            "seconds": {way: [9, seconds, 0] for way in ways},
        }
        for ranks, seconds in ((1, 1), (2, 1.25))
    }
    told = list(modules.bench.speed_ups("path", {1: (80, found[1]), 2: (80, found[2])}))
    assert [each.value for each in told] == [0.8] * (1 + len(ways))
    assert not list(modules.bench.speed_ups("path", {1: (80, found[1]), 2: (60, found[2])}))
    assert "no speed_up/np2: one rank had 80 sequences a batch, not 60" in capsys.readouterr().out
