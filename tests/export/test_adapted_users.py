"""A store of users has for each the weights that its last samples adapt to, whatever ends a process."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError, DataError, NotFiniteError, StoreUnavailableError
from gmeta.export import export_model
from gmeta.export.adapted_users import AdaptedUsers, MemoryUsers, RedisUsers
from gmeta.initializers import Uniform
from gmeta.layers import MLP, EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.meta import InnerLoop
from gmeta.models import MetaModel
from gmeta.models.meta.fast_weights import FastWeights
from support.row_stores import free_port, redis_cluster, redis_server

KEEP = 4


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A model, and its signatures: of a text, a list of ids and a number."""
    features = [
        FeatureConfig("city", TableConfig("city", 3, initializer=Uniform(-1, 1)), hash=True),
        FeatureConfig("tags", TableConfig("tags", 3, initializer=Uniform(-1, 1)), combiner="mean"),
    ]
    model = MetaModel(EmbeddingCollection(features), MLP({"fc": 4, "out": 1}), inner=InnerLoop(adapt="all"))
    model.compile("adam", "mse")
    folder = tmp_path_factory.mktemp("served") / "1"
    export_model(model, folder)
    return model, tf.saved_model.load(str(folder)).signatures


@pytest.fixture(params=["memory", "redis", "cluster"])
def store(request):
    if request.param == "memory":
        yield MemoryUsers()
    elif request.param == "redis":
        with redis_server() as port:
            yield RedisUsers(f"redis://localhost:{port}/users")
    else:
        with redis_cluster() as ports:
            yield RedisUsers(f"redis://{','.join(f'127.0.0.1:{port}' for port in ports)}/users")


def events(users, seed=0):
    """Samples of users, as columns and as a list."""
    random = np.random.default_rng(seed)
    cities = np.array(["Kyiv", "Oslo", "São Paulo"])[random.integers(0, 3, len(users))]
    tags = [random.integers(0, 9, random.integers(0, 4)).tolist() for _ in users]
    labels = random.integers(0, 5, len(users)).astype(np.float32)
    columns = {"city": cities, "tags": tf.ragged.constant(tags, tf.int64, ragged_rank=1)}
    return columns, labels, [*zip(users, cities, tags, labels, strict=True)]


