"""Training on a stream: from where it was, evaluated before it trains, by rules, and published."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from click.testing import CliRunner

from gmeta.checkpoint.store import step_of
from gmeta.cli import main
from gmeta.core.errors import ConfigError, DataError, GmetaError
from gmeta.experiment.online.follow import Following, begin, load_config
from gmeta.experiment.online.online_model import OnlineConfig, Outcomes
from gmeta.ops import hash_text

SMALL = {
    "label": "click",
    "time": "ts",
    "batch_size": 32,
    "dim": 4,
    "hidden": (8,),
    "window": 128,
    "rows_rate": 0.2,
}


def put(folder: Path, number: int, rows: int = 256, *, flip: bool = False) -> None:
    """Write a file of clicks on even items; all of it is a function of the number."""
    random = np.random.default_rng(number)
    users, items = random.integers(0, 20, rows), random.integers(0, 10, rows)
    clicks = (items % 2 == 0) != flip
    lines = [
        json.dumps(
            {
                "user": int(users[i]),
                "item": f"i{items[i]}",
                "price": float(items[i]) if i % 7 else None,
                "tags": [int(items[i]), 3][: i % 3],
                "words": ["a", "b"][: i % 3],
                "click": int(clicks[i]),
                "ts": 1_700_000_000 + number * rows + i,
            }
        )
        for i in range(rows)
    ]
    folder.mkdir(exist_ok=True)
    (folder / f".{number:04}").write_text("\n".join(lines) + "\n")
    (folder / f".{number:04}").rename(folder / f"{number:04}.jsonl")


def follow(run: Path, source: Path, **settings: Any) -> Following:
    """Train to the end of the log."""
    given = OnlineConfig(source=str(source), **{**SMALL, **settings})
    config, stream = begin(run, given, follow=False)
    lines: list[str] = []
    following = Following(run, config, stream, show=lines.append)
    following.lines = lines
    following.train()
    return following


def predictions(following: Following) -> np.ndarray:
    asked = {
        "user": tf.range(20, dtype=tf.int64),
        "item": tf.range(20, dtype=tf.int64),
        "price": tf.zeros([20]),
        "tags": tf.RaggedTensor.from_row_lengths(tf.range(20, dtype=tf.int64), [1] * 20),
        "words": tf.RaggedTensor.from_row_lengths(hash_text(tf.fill([20], "a")), [1] * 20),
    }
    return following.model(asked, training=False).numpy()


def test_days_in_parts_equal_days_at_once(tmp_path: Path) -> None:
    for number in range(4):
        put(tmp_path / "log", number)
    whole = follow(tmp_path / "whole", tmp_path / "log")
    put(tmp_path / "parts", 0)
    follow(tmp_path / "run", tmp_path / "parts")
    for number in range(1, 4):
        put(tmp_path / "parts", number)
    parts = follow(tmp_path / "run", tmp_path / "parts")
    np.testing.assert_array_equal(predictions(whole), predictions(parts))
    for name in ("auc", "log_loss", "calibration", "rows"):
        windows = [
            [window[name] for window in json.loads((tmp_path / run / "progress.json").read_text())]
            for run in ("whole", "run")
        ]
        assert windows[0] == windows[1]
        assert len(windows[0]) == 8
    assert parts.progress.metrics.windows[-1].auc > 0.9
    config = load_config(tmp_path / "run")
    assert config.features == ("user", "item", "price", "tags", "words")
    assert config.users == "user"
    with pytest.raises(ConfigError, match=r"began with dim = 4, and 8 is given"):
        follow(tmp_path / "run", tmp_path / "parts", dim=8)


def test_what_a_stream_cannot_be_trained_on_is_named_in_one_line(tmp_path: Path) -> None:
    put(tmp_path / "log", 0)
    rows = [json.loads(line) for line in (tmp_path / "log/0000.jsonl").read_text().splitlines()]
    texts = [{**row, "click": "yes"} for row in rows]
    gap = [{**row, "click": None if number == 100 else 1} for number, row in enumerate(rows)]
    for name, changed in (("text", texts), ("gap", gap)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.jsonl").write_text("\n".join(map(json.dumps, changed)))
    with pytest.raises(
        ConfigError, match="label = 'click' is string, and a label is 0 or 1, or a number with"
    ):
        follow(tmp_path / "run", tmp_path / "text")
    with pytest.raises(DataError, match=r"0\.jsonl: row 101: column 'click' has a gap"):
        follow(tmp_path / "gaps", tmp_path / "gap")
    found = follow(tmp_path / "rated", tmp_path / "log", positive=0)
    assert all(window.calibration < 1 for window in found.progress.metrics.windows)  # all are positive


@pytest.mark.shown_by("callbacks/test_progressive_evaluation.py::test_a_broken_rule_ends_training")
def test_rules_stop_training_or_return_to_a_checkpoint(tmp_path: Path) -> None:
    for number in range(10):
        put(tmp_path / "log", number)
    rule = ("normalised_entropy > 1.02",)
    good = follow(tmp_path / "run", tmp_path / "log", fall_back_if=rule)
    before = predictions(good)
    assert good.progress.metrics.windows[-1].normalised_entropy < 0.9
    put(tmp_path / "log", 10, flip=True)
    back = follow(tmp_path / "run", tmp_path / "log", fall_back_if=rule)
    assert any("are those of step-" in line for line in back.lines)
    shown = predictions(back)
    assert np.corrcoef(before[:, 0], shown[:, 0])[0, 1] > 0.9
    stops = ("normalised_entropy > 1.02",)
    for number in range(10):
        put(tmp_path / "other", number)
    put(tmp_path / "other", 10, flip=True)
    with pytest.raises(GmetaError, match="training stopped by a rule: normalised_entropy"):
        follow(tmp_path / "stopped", tmp_path / "other", stop_if=stops)


def wait_for(found: Callable[[], bool], seconds: float = 120.0) -> bool:
    end = time.monotonic() + seconds
    while not (done := found()) and time.monotonic() < end:
        time.sleep(0.05)
    return done


def saved_step(following: Following) -> int | None:
    latest = following.saving.store.latest()
    return None if latest is None else step_of(latest)


def test_what_is_due_is_published_and_saved_though_no_row_comes(tmp_path: Path) -> None:
    """Each file ends with a batch; nothing comes after it until its rows are published and saved."""
    given = OnlineConfig(
        source=str(tmp_path / "log"),
        **SMALL,
        features=("user", "item"),
        publish_every="0.3s",
        dense_every="0.6s",
        checkpoint_every="0.5s",
    )
    put(tmp_path / "log", 0, 64)  # two batches
    config, stream = begin(tmp_path / "run", given, follow=True)
    following = Following(tmp_path / "run", config, stream, publish=tmp_path / "online", show=lambda _: None)
    published: list[int] = []  # the step of each publication
    following.publisher.listeners.append(lambda _: published.append(int(following.model.reading.step)))
    seen = []

    def write() -> None:
        try:
            for number in range(2):
                steps = 2 * number + 2
                shown = wait_for(lambda steps=steps: published[-1:] == [steps])
                saved = wait_for(lambda steps=steps: saved_step(following) == steps)
                then = len(published)
                time.sleep(1.0)
                seen.append((shown, saved, len(published) - then <= 1))  # one with dense weights may follow
                if number == 0:
                    put(tmp_path / "log", number + 1, 64)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    writer = threading.Thread(target=write)
    writer.start()
    following.train()
    writer.join()
    following.publisher.close()
    assert seen == [(True, True, True)] * 2
    whole = follow(tmp_path / "whole", tmp_path / "log", features=("user", "item"))
    np.testing.assert_array_equal(predictions(whole), predictions(following))


def test_outcomes_label_a_stream(tmp_path: Path) -> None:
    for side in ("shown", "clicks"):
        (tmp_path / side).mkdir()
    rows = [{"request": f"r{i}", "user": i % 9, "item": i % 5, "ts": i} for i in range(600)]
    clicks = [
        {"request": row["request"], "ts": row["ts"] + 20} for row in rows if (row["user"] + row["item"]) % 2
    ]
    for side, lines in (("shown", rows), ("clicks", clicks)):
        (tmp_path / side / "1.jsonl").write_text("\n".join(map(json.dumps, lines)))
    outcomes = Outcomes(str(tmp_path / "clicks"), ("request",), "10s", corrections="1m", negatives=0.5)
    trained = follow(tmp_path / "run", tmp_path / "shown", outcomes=outcomes, window=64)
    assert load_config(tmp_path / "run").features == ("user", "item")
    windows = trained.progress.metrics.windows
    assert sum(window.corrections for window in windows) > 0
    assert trained.model.reading.state()["step"] > 10


@pytest.mark.shown_by("test_days_in_parts_equal_days_at_once")
def test_the_commands_train_publish_and_refuse(tmp_path: Path) -> None:
    def gmeta(*words: str) -> Any:
        return CliRunner().invoke(main, list(words))

    put(tmp_path / "log", 0)
    log, run, online = str(tmp_path / "log"), str(tmp_path / "run"), str(tmp_path / "online")
    found = gmeta("train", "--follow", log, "--run", run)
    assert found.exit_code == 2
    assert "--follow needs the column of labels" in found.output
    found = gmeta("train", "--follow", log, "--run", run, "--set", 'label="clicked"', "--until-end")
    assert "label = 'clicked' is no column" in found.output
    found = gmeta("train", "--run", run, "--publish", online)
    assert "--publish is for training on a stream" in found.output
    settings = [f"{name}={json.dumps(value)}" for name, value in SMALL.items()]
    words = [word for each in settings for word in ("--set", each)]
    found = gmeta("train", "--follow", log, "--run", run, "--until-end", "--publish", online, *words)
    assert found.exit_code == 0, found.output
    assert "read 256 rows, 8 steps are trained; the same command continues" in found.output
    put(tmp_path / "log", 1)
    found = gmeta("train", "--follow", log, "--run", run, "--until-end")
    assert "read 256 rows" in found.output
    found = gmeta("publish", "--run", run, "--to", str(tmp_path / "served"))
    assert found.exit_code == 0, found.output
    served = tf.saved_model.load(str(tmp_path / "served/model/1"))
    asked = {
        "user": tf.constant([3], tf.int64),
        "item": tf.constant(["i2"]),
        "price": tf.constant([1.0]),
        "tags": tf.constant([[2, 3]], tf.int64),
        "words": tf.constant([["b", "new"]]),
    }
    answer = served.signatures["predict"](**asked)
    config, stream = begin(tmp_path / "run", load_config(tmp_path / "run"), follow=False)
    model = Following(tmp_path / "run", config, stream).model
    own = model.signature().function(
        {
            **asked,
            "item": hash_text(asked["item"]),
            "tags": tf.ragged.constant([[2, 3]], tf.int64),
            "words": tf.RaggedTensor.from_tensor(hash_text(asked["words"])),
        }
    )
    np.testing.assert_array_equal(answer["click"], own["click"])
    with pytest.raises(DataError, match="no training on a stream has begun here"):
        load_config(tmp_path / "nothing")
