"""The main job as a user runs it: prepare, train, evaluate, each a process of its own."""

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf

from gmeta.experiment.runs.run_folder import RunFolder
from gmeta.experiment.runs.trainer import restore
from gmeta.testing import small_100k, small_toml
from support import warm
from support.process_ranks import own_lines, without_stalls
from support.serving import ask


def gmeta(*words, folder):
    return warm.run([sys.executable, "-m", "gmeta", *words], cwd=folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    small_100k(folder / "ml")
    (folder / "short.toml").write_text(small_toml(epochs=2))
    (folder / "long.toml").write_text(small_toml(epochs=100_000))
    prepared = gmeta("prepare", "--data", "ml", "--out", "run/data", folder=folder)
    assert prepared.returncode == 0, prepared.stderr
    return folder


@pytest.fixture(scope="module")
def trained(folder):
    return gmeta("train", "--run", "run", "--config", "short.toml", folder=folder)


@pytest.mark.shown_by("cli/test_own_data.py::test_the_report_has_baselines_and_says_first_who_wins")
def test_train_evaluate_and_report(folder, trained):
    assert trained.returncode == 0, trained.stderr
    assert "MAML, seed 0: 2 epochs" in trained.stderr
    assert "WARNING" not in without_stalls(trained.stderr) + trained.stdout
    measured = gmeta("evaluate", "--run", "run", "--json", "table.json", folder=folder)
    assert measured.returncode == 0, measured.stderr
    assert measured.stderr == ""
    assert "item mean" in measured.stdout
    assert "report: run/report.html" in measured.stdout
    assert json.loads((folder / "table.json").read_text())["seeds"] == [0]
    assert (folder / "run/report.html").stat().st_size > 10_000
    assert {png.name for png in (folder / "run/figures").iterdir()} == {
        "error-by-steps.png",
        "error-by-support.png",
        "reliability.png",
        "training.png",
    }


@pytest.mark.shown_by("cli/test_own_data.py::test_stock_tensorflow_adapts_to_a_new_user_from_strings")
def test_a_trained_run_is_exported_to_the_next_version(folder, trained):
    assert trained.returncode == 0, trained.stderr
    for version in (1, 2):
        result = gmeta("export", "--run", "run", "--out", "models/melu", folder=folder)
        assert result.returncode == 0, result.stderr
        *signatures, note, last = result.stdout.splitlines()
        assert [line.partition(": ")[0] for line in signatures] == [
            "predict",
            "adapt",
            "adapt_many",
            "predict_with",
        ]
        assert signatures[0].startswith("predict: year int64 [null], genre int64 [null, null], ")
        assert signatures[1].endswith(", label float32 [null] -> weights_bytes string []")
        assert signatures[2].endswith(" -> weights_bytes string [null]")
        assert signatures[3].endswith(", weights_bytes string [] -> rating float32 [null]")
        assert note.startswith("note: `predict` answers by the shared weights, which maml teaches to adapt")
        assert last.startswith(f"exported: models/melu/{version}, ")
    result = gmeta("export", "--run", "run", "--for", "triton", "--out", "models/triton", folder=folder)
    assert result.returncode == 0, result.stderr
    names = [f"triton_{name}" for name in ("adapt", "adapt_many", "predict", "predict_with")]
    assert f"exported: models/triton, version 1 of {', '.join(names)}, " in result.stdout
    assert sorted(path.name for path in (folder / "models/triton").iterdir()) == names
    assert (folder / "models/triton/triton_adapt/1/saved_model/saved_model.pb").exists()
    assert sorted(path.name for path in (folder / "models").iterdir()) == ["melu", "triton"]
    samples = {name: np.arange(3) for name in ("year", "gender", "age", "occupation", "area")}
    samples["genre"] = np.array([[1, 2], [3, -1], [-1, -1]])
    answer = ask(folder / "models/melu/2", "serving_default", samples)["rating"]
    config, _ = RunFolder(folder / "run").load()
    model, _ = restore(config, "maml", 0, folder=folder / "run/maml/seed-0")
    genres = tf.ragged.boolean_mask(tf.constant(samples["genre"]), samples["genre"] >= 0)
    features = {name: tf.constant(value) for name, value in samples.items()} | {"genre": genres}
    embeddings = model.collection.concat(model.collection.lookup(features, insert=False))
    np.testing.assert_allclose(answer, model.network(embeddings[tf.newaxis])[0, :, 0], rtol=1e-5)


# Quick: tests/experiment/test_trainer.py,
# test_a_run_that_was_interrupted_and_resumed_equals_one_that_was_not, and test_prepare.py,
# test_ctrl_c_leaves_nothing_behind, for the command.
@pytest.mark.slow
def test_ctrl_c_keeps_what_is_finished_and_the_same_command_resumes(folder):
    words = ["train", "--run", "stopped", "--data", "run/data", "--config", "long.toml"]
    process = subprocess.Popen(
        [sys.executable, "-m", "gmeta", *words], cwd=folder, stderr=subprocess.PIPE, text=True
    )
    history = folder / "stopped/maml/seed-0/history.json"
    deadline = time.monotonic() + 600
    while not (any(history.parent.glob("step-*")) and len(json.loads(history.read_text())) >= 3):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 130
    planned, interrupted = own_lines(stderr).splitlines()
    assert planned.startswith("trains on ")
    assert interrupted == "gmeta: interrupted; finished parts are kept"

    done = len(json.loads(history.read_text()))
    config = json.loads((folder / "stopped/config.json").read_text())
    config["experiment"]["methods"]["maml"]["epochs"] = done + 1
    (folder / "stopped/config.json").write_text(json.dumps(config))
    (folder / "rest.toml").write_text(small_toml(epochs=done + 1))
    words[-1] = "rest.toml"
    resumed = gmeta(*words, folder=folder)
    assert resumed.returncode == 0, resumed.stderr
    assert "MAML, seed 0: resumed after epoch" in resumed.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["train", "--run", "new"],
            r"new/data: no prepared data set, neither here nor in data; run `gmeta prepare` first",
        ),
        (["train", "--run", "run", "--config", "gone.toml"], "gone.toml: can't be read: No such file"),
        (
            ["export", "--run", "run", "--method", "sgd", "--out", "m"],
            "run has no method 'sgd'; it has maml",
        ),
        (["export", "--run", "run", "--seed", "5", "--out", "m"], "run has no seed 5; it has 0"),
        (
            ["train", "--run", "new", "--data", "run/data", "--config", "short.toml", "--set", "held_out=1"],
            "held_out=1 keeps one in this many tasks",
        ),
        (
            ["train", "--run", "new", "--data", "run/data", "--set", "rows=late"],
            "'rows=late' isn't KEY=VALUE",
        ),
        (
            ["evaluate", "--run", "run", "--run", "run"],
            "run measures cold: several runs are measured as one only on the tasks that each holds out",
        ),
        (["evaluate", "--run", "nowhere"], "nowhere: no run was begun here; run `gmeta train` first"),
        pytest.param(["prepare", "--out", "x", "--data", "gone"], "gone", id="prepare"),
    ],
)
@pytest.mark.shown_by(case="prepare")
def test_a_careless_command_gets_one_line(folder, request, words, message):
    if words[0] in ("export", "evaluate"):
        request.getfixturevalue("trained")
    result = gmeta(*words, folder=folder)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("gmeta: error: ")
    assert message in line


def test_a_folder_that_cannot_be_written_gets_one_line(folder):
    (folder / "file").write_text("")
    words = ["train", "--run", "file/run", "--data", "run/data", "--config", "short.toml"]
    result = gmeta(*words, folder=folder)
    assert result.returncode == 2, result.stderr
    *_, line = result.stderr.splitlines()  # after what is planned
    assert "file/run" in line
