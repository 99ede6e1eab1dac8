"""Servers that take deltas, over TensorFlow Serving's REST and gRPC interfaces.

Both interfaces call signatures. ``delta_version`` has no input; ``apply_delta`` has one, the bytes of a
delta; both return a version (`gmeta.export.delta_signatures`). REST encodes bytes in base64, which takes a
third more of them; gRPC sends them as they are.

An answer may come from anything at the address, so it is not trusted: at most 64 KiB of it are read, no
redirect is followed, and it must be a version.

`messages` has the interface's messages, and `gmeta.export.model_server` serves them. A client keeps in a
`StateCache` what servers have read of users.
"""

from __future__ import annotations

import base64
import functools
import http.client
import json
import math
import re
import ssl
import struct
import threading
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gmeta.core.errors import ConfigError, GmetaError, whole_number
from gmeta.core.imports import import_for
from gmeta.core.json_values import mapping, parse_json, whole

_LONGEST_ANSWER = 64 << 10
_LONGEST_REASON = 2000
_PART = 3 << 16
"""The bytes that are encoded at a time; a multiple of 3, so that base64 pads only the last part."""
_LARGEST = (1 << 31) - (1 << 16)
"""The largest delta in a message of protobuf."""
_SLOWEST = 1e6
"""Bytes a second that a connection must transmit, for gRPC's limit on the time of a whole call."""


class Server(ABC):
    """A model in a server.

    Args:
      url: Where it is, for messages.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def version(self) -> int:
        """Return the version that the server has.

        Raises:
          GmetaError: The server doesn't answer, or its answer isn't a version.
        """
        return self.ask("delta_version", {})

    def apply(self, delta: bytes) -> int:
        """Send a delta, and return the version that the server then has.

        Raises:
          GmetaError: As for `version`; or the server refuses the delta.
        """
        return self.ask("apply_delta", {"delta_bytes": delta})

    @abstractmethod
    def ask(self, signature: str, inputs: Mapping[str, bytes]) -> int:
        """Call a signature that returns a version.

        Raises:
          GmetaError: As for `version` and `apply`.
        """

    def _unreachable(self, reason: object) -> GmetaError:
        return GmetaError(f"{self.url} can't be reached: {_printable(str(reason))}")

    def _refusal(self, signature: str, code: object, reason: str) -> GmetaError:
        return GmetaError(f"{self.url} answers {code} to {signature}: {_printable(reason)}")

    def _no_version(self, signature: str, reason: object) -> GmetaError:
        return GmetaError(
            f"{self.url} answers {signature} with something other than a version: {_printable(str(reason))}"
        )


def _printable(text: str) -> str:
    """Return text in one line, without the control characters that a terminal interprets."""
    cut = text[:_LONGEST_REASON]
    return " ".join("".join(char if char.isprintable() else " " for char in cut).split())


def server_at(url: str, timeout: float = 60.0) -> Server:
    """Return the server at an address.

    Args:
      url: ``"http://host:8501/v1/models/NAME"`` is REST and ``"grpc://host:8500/NAME"`` is gRPC; both may
        end with ``/versions/N``. ``https`` and ``grpcs`` use TLS with the certificates that Python trusts
        (``SSL_CERT_FILE``).
      timeout: Seconds to wait for an answer.

    Raises:
      ConfigError: It isn't such an address, or ``grpcio`` isn't installed.
    """
    return (GrpcServer if url.startswith(("grpc://", "grpcs://")) else RestServer)(url, timeout)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Makes a redirect an error: following one would send a GET in place of the POST."""

    def redirect_request(self, *_: Any) -> None:
        """Return None: no request follows."""


