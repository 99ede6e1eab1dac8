"""Calls an exported model in a process that has TensorFlow and not gmeta; also over REST and gRPC."""

from __future__ import annotations

import atexit
import base64
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from google.protobuf import descriptor_pool, message_factory
from tensorflow.core.protobuf import saved_model_pb2

from gmeta.export.signature import PADDING, TEXT_PADDING

# As TensorFlow Serving loads it: the graph of one tag, variables, the initializers of tables, a signature. A
# line in is a request; the line out is empty, or an error.
_SCRIPT = """
import functools, json, os, sys, traceback
import numpy as np
class NoGmeta:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "gmeta":
            raise ImportError("gmeta isn't here")
sys.meta_path.insert(0, NoGmeta())
import tensorflow as tf
@functools.lru_cache(1)
def loaded(folder, written):
    graph = tf.Graph()
    session = tf.compat.v1.Session(graph=graph)
    with graph.as_default():
        model = tf.compat.v1.saved_model.load(session, ["serve"], folder)
    graph = model.graph_def
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    assert not [node.op for node in nodes if "Gmeta" in node.op]
    assert "gmeta" not in sys.modules
    return session, model
def answer(folder, signature, inputs, outputs):
    session, model = loaded(folder, os.stat(folder + "/saved_model.pb").st_mtime_ns)
    definition = model.signature_def[signature]
    given = np.load(inputs, allow_pickle=True)
    assert set(given) == set(definition.inputs), (set(given), set(definition.inputs))
    feed = {definition.inputs[name].name: given[name] for name in given}
    fetch = {name: tensor.name for name, tensor in definition.outputs.items()}
    found = session.run(fetch, feed)
    # NumPy's own strings would lose the zeros that a string of bytes ends with.
    texts = {name: np.array(value, object) for name, value in found.items() if type(value) is bytes}
    np.savez(outputs, **{**found, **texts})
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
for line in sys.stdin:
    error = ""
    try:
        answer(*json.loads(line))
    except Exception:
        error = traceback.format_exc()
    print(json.dumps(error), file=answers, flush=True)
"""


Request = tuple[Path, str, Mapping[str, npt.NDArray[np.generic]]]
"""A SavedModel's folder, the name of a signature, and name -> array of the signature's dtypes; a string is an
array of one object."""

Answer = dict[str, npt.NDArray[np.generic]]


def ask(folder: Path, signature: str, inputs: Mapping[str, npt.NDArray[np.generic]]) -> Answer:
    """The answer of a signature; see `Request`.

    Raises:
      RuntimeError: As in `ask_all`.
    """
    return ask_all([(folder, signature, inputs)])[0]


def ask_all(requests: Sequence[Request]) -> list[Answer]:
    """The answer to each request, by a process that answers all requests of this one.

    Raises:
      RuntimeError: A request failed; the message has its traceback, or the process's output before it died.
    """
    with tempfile.TemporaryDirectory() as scratch:
        answers = []
        for number, (folder, signature, inputs) in enumerate(requests):
            files = [str(Path(scratch, f"{part}-{number}.npz")) for part in ("inputs", "outputs")]
            np.savez(files[0], **inputs)
            if error := _server().ask([str(folder), signature, *files]):
                raise RuntimeError(error)
            answers.append(_read(files[1]))
        return answers


