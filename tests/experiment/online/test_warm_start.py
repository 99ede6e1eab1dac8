"""A model of a run for ranking goes on on a stream: from its own answers, with what it knows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from click.testing import CliRunner
from scipy.special import expit

from gmeta.cli import main
from gmeta.core.errors import ConfigError, DataError
from gmeta.experiment.online.follow import Following, begin, load_config
from gmeta.experiment.online.online_model import OnlineConfig
from gmeta.experiment.online.warm_start import _method
from gmeta.experiment.plan.ranking_config import RankingConfig, RankingMethod
from gmeta.experiment.ranking.runs import load_ranking
from gmeta.experiment.ranking.served import _encoder, in_tensorflow
from gmeta.experiment.runs.run_folder import RunFolder
from gmeta.export import export_model
from gmeta.ops import hash_text

USERS, ITEMS = 60, 40
METHODS = """
for = "ranking"
protocol = "random"
[methods.dcn]
label = "DCN-v2"
dim = 4
hidden = [8]
epochs = 4
[methods.dlrm]
label = "DLRM"
model = "dlrm"
dim = 4
hidden = [8]
dropout = 0.2
epochs = 1
[methods.fm]
label = "FM"
model = "fm"
dim = 4
epochs = 1
"""


def events(rows: int, seed: int, *, first: int = 0) -> dict[str, Any]:
    """Clicks by tastes, with texts, lists, numbers and gaps; users from ``first`` on."""
    draw, law = np.random.default_rng(seed), np.random.default_rng(9)
    tastes, traits = law.normal(size=(2 * USERS, 3)), law.normal(size=(ITEMS, 3))
    user, item = draw.integers(first, first + USERS, rows), draw.integers(0, ITEMS, rows)
    price = draw.lognormal(3, 2, rows)
    logit = 1.5 * (tastes[user] * traits[item]).sum(axis=1) + 2 * traits[item, 0] - 0.3 * np.log(price)
    return {
        "user": [f"u{each}" for each in user],
        "ts": 1_600_000_000 + 1000 * seed + np.sort(draw.random(rows)) * 1000,
        "item": item * 7 + 100,
        "tags": [[int(each) % 3, 7] if each % 4 else [] for each in item],
        "words": [[f"w{each % 5}", "all"] for each in item],
        "price": np.where(draw.random(rows) < 0.1, np.nan, price),
        "click": (draw.random(rows) < expit(logit)).astype(np.int64),
    }


def put(log: Path, name: str, columns: dict[str, Any]) -> None:
    """Write a file of a log."""
    log.mkdir(exist_ok=True)
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*map(list, columns.values()), strict=True)]
    lines = []
    for row in rows:
        plain = {name: each.item() if isinstance(each, np.generic) else each for name, each in row.items()}
        plain["price"] = None if plain["price"] != plain["price"] else plain["price"]
        lines.append(json.dumps(plain))
    (log / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def gmeta(*words: Any, code: int = 0) -> str:
    found = CliRunner().invoke(main, [*map(str, words)], catch_exceptions=False)
    assert found.exit_code == code, found.output
    return found.output


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run for ranking, ``batch``, and later events, ``log``."""
    folder = tmp_path_factory.mktemp("warm")
    history = events(2000, 0)
    history["ts"] = history["ts"].astype(np.int64)
    pq.write_table(pa.table(history), folder / "history.parquet")
    (folder / "methods.toml").write_text(METHODS)
    roles = ["--task", "user", "--time", "ts", "--label", "click", "--default", "price=own"]
    gmeta("prepare", "--data", folder / "history.parquet", *roles, "--out", folder / "data")
    words = ["--data", folder / "data", "--config", folder / "methods.toml"]
    gmeta("train", *words, "--run", folder / "batch")
    put(folder / "log", "1", events(512, 1))
    return folder


