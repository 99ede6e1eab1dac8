"""Training on a stream goes on where it was, publishes what it restored, and ends by a signal at any time."""

import json
import os
import signal
import threading

import numpy as np
import pytest

from gmeta.cli.publish import command as publish_command
from gmeta.core.errors import ConfigError
from gmeta.experiment.online.follow import Following, begin
from gmeta.experiment.online.online_model import OnlineConfig
from gmeta.export.published_folder import PublishedFolder

ROWS, BATCH = 128, 32


def write(folder, number):
    """Write a file of the log."""
    draw = np.random.default_rng(number)
    folder.mkdir(exist_ok=True)
    lines = [
        json.dumps({"user": int(draw.integers(50)), "item": int(draw.integers(50)), "click": i % 2, "ts": i})
        for i in range(number * ROWS, (number + 1) * ROWS)
    ]
    (folder / f"{number:03d}.jsonl").write_text("\n".join(lines) + "\n")


def following(path, *, follow=False, publish=True):
    """Begin or continue a run."""
    given = OnlineConfig(
        str(path / "log"), "click", time="ts", batch_size=BATCH, dim=4, hidden=(8,), window=BATCH
    )
    config, stream = begin(path / "run", given, follow)
    online = path / "online" if publish else None
    return Following(path / "run", config, stream, publish=online, show=lambda _: None)


def steps(run):
    return int(run.model.reading.step)


def end(run):
    """What the end of its process does."""
    run.saving.store._lock.release()
    if run.publisher is not None:
        run.publisher.close()


def test_a_run_goes_on_and_publishes_what_it_restored_even_if_nothing_is_new(tmp_path):
    write(tmp_path / "log", 0)
    first = following(tmp_path)
    first.train()
    assert steps(first) == ROWS // BATCH
    assert PublishedFolder(tmp_path / "online").contents().models == (1,)
    end(first)
    for killed in (".stream.json.17.tmp", "model/.9.17.partial", "deltas/.000000000009.delta.17.tmp"):
        (tmp_path / "online" / killed).write_text("half")
    again = following(tmp_path)
    again.train()
    assert steps(again) == ROWS // BATCH
    version = PublishedFolder(tmp_path / "online").contents().version
    assert PublishedFolder(tmp_path / "online").contents().models == (1, version)
    assert [path.name for path in (tmp_path / "online").rglob(".*")] == [".lock"]
    end(again)
    publish_command(["--run", str(tmp_path / "run"), "--to", str(tmp_path / "other")], standalone_mode=False)
    assert PublishedFolder(tmp_path / "other").contents().models == (1,)


@pytest.mark.shown_by(case="SIGINT-True")
@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_a_stream_without_traffic(tmp_path, name, new):
    number = signal.Signals[name]
    write(tmp_path / "log", 0)
    if not new:
        run = following(tmp_path, publish=False)
        run.train()
        end(run)
    before = signal.getsignal(number)
    run = following(tmp_path, follow=True, publish=False)

    def interrupt():
        while steps(run) < ROWS // BATCH:
            pause.wait(0.05)
        pause.wait(0.3)
        os.kill(os.getpid(), number)

    pause = threading.Event()
    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    run.train()
    thread.join()
    assert steps(run) == ROWS // BATCH
    assert run.saving.store.latest().name.endswith(f"{ROWS // BATCH}")
    assert signal.getsignal(number) is before
    end(run)


def test_a_second_training_of_a_run_has_no_effect(tmp_path, monkeypatch):
    from gmeta.checkpoint.store import CheckpointStore

    def refuse(_):
        raise ConfigError("is written by process 17")

    write(tmp_path / "log", 0)
    end(following(tmp_path))
    monkeypatch.setattr(CheckpointStore, "claim", refuse)
    with pytest.raises(ConfigError, match="is written by process 17"):
        following(tmp_path)
    assert PublishedFolder(tmp_path / "online").contents().models == ()