class _Server:
    """A process that has TensorFlow and not gmeta, and answers one request after another."""

    def __init__(self) -> None:
        self._said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _SCRIPT],
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
        )
        atexit.register(self._end)

    def ask(self, words: list[str]) -> str:
        """The error of a request; empty if it was answered."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(words) + "\n")
            self._process.stdin.flush()
        if line := self._process.stdout.readline():
            return str(json.loads(line))
        _server.cache_clear()  # it has died; the next request gets another one
        self._process.wait()
        self._said.seek(0)
        return f"it ended with exit code {self._process.returncode}:\n{self._said.read()}"

    def _end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@functools.cache
def _server() -> _Server:
    return _Server()


def _read(path: str) -> Answer:
    with np.load(path, allow_pickle=True) as arrays:
        return dict(arrays)


def padded(features: Mapping[str, Any]) -> dict[str, npt.NDArray[np.generic]]:
    """Features as a client sends them: ragged ids or text as a padded matrix."""
    return {
        name: (
            value.to_tensor(TEXT_PADDING if value.dtype == tf.string else PADDING).numpy()
            if isinstance(value, tf.RaggedTensor)
            else np.asarray(value)
        )
        for name, value in features.items()
    }


@contextmanager
def rest_server(base: Path) -> Iterator[int]:
    """Serve the models below ``base`` as TensorFlow Serving does over REST; yield the port.

    ``POST /v1/models/NAME:predict`` goes to the newest version in ``base/NAME``, and
    ``/v1/models/NAME/versions/N:predict`` to version N. Only the columnar form of
    requests is supported (https://www.tensorflow.org/tfx/serving/api_rest): strings of bytes are
    ``{"b64": ...}`` in both directions, and a signature's only output has no name.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                name = re.fullmatch("/v1/models/([^:/]+)(?:/versions/([0-9]+))?:predict", self.path)
                assert name is not None, self.path
                code, said = 200, {"outputs": _answer_rest(_version(base / name[1], name[2]), **asked)}
            except Exception as error:  # any error is reported to the client
                code, said = 400, {"error": f"{type(error).__name__}: {error}"}
            self.send_response(code)
            self.end_headers()
            self.wfile.write(json.dumps(said, sort_keys=True).encode() + b"\n")

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def _version(versions: Path, number: object) -> Path:
    """The folder of a version; of the newest one, if the number is empty."""
    return versions / str(number) if number else max(versions.iterdir(), key=lambda path: int(path.name))


def _answer_rest(model: Path, inputs: Mapping[str, Any], signature_name: str = "serving_default") -> Any:
    saved = saved_model_pb2.SavedModel.FromString((model / "saved_model.pb").read_bytes())
    signature = saved.meta_graphs[0].signature_def[signature_name]
    given = {
        name: _from_json(value, tf.as_dtype(signature.inputs[name].dtype)) for name, value in inputs.items()
    }
    found = {name: _to_json(name, value) for name, value in ask(model, signature_name, given).items()}
    return found if len(found) > 1 else next(iter(found.values()))


def _from_json(value: Any, dtype: tf.DType) -> npt.NDArray[np.generic]:
    if isinstance(value, dict):
        return np.array(base64.b64decode(value["b64"]), object)
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return np.array([base64.b64decode(each["b64"]) for each in value], object)
    if dtype != tf.string:
        return np.array(value, dtype.as_numpy_dtype)
    return np.vectorize(str.encode, otypes=[object])(np.array(value, object))


def _to_json(name: str, value: npt.NDArray[np.generic]) -> Any:
    """Convert as TensorFlow Serving does: a name that ends in ``_bytes`` has bytes."""
    if value.dtype != object:
        return value.tolist()
    if name.endswith("_bytes"):
        return {"b64": base64.b64encode(value.item()).decode()}
    return np.vectorize(bytes.decode, otypes=[object])(value).tolist()


PREDICT = "/tensorflow.serving.PredictionService/Predict"


@contextmanager
def grpc_service(
    answer: Callable[[bytes], bytes], credentials: grpc.ServerCredentials | None = None
) -> Iterator[int]:
    """Answer TensorFlow Serving's `Predict` over gRPC, bytes to bytes; yield the port."""

    class Handler(grpc.GenericRpcHandler):
        def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
            return grpc.unary_unary_rpc_method_handler(predict) if call.method == PREDICT else None

    def predict(request: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            return answer(request)
        except Exception as error:  # any error is reported to the client
            context.set_code(grpc.StatusCode.INVALID_ARGUMENT)
            context.set_details(f"{type(error).__name__}: {error}"[:2000])
            return b""

    with ThreadPoolExecutor(4) as threads:
        unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        server = grpc.server(threads, [Handler()], options=unlimited)
        if credentials is None:
            port = server.add_insecure_port("127.0.0.1:0")
        else:
            port = server.add_secure_port("localhost:0", credentials)
        server.start()
        try:
            yield port
        finally:
            server.stop(0).wait()


@contextmanager
def grpc_server(base: Path, content: bool = False) -> Iterator[int]:
    """Serve the models below ``base`` as TensorFlow Serving does over gRPC; yield the port.

    Args:
      base: As for `rest_server`.
      content: Whether numbers are sent as bytes, which TensorFlow Serving does with
        ``--prefer_tensor_content``.
    """

    def answer(data: bytes) -> bytes:
        request = predict_messages()["PredictRequest"].FromString(data)
        spec = request.model_spec
        model = _version(base / spec.name, spec.version.value)
        inputs = {name: tf.make_ndarray(value) for name, value in request.inputs.items()}
        response = predict_messages()["PredictResponse"]()
        for name, value in ask(model, spec.signature_name or "serving_default", inputs).items():
            tensor = tf.make_tensor_proto(value)
            if content and value.dtype == np.int64:
                tensor.ClearField("int64_val")
                tensor.tensor_content = value.tobytes()
            response.outputs[name].CopyFrom(tensor)
        return bytes(response.SerializeToString())

    with grpc_service(answer) as port:
        yield port


@functools.cache
def predict_messages() -> dict[str, Any]:
    """The messages of TensorFlow Serving's own predict.proto, by name."""
    pool = descriptor_pool.Default()  # which has TensorFlow's tensor.proto
    for file in (_MODEL_PROTO, _PREDICT_PROTO):
        pool.AddSerializedFile(base64.b85decode(file))
    file = pool.FindFileByName("tensorflow_serving/apis/predict.proto")
    return {name: message_factory.GetMessageClass(kind) for name, kind in file.message_types_by_name.items()}


# tensorflow_serving/apis/model.proto and predict.proto, of tensorflow-serving-api 2.16.1 (Apache 2.0).
_MODEL_PROTO = (
    "3L|u7ZgX#PW^8YFUvp)0c4=;BFJW+Lb1!XgWMynFaB^>SZxRx8Wo~nCa%OCAcP?{fa&~EMXBr-"
    "7Z*OO8WiN1YZ**^Bb!IPja$#_AWpZ;aaB^>SZz7BV3JFbbWMynqaAji>3<?BpVQpm?0U!Y=2@);}2X<w0b7^mG7y=*xC<`(hE@y9"
    "VXKZCIaB^>SZ(?<3E=g{5HZ)dYY;|Qw01_7p4R&R6b7^mGUu<DwWo#G(AOR=|NB|NR3J!B=XKrD1b#i52ZeeX@7y}>yC<#Ik3J!K"
    "<a&u{KZeL?)Z)sy?LId~#0b&Mla&L5RGX"
)
_PREDICT_PROTO = (
    "3MF)9ZgX#PW^8YFUvp)0c4=;BFJW+Lb1!gmWn^h%bS`jmZ**@G5_Dy5b8m8HY;Siib7gXNX>Mm4CUj+Pb8m8HY;SijV{dY0FJ^LK"
    "ZDn_Fa%(SiWo~nCaxQRkZ**@OBXnhMb8m8HY;Sj8b7gXNX>MmPVQ^`4FKusRWo#~Ra&L5RBHRKB4p4GsWNBk`Qe|;<Wpi{AF$xN8"
    "Z)9a`UvqF}V;BJ-"
    "0VoSH9WHcbZgX#PW^8YFE^}pac4=;BE=_M_Wo%P$Wn&UP3I=IzaCLNZ7y=*zC<`(!E_7vXb8m8HY;Siib7gXNX>MmOP;zBtX=8L!"
    "WpQ<7b963AZg6#Ub46}+a(NOJ3Jq^{bZ~WaUuJ1+bY*fF10Vw^2@*^S7;tiBWNBk`UvqSFWnpb)WM6M^bZKvHa~K660VoSHDlT+o"
    "ZgX#PW^8YFE^}pac4=;BE>Lo1WNBk`Q*?4=VQpn(PjGZ;Z*FrE777VtY-wd~bYE#?7zQ8#C=5sdhyei_MhXi_Zg6#Ub46}+a(NO9"
    "3Il6pc^Cm80VoL)CJF_1VQh6}7y=*xC<`(dE_7vXb8m8HY;SiiRAp{+Z*ov_Z**@u0yqIe3<?TgV{B<<ZggL1WJ&}G1P}!xuL24d"
    "P;zBtX=8L#baG{3ZDnLnaCB*JZgUb&3Jr2)adl;LbYF9HVRU5}0U!Y=4l*|`bY*UHZ*pdAZ+9+pWpZ|DZf7n~a%E&`V{}t=a%Ev{"
    "Wn@oqbZKvHb1qV4adl;LbW?O;bY&7*3J`N}Y-"
    "w~~WNB?>ZgXjGZgUs{AOk21GCwYKWo~nCa%OCAcP?{fa&~EMXD(23Wn^h%bW?P4Wnpb)WKVE(X>V?GE>m!9X>>$sZDnqAX>V?GMQ"
    "(I*c^Wnf6jN|)X>>$sZDnqAX>V?GMQ(I*c@hf>18Ze@7y%#wC<zh`3I%pyY;|QA0w4h>1v&ya0U|OA3{qurb!BsOQ*>c;WfBMq1W"
    "r#*MGycI2?_;MP)tcw5CIYm3JFC{L|;=-"
    "Oi5G_0wT}>3J*|nWn^h%bW&w=aBpsNWfCz83T<y>Wo%z_aAji{0w4h>3o;!pbY*UHZ*pdAZ+9+pWpZ|DZf7n{Z)9a`Q*dQt5<v<F"
    "Z*_EVb#!wW0U!e?3o<Y+bY*UHZ*pdAZ+9+pWpZ|DZf7n~a%E&`V{}qwb8v5Nb7d}1b#!obbaO>+baHtbM+yv2b#!obbaO>+baHtT"
    "3km~kWqB9@AOR=|5+(`-c42IFWf%e=0VoSH7cO*VZgX#PW^8YFE>vZ1b8m7`a&L5RIs!NWLId~#0b&Mla&L5RGX"
)
