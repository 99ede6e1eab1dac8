"""`gmeta serve`: an exported model behind TensorFlow Serving's gRPC interface, by stock TensorFlow.

gRPC's event loop, in one thread, receives a request, and refuses it if too many others wait. A worker decodes
it, runs the signature in a session, and encodes the answer. All ops of a request run in the worker's thread:
graphs have many small ops, and handing one to another thread takes longer than most of them. So as many
requests run at a time as there are workers.

Requests are never merged: ``adapt``, ``score`` and others are of single users, whom a batch would mix.

A version is loaded beside the one that serves, answers its warm-up requests, and then takes its place.
Requests that run in the former version end there.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.saved_model.loader_impl import SavedModelLoader

from gmeta.core.errors import ConfigError, GmetaError, first_line
from gmeta.core.imports import import_for
from gmeta.export.server_files import read_warm_up, reason_of
from gmeta.export.servers import array_of, messages, put_array
from gmeta.export.signature import DEFAULT_SIGNATURE

_LONGEST_TOLD = 1000
_AVAILABLE, _ENDED = 30, 50  # ModelVersionStatus.State
_LONGEST_PAUSE = 60.0


class RefusedError(Exception):
    """An answer that is an error.

    Args:
      code: The name of gRPC's status code.
      told: What clients are told, one line.
    """

    def __init__(self, code: str, told: str) -> None:
        super().__init__(told)
        self.code, self.told = code, told[:_LONGEST_TOLD]


class Wanted(NamedTuple):
    """A signature's input or output: its ``tensorflow.DataType``, and its shape with None for any size."""

    dtype: int
    shape: tuple[int | None, ...] | None

    @classmethod
    def of(cls, info: Any) -> Wanted:
        """Make it from a ``TensorInfo``."""
        shape = tf.TensorShape(info.tensor_shape)
        return cls(info.dtype, None if shape.rank is None else tuple(shape.as_list()))

    def __str__(self) -> str:
        shape = "of any shape" if self.shape is None else _shown(self.shape)
        return f"{tf.as_dtype(self.dtype).name} {shape}"

    def takes(self, shape: Sequence[int]) -> bool:
        """Return whether an array of a shape fits."""
        if self.shape is None:
            return True
        pairs = zip(self.shape, shape, strict=False)
        return len(self.shape) == len(shape) and all(want in (None, size) for want, size in pairs)


def _shown(shape: Sequence[int | None]) -> str:
    sizes = ", ".join("n" if size is None else str(size) for size in shape)
    return f"({sizes},)" if len(shape) == 1 else f"({sizes})"


class Called(NamedTuple):
    """A signature in a session: its inputs, its outputs, and the function of arrays in their order."""

    inputs: dict[str, Wanted]
    outputs: dict[str, Wanted]
    run: Callable[..., list[Any]]


