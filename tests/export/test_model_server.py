"""`gmeta serve` answers TensorFlow Serving's gRPC interface, whatever clients and folders do."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress

import grpc
import numpy as np
import pytest
import tensorflow as tf
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tensorflow.core.framework import tensor_pb2
from tensorflow.core.protobuf import meta_graph_pb2

from gmeta.cli.publish import serve_command
from gmeta.core.errors import ConfigError, GmetaError
from gmeta.export import Publisher, export_model
from gmeta.export.delivery import deliver
from gmeta.export.model_server import LoadedModel, ModelServer, RefusedError
from gmeta.export.server_files import WARM_UP
from gmeta.export.servers import array_of, messages, put_array, server_at
from gmeta.initializers import Constant
from gmeta.layers import MLP, EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.meta import InnerLoop
from gmeta.models import MetaModel
from gmeta.models.meta.fast_weights import FastWeights
from support.serving import PREDICT, predict_messages

RATED = {"user": np.array([1, 1, 1]), "item": np.array([3, 4, 5])}
LABEL = np.float32([1, 0, 1])
ASKED = {"user": np.array([1, 2]), "item": np.array([5, 900])}


def made():
    features = [
        FeatureConfig(name, TableConfig(name, 3, initializer=Constant(0.5))) for name in ("user", "item")
    ]
    network, inner = MLP({"hidden": 4, "head": 1}), InnerLoop("anil", steps=1)
    model = MetaModel(EmbeddingCollection(features), network, inner=inner)
    model.compile()
    model.adapt(RATED, LABEL)
    return model


@pytest.fixture(scope="module")
def model():
    return made()


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "taste"
    export_model(model, folder / "1")
    return folder


@contextmanager
def serving(folder, **settings):
    """A server in a thread."""
    settings.setdefault("port", 0)
    loop, told = asyncio.new_event_loop(), []
    server = ModelServer(folder, poll=0.05, say=told.append, **settings)
    server.told = told
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result(120)
        yield server
        asyncio.run_coroutine_threadsafe(server.stop(5), loop).result(30)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)


@pytest.fixture(scope="module")
def server(exported):
    with serving(exported) as found:
        yield found


def encoded(signature, inputs, name="taste", **spec):
    request = predict_messages()["PredictRequest"]()
    request.model_spec.name, request.model_spec.signature_name = name, signature
    if "version" in spec:
        request.model_spec.version.value = spec["version"]
    for key, value in inputs.items():
        request.inputs[key].CopyFrom(tf.make_tensor_proto(value))
    return request


def sent(port, method, data, timeout=60):
    with grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
        return channel.unary_unary(method)(data, timeout=timeout, wait_for_ready=True)


def ask(port, signature, inputs, **spec):
    data = sent(port, PREDICT, encoded(signature, inputs, **spec).SerializeToString())
    response = predict_messages()["PredictResponse"].FromString(data)
    return {name: tf.make_ndarray(value) for name, value in response.outputs.items()}


def refusal(call):
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert "\n" not in caught.value.details()
    return caught.value.code().name, caught.value.details()


def test_a_user_adapts_and_is_served_as_in_python(model, server):
    (weights,) = ask(server.port, "adapt", {**RATED, "label": LABEL}).values()
    fast = FastWeights.from_bytes(weights.item())
    expected = model.predict(ASKED, weights=fast)
    found = ask(server.port, "predict_with", {**ASKED, "weights_bytes": weights.item()})["rating"]
    np.testing.assert_allclose(found, np.reshape(expected, -1), rtol=1e-5)
    shared = ask(server.port, "predict", ASKED)["rating"]
    assert np.abs(shared - found).max() > 1e-4
    np.testing.assert_array_equal(ask(server.port, "", ASKED)["rating"], shared)  # the default signature


def test_numbers_may_come_as_bytes_and_equal_ones_once(server):
    whole = {"user": np.array([7, 7, 7]), "item": np.array([3, 4, 5])}
    request = encoded("predict", whole)
    assert request.inputs["item"].tensor_content
    del request.inputs["user"].int64_val[:]
    request.inputs["user"].tensor_content = b""
    request.inputs["user"].int64_val.append(7)
    data = sent(server.port, PREDICT, request.SerializeToString())
    found = predict_messages()["PredictResponse"].FromString(data).outputs["rating"]
    np.testing.assert_array_equal(tf.make_ndarray(found), ask(server.port, "predict", whole)["rating"])
    assert list(found.float_val)  # in the field where clients of TensorFlow Serving look


REFUSED = {
    "no signature": (lambda: ("nope", ASKED), {}, "NOT_FOUND", "there are adapt, adapt_many, predict"),
    "a model": (lambda: ("predict", ASKED), {"name": "x"}, "NOT_FOUND", "no model 'x': 'taste' is served"),
    "a version": (lambda: ("predict", ASKED), {"version": 9}, "NOT_FOUND", "version 9 isn't served: 1 is"),
    "a dtype": (
        lambda: ("predict", {**ASKED, "user": np.float32([1, 2])}),
        *({}, "INVALID_ARGUMENT", "input 'user' of predict must be int64 (n,), but it is float32"),
    ),
    "a shape": (
        lambda: ("predict", {**ASKED, "user": [[1, 2]]}),
        *({}, "INVALID_ARGUMENT", "input 'user' of predict must be int64 (n,), but it is int32"),
    ),
    "a rank": (
        lambda: ("predict", {**ASKED, "user": np.array([[1, 2]])}),
        *({}, "INVALID_ARGUMENT", "input 'user' of predict must be int64 (n,), but its shape is (1, 2)"),
    ),
    "a missing one": (lambda: ("predict", {"user": [1]}), {}, "INVALID_ARGUMENT", "it is missing"),
    "another input": (
        lambda: ("predict", {**ASKED, "year": [1]}),
        *({}, "INVALID_ARGUMENT", "predict has no input 'year'; it takes item, user"),
    ),
    "unequal": (
        lambda: ("predict", {**ASKED, "user": np.array([1])}),
        *({}, "INVALID_ARGUMENT", "predict: inputs must have equal numbers of samples, but have"),
    ),
    "cut bytes": (
        lambda: ("predict_with", {**ASKED, "weights_bytes": b"abc"}),
        *({}, "INVALID_ARGUMENT", "predict_with: weights_bytes is shorter than a header"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_request_learns_what_is_wrong(case, server):
    make, spec, code, told = REFUSED[case]
    found = refusal(lambda: ask(server.port, *make(), **spec))
    assert found[0] == code
    assert told in found[1]


def test_what_is_no_message_is_refused_and_the_server_lives_on(server):
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(range(256)) * 40)
    request = encoded("predict", ASKED).SerializeToString()
    code, told = refusal(lambda: sent(server.port, PREDICT, request[:-3]))
    assert (code, told[: told.index(":")]) == (
        "INVALID_ARGUMENT",
        f"{len(request) - 3:,} bytes aren't a PredictRequest",
    )
    assert ask(server.port, "predict", ASKED)


def test_a_shape_of_more_values_than_memory_is_refused(server):
    request = encoded("predict", ASKED)
    request.inputs["user"].CopyFrom(tf.make_tensor_proto(np.int64([1])))
    request.inputs["user"].tensor_shape.dim[0].size = 1 << 50
    found = refusal(lambda: sent(server.port, PREDICT, request.SerializeToString()))
    assert found[0] == "INVALID_ARGUMENT"
    assert "1 values don't fill shape [1125899906842624]" in found[1]


def test_a_request_above_the_limit_of_bytes_is_refused(exported):
    with serving(exported, max_bytes=1000) as small:
        many = {name: np.arange(1000) for name in ASKED}
        code, told = refusal(lambda: ask(small.port, "predict", many))
        assert code == "RESOURCE_EXHAUSTED"
        assert "larger than max" in told
        assert ask(small.port, "predict", ASKED)


def test_the_signatures_are_described(server):
    request = messages()["GetModelMetadataRequest"](metadata_field=["signature_def"])
    request.model_spec.name = "taste"
    method = "/tensorflow.serving.PredictionService/GetModelMetadata"
    data = sent(server.port, method, request.SerializeToString())
    response = messages()["GetModelMetadataResponse"].FromString(data)
    assert response.model_spec.version.value == 1
    (field,) = response.metadata
    found = messages()["SignatureDefMap"].FromString(field.value.value)
    definitions = {e.key: meta_graph_pb2.SignatureDef.FromString(e.value) for e in found.signature_def}
    assert {*definitions} == {"serving_default", "predict", "adapt", "adapt_many", "predict_with"}
    assert definitions["adapt"].inputs["label"].dtype == tf.float32.as_datatype_enum
    code, _ = refusal(lambda: sent(server.port, method, b""))
    assert code == "INVALID_ARGUMENT"


def states(port):
    data = sent(port, "/tensorflow.serving.ModelService/GetModelStatus", b"")
    found = messages()["GetModelStatusResponse"].FromString(data)
    return {each.version: each.state for each in found.model_version_status}


def wait_for(condition, seconds=60):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_new_version_serves_once_it_is_warm_and_a_broken_one_never(exported, tmp_path):
    folder = tmp_path / "taste"
    shutil.copytree(exported / "1", folder / "1")
    with serving(folder) as server:
        assert states(server.port) == {1: 30}
        shutil.copytree(folder / "1", tmp_path / "part")
        (tmp_path / "part" / WARM_UP).write_bytes(b"no record of TFRecord")
        (tmp_path / "part").rename(folder / "2")
        wait_for(lambda: 2 in states(server.port))
        assert states(server.port) == {1: 30, 2: 50}
        assert "version 2 isn't served, 1 still is" in server.told[-1]
        ask(server.port, "predict", ASKED, version=1)
        shutil.copytree(folder / "1", tmp_path / "part")
        (tmp_path / "part").rename(folder / "3")
        wait_for(lambda: server.told[-1] == "taste: version 3 serves; 5 warm-up requests answered")
        assert states(server.port) == {3: 30}
        assert ask(server.port, "predict", ASKED, version=3)
        shutil.rmtree(folder / "3")  # back to the newest that is there, which is broken
        time.sleep(0.2)
        assert ask(server.port, "predict", ASKED, version=3)


class Gate:
    """Lets requests of a server begin, and wait until it is opened."""

    def __init__(self, server, monkeypatch):
        self.opened, self.began, self.inner = threading.Event(), [], server._model.answer
        monkeypatch.setattr(server._model, "answer", self.answer)

    def answer(self, request):
        self.began.append(time.monotonic())
        assert self.opened.wait(60)
        return self.inner(request)


def test_a_full_queue_refuses_and_a_passed_deadline_is_not_begun(exported, monkeypatch):
    with serving(exported, workers=1, max_queue=2) as server:
        gate = Gate(server, monkeypatch)
        data = encoded("predict", ASKED).SerializeToString()
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            call = channel.unary_unary(PREDICT)
            first = call.future(data)
            wait_for(lambda: gate.began)
            late, patient = call.future(data, timeout=0.3), call.future(data)
            wait_for(lambda: server._waiting == 3)
            code, told = refusal(lambda: call(data))
            assert (code, told.split(" requests")[0]) == ("RESOURCE_EXHAUSTED", "3")
            health = sent(server.port, "/grpc.health.v1.Health/Check", b"")  # isn't behind the queue
            assert messages()["HealthCheckResponse"].FromString(health).status == 1
            assert refusal(late.result)[0] == "DEADLINE_EXCEEDED"
            gate.opened.set()
            assert first.result(60)
            assert patient.result(60)
        wait_for(lambda: server._waiting == 0)
        assert len(gate.began) == 2


@contextmanager
def one_running(exported, monkeypatch):
    """A request that runs until its gate opens, and a function that stops the server."""
    with serving(exported) as server:
        gate, loop = Gate(server, monkeypatch), server._watching.get_loop()
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            call = channel.unary_unary(PREDICT).future(encoded("predict", ASKED).SerializeToString())
            wait_for(lambda: gate.began)
            yield (
                gate,
                call,
                lambda grace: asyncio.run_coroutine_threadsafe(server.stop(grace), loop).result(60),
            )


def test_the_end_waits_for_requests(exported, monkeypatch):
    with one_running(exported, monkeypatch) as (gate, call, stop):
        threading.Timer(0.5, gate.opened.set).start()
        assert stop(30) == 0
        assert call.result(10)


def test_the_end_says_how_many_requests_it_leaves(exported, monkeypatch):
    with one_running(exported, monkeypatch) as (gate, call, stop):
        assert stop(0.1) == 1
        assert refusal(call.result)[0] in ("UNAVAILABLE", "CANCELLED")
        gate.opened.set()


@pytest.mark.parametrize("size", ["0", "2GiB"])
def test_a_limit_of_bytes_that_grpc_has_not_is_refused(size, tmp_path):
    found = CliRunner().invoke(serve_command, [str(tmp_path), "--max-bytes", size])
    assert isinstance(found.exception, ConfigError)
    assert "--max-bytes must be" in str(found.exception)


def test_deltas_reach_it(tmp_path):
    model = made()
    publisher = Publisher(model, tmp_path / "online")
    publisher.publish()
    with serving(tmp_path / "online" / "model") as server:
        url = f"grpc://127.0.0.1:{server.port}/model"
        before, version = ask(server.port, "predict", ASKED, name="model")["rating"], server_at(url).version()
        for weight in model.trainable_weights:
            weight.assign_add(tf.ones_like(weight))
        publisher.publish()
        assert deliver(tmp_path / "online", [url])[url] > version
        after = ask(server.port, "predict", ASKED, name="model")["rating"]
        np.testing.assert_allclose(after, np.reshape(model.predict(ASKED), -1), rtol=1e-5)
        assert np.abs(after - before).max() > 0.1
    publisher.close()


def test_a_session_closes_when_its_last_request_ends(exported):
    loaded = LoadedModel(exported / "1", 1, "taste")
    with loaded.running():
        loaded.retire()
        request = messages()["PredictRequest"].FromString(encoded("predict", ASKED).SerializeToString())
        assert loaded.answer(request).outputs
    with pytest.raises((RefusedError, RuntimeError)):
        loaded.answer(request)


@pytest.mark.parametrize(
    ("name", "told"),
    [("absent", "isn't a folder"), ("empty", "has neither saved_model.pb nor a version")],
)
def test_a_wrong_folder_is_an_error(name, told, tmp_path):
    (tmp_path / "empty" / "logs").mkdir(parents=True)
    with pytest.raises(ConfigError, match=told):
        ModelServer(tmp_path / name)


def test_a_folder_that_holds_no_model_is_an_error(tmp_path):
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "saved_model.pb").write_bytes(b"\x08")
    with pytest.raises(GmetaError, match="can't be loaded"):
        ModelServer(tmp_path, port=0).load_newest()


@contextmanager
def process(folder, port):
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    words = [sys.executable, "-m", "gmeta", "serve", folder, "--port", str(port), "--workers", "1"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, env=environment) as found:
        yield found
        with suppress(ProcessLookupError):
            found.kill()


@pytest.mark.shown_by("test_the_end_waits_for_requests")
def test_the_command_restarts_after_a_kill_and_ends_at_a_signal(exported):
    """In processes of its own: nothing of it needs the process that exported the model."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with process(exported, port) as first:
        assert ask(port, "predict", ASKED)
        with process(exported, port) as second:
            told = second.communicate(timeout=120)[1].decode()
            assert second.returncode == 2
            assert f"gmeta: error: can't listen at 127.0.0.1:{port}" in told
        first.kill()
        first.wait(30)
    with process(exported, port) as again:
        assert ask(port, "predict", ASKED)
        again.send_signal(signal.SIGTERM)
        told = again.communicate(timeout=60)[1].decode()
        assert again.returncode == 0, told
        assert told.splitlines()[-1] == "SIGTERM: ends when the requests that are here are answered"


KINDS = {np.float32: 1, np.float64: 2, np.int32: 3, np.uint8: 4, np.int64: 9, np.bool_: 10, np.uint64: 23}


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_arrays_are_read_as_they_were_written(data):
    kind = data.draw(st.sampled_from([*KINDS]))
    array = data.draw(hnp.arrays(kind, hnp.array_shapes(min_dims=0, min_side=0)))
    tensor = messages()["Tensor"]()
    put_array(tensor, array, KINDS[kind])
    read = tf.make_ndarray(tensor_pb2.TensorProto.FromString(tensor.SerializeToString()))
    for found in (array_of(tensor, 0), read):
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from([*KINDS.values(), 7, 0, 14, 99]),
    st.lists(st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(0, 4), max_size=3),
    st.binary(max_size=20),
    st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=4),
)
def test_any_message_is_an_array_or_refused(dtype, shape, content, values):
    tensor = messages()["Tensor"](dtype=dtype, tensor_content=content, int_val=values)
    for size in shape:
        tensor.tensor_shape.dim.add(size=size)
    with suppress(ValueError, OverflowError):
        found = array_of(tensor, 1 << 10)
        assert [*found.shape] == shape
        assert found.nbytes <= 1 << 10