def following(run: Path, log: Path, start: Path | None, **settings: Any) -> Following:
    """Begin, or continue, training to the end of a log."""
    common = {"time": "ts", "batch_size": 64, "window": 256, **settings}
    if start is None:
        common |= {"dim": 4, "hidden": (8,)}
    given = OnlineConfig(str(log), "click", start=None if start is None else str(start), **common)
    config, stream = begin(run, given, follow=False)
    return Following(run, config, stream, show=lambda _: None)


def end(trained: Following) -> None:
    """Do what the end of its process does."""
    trained.saving.store._lock.release()


def request() -> dict[str, tf.Tensor]:
    """Rows of known and unknown ids, as clients send them."""
    return {
        "user": tf.constant(["u1", "nobody", "u3"]),
        "item": tf.constant([100, 107, 5], tf.int64),
        "tags": tf.constant([[1, 7], [9, -1], [2, 9]], tf.int64),
        "words": tf.constant([["w1", "all"], ["new", ""], ["", ""]]),
        "price": tf.constant([3.0, np.nan, 1e6]),
    }


@pytest.mark.shown_by(case="fm")
@pytest.mark.parametrize("method", ["dcn", "dlrm", "fm"])
def test_before_any_event_answers_are_those_of_the_run(runs: Path, tmp_path: Path, method: str) -> None:
    batch = runs / "batch"
    begun = following(tmp_path / "run", runs / "log", batch / method)
    assert load_config(tmp_path / "run").start == str(batch / method / "seed-0")
    trained = load_ranking(RunFolder(batch))
    _, scorer = trained.choose(method, None)
    asked = request()
    given = {
        "user": hash_text(asked["user"]),
        "item": asked["item"],
        "tags": tf.ragged.boolean_mask(asked["tags"], asked["tags"] >= 0),
        "words": tf.ragged.map_flat_values(
            hash_text, tf.ragged.boolean_mask(asked["words"], asked["words"] != "")
        ),
        "price": asked["price"],
    }
    logits = begun.model(given, training=False)[:, 0]
    # What `gmeta export` writes, before TensorFlow's optimizer of graphs changes last bits.
    np.testing.assert_array_equal(in_tensorflow(scorer)(_encoder(trained.parts.encoding)(asked)), logits)
    export_model(begun.model, tmp_path / "served", signatures={"predict": begun.model.signature()})
    served = tf.saved_model.load(str(tmp_path / "served")).signatures["predict"](**asked)
    np.testing.assert_allclose(served["click"], tf.sigmoid(logits), rtol=2e-6)
    end(begun)


@pytest.mark.shown_by("test_before_any_event_answers_are_those_of_the_run")
def test_a_warm_start_is_better_than_a_cold_one_from_the_first_window_on(runs: Path, tmp_path: Path) -> None:
    put(tmp_path / "log", "1", events(1024, 1))
    put(tmp_path / "log", "2", events(1024, 2, first=USERS))  # users that the run didn't see
    aucs = {}
    for name, start in (("warm", runs / "batch/dcn"), ("cold", None)):
        trained = following(tmp_path / name, tmp_path / "log", start)
        trained.train()
        aucs[name] = [window.auc for window in trained.progress.metrics.windows]
        end(trained)
        if start is not None:
            tables = {table.name: table.size() for table in trained.model.new.tables}
    assert aucs["warm"][0] > aucs["cold"][0] + 0.1
    assert aucs["warm"][0] > 0.65
    assert sum(tables.values()) >= USERS - 2  # rows of new users


