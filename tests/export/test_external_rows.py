"""A server that is sent the rows of external tables answers as an export that holds them."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from gmeta import optimizers
from gmeta.core.errors import ConfigError
from gmeta.export import Publisher, export_model
from gmeta.export.delivery import deliver
from gmeta.export.row_stores import encode_rows
from gmeta.export.saved_model import Signature, feature_inputs
from gmeta.layers import HSTU, MLP, EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.meta import InnerLoop
from gmeta.models import MetaModel, NextItemModel
from support.external_model import CLIENT, EXTERNAL, FEATURES, NORMAL, client_of, ids_of, make, rows_of, train
from support.row_stores import redis_server
from support.serving import ask, rest_server


@pytest.fixture(scope="module")
def server():
    with redis_server() as port:
        yield port


@pytest.fixture
def redis_url(server, tmp_path):
    return f"redis://127.0.0.1:{server}/{tmp_path.name}"


@pytest.fixture
def model():
    return make()


def signatures(model):
    """Answers with rows, which show every bit, and with scores."""
    collection = model.collection

    def vectors(ids):
        found = collection.embed(collection.lookup(ids, insert=False))
        score = model.dense(tf.concat([*found.values()], axis=-1))
        return {**found, "known": collection.has_rows("user", ids["user"]), "score": score}

    return {"vectors": Signature(vectors, feature_inputs(FEATURES))}


def options(model):
    return {"signatures": signatures(model), "external": EXTERNAL}


def requests():
    """Ids that are trained, evicted, and unknown."""
    values = np.arange(300)
    tags = np.array([[f"t{value % 11}", "t"] for value in values], object)
    return {name: tags if name == "tags" else values for name in ("user", "item", "tags", "place")}


def answers(base, rows):
    """What the model in a folder answers when a client sends it the rows of a store."""
    ids = ask(base, "vectors_ids", requests())
    assert all(len(np.unique(each)) == len(each) for each in ids.values())
    found = rows.get({name.removesuffix("_ids"): each.tolist() for name, each in ids.items()})
    values = {f"{name}_rows": np.array(each, object) for name, each in found.items()}
    return ask(base, "vectors", {**requests(), **ids, **values})


def right_answers(model, folder, dtype):
    exported = export_model(model, folder, signatures=signatures(model), dtype=dtype)
    return ask(exported.folder, "vectors", requests())


def check(found, right):
    assert found.keys() == right.keys()
    for name, value in right.items():
        np.testing.assert_array_equal(found[name], value, name)


@pytest.mark.shown_by(case="float32")
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_each_version_answers_as_an_export_with_all_rows(model, tmp_path, redis_url, dtype):
    """A server takes the other tables and the weights; of the rows, the client gets what a store has."""
    train(model, 0)
    folder = tmp_path / "online"
    publisher = Publisher(model, folder, dtype=dtype, export=options(model))
    base = publisher.publish().path
    with rest_server(folder) as port:
        web = f"http://127.0.0.1:{port}/v1/models/model"
        for seed in (1, 2):
            version = publisher.version
            assert deliver(folder, [web, redis_url], say=str) == {web: version, redis_url: version}
            check(
                answers(base, client_of(redis_url)), right_answers(model, tmp_path / f"right-{seed}", dtype)
            )
            train(model, seed)
            model.collection.tables[0].remove(tf.range(50, dtype=tf.int64))  # some users
            assert publisher.publish().removed


@pytest.mark.shown_by("test_each_version_answers_as_an_export_with_all_rows")
def test_a_server_holds_no_external_rows(model, tmp_path):
    train(model, 0)
    whole = export_model(model, tmp_path / "whole")
    small = export_model(model, tmp_path / "small", external=EXTERNAL)
    assert small.rows == whole.rows - len(rows_of(model)) > 0
    assert set(small.signatures) == {"serving_default", "serving_default_ids"}
    assert set(small.answers["serving_default_ids"]) == {"user_ids", "item_ids", "place_ids"}
    none = export_model(model, tmp_path / "none", external="all")
    assert none.rows == 0
    assert none.signatures["serving_default"]["tag_rows"] == "string [null]"


@pytest.mark.shown_by("test_each_version_answers_as_an_export_with_all_rows")
def test_a_client_without_gmeta_asks_over_rest(model, tmp_path, redis_url):
    folder = tmp_path / "online"
    train(model, 0)
    Publisher(model, folder, export={"external": "all"}).publish()
    deliver(folder, [redis_url], say=str)
    tables = [*EXTERNAL, "tag"]
    inputs = {name: np.asarray(each)[:90].tolist() for name, each in requests().items()}
    with rest_server(folder) as port:
        server = f"http://127.0.0.1:{port}/v1/models/model"
        found = CLIENT.predict(server, client_of(redis_url), tables, inputs, "serving_default")
    given = {**ids_of(range(90)), "tags": tf.ragged.constant(inputs["tags"])}
    np.testing.assert_allclose(found, model(given), rtol=1e-5, atol=1e-5)


def test_a_request_with_other_ids_or_rows_is_refused(model, tmp_path):
    train(model, 0)
    base = export_model(model, tmp_path / "1", **options(model)).folder
    inputs = {name: each[:3] for name, each in requests().items()}
    ids = ask(base, "vectors_ids", inputs)
    value = encode_rows(np.ones((1, 4), np.float32), "float32", 1)[0]
    rows = {name.replace("_ids", "_rows"): np.array([b""] * len(each), object) for name, each in ids.items()}

    def changed(**changes):
        return ask(base, "vectors", {**inputs, **ids, **rows, **changes})

    assert changed()["known"].tolist() == [False] * 3
    found = changed(user_rows=np.array([value, b"", b""], object))
    assert found["user"][0].tolist() == [1.0] * 4
    assert found["known"].tolist() == [True, False, False]
    refused = {
        "lacks ids of": {"user_ids": ids["user_ids"] + 50},
        "twice": {"user_ids": ids["user_ids"][[0, 1, 1]]},
        "a value for each of user_ids": {"user_rows": rows["user_rows"][:2]},
        "24 a row": {"user_rows": np.array([value[:-4], b"", b""], object)},
        "must be rows of float32": {"user_rows": np.array([b"\2" + value[1:], b"", b""], object)},
    }
    for why, changes in refused.items():
        with pytest.raises(RuntimeError, match=why):
            changed(**changes)


def test_tables_that_can_not_be_external_are_refused(model, tmp_path):
    def export(match, *, signature=None, name="predict", external=EXTERNAL, **more):
        given = {name: Signature(signature or model, feature_inputs(FEATURES)), **more}
        with pytest.raises(ConfigError, match=match):
            export_model(model, tmp_path / "1", signatures=given, external=external)

    def in_a_loop(ids):
        def add(number, total):
            one = {**ids, "user": ids["user"][number : number + 1]}
            return number + 1, total + tf.reduce_sum(model.collection.lookup(one, insert=False).rows[0])

        # After an error within map_fn, TensorFlow leaves its variable scope changed for all later tests.
        return tf.while_loop(lambda number, _: number < tf.size(ids["user"]), add, (0, 0.0))[1]

    def by_rows(ids):
        score = tf.cast(tf.math.sign(model(ids, training=False)), tf.int64)
        return model({**ids, "item": tf.abs(score)}, training=False)

    export("'shop': it has", external=["shop"])
    export("must be 'all' or a list", external="user")
    export("'user' can't be external alone.* item. Name these too", external=["user"])
    export("inside a loop, a condition", signature=in_a_loop)
    export("which of its ids are read depends on rows", signature=by_rows)
    other = Signature(lambda ids: model(ids, training=False), feature_inputs(FEATURES))
    export("'predict_ids' is that of ids", predict_ids=other)
    shown = {"place_rows": tf.TensorSpec([None], tf.float32), **feature_inputs(FEATURES)}
    with pytest.raises(ConfigError, match="input 'place_rows' has the name"):
        export_model(
            model,
            tmp_path / "1",
            signatures={"p": Signature(model, shown)},
            external=["place"],
            text_ids=False,
        )
    collection = EmbeddingCollection([FeatureConfig("item", TableConfig("item", 8))])
    blocks = HSTU(blocks=1, heads=2, attention_dim=4, value_dim=4, max_length=6, bias_by_time=False)
    next_item = NextItemModel(collection, blocks, items=12, max_length=6)
    next_item({"item": tf.ragged.constant([[1, 2, 3]], dtype=tf.int64)})
    with pytest.raises(ConfigError, match="whole catalogue"):
        export_model(next_item, tmp_path / "1", external="all")


@pytest.mark.shown_by("test_each_version_answers_as_an_export_with_all_rows")
def test_a_server_adapts_by_rows_of_a_store(tmp_path, redis_url):
    features = [FeatureConfig(name, TableConfig(name, 3, initializer=NORMAL)) for name in ("user", "item")]
    collection = EmbeddingCollection(features, optimizer=optimizers.SGD(0.1))
    model = MetaModel(collection, MLP({"fc": 4, "out": 1}), inner=InnerLoop(steps=1, learning_rate=0.1))
    model.compile("adam", "mse")
    label = np.array([5.0, 1.0, 3.0], np.float32)
    task = {name: np.arange(3) for name in ("user", "item")}
    model.adapt(task, label)
    collection.lookup({name: tf.constant(ids) for name, ids in task.items()}, insert=True)
    base = Publisher(model, tmp_path / "online", export={"external": "all"}).publish().path
    deliver(tmp_path / "online", [redis_url], say=str)
    right = export_model(model, tmp_path / "right").folder
    rows = client_of(redis_url)

    def both(name, inputs):
        ids = ask(base, f"{name}_ids", inputs)
        found = rows.get({key.removesuffix("_ids"): each.tolist() for key, each in ids.items()})
        values = {f"{key}_rows": np.array(each, object) for key, each in found.items()}
        assert all(values["user_rows"])
        return ask(base, name, {**inputs, **ids, **values}), ask(right, name, inputs)

    learned, expected = both("adapt", {**task, "label": label})
    assert learned["weights_bytes"].item() == expected["weights_bytes"].item()
    check(*both("predict_with", {**task, **learned}))