class LoadedModel:
    """A version of a model in a session of TensorFlow. Threads may share one.

    Args:
      folder: The SavedModel.
      version: Its version.
      name: The model's name.
      threads: Threads that one op may use.
      most: The most bytes of a request.

    Raises:
      GmetaError: It isn't a SavedModel that TensorFlow can load.
    """

    def __init__(self, folder: Path, version: int, name: str, threads: int = 1, most: int = 1 << 30) -> None:
        self.folder, self.version, self.name, self._most = folder, version, name, most
        self._lock, self._runs, self._retired = threading.Lock(), 0, False
        graph = tf.Graph()
        config = config_pb2.ConfigProto(intra_op_parallelism_threads=threads, inter_op_parallelism_threads=1)
        self._session = tf.compat.v1.Session(graph=graph, config=config)
        try:
            with graph.as_default():
                model = SavedModelLoader(str(folder)).load(self._session, ["serve"])
            self._defs = {n: each for n, each in model.signature_def.items() if not n.startswith("__")}
            self.signatures = {name: self._called(each) for name, each in self._defs.items()}
        except (tf.errors.OpError, OSError, ValueError, RuntimeError) as error:
            self._session.close()
            raise GmetaError(f"{folder} can't be loaded: {reason_of(error)}") from error

    def _called(self, definition: Any) -> Called:
        options = config_pb2.CallableOptions()
        options.feed.extend(definition.inputs[name].name for name in sorted(definition.inputs))
        options.fetch.extend(definition.outputs[name].name for name in sorted(definition.outputs))
        options.run_options.inter_op_thread_pool = -1  # the caller's thread
        return Called(
            {name: Wanted.of(definition.inputs[name]) for name in sorted(definition.inputs)},
            {name: Wanted.of(definition.outputs[name]) for name in sorted(definition.outputs)},
            self._session._make_callable_from_options(options),
        )

    def answer(self, request: Any) -> Any:
        """Answer a ``PredictRequest`` by a ``PredictResponse`` (`gmeta.export.servers.messages`).

        Raises:
          RefusedError: The request can't be answered.
        """
        self.check(request.model_spec)
        name = request.model_spec.signature_name or DEFAULT_SIGNATURE
        called = self.signatures.get(name)
        if called is None:
            raise RefusedError("NOT_FOUND", f"there is no signature {name!r}; there are {self.listed()}")
        given = {each.key: each.value for each in request.inputs}
        if strange := sorted(given.keys() - called.inputs.keys()):
            takes = ", ".join(called.inputs) or "none"
            raise RefusedError("INVALID_ARGUMENT", f"{name} has no input {strange[0]!r}; it takes {takes}")
        if strange := sorted({*request.output_filter} - called.outputs.keys()):
            gives = ", ".join(called.outputs)
            raise RefusedError("INVALID_ARGUMENT", f"{name} has no output {strange[0]!r}; it gives {gives}")
        arrays = [self._array(name, key, given.get(key), wanted) for key, wanted in called.inputs.items()]
        try:
            found = called.run(*arrays)
        except tf.errors.OpError as error:
            raise RefusedError(
                _CODES.get(error.error_code, "UNKNOWN"), f"{name}: {reason_of(error)}"
            ) from error
        response = messages()["PredictResponse"]()
        self._fill(response.model_spec, name)
        for (key, wanted), value in zip(called.outputs.items(), found, strict=True):
            if not request.output_filter or key in request.output_filter:
                array = np.array(value, object) if isinstance(value, bytes) else np.asarray(value)
                put_array(response.outputs.add(key=key).value, array, wanted.dtype)
        return response

    def _array(self, signature: str, key: str, tensor: Any, wanted: Wanted) -> npt.NDArray[Any]:
        try:
            if tensor is None:
                raise ValueError("it is missing")
            if tensor.dtype != wanted.dtype:
                raise ValueError(f"it is {_dtype(tensor.dtype)}")
            array = array_of(tensor, self._most)
            if not wanted.takes(array.shape):
                raise ValueError(f"its shape is {_shown(array.shape)}")
        except (ValueError, OverflowError, MemoryError) as error:
            told = f"input {key!r} of {signature} must be {wanted}, but {error}"
            raise RefusedError("INVALID_ARGUMENT", told) from error
        return array

    def check(self, spec: Any) -> None:
        """Check that a ``ModelSpec`` names this model.

        Raises:
          RefusedError: It names another one.
        """
        if spec.name not in ("", self.name):
            raise RefusedError("NOT_FOUND", f"there is no model {spec.name!r}: {self.name!r} is served")
        if spec.version_label:
            raise RefusedError("INVALID_ARGUMENT", "versions have no labels here: send a number, or none")
        if spec.HasField("version") and spec.version.value != self.version:
            told = f"version {spec.version.value} isn't served: {self.version} is"
            raise RefusedError("NOT_FOUND", told)

    def metadata(self, request: Any) -> Any:
        """Answer a ``GetModelMetadataRequest``, as `answer` does."""
        self.check(request.model_spec)
        if [*request.metadata_field] != ["signature_def"]:
            raise RefusedError("INVALID_ARGUMENT", "metadata_field must be 'signature_def'")
        found = messages()["SignatureDefMap"]()
        for name, each in self._defs.items():
            found.signature_def.add(key=name, value=each.SerializeToString())
        response = messages()["GetModelMetadataResponse"]()
        self._fill(response.model_spec)
        value = response.metadata.add(key="signature_def").value
        value.type_url = "type.googleapis.com/tensorflow.serving.SignatureDefMap"
        value.value = found.SerializeToString()
        return response

    def warm_up(self) -> int:
        """Answer the requests that the SavedModel has for this, and return how many there were.

        Raises:
          GmetaError: One isn't answered.
        """
        requests = read_warm_up(self.folder)
        for number, request in enumerate(requests, 1):
            request.model_spec.name = ""
            request.model_spec.ClearField("version")
            try:
                self.answer(request)
            except RefusedError as error:
                raise GmetaError(f"{self.folder}: warm-up request {number} fails: {error}") from error
        return len(requests)

    @contextmanager
    def running(self) -> Iterator[LoadedModel]:
        """Keep the session open while the block runs."""
        with self._lock:
            self._runs += 1
        try:
            yield self
        finally:
            self._end(-1)

    def retire(self) -> None:
        """Close the session as soon as no request runs."""
        self._retired = True
        self._end(0)

    def _end(self, runs: int) -> None:
        with self._lock:
            self._runs += runs
            close = self._retired and self._runs == 0
        if close:
            self._session.close()

    def _fill(self, spec: Any, signature: str = "") -> None:
        spec.name, spec.signature_name, spec.version.value = self.name, signature, self.version

    def listed(self) -> str:
        """Return the names of signatures, in a line."""
        return ", ".join(sorted(self.signatures.keys() - {DEFAULT_SIGNATURE})) or DEFAULT_SIGNATURE


