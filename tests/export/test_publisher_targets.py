"""A publisher whose files are in an object store, or can't be written."""

from __future__ import annotations

import shutil
from concurrent.futures import wait

import numpy as np
import pytest
import tensorflow as tf

from gmeta import optimizers
from gmeta.core.errors import ConfigError, GmetaError
from gmeta.export import Publisher
from gmeta.export import publisher as publisher_module
from gmeta.export.delivery import catch_up
from gmeta.export.delta_signatures import tables_of
from gmeta.export.published_folder import PublishedFolder
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.models import Model
from support.stored_files import stored


class Scores(Model):
    def __init__(self):
        super().__init__(name="scores")
        self.collection = EmbeddingCollection(
            [FeatureConfig("user", TableConfig("user", 4))], optimizer=optimizers.SGD(0.1)
        )
        self.dense = tf.keras.layers.Dense(1)

    def call(self, inputs, training=False):
        return self.dense(self.collection(inputs, training=training)["user"])[:, 0]


@pytest.fixture
def model():
    model = Scores()
    train(model, np.arange(50))
    return model


def train(model, ids):
    lookup = model.collection.lookup({"user": tf.constant(ids)}, insert=True)
    model.collection.apply_gradients(lookup, [tf.ones_like(rows) for rows in lookup.rows])
    model({"user": tf.constant([0])})
    model.dense.weights[0].assign_add(tf.ones_like(model.dense.weights[0]))


class Replica:
    """What a server has: rows and weights of the deltas that it took, from a version on."""

    def __init__(self, version, layout):
        self.url, self._version, self._layout = "replica", version, layout
        self.state = {}

    def version(self):
        return self._version

    def apply(self, data):
        from gmeta.export.model_deltas import Delta

        delta = Delta.decode(data, self._layout)
        assert delta.after == self._version
        for name, change in delta.tables.items():
            for each in change.removed.tolist():
                self.state[name, each] = None
            self.state |= {
                (name, each): row.tobytes()
                for each, row in zip(change.ids.tolist(), change.rows, strict=True)
            }
        self.state |= {name: value.tobytes() for name, value in delta.dense.items()}
        self._version = delta.version
        return delta.version


def held(model):
    """The state of a replica that has taken everything."""
    (table,) = tables_of(model)
    rows = table.export()
    found = {
        ("embeddings/user", key): row.tobytes()
        for key, row in zip(rows.keys.numpy(), rows.rows.numpy(), strict=True)
    }
    return found, {weight.name: weight.numpy().tobytes() for weight in model.dense.weights}


def check(replica, model):
    rows, weights = held(model)
    got = {
        name[1]: value
        for name, value in replica.state.items()
        if isinstance(name, tuple) and value is not None
    }
    assert got == {name[1]: value for name, value in rows.items()}
    assert {name: replica.state[name] for name in weights} == weights


@pytest.mark.parametrize("kind", ["s3", "hdfs"])
def test_what_cannot_be_written_is_in_the_next_delta_and_nobody_misses_any(model, tmp_path, kind):
    """Replicas that have received a delta which failed for the publisher continue too."""
    files, system = stored(tmp_path, kind)
    publisher = Publisher(model, PublishedFolder(files), journal=100)
    base = publisher.publish()
    assert base.path.name == "2"  # an earlier publisher might still write 1
    folder = PublishedFolder(files)
    replicas = [Replica(2, folder.layout()) for _ in range(2)]
    train(model, np.arange(50))
    publisher.publish()
    assert [catch_up(folder, replica, lambda line: None) for replica in replicas] == [3, 3]
    appears = "open_output_stream" if kind == "s3" else "move"

    def fail(operation, path):
        if operation == appears and path.endswith(".delta"):
            raise OSError(
                "AWS Error NETWORK_CONNECTION during PutObject operation: Couldn't connect to server"
            )

    for number in range(3):
        train(model, np.arange(60 + number))
        if number:
            tables_of(model)[0].remove(tf.constant([number, 58], tf.int64))
        system.before = fail
        with pytest.warns(UserWarning, match="not published, the next delta has it: can't write .* network"):
            publisher.on_train_end()
        system.before = lambda operation, path: None
        if number == 1:  # as if the answer alone were lost
            real = files.write
            files.write = lambda name, data, real=real: (real(name, data), fail(appears, name))
            with pytest.warns(UserWarning, match="not published"):
                publisher.on_train_end()
            files.write = real
            assert catch_up(folder, replicas[0], lambda line: None) == 6
    train(model, np.arange(10))
    published = publisher.publish(dense=False)
    assert (published.version, published.path.name) == (8, "000000000003-000000000008.delta")
    for replica in replicas:
        assert catch_up(folder, replica, lambda line: None) == 8
        check(replica, model)
    publisher.close()