def assert_adapted(model, users, log):
    """Check that each user of a log has the weights of the model's own adaptation."""
    for user in {each[0] for each in log}:
        own = [each for each in log if each[0] == user][-KEEP:]
        x = {
            "city": tf.constant([each[1] for each in own]),
            "tags": tf.ragged.constant([each[2] for each in own], tf.int64, ragged_rank=1),
        }
        expected = model.adapt(x, np.array([each[3] for each in own], np.float32))
        (data,) = users.weights([user])
        found = FastWeights.from_bytes(data)
        assert found.metadata() == expected.metadata()
        for name, delta in expected.deltas.items():
            np.testing.assert_allclose(found.deltas[name], delta, rtol=1e-4, atol=1e-5)
        for name, (keys, deltas) in expected.rows.items():
            np.testing.assert_array_equal(found.rows[name].keys, keys)
            np.testing.assert_allclose(found.rows[name].deltas, deltas, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("store", ["memory", "redis", "cluster"], indirect=True)
@pytest.mark.shown_by(case="redis")
def test_users_have_the_weights_of_their_last_samples(served, store):
    model, signatures = served
    users = AdaptedUsers(signatures["adapt_many"], store, keep=KEEP, at_once=2)
    log = []
    for seed in range(3):
        names = np.random.default_rng(seed).choice(["ann", "b:o}b", "eve", "7"], 6).tolist()
        columns, labels, listed = events(names, seed)
        log += listed
        users.observe([7 if name == "7" else name for name in names], columns, labels)
        changed = len({*names})
        first = users.refresh(most=1)
        assert first.adapted == 1
        assert users.refresh().adapted == changed - 1
        assert users.refresh()[:2] == (0, ())
        assert_adapted(model, users, log)
    again = AdaptedUsers(signatures["adapt_many"], store, keep=KEEP)
    again.readapt()
    assert again.refresh().adapted == len({each[0] for each in log})
    again.drop(["ann", 7])
    assert again.weights(["ann", "7"]) == [None, None]
    again.readapt()
    assert again.refresh().adapted == len({each[0] for each in log} - {"ann", "7"})


class EndsError(Exception):
    """Stands for a kill."""


@settings(max_examples=20, deadline=None)
@given(ends=st.integers(0, 12), users=st.lists(st.sampled_from("abc"), min_size=1, max_size=5))
def test_a_process_that_ends_anywhere_leaves_no_user_behind(served, ends, users):
    """The caller observes events again unless `observe` returned, as a resumed stream does."""
    model, signatures = served
    store, calls = MemoryUsers(), []

    class Ending(MemoryUsers):
        def read(self, kind, names):
            self._count()
            return store.read(kind, names)

        def write(self, kind, values):
            self._count()
            store.write(kind, values)

        def mark(self, names, changed):
            self._count()
            store.mark(names, changed)

        def changed(self, most):
            return store.changed(most)

        def _count(self):
            calls.append(None)
            if len(calls) == ends:
                raise EndsError

    columns, labels, log = events(users)
    done = False
    try:
        ending = AdaptedUsers(signatures["adapt_many"], Ending(), keep=KEEP, at_once=1)
        ending.observe(users, columns, labels)
        done = True
        ending.refresh()
    except EndsError:
        pass
    after = AdaptedUsers(signatures["adapt_many"], store, keep=KEEP)
    if done:
        after.refresh()
        assert_adapted(model, after, log)
    else:
        assert store.read("samples", users) == [None] * len(users)
        assert after.refresh()[:2] == (0, ())
        assert after.weights(users) == [None] * len(users)


def test_a_user_that_diverges_keeps_its_weights_and_is_named(served):
    _, signatures = served
    users = AdaptedUsers(signatures["adapt_many"], MemoryUsers(), keep=1)
    columns, labels, _ = events(["ann", "bob"])
    users.observe(["ann", "bob"], columns, labels)
    users.refresh()
    before = users.weights(["ann", "bob"])
    users.observe(["ann", "bob"], columns, np.float32([1e30, 2]))
    assert users.refresh()[:2] == (1, ("ann",))
    after = users.weights(["ann", "bob"])
    assert after[0] == before[0]
    assert after[1] != before[1]
    assert users.refresh()[:2] == (0, ())


def test_a_user_whose_samples_fail_is_named_and_others_are_adapted(served):
    users = AdaptedUsers(served[1]["adapt_many"], store := MemoryUsers())
    columns, labels, log = events(["ann", "bob", "eve", "joe", "7"])
    users.observe([each[0] for each in log], columns, labels)
    store.write("samples", {"eve": b'{"city": ["Kyiv"], "tags": [["x"]], "label": [1.0]}', "joe": b"{"})
    done = users.refresh()
    assert (done.adapted, done.diverged, sorted(done.failed)) == (3, (), ["eve", "joe"])
    assert "joe" in done.failed["joe"]
    assert [data is None for data in users.weights(["ann", "bob", "eve", "joe", 7])] == [0, 0, 1, 1, 0]
    assert users.refresh() == (0, (), {})
    users.drop(["joe"])
    users.observe(["joe"], {name: column[:1] for name, column in columns.items()}, labels[:1])
    assert users.refresh().adapted == 1


@pytest.mark.parametrize("bad", ["ann", b"ann", [["ann"]], [1.5], [None], [True]])
def test_users_that_are_no_integers_or_texts_are_refused(served, bad):
    users = AdaptedUsers(served[1]["adapt_many"], MemoryUsers())
    columns, labels, _ = events(["ann"])
    for call in (users.weights, users.drop, lambda names: users.observe(names, columns, labels)):
        with pytest.raises(ConfigError, match="users must be a vector of integers or texts"):
            call(bad)


def test_what_does_not_fit_is_refused(served):
    _, signatures = served
    with pytest.raises(ConfigError, match=r"needs the signature adapt_many .* takes .*weights_bytes"):
        AdaptedUsers(signatures["predict_with"], MemoryUsers())
    with pytest.raises(ConfigError, match="keep must be a whole number from 1 on, got 0"):
        AdaptedUsers(signatures["adapt_many"], MemoryUsers(), keep=0)
    store = MemoryUsers()
    users = AdaptedUsers(signatures["adapt_many"], store)
    columns, labels, _ = events(["ann", "bob"])
    for changed, given_labels, error, told in (
        ({"town": columns["city"]}, labels, ConfigError, "samples have the columns city, tags, town, label"),
        ({"city": ["Kyiv"]}, labels, ConfigError, r"city of 2 samples has the shape \(1,\)"),
        ({"city": [3, 4]}, labels, ConfigError, "city is int64, and the model takes string"),
        ({"tags": [[0.5], [1.0]]}, labels, ConfigError, "tags is float64, and the model takes int64"),
        ({}, [1.0, np.nan], NotFiniteError, "label holds NaN or infinity"),
        ({}, [[1.0], [2.0]], ConfigError, r"label of 2 samples has the shape \(2, 1\)"),
    ):
        with pytest.raises(error, match=told):
            users.observe(["ann", "bob"], {**columns, **changed}, given_labels)
    assert users.refresh()[:2] == (0, ())
    users.observe(["ann", "bob"], {**columns, "tags": [[1, -1], [-1, 2]]}, labels)
    assert b'"tags":[[1]]' in store.read("samples", ["ann"])[0]
    store.write("samples", {"ann": b'{"city":["Kyiv"],"label":[1.0]}', "bob": b"{"})
    with pytest.raises(DataError, match="samples of user ann have the columns city, label, and the model"):
        users.observe(["ann"], {name: column[:1] for name, column in columns.items()}, labels[:1])
    with pytest.raises(DataError, match="samples of user bob are damaged"):
        users.observe(["bob"], {name: column[:1] for name, column in columns.items()}, labels[:1])
    away = AdaptedUsers(signatures["adapt_many"], RedisUsers(f"redis://localhost:{free_port()}/users"))
    with pytest.raises(StoreUnavailableError, match="can't be reached"):
        away.observe(["ann", "bob"], columns, labels)
