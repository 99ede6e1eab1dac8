"""Deltas reach servers over REST and gRPC, whatever other servers do and answer."""

import base64
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import grpc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError, DataError, GmetaError
from gmeta.export.delivery import deliver
from gmeta.export.model_deltas import Delta, Layout, TableChange
from gmeta.export.published_folder import DELTAS, STREAM
from gmeta.export.servers import StateCache, array_of, messages, server_at
from support.serving import grpc_service, predict_messages

LAYOUT = Layout("a stream", {"id": 3}, {})
INT64, STRING = 9, 7


def encoded(version):
    ids = np.arange(50_000)
    rows = np.random.default_rng(version).normal(size=(len(ids), 3)).astype(np.float32)
    return Delta(version - 1, version, {"id": TableChange(ids, rows, ids[:0])}, {}).encode(LAYOUT)


def publish(folder, version):
    part = folder / "part"
    part.write_bytes(encoded(version))
    part.rename(folder / DELTAS / f"{version}.delta")


@pytest.fixture
def folder(tmp_path):
    """The deltas to versions 2 and 3."""
    (tmp_path / STREAM).write_text(LAYOUT.to_json())
    (tmp_path / DELTAS).mkdir()
    for version in (2, 3):
        publish(tmp_path, version)
    return tmp_path


class Replica:
    """What a server does with deltas, without rows."""

    def __init__(self):
        self.version, self.reached, self.lock = 1, {}, threading.Lock()

    def answer(self, signature, delta=None):
        assert (signature, delta is None) in {("delta_version", True), ("apply_delta", False)}
        if delta is not None:
            change = Delta.decode(delta, LAYOUT, "what was sent")
            with self.lock:
                assert change.after == self.version or change.version <= self.version
                self.version = max(change.version, self.version)
            self.reached.setdefault(self.version, threading.Event()).set()
        return self.version

    def over_rest(self, body):
        asked = json.loads(body)
        inputs = {name: base64.b64decode(value["b64"]) for name, value in asked.pop("inputs").items()}
        assert set(inputs) <= {"delta_bytes"}
        version = self.answer(asked.pop("signature_name"), inputs.get("delta_bytes"))
        assert not asked
        return http(json.dumps({"outputs": version}).encode())

    def over_grpc(self, data):
        request = predict_messages()["PredictRequest"].FromString(data)
        assert request.model_spec.name == "m"
        delta = None
        if request.inputs:
            tensor = request.inputs["delta_bytes"]
            assert (tensor.dtype, len(tensor.tensor_shape.dim)) == (STRING, 0)
            (delta,) = tensor.string_val
        return predicted(self.answer(request.model_spec.signature_name, delta))

    def wait(self, version):
        assert self.reached.setdefault(version, threading.Event()).wait(60)


def http(body, status="200 OK", head=""):
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{head}\r\n".encode() + body


def predicted(version, dtype=INT64, **names):
    response = predict_messages()["PredictResponse"]()
    tensor = response.outputs["delta_version"]
    tensor.dtype = dtype
    tensor.int64_val.append(version)
    return response