_CODES = {
    value: name
    for name, value in vars(tf.errors).items()
    if name.isupper() and isinstance(value, int) and value > 0
}


def _dtype(number: int) -> str:
    try:
        return str(tf.as_dtype(number).name)
    except TypeError:
        return f"dtype {number}, which TensorFlow doesn't have"


def versions_in(folder: Path) -> dict[int, Path]:
    """Return the versions of a model: those in its folder, or the SavedModel that the folder itself is."""
    if (folder / "saved_model.pb").is_file():
        return {int(folder.name) if folder.name.isdecimal() else 1: folder}
    found = [path for path in folder.iterdir() if path.name.isdecimal() and path.is_dir()]
    return {int(path.name): path for path in found}


class ModelServer:
    """Serves the newest version of a model over gRPC.

    Args:
      folder: A SavedModel, or a folder of versions, whose names are numbers.
      name: The model's name; None: that of its folder.
      host: The address to listen on.
      port: The port; 0: any that is free.
      workers: Requests that run at a time.
      threads: Threads that one op of a request may use.
      max_bytes: The most bytes of a request; those that wait may have four times as many together.
      max_queue: The most requests that wait.
      poll: Seconds between looks for a new version.
      say: Shows a line.

    Raises:
      ConfigError: The folder has no model; or grpcio isn't installed.
    """

    def __init__(
        self,
        folder: Path,
        *,
        name: str | None = None,
        host: str = "127.0.0.1",
        port: int = 8500,
        workers: int = 2,
        threads: int = 1,
        max_bytes: int = 64_000_000,
        max_queue: int = 64,
        poll: float = 1.0,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._grpc: Any = import_for("gmeta serve", "grpc", "serve")
        self._aio: Any = import_for("gmeta serve", "grpc.aio", "serve")
        if not folder.is_dir():
            raise ConfigError(f"{folder} isn't a folder: name a SavedModel, or a folder of versions")
        if not versions_in(folder):
            raise ConfigError(
                f"{folder} has neither saved_model.pb nor a version such as {folder}/1: name the folder that "
                "`gmeta export --out` or export_model wrote"
            )
        own = folder.resolve()
        own = own.parent if (own / "saved_model.pb").is_file() and own.name.isdecimal() else own
        self.folder, self.name, self.address, self.port = folder, name or own.name, host, port
        self._workers, self._threads, self._most, self._queue = workers, threads, max_bytes, max_queue
        self._poll, self._say = poll, say
        self._pool = ThreadPoolExecutor(workers, "gmeta-serve")
        self._lock, self._waiting, self._bytes = threading.Lock(), 0, 0
        self._model: LoadedModel | None = None
        self._failed: dict[int, tuple[str, int, float]] = {}  # version -> reason, tries, when to try again
        self._serving = False

    # Versions.

    def load_newest(self) -> bool:
        """Load the newest version if another one serves; return whether it now serves.

        A version that can't be loaded is tried again later, and doesn't replace the one that serves.

        Raises:
          GmetaError: It can't be loaded, and none serves.
        """
        found = versions_in(self.folder)
        now = self._model.version if self._model else None
        version = max(found, default=now)
        if version is None or version == now:
            return False
        reason, tries, again = self._failed.get(version, ("", 0, 0.0))
        if time.monotonic() < again:
            return False
        try:
            model = LoadedModel(found[version], version, self.name, self._threads, self._most)
            requests = model.warm_up()
        except GmetaError as error:
            if now is None:
                raise
            if str(error) != reason:
                self._say(f"version {version} isn't served, {now} still is: {error}")
            pause = min(_LONGEST_PAUSE, self._poll * 2**tries)
            self._failed[version] = (str(error), tries + 1, time.monotonic() + pause)
            return False
        former, self._model = self._model, model
        self._failed.clear()
        if former is not None:
            former.retire()
        warm = f"{requests} warm-up requests answered" if requests else "it has no warm-up requests"
        self._say(f"{self.name}: version {version} serves; {warm}")
        return True

    @contextmanager
    def _current(self) -> Iterator[LoadedModel]:
        while True:
            model = self._model
            assert model is not None
            with model.running():
                if model is self._model:
                    yield model
                    return

    # Calls.

    async def start(self) -> None:
        """Take the port, load the newest version and listen.

        Raises:
          GmetaError: The port can't be used, or the model can't be loaded.
        """
        self._server = self._aio.server(
            options=[
                ("grpc.max_receive_message_length", self._most),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),  # a second server at the port is an error
            ]
        )
        predict = {"Predict": self._predict, "GetModelMetadata": self._metadata}
        for service, methods in (
            ("tensorflow.serving.PredictionService", predict),
            ("tensorflow.serving.ModelService", {"GetModelStatus": self._status}),
            ("grpc.health.v1.Health", {"Check": self._health}),
        ):
            handlers = {name: self._handler(method) for name, method in methods.items()}
            handler = self._grpc.method_handlers_generic_handler(service, handlers)
            self._server.add_generic_rpc_handlers((handler,))
        address = f"{self.address}:{self.port}"
        try:
            self.port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            told = "another program uses it, or this machine doesn't have it"
            raise GmetaError(f"can't listen at {address}: {told}; name another --port or --host") from error
        await asyncio.get_running_loop().run_in_executor(None, self.load_newest)
        await self._server.start()
        self._serving = True
        self._watching = asyncio.create_task(self._watch())
        with self._current() as model:
            self._say(f"grpc://{self.address}:{self.port}/{self.name} answers {model.listed()}")

    async def stop(self, grace: float) -> int:
        """Refuse new requests, wait ``grace`` seconds at most for others, and return how many still run."""
        self._serving = False
        self._watching.cancel()
        await self._server.stop(grace)
        self._pool.shutdown(wait=False, cancel_futures=True)
        return self._waiting

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._poll)
            try:
                await loop.run_in_executor(None, self.load_newest)
            except OSError as error:
                self._say(f"{self.folder} can't be read: {error.strerror or error}")

    def _handler(self, method: Callable[[bytes, Any], Awaitable[Any]]) -> Any:
        async def answer(data: bytes, context: Any) -> bytes:
            try:
                return await method(data, context)
            except RefusedError as error:
                code = getattr(self._grpc.StatusCode, error.code)
                await context.abort(code, error.told)
                raise

        return self._grpc.unary_unary_rpc_method_handler(answer)

    async def _predict(self, data: bytes, context: Any) -> bytes:
        left = context.time_remaining()
        until = math.inf if left is None else time.monotonic() + left
        with self._lock:
            if self._waiting >= self._queue + self._workers or (
                self._waiting and self._bytes + len(data) > 4 * self._most
            ):
                told = f"{self._waiting} requests of {self._bytes:,} bytes run and wait: try again later"
                raise RefusedError("RESOURCE_EXHAUSTED", told)
            self._waiting += 1
            self._bytes += len(data)
        future = self._pool.submit(self._work, data, until)
        future.add_done_callback(lambda _: self._leave(len(data)))
        return await asyncio.wrap_future(future)

    def _leave(self, size: int) -> None:
        with self._lock:
            self._waiting -= 1
            self._bytes -= size

    def _work(self, data: bytes, until: float) -> bytes:
        """Answer a request in a worker's thread."""
        if time.monotonic() >= until:
            raise RefusedError("DEADLINE_EXCEEDED", "the deadline passed while the request waited")
        request = _parsed("PredictRequest", data)
        with self._current() as model:
            return bytes(model.answer(request).SerializeToString())

    async def _metadata(self, data: bytes, context: Any) -> bytes:
        with self._current() as model:
            request = _parsed("GetModelMetadataRequest", data)
            return bytes(model.metadata(request).SerializeToString())

    async def _status(self, data: bytes, context: Any) -> bytes:
        spec = _parsed("GetModelStatusRequest", data).model_spec
        response = messages()["GetModelStatusResponse"]()
        with self._current() as model:
            model.check(spec)
            response.model_version_status.add(version=model.version, state=_AVAILABLE).status.SetInParent()
        for version, (reason, _, _) in [*self._failed.items()]:
            failed = response.model_version_status.add(version=version, state=_ENDED)
            failed.status.error_code, failed.status.error_message = 2, reason
        return bytes(response.SerializeToString())

    async def _health(self, data: bytes, context: Any) -> bytes:
        service = _parsed("HealthCheckRequest", data).service
        if service not in ("", self.name, "tensorflow.serving.PredictionService"):
            raise RefusedError("NOT_FOUND", f"there is no service {service!r}")
        response = messages()["HealthCheckResponse"](status=1 if self._serving else 2)
        return bytes(response.SerializeToString())


def _parsed(kind: str, data: bytes) -> Any:
    try:
        return messages()[kind].FromString(data)
    except Exception as error:  # protobuf's DecodeError isn't a ValueError
        told = f"{len(data):,} bytes aren't a {kind}: {first_line(error)}"
        raise RefusedError("INVALID_ARGUMENT", told) from error
