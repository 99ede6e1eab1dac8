"""The benchmark of GRM's quality: its users, what its baseline computes, and which epochs it reports."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pytest
import tensorflow as tf

from gmeta.meta import InnerLoop
from gmeta.models import MetaGRM
from gmeta.ops import AttentionMask, Jagged
from gmeta.preprocess.synthetic.exposures import ExposureConfig
from support.drawn_batches import draw_sequences, plain

BENCH = Path(__file__).resolve().parents[2] / "tools" / "bench"
SETTINGS = {"dim": 4, "blocks": 1, "rate": 0.01, "window": 0}


@pytest.fixture(scope="module")
def bench():
    """The benchmark's modules, which import each other by their names."""
    sys.path.insert(0, str(BENCH))
    names = {"quality": "grm_quality", "logs": "parts.exposure_logs", "rankers": "parts.exposure_rankers"}
    yield SimpleNamespace(**{name: importlib.import_module(module) for name, module in names.items()})
    sys.path.remove(str(BENCH))
    for name in [each for each in sys.modules if each.split(".")[0] in ("harness", "parts", "grm_quality")]:
        del sys.modules[name]


def test_the_baseline_is_the_mean_of_what_a_token_sees(bench):
    mask = AttentionMask(by_time=True, window=3)
    drawn = draw_sequences(3, [(2, 6, 2), (0, 0, 1), (1, 4, 0)], 4, mask)
    layer = bench.rankers.MeanOfPast(mask=mask)
    out = layer(
        Jagged(tf.constant(drawn.x, tf.float32), tf.constant(drawn.offsets)), **drawn.arguments
    ).values
    expected = []
    for number, seen in enumerate(drawn.masks):
        x, contexts = drawn.only(number).x, drawn.contexts[number]
        for token, row in enumerate(seen):
            past = row & (np.arange(len(x)) != token) & (np.arange(len(x)) >= contexts)
            mean = x[past].mean(axis=0) if past.any() else np.zeros(4)
            of_contexts = x[:contexts].mean(axis=0) if contexts else np.zeros(4)
            expected.append(np.concatenate([x[token], of_contexts, mean]))
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kinds", "dnn", "--horizon", "60"], "--horizon is of hstu, which isn't among --kinds"),
        (["--meta", "--seconds", "60"], "--seconds isn't taken with --meta"),
        (["--kinds", "hstu", "bert"], "invalid choice: 'bert'"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(bench, words, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["grm_quality.py", *words])
    with pytest.raises(SystemExit):
        bench.quality.arguments()
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("given", "found"), [(None, 3600.0), (0.0, None), (60.0, 60.0)])
def test_a_horizon_is_handed_to_hstu(bench, given, found):
    model = bench.rankers.ranker("hstu", ExposureConfig(), dim=4, blocks=1, rate=0.01, seed=0, horizon=given)
    assert [block.horizon for block in model.trunk.backbone.blocks] == [found]


def test_the_report_is_of_the_epoch_in_time_that_validation_chooses(bench):
    def row(seed, epoch, validation, test, in_time=True):
        gauc = {"validation_gauc_ctr": validation, "validation_gauc_ctcvr": validation, "in_time": in_time}
        return {
            "kind": "hstu",
            "seed": seed,
            "epoch": epoch,
            "gauc_ctr": test,
            "gauc_ctcvr": test + 0.1,
            **gauc,
        }

    rows = [row(0, 1, 0.6, 0.5), row(0, 2, 0.7, 0.4), row(0, 3, 0.65, 0.8), row(0, 4, 0.9, 0.9, False)]
    found = {each.name: each.value for each in bench.quality.results_of([*rows, row(1, 1, 0.6, 0.6)])}
    assert found == pytest.approx(
        {
            "grm/quality/hstu/gauc_ctr": 0.5,
            "grm/quality/hstu/gauc_ctr/spread": 0.1 * 2**0.5,
            "grm/quality/hstu/gauc_ctcvr": 0.6,
            "grm/quality/hstu/gauc_ctcvr/spread": 0.1 * 2**0.5,
        }
    )