class RestServer(Server):
    """A server's REST interface; see `server_at`."""

    def __init__(self, url: str, timeout: float = 60.0) -> None:
        super().__init__(url.rstrip("/"))
        if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", url):
            raise ConfigError(f"{url} must be like http://host:8501/v1/models/NAME")
        self._timeout = timeout
        self._open = urllib.request.build_opener(_NoRedirects).open

    def ask(self, signature: str, inputs: Mapping[str, bytes]) -> int:
        """Call a signature; see `Server.ask`."""
        size = sum(len(part) for part in _json(signature, dict.fromkeys(inputs, b"")))
        size += sum(-(-len(value) // 3) * 4 for value in inputs.values())
        headers = {"Content-Type": "application/json", "Content-Length": str(size)}
        try:
            request = urllib.request.Request(f"{self.url}:predict", _json(signature, inputs), headers)
            with self._open(request, timeout=self._timeout) as answer:
                body = answer.read(_LONGEST_ANSWER + 1)
        except urllib.error.HTTPError as error:
            raise self._refusal(signature, error.code, _reason(error)) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._unreachable(getattr(error, "reason", None) or error) from error
        try:
            if len(body) > _LONGEST_ANSWER:
                raise ValueError(f"more than {_LONGEST_ANSWER:,} bytes")
            return whole(mapping(parse_json(body), "the answer")["outputs"], "outputs")
        except KeyError as error:
            raise self._no_version(signature, f"it has no {error}") from error
        except ValueError as error:
            raise self._no_version(signature, error) from error


def _json(signature: str, inputs: Mapping[str, bytes]) -> Iterator[bytes]:
    """Yield the parts of a request, so that a delta isn't copied as a whole."""
    yield f'{{"signature_name": {json.dumps(signature)}, "inputs": {{'.encode()
    for number, (name, value) in enumerate(inputs.items()):
        yield f'{", " if number else ""}{json.dumps(name)}: {{"b64": "'.encode()
        view = memoryview(value)
        for begin in range(0, len(view), _PART):
            yield base64.b64encode(view[begin : begin + _PART])
        yield b'"}'
    yield b"}}"


def _reason(error: urllib.error.HTTPError) -> str:
    """Return what an answer with an error code says."""
    if 300 <= error.code < 400:
        return f"it redirects to {error.headers.get('Location')}; name that address, if it is the server's"
    try:
        return error.read(_LONGEST_REASON).decode(errors="replace")
    except (OSError, http.client.HTTPException) as cut:
        return str(cut)


class GrpcServer(Server):
    """A server's gRPC interface; see `server_at`.

    ``timeout`` covers a whole call, so the time to send a delta at 1 MB/s is added to it.
    """

    def __init__(self, url: str, timeout: float = 60.0) -> None:
        super().__init__(url.rstrip("/"))
        found = re.fullmatch(r"(grpcs?)://([^/@\s]+:\d+)/([^/?#\s]+)(?:/versions/(\d+))?/?", url)
        if found is None:
            raise ConfigError(f"{url} must be like grpc://host:8500/NAME or grpc://host:8500/NAME/versions/N")
        scheme, self._host, self._model, version = found.groups()
        self._version = None if version is None else int(version)
        self._secure = scheme == "grpcs"
        self._timeout = timeout
        self._grpc: Any = import_for("grpc://", "grpc", "online")

    def ask(self, signature: str, inputs: Mapping[str, bytes]) -> int:
        """Call a signature; see `Server.ask`."""
        data = self._request(signature, inputs)
        try:
            with self._channel() as channel:
                call = channel.unary_unary("/tensorflow.serving.PredictionService/Predict")
                answer = call(data, timeout=self._timeout + len(data) / _SLOWEST)
        except self._grpc.RpcError as error:
            code, said = error.code(), error.details() or ""
            if code in (self._grpc.StatusCode.UNAVAILABLE, self._grpc.StatusCode.DEADLINE_EXCEEDED):
                raise self._unreachable(said) from error
            raise self._refusal(signature, code.name, said) from error
        try:
            response = messages()["PredictResponse"].FromString(answer)
            (tensor,) = (output.value for output in response.outputs)
            return _version_in(tensor)
        except Exception as error:  # protobuf's DecodeError isn't a ValueError
            raise self._no_version(signature, error) from error

    def _request(self, signature: str, inputs: Mapping[str, bytes]) -> bytes:
        if (size := sum(map(len, inputs.values()))) > _LARGEST:
            raise GmetaError(f"{self.url} can't receive {size:,} bytes over gRPC: use its REST interface")
        request = messages()["PredictRequest"]()
        request.model_spec.name, request.model_spec.signature_name = self._model, signature
        if self._version is not None:
            request.model_spec.version.value = self._version
        for name, value in inputs.items():
            tensor = request.inputs.add(key=name).value
            tensor.dtype = _STRING
            tensor.tensor_shape.SetInParent()  # no dimensions: a scalar
            tensor.string_val.append(value)
        return bytes(request.SerializeToString())

    def _channel(self) -> Any:
        """Open a connection for one call: a kept one would wait after a failure, by its own pauses."""
        options = [
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", _LONGEST_ANSWER),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_retries", 0),
        ]
        if not self._secure:
            return self._grpc.insecure_channel(self._host, options)
        trusted = ssl.get_default_verify_paths().cafile
        roots = None if trusted is None else Path(trusted).read_bytes()
        return self._grpc.secure_channel(self._host, self._grpc.ssl_channel_credentials(roots), options)


def _version_in(tensor: Any) -> int:
    """Read a version from a tensor, as either of the two fields that TensorFlow Serving fills."""
    if tensor.dtype != _INT64 or tensor.tensor_shape.dim:
        raise ValueError(f"dtype {tensor.dtype}, {len(tensor.tensor_shape.dim)} dimensions")
    content = tensor.tensor_content
    (value,) = struct.unpack("<q", content) if content else tensor.int64_val
    return whole(value, "a version")


_STRING, _INT64 = 7, 9
"""``tensorflow.DataType``."""


@functools.cache
def messages() -> dict[str, Any]:
    """Return the classes of the messages in `_FIELDS` by name."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="gmeta/predict.proto", package="gmeta", syntax="proto3")
    for name, fields in re.findall(r"^(\w+): (.*(?:\n  .*)*)", _FIELDS, re.MULTILINE):
        message = file.message_type.add(name=name)
        for field, number, kind, many in re.findall(r"(\w+)=(\d+) (\w+)(\*?)", fields):
            label = kinds.LABEL_REPEATED if many else kinds.LABEL_OPTIONAL
            added = message.field.add(name=field, number=int(number), label=label)
            if kind.isupper():
                added.type = getattr(kinds, f"TYPE_{kind}")
            else:
                added.type, added.type_name = kinds.TYPE_MESSAGE, f".gmeta.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        kind.name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"gmeta.{kind.name}"))
        for kind in file.message_type
    }


# The fields that are needed of tensorflow_serving/apis/{model,predict,prediction_log,get_model_metadata,
# get_model_status}.proto, tensorflow/core/framework/tensor.proto and grpc/health/v1/health.proto. In bytes, a
# map is a list of keys with values, and an enumeration is a number. The package tensorflow-serving-api has
# all fields, and asks for TensorFlow.
_FIELDS = """
Version: value=1 INT64
ModelSpec: name=1 STRING, version=2 Version, signature_name=3 STRING, version_label=4 STRING
Dim: size=1 INT64
Shape: dim=2 Dim*, unknown_rank=3 BOOL
Tensor: dtype=1 INT32, tensor_shape=2 Shape, tensor_content=4 BYTES, float_val=5 FLOAT*, double_val=6 DOUBLE*,
  int_val=7 INT32*, string_val=8 BYTES*, int64_val=10 INT64*, bool_val=11 BOOL*, uint32_val=16 UINT32*,
  uint64_val=17 UINT64*
Named: key=1 STRING, value=2 Tensor
PredictRequest: model_spec=1 ModelSpec, inputs=2 Named*, output_filter=3 STRING*
PredictResponse: outputs=1 Named*, model_spec=2 ModelSpec
PredictLog: request=1 PredictRequest
PredictionLog: predict_log=6 PredictLog
GetModelMetadataRequest: model_spec=1 ModelSpec, metadata_field=2 STRING*
Any: type_url=1 STRING, value=2 BYTES
NamedAny: key=1 STRING, value=2 Any
GetModelMetadataResponse: model_spec=1 ModelSpec, metadata=2 NamedAny*
NamedBytes: key=1 STRING, value=2 BYTES
SignatureDefMap: signature_def=1 NamedBytes*
GetModelStatusRequest: model_spec=1 ModelSpec
Status: error_code=1 INT32, error_message=2 STRING
VersionStatus: version=1 INT64, state=2 INT32, status=3 Status
GetModelStatusResponse: model_version_status=1 VersionStatus*
HealthCheckRequest: service=1 STRING
HealthCheckResponse: status=1 INT32
"""


# Tensors in messages.

_KINDS: dict[int, tuple[Any, str]] = {
    1: (np.float32, "float_val"),
    2: (np.float64, "double_val"),
    3: (np.int32, "int_val"),
    4: (np.uint8, "int_val"),
    5: (np.int16, "int_val"),
    6: (np.int8, "int_val"),
    _STRING: (np.object_, "string_val"),
    _INT64: (np.int64, "int64_val"),
    10: (np.bool_, "bool_val"),
    17: (np.uint16, "int_val"),
    22: (np.uint32, "uint32_val"),
    23: (np.uint64, "uint64_val"),
}
"""``tensorflow.DataType`` -> NumPy's dtype, and the field with the values."""


def array_of(tensor: Any, most: int) -> npt.NDArray[Any]:
    """Read the array in a ``Tensor`` of `messages`; strings are bytes in an array of objects.

    Args:
      tensor: The message, of anybody.
      most: The most bytes that one value, repeated, may fill.

    Raises:
      ValueError: The message isn't a tensor, or is of a dtype that can't be read.
    """
    if tensor.dtype not in _KINDS:
        raise ValueError(f"dtype {tensor.dtype} of tensorflow.DataType can't be read")
    kind, field = _KINDS[tensor.dtype]
    shape = [dim.size for dim in tensor.tensor_shape.dim]
    if tensor.tensor_shape.unknown_rank or min(shape, default=0) < 0:
        raise ValueError(f"it has no shape: {shape}")
    size, content, values = math.prod(shape), tensor.tensor_content, getattr(tensor, field)
    if content and kind is not np.object_:
        if len(content) != size * np.dtype(kind).itemsize:
            raise ValueError(f"{len(content):,} bytes aren't the values of shape {shape}")
        return np.frombuffer(content, kind).reshape(shape)
    wide = np.fromiter(values, np.int32 if field == "int_val" else kind, len(values))
    found = wide.astype(kind)
    if field == "int_val" and (found != wide).any():
        raise ValueError(f"a value isn't one of {found.dtype}")
    width = np.dtype(kind).itemsize + (len(found[0]) if kind is np.object_ and len(found) == 1 else 0)
    if len(found) == 1 < size <= most // width:  # as TensorFlow sends equal values
        found = np.repeat(found, size)
    if len(found) != size:
        raise ValueError(f"{len(found)} values don't fill shape {shape}")
    return found.reshape(shape)


def put_array(tensor: Any, array: npt.NDArray[Any], dtype: int) -> None:
    """Write an array into a ``Tensor`` of `messages`, into the fields that TensorFlow Serving fills.

    Args:
      tensor: The message, empty.
      array: The array; strings are bytes in an array of objects.
      dtype: ``tensorflow.DataType``.

    Raises:
      ValueError: The dtype can't be written.
    """
    if dtype not in _KINDS:
        raise ValueError(f"dtype {dtype} of tensorflow.DataType can't be written")
    tensor.dtype = dtype
    tensor.tensor_shape.SetInParent()  # without dimensions: a scalar
    for size in array.shape:
        tensor.tensor_shape.dim.add(size=size)
    getattr(tensor, _KINDS[dtype][1]).extend(array.ravel().tolist())


# States of users (`gmeta.export.sequence_models.state_signatures`) in the memory of a server's client.


class CacheCounts(NamedTuple):
    """What a `StateCache` has done.

    Attributes:
      hits: Requests for states that were there.
      misses: Requests for others.
      evicted: States that were dropped for room.
      states: States now.
      bytes: Their bytes, keys not counted.
    """

    hits: int
    misses: int
    evicted: int
    states: int
    bytes: int


class StateCache:
    """States of users in the memory of a process, of which the least recently used are dropped for room.

    Threads may share one.

    Args:
      max_bytes: The most bytes of states, keys not counted.

    Raises:
      ConfigError: ``max_bytes`` is below 1.

    Example:
      >>> cache = StateCache(max_bytes=20)
      >>> cache.put("ann", b"12345678")
      >>> cache.put("bob", b"12345678")
      >>> cache.get("ann")
      b'12345678'
      >>> cache.put("eve", b"12345678")
      >>> cache.get("bob") is None  # the least recently used
      True
    """

    def __init__(self, max_bytes: int) -> None:
        self._most = whole_number("StateCache: max_bytes", max_bytes, least=1)
        self._states: OrderedDict[Hashable, bytes] = OrderedDict()
        self._bytes = self._hits = self._misses = self._evicted = 0
        self._lock = threading.Lock()

    def get(self, user: Hashable) -> bytes | None:
        """Return a user's state; None: it isn't there."""
        with self._lock:
            state = self._states.get(user)
            if state is None:
                self._misses += 1
                return None
            self._hits += 1
            self._states.move_to_end(user)
            return state

    def put(self, user: Hashable, state: bytes) -> None:
        """Keep a user's state in place of a former one. One larger than ``max_bytes`` isn't kept.

        Raises:
          ConfigError: The state isn't bytes, such as a tensor: take an element, and call ``numpy()``.
        """
        if not isinstance(state, bytes):
            raise ConfigError(
                f"StateCache: a state must be bytes, got {type(state).__name__}: give "
                'read(...)["state_bytes"][0].numpy()'
            )
        with self._lock:
            self._bytes -= len(self._states.pop(user, b""))
            if len(state) > self._most:
                self._evicted += 1
                return
            self._states[user] = state
            self._bytes += len(state)
            while self._bytes > self._most:
                self._bytes -= len(self._states.popitem(last=False)[1])
                self._evicted += 1

    def drop(self, user: Hashable) -> None:
        """Drop a user's state, if there is one: after a deletion, or if a server refuses it."""
        with self._lock:
            self._bytes -= len(self._states.pop(user, b""))

    @property
    def counts(self) -> CacheCounts:
        """What the cache has done until now."""
        with self._lock:
            return CacheCounts(self._hits, self._misses, self._evicted, len(self._states), self._bytes)
