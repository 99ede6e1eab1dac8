"""The recipe of GRM: from a generated log to a table of GAUC, and what its baseline computes."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import tensorflow as tf
from click.testing import CliRunner

from gmeta.meta import InnerLoop
from gmeta.models import MetaGRM
from gmeta.ops import AttentionMask, Jagged
from gmeta.preprocess.synthetic.exposures import ExposureConfig
from support.drawn_batches import draw_sequences, plain

RECIPE = Path(__file__).resolve().parents[3] / "models" / "grm"
_MODULES = ("train", "meta_ranking", "logs", "results", "rankers")


@pytest.fixture(scope="module")
def recipe():
    """The recipe's modules, which import each other by their names."""
    kept = {name: sys.modules.pop(name, None) for name in _MODULES}
    sys.path.insert(0, str(RECIPE))
    yield {name: importlib.import_module(name) for name in _MODULES}
    sys.path.remove(str(RECIPE))
    for name, module in kept.items():
        del sys.modules[name]
        if module is not None:
            sys.modules[name] = module


def test_the_baseline_is_the_mean_of_what_a_token_sees(recipe):
    mask = AttentionMask(by_time=True, window=3)
    drawn = draw_sequences(3, [(2, 6, 2), (0, 0, 1), (1, 4, 0)], 4, mask)
    layer = recipe["rankers"].MeanOfPast(mask=mask)
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
    ("words", "told"),
    [
        (["--out=/proc/none"], "Error: /proc/none: "),
        (["--out=x", "--seeds=0,one"], "'0,one' isn't numbers such as 0,1,2"),
        (["--out=x", "--kinds=dnn", "--horizon=60"], "isn't among --kinds"),
        (["--out=x", "--meta", "--seconds=60"], "isn't taken with --meta"),
        (["--out=x", "--kinds=hstu,bert"], "bert: choose among hstu, fuxi, dnn"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(recipe, words, told):
    result = CliRunner().invoke(recipe["train"].main, words)
    assert result.exit_code in (1, 2)
    assert told in result.output
    assert isinstance(result.exception, SystemExit)


@pytest.mark.parametrize(("given", "found"), [(None, 3600.0), (0.0, None), (60.0, 60.0)])
def test_a_horizon_is_handed_to_hstu(recipe, given, found):
    model = recipe["rankers"].ranker(
        "hstu", ExposureConfig(), dim=4, blocks=1, rate=0.01, seed=0, horizon=given
    )
    assert [block.horizon for block in model.trunk.backbone.blocks] == [found]


def test_the_report_is_of_the_epoch_in_time_that_validation_chooses(recipe):
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
    lines = recipe["results"].report([*rows, row(1, 1, 0.6, 0.6)]).splitlines()
    assert [line.split()[1:4] + line.split()[-2:] for line in lines[1:3]] == [
        ["0", "0", "2", "0.4000", "0.5000"],
        ["1", "0", "1", "0.6000", "0.7000"],
    ]
    assert lines[3].endswith("0.5000±0.1414  0.6000±0.1414")


def test_new_users_are_validation_or_test_and_never_both(recipe, tmp_path):
    log = ExposureConfig(users=40, mean_events=20, exposures=10)
    folder = recipe["logs"].prepare_log(tmp_path, log)
    found = [
        {int(user) for batch in part for user in batch["task"]}
        for part in recipe["logs"].parts(folder, 0, recipe["logs"].Batches(600))
    ]
    assert [len(part) for part in found] == [32, 4, 4]
    assert len(set.union(*found)) == 40


def test_training_ends_with_its_time(recipe, tmp_path):
    train, logs, rows = recipe["train"], recipe["logs"], []
    log = ExposureConfig(users=40, mean_events=20, exposures=10)
    data = logs.parts(logs.prepare_log(tmp_path, log), 0, logs.Batches(600))
    settings = {"dim": 4, "blocks": 1, "rate": 0.01, "window": 0}
    train.train("dnn", log, data, epochs=3, seconds=1e-9, tell=rows.append, **settings)
    assert [row["in_time"] for row in rows] == [False]


# Quick: tests/io/histories/test_late.py, test_batches_are_those_of_rows_that_hold_their_histories.
@pytest.mark.slow
def test_histories_out_of_a_store_are_those_beside_the_exposures(recipe, tmp_path):
    logs, train = recipe["logs"], recipe["train"]
    log = ExposureConfig(users=40, mean_events=20, exposures=10)
    found = {}
    for store in (None, tmp_path / "stored" / "histories-0"):
        folder = logs.prepare_log(tmp_path / ("stored" if store else "fat"), log, store=store)
        data = logs.parts(folder, 0, logs.Batches(users=7, store=store, longest=12))
        rows = []
        settings = {"dim": 4, "blocks": 1, "rate": 0.01, "window": 0}
        train.train("dnn", log, data, epochs=2, seconds=None, tell=rows.append, **settings)
        figures = [{name: value for name, value in row.items() if name != "seconds"} for row in rows]
        batches = [plain(batch) for part in data for batch in part]
        found[store is None] = figures, batches
    assert found[True] == found[False]
    figures, batches = found[True]
    assert [row["epoch"] for row in figures] == [1, 2]
    assert sum(len(batch["task"]) for batch in batches) == 40
    lengths = [len(history) for batch in batches for history in batch["history"]["item"]]
    assert max(lengths) == 12


def test_only_events_before_an_exposure_are_kept(recipe):
    log = pyarrow.table(
        {
            "user": [1, 1, 1, 1, 2, 2, 3],
            "timestamp": [5, 8, 8, 9, 1, 2, 4],
            "exposed": [0, 1, 0, 0, 0, 1, 0],
        }
    )
    kept = recipe["logs"].seen(log)
    assert kept["timestamp"].to_pylist() == [5, 8, 1, 2]
    assert kept["exposed"].to_pylist() == [0, 1, 0, 1]


@pytest.mark.slow
def test_the_recipe_runs_and_tells_the_best_epochs(recipe, tmp_path):
    sizes = {"users": 40, "events": 20, "exposures": 10, "epochs": 1, "dim": 4, "tokens": 600}
    words = [f"--{name}={size}" for name, size in sizes.items()]
    words += ["--kinds=dnn", "--store", f"--out={tmp_path}", f"--json={tmp_path / 'rows.json'}"]
    result = CliRunner().invoke(recipe["train"].main, words, catch_exceptions=False)
    assert result.exit_code == 0
    best, dnn = json.loads((tmp_path / "rows.json").read_text())
    assert best["kind"] == "oracle"
    assert 0.5 < best["gauc_ctr"] < 1
    assert np.isfinite(dnn["loss"])
    assert {"gauc_ctr", "gauc_ctcvr", "auc_ctr", "auc_ctcvr"} <= set(dnn)
    assert result.output.splitlines()[-1].startswith("dnn")


def test_adaptation_is_compared_by_the_same_users_after_each_number_of_steps(recipe):
    base = recipe["rankers"].ranker("dnn", ExposureConfig(), dim=4, blocks=1, rate=0.01, seed=0, report=None)
    model = MetaGRM(base, inner=InnerLoop(steps=1, learning_rate=0.5, adapt=["heads"]))
    model.compile("sgd")
    batch = sequences(recipe["rankers"])
    found = recipe["meta_ranking"].after_steps(model, users(batch), [0, 1])
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