@contextmanager
def tcp_server(serve, trusted=None):
    """Call ``serve(connection)`` for each connection, in a thread; yield the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def one(connection):
            with connection:
                serve(connection)

        def listen():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:  # closed
                    return
                try:
                    connection = connection if trusted is None else trusted.wrap_socket(connection, True)
                except OSError:
                    continue
                threading.Thread(target=one, args=(connection,), daemon=True).start()

        threading.Thread(target=listen, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


@contextmanager
def rest(answer, trusted=None):
    """Answer POSTs: ``answer(body)`` returns all bytes of the answer; yield the model's address."""

    def serve(connection):
        received = b""
        while b"\r\n\r\n" not in received:
            received += connection.recv(1 << 16)
        head, _, body = received.partition(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length:")[2].split()[0])
        while len(body) < size:
            body += connection.recv(1 << 20)
        assert len(body) == size
        with suppress(OSError):  # the client has read enough
            connection.sendall(answer(body))

    with tcp_server(serve, trusted) as port:
        yield f"http{'' if trusted is None else 's'}://localhost:{port}/v1/models/m"


@contextmanager
def over_grpc(answer, credentials=None):
    def encoded_answer(data):
        found = answer(data)
        return found if isinstance(found, bytes) else found.SerializeToString()

    with grpc_service(encoded_answer, credentials) as port:
        yield f"grpc{'' if credentials is None else 's'}://localhost:{port}/m"


def test_both_interfaces_take_deltas_byte_for_byte(folder):
    first, second = Replica(), Replica()
    with rest(first.over_rest) as one, over_grpc(second.over_grpc) as two:
        assert deliver(folder, [one, two, f"{two}/versions/7"], say=str) == {
            one: 3,
            two: 3,
            f"{two}/versions/7": 3,
        }
    assert first.version == second.version == 3


@settings(max_examples=30, deadline=None)
@given(st.binary(max_size=100), st.sampled_from([0, 1, (3 << 16) - 51, 3 << 16, 1_000_000]))
def test_a_request_is_the_json_of_its_inputs(data, padding):
    found = []

    def answer(body):
        found.append(json.loads(body))
        return http(b'{"outputs": 5}')

    delta = data + bytes(padding)
    with rest(answer) as url:
        assert server_at(url).apply(delta) == 5
    expected = {"delta_bytes": {"b64": base64.b64encode(delta).decode()}}
    assert found == [{"signature_name": "apply_delta", "inputs": expected}]


def test_a_version_of_a_model_is_named_over_grpc():
    found = []

    def answer(data):
        found.append(predict_messages()["PredictRequest"].FromString(data).model_spec)
        return predicted(4)

    with over_grpc(answer) as url:
        assert server_at(f"{url}/versions/12").version() == 4
        assert server_at(f"{url}/").version() == 4
    assert [spec.version.value for spec in found] == [12, 0]
    assert [spec.HasField("version") for spec in found] == [True, False]
    assert {(spec.name, spec.signature_name) for spec in found} == {("m", "delta_version")}


ENDLESS = b"HTTP/1.1 200 OK\r\n\r\n" + b" " * (64 << 20)
REST_ANSWERS = {
    "redirects to http://elsewhere/; name": http(b"", "302 Found", "Location: http://elsewhere/\r\n"),
    "redirects to http://other/; name": http(b"", "307 Moved", "Location: http://other/\r\n"),
    r"answers 404 to delta_version: no \[31mmodel m$": http(b"no \x1b[31mmodel\nm\r\n", "404 Not Found"),
    "answers 500 to delta_version: $": b"HTTP/1.1 500 x\r\nContent-Length: 900\r\n\r\n",
    "can't be reached: SSH": b"SSH-2.0-OpenSSH_9.2\r\n",
    "can't be reached": b"",
    "than a version: .*Expecting value": http(b"<html>"),
    "than a version: the answer must be an object": http(b"[3]"),
    "than a version: it has no 'outputs'": http(b'{"predictions": 3}'),
    "than a version: outputs must be a whole number .*got '3'": http(b'{"outputs": "3"}'),
    "than a version: outputs .*got True": http(b'{"outputs": true}'),
    "than a version: outputs .*got 3.5": http(b'{"outputs": 3.5}'),
    "than a version: outputs .*got -1": http(b'{"outputs": -1}'),
    "than a version: outputs .*got 9223372036854775808": http(b'{"outputs": 9223372036854775808}'),
    "than a version: its values are nested": http(b"[" * 60_000),
    "than a version: more than 65,536 bytes": ENDLESS,
    "than a version: .*codec can't decode": http(b"\xff\xfe\xfd\xfc\xfb"),
}


@pytest.mark.parametrize("reason", [*REST_ANSWERS])
def test_what_is_no_version_over_rest_is_an_error(reason):
    with (
        rest(lambda _: REST_ANSWERS[reason]) as url,
        pytest.raises(GmetaError, match=f"(?s)^{url} .*{reason}"),
    ):
        server_at(url).version()


def shaped(*sizes):
    response = predicted(3)
    for size in sizes:
        response.outputs["delta_version"].tensor_shape.dim.add(size=size)
    return response


def content(data):
    response = predicted(3)
    response.outputs["delta_version"].ClearField("int64_val")
    response.outputs["delta_version"].tensor_content = data
    return response


def two_outputs():
    response = predicted(3)
    response.outputs["other"].CopyFrom(response.outputs["delta_version"])
    return response


GRPC_ANSWERS = {
    "than a version: Error parsing": b"\xff" * 9,
    "than a version: dtype 1, 0 dim": predicted(3, dtype=1),
    "than a version: dtype 9, 2 dim": shaped(1 << 40, 1 << 20),
    "than a version: a version must .*got -2": predicted(-2),
    "than a version: too many values": two_outputs(),
    "than a version: not enough values": b"",
    "than a version: unpack requires a buffer of 8 bytes": content(b"\5" + bytes(8)),
    "answers RESOURCE_EXHAUSTED to delta_version: .*larger than max": b" " * (8 << 20),
}


@pytest.mark.parametrize("reason", [*GRPC_ANSWERS])
def test_what_is_no_version_over_grpc_is_an_error(reason):
    with (
        over_grpc(lambda _: GRPC_ANSWERS[reason]) as url,
        pytest.raises(GmetaError, match=f"^{url} .*{reason}"),
    ):
        server_at(url).version()


def test_a_repeated_text_counts_with_all_its_bytes():
    tensor = messages()["Tensor"](dtype=7, string_val=[b"x" * 100])
    tensor.tensor_shape.dim.add(size=10)
    assert array_of(tensor, 2000).tolist() == [b"x" * 100] * 10
    with pytest.raises(ValueError, match="1 values don't fill shape"):
        array_of(tensor, 1000)


@pytest.mark.parametrize("state", ["text", None, np.array([b"state"], object), bytearray(b"state")])
def test_a_cache_takes_bytes_alone(state):
    with pytest.raises(ConfigError, match="a state must be bytes, got"):
        StateCache(100).put("ann", state)


def test_versions_arrive_in_either_field_of_a_tensor():
    with over_grpc(lambda _: content((1 << 40).to_bytes(8, "little"))) as url:
        assert server_at(url).version() == 1 << 40


def test_grpc_servers_that_refuse_or_are_not_there_are_named():
    def refuse(data):
        raise ValueError("no \x1b[1mmodel")

    with (
        over_grpc(refuse) as url,
        pytest.raises(
            GmetaError,
            match=r"^grpc\S+/m answers INVALID_ARGUMENT to delta_version: ValueError: no \[1mmodel$",
        ),
    ):
        server_at(url).version()
    with pytest.raises(GmetaError, match="can't be reached: "):
        server_at("grpc://127.0.0.1:9/m").version()
    with tcp_server(hang) as port, pytest.raises(GmetaError, match=r"can't be reached: .*"):
        server_at(f"grpc://localhost:{port}/m", timeout=0.5).version()


@pytest.mark.parametrize(
    "bad",
    [
        "grpc://host/m",
        "grpc://host:1",
        "grpc://host:1/m/versions/new",
        "grpc://me:secret@host:1/m",
        "http://",
    ],
)
def test_addresses_that_are_not_one_are_refused(bad):
    with pytest.raises(ConfigError, match="must be like"):
        server_at(bad)


@pytest.fixture
def certificate(tmp_path):
    key, own = tmp_path / "key.pem", tmp_path / "own.pem"
    words = ["-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-keyout", key, "-out", own]
    words += ["-addext", "subjectAltName=DNS:localhost"]
    subprocess.run(["openssl", "req", "-x509", "-days", "2", *words], check=True, capture_output=True)
    return key, own


def test_tls_trusts_what_python_trusts(certificate, monkeypatch):
    key, own = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own, key)
    credentials = grpc.ssl_server_credentials([(key.read_bytes(), own.read_bytes())])
    with (
        rest(lambda _: http(b'{"outputs": 6}'), context) as one,
        over_grpc(lambda _: predicted(6), credentials) as two,
    ):
        for url in (one, two):
            with pytest.raises(GmetaError, match=r"(?i)can't be reached: .*(certificate|handshake)"):
                server_at(url).version()
            monkeypatch.setenv("SSL_CERT_FILE", str(own))
            assert server_at(url).version() == 6
            monkeypatch.delenv("SSL_CERT_FILE")