def test_a_model_that_cannot_be_written_leaves_no_version_and_training_goes_on(model, tmp_path):
    files, system = stored(tmp_path)
    publisher = Publisher(model, PublishedFolder(files), every="1h")

    def fail(operation, path):
        if path.endswith("saved_model.pb") and operation == "open_output_stream":
            raise OSError("AWS Error ACCESS_DENIED during PutObject operation: Access Denied")

    system.before = fail
    with pytest.warns(UserWarning, match="not published.*use credentials that may read, write, list"):
        publisher.on_train_batch_end(0)
    assert PublishedFolder(files).contents().models == ()
    assert not [name for name in files.list() if name.startswith("model/")]
    publisher.on_train_batch_end(1)  # tries again after `every` only
    system.before = lambda operation, path: None
    assert publisher.publish().version == 3
    assert PublishedFolder(files).contents().models == (3,)
    publisher.close()


def test_what_is_removed_from_the_folder_is_written_again(model, tmp_path):
    publisher = Publisher(model, tmp_path, dense_every="1s")
    publisher.publish()
    stream = (tmp_path / "stream.json").read_bytes()
    shutil.rmtree(tmp_path / "model")
    train(model, np.arange(60))
    with pytest.warns(UserWarning, match="has lost its SavedModels: the next publication is one"):
        assert publisher.publish().path == tmp_path / "model/2"
    (tmp_path / "stream.json").unlink()
    train(model, np.arange(70))
    with pytest.warns(UserWarning, match="had lost stream.json, which is written again"):
        assert publisher.publish().path.suffix == ".delta"
    assert (tmp_path / "stream.json").read_bytes() == stream


def test_a_publisher_takes_over_from_one_that_still_runs(model, tmp_path):
    files = stored(tmp_path)[0]
    first = Publisher(model, PublishedFolder(files))
    first.publish()
    second = Publisher(model, PublishedFolder(stored(tmp_path)[0]))
    assert second.publish().version == 4  # the first one might still write 3
    train(model, np.arange(5))
    with pytest.raises(ConfigError, match="has been taken over by another writer"):
        first.on_train_end()
    assert second.publish().version == 5
    for publisher in (first, second):
        publisher.close()
    with pytest.raises(ConfigError, match="is closed: make another one"):
        first.publish()


def test_many_changes_are_divided_among_versions(model, tmp_path, monkeypatch):
    monkeypatch.setattr(publisher_module, "LARGEST", 300)
    publisher = Publisher(model, tmp_path / "online")
    publisher.publish()
    folder = PublishedFolder(tmp_path / "online")
    replica = Replica(1, folder.layout())
    train(model, np.arange(60))
    published = publisher.publish()
    assert published.rows == 60
    assert published.version == 1 + -(-60 // (300 // 24))
    spans = folder.contents().deltas
    assert published.bytes == sum(span.bytes for span in spans)
    dense = [bool(folder.read(span.name, folder.layout()).dense) for span in spans]
    assert dense == [False] * (len(spans) - 1) + [True]
    assert catch_up(folder, replica, lambda line: None) == published.version
    check(replica, model)
    for _ in range(20):
        train(model, np.arange(3))
        publisher.publish(dense=False)
    publisher.close()  # waits for the thread that compacts
    assert any(span.version - span.after == 8 for span in folder.contents().deltas)
    catch_up(folder, replica, lambda line: None)
    publisher = Publisher(model, tmp_path / "online")
    with pytest.raises(GmetaError, match="used by another Publisher"):
        Publisher(model, tmp_path / "online")
    publisher.close()


def test_a_failed_compaction_is_a_warning_and_is_tried_again(model, tmp_path):
    files, system = stored(tmp_path)
    publisher = Publisher(model, PublishedFolder(files))

    def fail(operation, path):
        if operation == "open_output_stream" and "-" in path:
            raise OSError("AWS Error ACCESS_DENIED during PutObject operation: Access Denied")

    publisher.publish()
    system.before = fail

    def publish(number):
        for _ in range(number):
            train(model, np.arange(2))
            publisher.publish(dense=False)
            wait([publisher._folder._compaction])

    with pytest.warns(
        UserWarning, match="not compacted, tried again later: can't write .*use credentials that"
    ):
        publish(18)
    system.before = lambda operation, path: None
    assert len(PublishedFolder(files).contents().deltas) == 18
    with pytest.warns(UserWarning, match="not compacted"):  # the last failure
        publish(1)
    assert len(PublishedFolder(files).contents().deltas) == 19 - 7
    publisher.close()