def test_it_goes_on_without_the_run_and_to_the_same_bits(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "batch", tmp_path / "batch")
    put(tmp_path / "log", "1", events(256, 1))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    probe = following(tmp_path / "probe", tmp_path / "log", tmp_path / "batch/dlrm")
    features = next(iter(probe._data))[0]
    first = following(parts, tmp_path / "log", tmp_path / "batch/dlrm")
    first.train()
    end(first)
    put(tmp_path / "log", "2", events(256, 2, first=USERS))
    once = following(whole, tmp_path / "log", tmp_path / "batch/dlrm")
    shutil.rmtree(tmp_path / "batch")
    again = following(parts, tmp_path / "log", tmp_path / "batch/dlrm")
    for each in (once, again):
        each.train()
        end(each)
    np.testing.assert_array_equal(once.model(features), again.model(features))
    assert int(again.model.reading.step) == 8
    shutil.rmtree(parts / "start")
    with pytest.raises(DataError, match="the model that this run began with can't be read"):
        following(parts, tmp_path / "log", None)


def test_what_cannot_go_on_is_refused_with_advice(runs: Path, tmp_path: Path) -> None:
    batch, log = runs / "batch", runs / "log"

    def refused(start: Path, match: str, log: Path = log, **settings: Any) -> None:
        with pytest.raises((ConfigError, DataError), match=match):
            following(tmp_path / "run", log, start, **settings)

    refused(batch / "grm", r"continues dcn, dlrm, fm; 'grm' is none of them")
    refused(batch / "blend", r"'blend' holds baselines, which don't learn from a stream")
    refused(batch / "other", r"'other' is none of them")
    refused(batch / "dcn/seed-7", r"the seeds are 0")
    refused(tmp_path, "no run of `gmeta train` is here")
    refused(batch, r"features: --from takes the run's", features=("user",))
    some = events(8, 1)
    put(tmp_path / "less", "1", {name: each for name, each in some.items() if name != "item"})
    refused(batch, r"lacks item, .*add what is missing to the events", tmp_path / "less")
    put(tmp_path / "typed", "1", {**some, "user": np.arange(8)})
    refused(batch, r"'user' is int64, and .* was trained on string", tmp_path / "typed")
    put(
        tmp_path / "named", "1", {("liked" if name == "click" else name): each for name, each in some.items()}
    )
    refused(batch, r"label = 'click' is no column", tmp_path / "named")
    assert not (tmp_path / "run").exists()
    reading = {"dcn": RankingMethod("DCN"), "grm": RankingMethod("GRM", "grm")}
    config = RankingConfig("click", ("user",), user="user", time="ts", methods=reading)
    with pytest.raises(ConfigError, match="continues dcn; 'grm' reads histories, which a"):
        _method(config, "grm", batch)


@pytest.mark.shown_by("test_it_goes_on_without_the_run_and_to_the_same_bits")
def test_the_command_begins_with_a_run_and_goes_on(runs: Path, tmp_path: Path) -> None:
    words = ["train", "--follow", runs / "log", "--run", tmp_path / "run", "--until-end"]
    found = gmeta(*words, "--from", runs / "batch", "--set", "dim=8", code=2)
    assert "dim: --from takes the run's" in found
    found = gmeta("train", "--run", tmp_path / "run", "--from", runs / "batch", code=2)
    assert "--from is for training on a stream" in found
    found = gmeta("train", "--follow", runs / "log", "--run", runs / "batch", "--until-end", code=2)
    assert f"--from {runs / 'batch'}" in found
    settings = ["--set", 'time="ts"', "--set", "batch_size=64", "--publish", tmp_path / "online"]
    found = gmeta(*words, "--from", runs / "batch/dcn", *settings)
    assert "read 512 rows, 8 steps are trained; the same command continues" in found
    found = gmeta(*words, "--from", runs / "batch/dcn", "--publish", tmp_path / "again")
    assert "read 0 rows" in found
    assert "began with start" in gmeta(*words, "--from", runs / "batch/fm", code=2)
    gmeta("publish", "--run", tmp_path / "run", "--to", tmp_path / "served")
    served = tf.saved_model.load(str(tmp_path / "served/model/1")).signatures["predict"](**request())
    again = tf.saved_model.load(str(tmp_path / "again/model/1")).signatures["predict"](**request())
    np.testing.assert_array_equal(served["click"], again["click"])
