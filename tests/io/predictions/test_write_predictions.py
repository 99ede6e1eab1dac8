"""Predictions in Arrow files: each row once and the same bytes, whatever ends a run and on any ranks."""

import hashlib
import itertools
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pytest
import tensorflow as tf

from gmeta.core.errors import ConfigError, DataError, GmetaError
from gmeta.io import ReadOptions, groups, rows, sequences, write_predictions
from gmeta.io.predictions.plan import Predictions
from gmeta.io.reader_stats import ReaderStats
from support.disk_changes import wrap_changes
from support.grouped_data import record_offsets, write_folder

SIZES = [3, 1, 4, 2, 5, 1, 2, 6, 2, 3, 1, 2, 4]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("prepared"), SIZES[:6], SIZES[6:])


def score(batch):
    """A scalar, a vector and a ragged row for each user."""
    length = tf.cast(batch["history"]["item"].row_lengths(), tf.float32)
    return {
        "length": length,
        "vector": length[:, None] * tf.constant([1.0, 0.5]),
        "items": batch["history"]["item"],
        "genres": batch["history"]["genre"],
    }


def write(path, out, model=score, **changes):
    def read(**start):
        return sequences(path, history=["item", "genre"], sequences_per_batch=2, **start)

    given = {"reader": read, "columns": {"user": "task"}, "groups_per_part": 3, **changes}
    return write_predictions(model, path, out, **given)


def files(out):
    """Every file's bytes, but for the lock and what a killed process left."""
    return {path.name: path.read_bytes() for path in out.glob("[!.]*")}


def table(out):
    """As a user reads it: the folder."""
    return pa.dataset.dataset(out, format="arrow").to_table()