def hang(connection):
    while connection.recv(1 << 20):  # reads requests, and never answers
        pass


def test_servers_that_hang_die_or_lie_do_not_delay_others(folder):
    """The first hangs, the second dies within each delta, the third answers another version after it."""
    good, lies = Replica(), Replica()
    deaths = []

    def dies(connection):
        if b"delta_version" in connection.recv(1 << 16):
            connection.sendall(http(b'{"outputs": 1}'))
        else:
            deaths.append(connection.recv(1 << 16))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset

    def lie(body):
        lies.over_rest(body)
        return http(b'{"outputs": 1}')

    said = []

    class EnoughError(Exception):
        pass

    def say(line):
        said.append(line)
        if line.startswith(urls[-1]) and "version 5" in line:
            raise EnoughError

    with (
        tcp_server(hang) as one,
        tcp_server(dies) as two,
        rest(lie) as three,
        over_grpc(good.over_grpc) as four,
    ):
        urls = [f"http://localhost:{one}/v1/models/m", f"http://localhost:{two}/v1/models/m", three, four]
        with ThreadPoolExecutor() as pool:
            ended = pool.submit(deliver, folder, urls, follow=True, every=0.01, say=say)
            good.wait(3)
            for version in (4, 5):
                publish(folder, version)
                good.wait(version)
            with pytest.raises(EnoughError):
                ended.result(60)
        assert good.version == 5
        assert deaths
        assert not [line for line in said if line.startswith(urls[0])]
        assert [line for line in said if line.startswith(f"{urls[1]} can't be reached")]
        assert [line for line in said if line.startswith(f"{three} still has version 1")]
        assert len([line for line in said if line.startswith(four)]) == 3