def test_new_users_are_validation_or_test_and_never_both(bench, tmp_path):
    log = ExposureConfig(users=40, mean_events=20, exposures=10)
    folder = bench.logs.prepare_log(tmp_path, log)
    found = [
        {int(user) for batch in part for user in batch["task"]}
        for part in bench.logs.parts(folder, 0, bench.logs.Batches(600))
    ]
    assert [len(part) for part in found] == [32, 4, 4]
    assert len(set.union(*found)) == 40


@pytest.mark.shown_by("test_the_report_is_of_the_epoch_in_time_that_validation_chooses")
def test_training_ends_with_its_time(bench, tmp_path):
    logs, rows = bench.logs, []
    log = ExposureConfig(users=40, mean_events=20, exposures=10)
    data = logs.parts(logs.prepare_log(tmp_path, log), 0, logs.Batches(600))
    bench.rankers.train("dnn", log, data, epochs=3, seconds=1e-9, keep=rows.append, **SETTINGS)
    assert [row["in_time"] for row in rows] == [False]


# Quick: tests/io/histories/test_late.py, test_batches_are_those_of_rows_that_hold_their_histories.
@pytest.mark.slow
def test_histories_out_of_a_store_are_those_beside_the_exposures(bench, tmp_path):
    logs = bench.logs
    log = ExposureConfig(users=40, mean_events=20, exposures=10)
    found = {}
    for store in (None, tmp_path / "stored" / "histories-0"):
        folder = logs.prepare_log(tmp_path / ("stored" if store else "fat"), log, store=store)
        data = logs.parts(folder, 0, logs.Batches(users=7, store=store, longest=12))
        rows = []
        bench.rankers.train("dnn", log, data, epochs=2, seconds=None, keep=rows.append, **SETTINGS)
        figures = [{name: value for name, value in row.items() if name != "seconds"} for row in rows]
        batches = [plain(batch) for part in data for batch in part]
        found[store is None] = figures, batches
    assert found[True] == found[False]
    figures, batches = found[True]
    assert [row["epoch"] for row in figures] == [1, 2]
    assert sum(len(batch["task"]) for batch in batches) == 40
    lengths = [len(history) for batch in batches for history in batch["history"]["item"]]
    assert max(lengths) == 12


def test_only_events_before_an_exposure_are_kept(bench):
    log = pyarrow.table(
        {
            "user": [1, 1, 1, 1, 2, 2, 3],
            "timestamp": [5, 8, 8, 9, 1, 2, 4],
            "exposed": [0, 1, 0, 0, 0, 1, 0],
        }
    )
    kept = bench.logs.seen(log)
    assert kept["timestamp"].to_pylist() == [5, 8, 1, 2]
    assert kept["exposed"].to_pylist() == [0, 1, 0, 1]


def test_adaptation_is_compared_by_the_same_users_after_each_number_of_steps(bench):
    base = bench.rankers.ranker("dnn", ExposureConfig(), dim=4, blocks=1, rate=0.01, seed=0, report=None)
    model = MetaGRM(base, inner=InnerLoop(steps=1, learning_rate=0.5, adapt=["heads"]))
    model.compile("sgd")
    batch = sequences(bench.rankers)
    found = bench.quality.after_steps(model, users(batch), [0, 1])
    model.test_step(batch)
    measured = {metric.name: float(metric.result()) for metric in model.metrics if "gauc" in metric.name}
    assert found[1] == measured != found[0]


def users(batch):
    """A data set of one batch, of however many users."""
    return tf.data.Dataset.from_tensor_slices(batch).batch(6)


def sequences(rankers):
    random = np.random.default_rng(0)

    def ragged(rows):
        return tf.RaggedTensor.from_row_lengths(random.integers(0, 1000, 6 * rows), [rows] * 6)

    clicks = ragged(8)
    return {
        "task": tf.range(6),
        "contexts": {name: tf.constant(random.integers(0, 5, 6)) for name in rankers.CONTEXTS},
        "history": {**{name: ragged(4) for name in rankers.HISTORY}, rankers.TIME: ragged(4) * 0},
        "targets": {name: ragged(8) for name in (*rankers.TARGETS, rankers.TIME)},
        "labels": {"click": tf.cast(clicks > 500, tf.float32), "buy": tf.cast(clicks > 700, tf.float32)},
    }