def test_each_row_is_there_once_in_the_order_of_the_data(prepared, tmp_path):
    done = write(prepared, tmp_path / "out")
    found = table(tmp_path / "out").to_pydict()
    assert found["user"] == list(range(len(SIZES)))
    assert found["length"] == [float(size) for size in SIZES]
    assert found["vector"] == [[size, size / 2] for size in SIZES]
    options = ReadOptions(shuffle=False)
    elements = list(groups(prepared, groups_per_element=1, options=options))
    assert found["items"] == [e["columns"]["item"].numpy().tolist() for e in elements]
    assert found["genres"] == [e["columns"]["genre"].to_list() for e in elements]
    assert (done.rows, len(done.parts)) == (len(SIZES), 5)
    assert done.schema["vector"] == "fixed_size_list<item: float not null>[2]"
    for part in done.parts:
        data = (tmp_path / "out" / part.name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (part.bytes, part.sha256)
    assert Predictions.load(tmp_path / "out") == done


def test_rows_of_the_row_reader_are_rows_of_the_table(prepared, tmp_path):
    def read(**start):
        return rows(prepared, batch_size=4, label="rating", features=["task", "item"], **start)

    write_predictions(
        lambda batch: batch[1] * 2,
        prepared,
        tmp_path / "out",
        reader=read,
        columns={"user": "0/task", "item": "0/item"},
        groups_per_part=5,
    )
    found = table(tmp_path / "out").to_pydict()
    (whole,) = groups(prepared, groups_per_element=99, options=ReadOptions(shuffle=False))
    assert found["user"] == np.repeat(np.arange(len(SIZES)), SIZES).tolist()
    assert found["item"] == whole["columns"]["item"].numpy().tolist()
    assert found["prediction"] == (whole["columns"]["rating"] * 2).numpy().tolist()


def test_a_keras_model_is_called_by_its_predict_step(prepared, tmp_path):
    class Lengths(tf.keras.Model):
        def call(self, batch, training=None):
            assert training is False
            return tf.cast(batch["history"]["item"].row_lengths(), tf.float32)

    write(prepared, tmp_path / "out", Lengths())
    assert table(tmp_path / "out").to_pydict()["prediction"] == [float(size) for size in SIZES]


class KilledError(BaseException):
    pass


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.shown_by(case="4")
def test_a_process_may_be_killed_at_any_change_of_the_disk(prepared, tmp_path, monkeypatch, every):
    """As by SIGKILL: from that change on, no other one is made, not even those that clean up."""
    calls, left = [], [0]

    def predict(element):
        calls.extend(element["task"].numpy().tolist())
        return {"rows": element["row_splits"][1:] - element["row_splits"][:-1]}

    def run(out):
        def read(**start):
            return groups(prepared, groups_per_element=3, **start)

        return write(prepared, out, predict, reader=read, groups_per_part=5)

    def dying(real):
        def call(*arguments, **named):
            left[0] -= 1
            if left[0] <= 0:
                raise KilledError
            return real(*arguments, **named)

        return call

    run(tmp_path / "whole")
    whole, out, points = files(tmp_path / "whole"), tmp_path / "out", 0
    for count in itertools.count(1, every):
        shutil.rmtree(out, ignore_errors=True)
        left[:] = [count]
        with monkeypatch.context() as patch:
            wrap_changes(dying, patch.setattr)
            try:
                run(out)
                break
            except KilledError:
                points += every
        finished = {name: data for name, data in files(out).items() if name.endswith(".arrow")}
        assert all(whole[name] == data for name, data in finished.items())
        assert len(finished) == 3 or "_manifest.json" not in files(out)
        calls.clear()
        run(out)
        assert files(out) == whole
        done = {
            task
            for part, size in enumerate((5, 5, 3))
            if f"part-0000{part}.arrow" in finished
            for task in range(5 * part, 5 * part + size)
        }
        assert calls == [task for task in range(len(SIZES)) if task not in done]
        assert not list(out.glob(".*.tmp"))
    assert (
        points >= 12
    )  # the folder, a flush of names; a flush and a rename of plan, three parts and manifest


def test_what_is_done_is_not_done_again(prepared, tmp_path):
    done = write(prepared, tmp_path / "out")

    def fail(batch):
        raise AssertionError(batch)

    assert write(prepared, tmp_path / "out", fail) == done


@pytest.mark.parametrize("parts", [5, 2, 0])
@pytest.mark.shown_by(case="2")
def test_a_folder_of_an_earlier_version_is_gone_on_with(prepared, tmp_path, parts):
    """It had ``plan.json`` and, once complete, ``manifest.json``, over which readers of folders stumble."""
    out, renamed = tmp_path / "out", ["plan.json", *["manifest.json"] * (parts == 5)]
    done = write(prepared, out)
    whole = files(out)
    if parts < 5:
        (out / "_manifest.json").unlink()
    for part in range(parts, 5):
        (out / f"part-0000{part}.arrow").unlink()
    for name in renamed:
        (out / f"_{name}").rename(out / name)
    if parts == 5:
        assert Predictions.load(out) == done
    with pytest.raises(ConfigError, match="model was '', and is 'b'"):
        write(prepared, out, model_name="b")
    assert set(renamed) <= set(files(out))  # what is refused stays as it is
    calls = []
    assert write(prepared, out, lambda batch: calls.append(batch) or score(batch)) == done
    assert sum(len(batch["task"]) for batch in calls) == len(SIZES) - min(3 * parts, len(SIZES))
    assert files(out) == whole


def test_the_folder_of_a_data_set_is_left_alone(prepared):
    before = files(prepared.parent)
    with pytest.raises(ConfigError, match="holds files that are no predictions of gmeta's"):
        write(prepared, prepared.parent)
    assert files(prepared.parent) == before


def test_a_full_disk_leaves_no_half_of_a_part(prepared, tmp_path, monkeypatch):
    real = os.fsync

    def full(descriptor):
        if "part-00001" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(GmetaError, match=r"can't write .*part-00001.arrow: No space left on device"):
        write(prepared, tmp_path / "out")
    monkeypatch.undo()
    assert sorted(files(tmp_path / "out")) == ["_plan.json", "part-00000.arrow"]
    assert write(prepared, tmp_path / "out").rows == len(SIZES)


def test_a_run_of_other_predictions_is_refused_by_name(prepared, tmp_path):
    def stop(batch):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(prepared, tmp_path / "out", stop, model_name="a")
    (tmp_path / "other").mkdir()
    other = write_folder(tmp_path / "other", SIZES)
    for path, changes, says in (
        (prepared, {"model_name": "b"}, "model was 'a', and is 'b'"),
        (prepared, {"model_name": "a", "columns": {}}, r"columns was \{'user': 'task'\}, and is \{\}"),
        (prepared, {"model_name": "a", "groups_per_part": 4}, "groups_per_part was 3, and is 4"),
        (prepared, {"model_name": "a", "options": ReadOptions(on_bad="skip")}, "on_bad was 'raise'"),
        (other, {"model_name": "a"}, "data was"),
    ):
        with pytest.raises(ConfigError, match=says):
            write(path, tmp_path / "out", **changes)
    longer = {"reader": lambda **start: sequences(prepared, history=["item"], **start)}
    with pytest.raises(ConfigError, match="batches was"):
        write(prepared, tmp_path / "out", model_name="a", **longer)
    assert write(prepared, tmp_path / "out", model_name="a").rows == len(SIZES)


def test_columns_that_change_between_runs_are_refused(prepared, tmp_path):
    calls = []

    def stop(batch):
        calls.append(batch)
        if len(calls) > 2:
            raise KeyboardInterrupt
        return tf.zeros_like(batch["task"])

    with pytest.raises(KeyboardInterrupt):
        write(prepared, tmp_path / "out", stop)
    with pytest.raises(
        ConfigError, match=r"part-00001.*must be the same .*prediction int64, and are .*float"
    ):
        write(prepared, tmp_path / "out", lambda batch: tf.cast(batch["task"], tf.float32))


@pytest.mark.parametrize(
    ("model", "changes", "says"),
    [
        (lambda batch: tf.zeros([7]), {}, "numbers of rows are user 2, prediction 7"),
        (lambda batch: tf.zeros([]), {}, "'prediction' is one number for the whole batch"),
        (lambda batch: {"user": batch["task"]}, {}, "both named user"),
        (score, {"columns": {"user": "tusk"}}, "no 'tusk'; in place of 'tusk' there are task, contexts"),
        (score, {"columns": {"user": "task/0"}}, "in place of '0' there are no parts"),
        (score, {"groups_per_part": 0}, "groups_per_part must be a whole number from 1"),
    ],
)
def test_what_makes_no_sense_is_refused(prepared, tmp_path, model, changes, says):
    with pytest.raises(ConfigError, match=says):
        write(prepared, tmp_path / "out", model, **changes)


def test_a_reader_that_reads_something_else_is_refused(prepared, tmp_path):
    for read in (
        lambda start, options: sequences(prepared, history=["item"], options=options),
        lambda start, options: sequences(prepared, history=["item"], start=start),
        lambda start, options: sequences(
            prepared, history=["item"], start=start, options=replace(options, shuffle=True)
        ),
        lambda start, options: tf.data.Dataset.range(3),
    ):
        with pytest.raises(ConfigError, match="reader must read the requested part: pass on start"):
            write(prepared, tmp_path / "out", reader=read)


def test_parts_without_a_sound_group_have_no_rows(tmp_path):
    path = write_folder(tmp_path, [2] * 6)
    (shard,) = path.parent.glob("*.tfrecord")
    data, offsets = bytearray(shard.read_bytes()), record_offsets(shard)
    for group in (2, 3):
        data[offsets[group] + 20] ^= 0xFF
    shard.write_bytes(data)
    with pytest.raises(DataError, match=r"tfrecord at byte \d+"):
        write(path, tmp_path / "out", groups_per_part=2)
    stats = ReaderStats()
    options = ReadOptions(on_bad="skip", stats=stats)
    done = write(path, tmp_path / "skipped", groups_per_part=2, options=options)
    assert [part.rows for part in done.parts] == [2, 0, 2]
    assert stats.read().skipped
    assert table(tmp_path / "skipped").to_pydict()["user"] == [0, 1, 4, 5]

    def read(**start):
        return rows(path, batch_size=4, label="rating", features=["task"], **start)

    done = write(
        path,
        tmp_path / "rows",
        lambda batch: batch[1],
        reader=read,
        columns={"user": "0/task"},
        groups_per_part=2,
        options=options,
    )
    assert [part.rows for part in done.parts] == [4, 0, 4]


def test_damage_is_found_before_the_manifest_is_written(prepared, tmp_path):
    write(prepared, tmp_path / "out")
    (tmp_path / "out" / "_manifest.json").unlink()
    part = tmp_path / "out" / "part-00002.arrow"
    sound = part.read_bytes()
    for bad, says in (
        (sound[: len(sound) // 2], "the part can't be read"),
        ((tmp_path / "out" / "part-00001.arrow").read_bytes(), "not part 2 of these predictions"),
    ):
        part.write_bytes(bad)
        with pytest.raises(DataError, match=rf"part-00002.arrow: {says}.*only this part is repeated"):
            write(prepared, tmp_path / "out")
    part.unlink()
    assert write(prepared, tmp_path / "out").rows == len(SIZES)
    assert part.read_bytes() == sound


def test_an_edited_plan_or_manifest_is_refused(prepared, tmp_path):
    out = tmp_path / "out"
    write(prepared, out)
    manifest = json.loads((out / "_manifest.json").read_text())
    manifest["parts"][0]["rows"] = 7
    (out / "_manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="its digest doesn't match its content"):
        write(prepared, out)
    (out / "_plan.json").write_text("{}")
    with pytest.raises(DataError, match="no plan of predictions"):
        write(prepared, out)
    (out / "_plan.json").unlink()
    with pytest.raises(ConfigError, match="holds files that are no predictions of gmeta's"):
        write(prepared, out)
