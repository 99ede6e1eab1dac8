"""What the benchmark of a GRM on GPU ranks stands on: its batches, counts of operations, and lookups."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core.errors import RanksError
from gmeta.io import SequenceCost
from gmeta.ops import AttentionMask

BENCH = Path(__file__).resolve().parents[2] / "tools" / "bench"
PARTS = ("calibration", "data", "model", "operations", "replay")
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
        names = {name: f"parts.gpu_grm.{name}" for name in PARTS}
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


def test_a_batch_balanced_by_another_cost_has_about_as_much_of_it_and_as_many_tokens(modules):
    cost = SequenceCost(1.0, 0.1)
    drawn = modules.data.lengths_of(3, SETTINGS, {"measured": cost})
    assert list(drawn) == ["fixed", "balanced", "measured"]  # the order in which ways are timed
    spreads = {way: np.std([float(cost.of(one).sum()) for one in of]) for way, of in drawn.items()}
    assert spreads["measured"] < spreads["balanced"] < spreads["fixed"]
    assert np.mean([one.sum() for one in drawn["measured"]]) == pytest.approx(6 * 30, rel=0.1)


def test_the_cost_is_fitted_to_batches_that_tell_tokens_from_squares(modules):
    settings = {**SETTINGS, "sequences": 80, "mean": 600, "longest": 3000}
    batches = modules.calibration.calibration_batches(settings)
    assert len(batches) == 20
    tokens, squares = np.array([modules.calibration.sums(one) for one in batches]).T
    short, long = slice(12, 16), slice(16, 20)
    assert tokens[12:].min() > 0.9 * tokens[12:].max()
    assert squares[long].min() > 2 * squares[short].max()
    true = SequenceCost(2e-6, 1.5e-9)
    took = iter(np.random.default_rng(0).uniform(0.997, 1.003, 20))
    found, noted = modules.calibration.measured_cost(
        batches, lambda one: next(took) * (0.01 + float(true.of(one).sum()))
    )
    assert found.quadratic / found.linear == pytest.approx(1.5e-9 / 2e-6, rel=0.05)
    assert noted["sums"] == np.stack([tokens, squares], axis=1).tolist()
    assert (noted["linear"], noted["quadratic"]) == (found.linear, found.quadratic)


def test_times_that_tell_no_cost_are_noted_with_the_reason(modules):
    took = iter(range(20, 0, -1))
    batches = [np.full(count, length) for count, length in ((1, 5), (4, 5), (2, 9), (9, 9))]
    found, noted = modules.calibration.measured_cost(batches, lambda one: 1 / one.sum() + next(took))
    assert found is None
    assert "steps of more tokens don't take longer" in noted["refused"]
    assert len(noted["seconds"]) == 4


def replayed(modules, monkeypatch, limit, takes):
    """What a replay notes whose steps take so many seconds, by a clock of their own."""

    class Model:
        def make_train_function(self):
            pass

        def train_step(self, batch):
            raise AssertionError("steps are replaced")

    now = [0.0]

    def run(lengths):
        now[0] += takes(lengths)
        return {"loss": 0.0}

    clock = SimpleNamespace(perf_counter=lambda: now[0])
    replay = modules.replay
    monkeypatch.setattr(replay, "time", clock)
    monkeypatch.setattr(sys.modules["parts.gpu_grm.in_rank"], "time", clock)
    monkeypatch.setattr(replay, "tf", SimpleNamespace(function=lambda *_, **__: run))
    monkeypatch.setattr(replay, "new_model", lambda *_, **__: Model())
    monkeypatch.setattr(replay, "dataset", lambda _: SimpleNamespace(element_spec=None))
    monkeypatch.setattr(replay.Users, "batch", lambda _, lengths: lengths)
    notes = []
    settings = {**SETTINGS, "replay": 4, "batches": 2, "pool": 2000, "most": 50, "seconds": limit}
    replay.measure(settings, notes.append)
    return notes[-1]


def test_a_replay_balances_by_the_times_that_it_has_measured(modules, monkeypatch):
    true = SequenceCost(1e-4, 1e-5)
    found = replayed(modules, monkeypatch, 1e9, lambda lengths: 0.01 + float(true.of(lengths).sum()))
    assert list(found["seconds"]) == ["fixed", "balanced", "by_cost", "measured"]
    assert found["repeats"] == 3
    assert found["fit"]["linear"] == pytest.approx(1e-4, rel=1e-3)
    assert found["fit"]["quadratic"] == pytest.approx(1e-5, rel=1e-3)
    for way, seconds in found["seconds"].items():
        tokens, squares = np.moveaxis(np.array(found["sums"][way]), -1, 0)
        np.testing.assert_allclose(seconds, 0.01 + 1e-4 * tokens + 1e-5 * squares, rtol=1e-6)
    uneven = {way: modules.replay.spread(each, 4)["uneven"] for way, each in found["seconds"].items()}
    assert uneven["measured"] < min(uneven["fixed"], uneven["balanced"])
    told = {each.name: each.value for each in modules.bench.figure7("path", [2, 4], found, SETTINGS)}
    assert told["path/figure7/np4/measured"] == uneven["measured"]
    counted = SequenceCost.of_hstu(16)
    assert told["path/figure7/pair"] == pytest.approx(0.1 / (counted.quadratic / counted.linear), rel=1e-3)


def test_a_replay_that_is_short_of_time_counts_the_second_time_of_each_batch(modules, monkeypatch):
    found = replayed(modules, monkeypatch, 0.1, lambda lengths: 1e-4 * float(lengths.sum()))
    assert found["repeats"] == 1
    assert [len(each) for each in found["seconds"].values()] == [1, 1, 1, 1]  # a step at least


def test_a_replay_without_a_cost_says_why(modules, monkeypatch, capsys):
    found = replayed(modules, monkeypatch, 1e9, lambda lengths: 1 / float(lengths.sum()))
    assert list(found["seconds"]) == ["fixed", "balanced", "by_cost"]
    told = [each.name for each in modules.bench.figure7("path", [2], found, SETTINGS)]
    assert not any("measured" in name or "pair" in name for name in told)
    assert "no way measured: of_steps: steps of more tokens don't take longer" in capsys.readouterr().out


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