def test_without_follow_all_are_tried_and_the_first_failure_is_raised(folder):
    good = Replica()
    with rest(good.over_rest) as url, rest(lambda _: http(b'{"outputs": 9}')) as ahead:
        with pytest.raises(DataError, match="the server has version 9, and the last one here is 3"):
            deliver(folder, [ahead, "http://localhost:9/v1/models/m", url], say=str)
        with pytest.raises(GmetaError, match="localhost:9/v1/models/m can't be reached"):
            deliver(folder, ["http://localhost:9/v1/models/m", ahead, url], say=str)
    assert good.version == 3


def test_a_mistake_in_a_thread_is_raised(folder):
    with rest(Replica().over_rest) as url, pytest.raises(ZeroDivisionError):
        deliver(folder, [url], follow=True, say=lambda line: 1 / 0)


def test_ctrl_c_ends_the_command_while_a_server_hangs(folder):
    good = Replica()
    with tcp_server(hang) as port, rest(good.over_rest) as url:
        words = ["deliver", "--from", str(folder), "--to", f"http://localhost:{port}/v1/models/m"]
        words += ["--to", url, "--follow"]
        process = subprocess.Popen(
            [sys.executable, "-c", "from gmeta.cli import main; main()", *words],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        good.wait(3)
        assert f"{url}: version 3" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, rest_of_it = process.communicate(timeout=30)  # a request would end after 60 s
        assert process.returncode == 130
        assert "Traceback" not in rest_of_it
