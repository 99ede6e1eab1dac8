"""Files for servers around a SavedModel: warm-up requests, and a model repository of Triton.

A server's first request of a signature takes longer than the others, because TensorFlow then prepares its
graph. TensorFlow Serving and `gmeta serve` therefore answer the requests in
``assets.extra/tf_serving_warmup_requests`` before a version takes requests of clients.

Triton calls models by its own interface. Its Python backend runs a ``model.py``, which here calls a signature
in a session of stock TensorFlow.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, saved_model_pb2

from gmeta.core.errors import ConfigError, GmetaError, first_line, without_ops
from gmeta.core.files import stage_folder
from gmeta.export.servers import messages, put_array
from gmeta.export.signature import DEFAULT_SIGNATURE

WARM_UP = Path("assets.extra", "tf_serving_warmup_requests")
"""The file of warm-up requests in a SavedModel: a TFRecord file of ``PredictionLog``."""

Inputs: TypeAlias = "Mapping[str, npt.ArrayLike]"
Arrays: TypeAlias = "dict[str, npt.NDArray[Any]]"
Specs: TypeAlias = "Mapping[str, Mapping[str, tf.TensorSpec]]"

_BYTES, _IDS, _ROWS = "_bytes", "_ids", "_rows"


def reason_of(error: BaseException) -> str:
    """Return what TensorFlow's error about a request says, in one line: what was asserted, if that failed."""
    text = str(getattr(error, "message", error))
    if asserted := re.search(r"assertion failed: \[(.*)\]\s*$", text, re.MULTILINE):
        return asserted[1].replace("] [", " ")
    around = r"\s*$|\d+ root error|Graph execution error:|Detected at node|<stack traces|\s*\[\["
    lines = [line for line in text.splitlines() if not re.match(around, line)]
    return without_ops(lines[0].strip()) if lines else type(error).__name__


class _NoSampleError(Exception):
    """A signature's inputs can't be made up."""


class WarmUp:
    """Makes a small request for each signature of an export.

    A request has one sample, with the id 1, the text "1" and the number 1, or what the user gives. Bytes that
    one signature takes and another answers, such as ``weights_bytes``, are the other one's answer. Rows of
    external tables are absent.

    Args:
      functions: Signature -> its function in the export.
      specs: Signature -> name of an input -> its spec, as clients send it.
      given: Signature -> its inputs by name, from the user.

    Raises:
      ConfigError: ``given`` names a signature or an input that doesn't exist, lacks an input, or has one of
        another dtype or shape.
    """

    def __init__(self, functions: Mapping[str, Any], specs: Specs, given: Mapping[str, Inputs]) -> None:
        self._functions, self._specs = functions, specs
        self._answers_of = {name: {*each.structured_outputs} for name, each in functions.items()}
        self._given = {name: self._check(name, inputs) for name, inputs in given.items()}
        self._inputs: dict[str, Arrays] = {}
        self._answers: dict[str, Arrays] = {}

    def requests(self) -> tuple[dict[str, Arrays], dict[str, str]]:
        """Return signature -> inputs of the requests that are answered, and signature -> why it has none.

        Raises:
          ConfigError: A request of the user's isn't answered.
        """
        failed = {}
        for name in self._specs:
            try:
                self._ask(name)
            except (_NoSampleError, tf.errors.OpError) as error:
                if name in self._given:
                    raise ConfigError(f"warm_up[{name!r}] isn't answered: {reason_of(error)}") from error
                failed[name] = reason_of(error)
        return {name: self._inputs[name] for name in self._specs if name in self._answers}, failed

    def _check(self, name: str, inputs: Inputs) -> Arrays:
        if name not in self._specs:
            raise ConfigError(f"warm_up: there is no signature {name!r}; there are {', '.join(self._specs)}")
        specs = self._specs[name]
        if strange := sorted(inputs.keys() - specs.keys()):
            raise ConfigError(f"warm_up[{name!r}]: there is no input {strange[0]!r}, but {', '.join(specs)}")
        lacking = [key for key in specs if key not in inputs and self._source(name, key) is None]
        if lacking:
            raise ConfigError(f"warm_up[{name!r}] lacks {', '.join(lacking)}")
        found = {}
        for key, value in inputs.items():
            try:
                tensor = tf.convert_to_tensor(value, specs[key].dtype)
            except (TypeError, ValueError) as error:
                raise ConfigError(f"warm_up[{name!r}][{key!r}]: {first_line(error)}") from error
            if not specs[key].shape.is_compatible_with(tensor.shape):
                wanted = specs[key].shape
                raise ConfigError(f"warm_up[{name!r}][{key!r}] must have shape {wanted}, got {tensor.shape}")
            found[key] = _array(tensor)
        return found

    def _source(self, name: str, key: str) -> str | None:
        """Return the signature whose answer is an input of another one; None: there is none."""
        own = f"{name}{_IDS}"
        ids = f"{key.removesuffix(_ROWS)}{_IDS}" if key.endswith(_ROWS) else key
        if ids in self._answers_of.get(own, ()):
            return own
        if not key.endswith(_BYTES):
            return None
        others = [other for other, answers in self._answers_of.items() if key in answers]
        return next((other for other in others if other != name and key not in self._specs[other]), None)

    def _ask(self, name: str) -> Arrays:
        if name not in self._answers:
            given = self._given.get(name, {})
            shared = given or self._given.get(name.removesuffix(_IDS), {})
            inputs = {key: self._input(name, key, spec, shared) for key, spec in self._specs[name].items()}
            self._inputs[name] = inputs
            sent = {key: tf.constant(value, self._specs[name][key].dtype) for key, value in inputs.items()}
            found = self._functions[name](**sent)
            self._answers[name] = {key: _array(value) for key, value in found.items()}
        return self._answers[name]

    def _input(self, name: str, key: str, spec: tf.TensorSpec, given: Arrays) -> npt.NDArray[Any]:
        if key in given:
            return given[key]
        if (source := self._source(name, key)) is not None:
            answer = self._ask(source)
            if key.endswith(_ROWS) and key not in answer:
                return np.full(answer[f"{key.removesuffix(_ROWS)}{_IDS}"].shape, b"", object)
            return answer[key]
        if key.endswith(_BYTES):
            raise _NoSampleError(f"no signature answers {key}")
        shape = [1 if size is None else size for size in (spec.shape.as_list() if spec.shape.rank else [])]
        return np.full(shape, b"1", object) if spec.dtype == tf.string else np.ones(shape, _numpy(spec.dtype))


def _numpy(dtype: tf.DType) -> Any:
    return dtype.as_numpy_dtype


def _array(tensor: tf.Tensor) -> npt.NDArray[Any]:
    """Return an array; NumPy's own strings would lose the zeros at the end of bytes."""
    return np.array(tensor.numpy(), object if tensor.dtype == tf.string else None)


def write_warm_up(folder: Path, requests: Mapping[str, Arrays], specs: Specs) -> None:
    """Write warm-up requests into a SavedModel.

    Args:
      folder: The SavedModel.
      requests: Signature -> inputs.
      specs: Signature -> the specs of its inputs.
    """
    (folder / WARM_UP).parent.mkdir(exist_ok=True)
    with tf.io.TFRecordWriter(str(folder / WARM_UP)) as writer:
        for name, inputs in requests.items():
            log = messages()["PredictionLog"]()
            request = log.predict_log.request
            request.model_spec.signature_name = name
            for key, array in inputs.items():
                value = request.inputs.add(key=key).value
                put_array(value, array, specs[name][key].dtype.as_datatype_enum)
            writer.write(log.SerializeToString())


def read_warm_up(folder: Path) -> list[Any]:
    """Read the warm-up requests of a SavedModel, each a ``PredictRequest``; none if it has no such file.

    Raises:
      GmetaError: The file is damaged, or a record is of another interface.
    """
    path = folder / WARM_UP
    if not path.is_file():
        return []
    found: list[Any] = []
    try:
        for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
            log = messages()["PredictionLog"].FromString(record)
            if not log.HasField("predict_log"):
                raise ValueError(f"record {len(found) + 1} isn't one of Predict")
            found.append(log.predict_log.request)
    except Exception as error:  # protobuf's DecodeError isn't a ValueError
        raise GmetaError(f"{path}: {first_line(error)}; write it again, or remove it") from error
    return found


# Triton.


class TritonPythonModel:
    """A signature of the SavedModel in this folder, for Triton's Python backend.

    Requests are answered one by one: a batch would mix users.
    """

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the SavedModel into a session.

        Args:
          args: As Triton's Python backend gives them.
        """
        parameters = json.loads(args["model_config"])["parameters"]
        folder = Path(args["model_repository"], str(args["model_version"]), "saved_model")
        graph = tf.Graph()
        config = config_pb2.ConfigProto(intra_op_parallelism_threads=1)
        self._session = tf.compat.v1.Session(graph=graph, config=config)
        with graph.as_default():
            model = tf.compat.v1.saved_model.load(self._session, ["serve"], str(folder))
        signature = model.signature_def[parameters["signature"]["string_value"]]
        self._inputs, self._outputs = sorted(signature.inputs), sorted(signature.outputs)
        infos = [signature.inputs[name] for name in self._inputs]
        self._scalars = [not each.tensor_shape.dim and not each.tensor_shape.unknown_rank for each in infos]
        options = config_pb2.CallableOptions()
        options.feed.extend(each.name for each in infos)
        options.fetch.extend(signature.outputs[name].name for name in self._outputs)
        options.run_options.inter_op_thread_pool = -1  # the caller's thread: the graphs have small ops
        self._run = self._session._make_callable_from_options(options)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer requests."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        import triton_python_backend_utils as triton

        try:
            given = []
            for name, scalar in zip(self._inputs, self._scalars, strict=True):
                array = triton.get_input_tensor_by_name(request, name).as_numpy()
                given.append(array.reshape(()) if scalar else array)  # Triton has no scalars
            found = self._run(*given)
        except (tf.errors.OpError, ValueError) as error:
            return triton.InferenceResponse(error=triton.TritonError(str(error).partition("\n\t")[0]))
        arrays = [
            np.array(value, object) if isinstance(value, bytes) else np.asarray(value) for value in found
        ]
        tensors = zip(self._outputs, map(np.atleast_1d, arrays), strict=True)
        return triton.InferenceResponse([triton.Tensor(name, array) for name, array in tensors])

    def finalize(self) -> None:
        """Release the memory."""
        self._session.close()


_MODEL = '''"""`gmeta export --for triton` wrote this file. It needs TensorFlow and NumPy, and no gmeta."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2


'''

_TRITON = {
    **{tf.as_dtype(name): f"TYPE_{name.upper()}" for name in ("bool", "uint8", "uint16", "uint32", "uint64")},
    **{tf.as_dtype(name): f"TYPE_{name.upper()}" for name in ("int8", "int16", "int32", "int64")},
    **{tf.float16: "TYPE_FP16", tf.float32: "TYPE_FP32", tf.float64: "TYPE_FP64", tf.string: "TYPE_STRING"},
}
"""TensorFlow's dtype -> Triton's name of it."""


def triton_version(repository: Path) -> int:
    """Return the number of the next version in a model repository."""
    return max([0, *(int(path.name) for path in repository.glob("*/*") if path.name.isdecimal())]) + 1


def write_triton(saved_model: Path, repository: Path, version: int) -> list[str]:
    """Write a SavedModel as a model repository of Triton, a model for each signature.

    The models are called ``<repository's name>_<signature>``. Signatures of deltas aren't among them: each
    model has tables of its own, so that a delta would change those of one.

    Args:
      saved_model: The SavedModel; its files get second names in the repository, or are copied.
      repository: The folder; it may have earlier versions.
      version: The version to write.

    Returns:
      The models' names.

    Raises:
      ConfigError: A signature has a dtype that Triton hasn't, or no inputs; or the version exists.
      GmetaError: The folder can't be written.
    """
    data = (saved_model / "saved_model.pb").read_bytes()
    signatures = saved_model_pb2.SavedModel.FromString(data).meta_graphs[0].signature_def
    hidden = (DEFAULT_SIGNATURE, "apply_delta", "delta_version")
    names = [name for name in sorted(signatures) if name not in hidden and not name.startswith("__")]
    configs = {f"{repository.name}_{name}": _config(repository, name, signatures[name]) for name in names}
    if taken := [name for name in configs if (repository / name / str(version)).exists()]:
        raise ConfigError(f"{repository / taken[0] / str(version)} exists: name another --model-version")
    for name, config in configs.items():
        with stage_folder(repository / name / str(version)) as staging:
            (staging / "model.py").write_text(_MODEL + inspect.getsource(TritonPythonModel))
            shutil.copytree(saved_model, staging / "saved_model", copy_function=_link)
            (repository / name / "config.pbtxt").write_text(config)
    return [*configs]


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)


def _config(repository: Path, name: str, signature: Any) -> str:
    parts = [f'name: "{repository.name}_{name}"', 'backend: "python"', "max_batch_size: 0"]
    for kind, tensors in (("input", signature.inputs), ("output", signature.outputs)):
        parts += [_tensor(kind, name, key, tensors[key]) for key in sorted(tensors)]
    parts.append(f'parameters {{ key: "signature" value {{ string_value: "{name}" }} }}')
    parts.append("instance_group [ { kind: KIND_CPU } ]")
    return "\n".join(parts) + "\n"


def _tensor(kind: str, signature: str, key: str, info: Any) -> str:
    dtype, shape = tf.as_dtype(info.dtype), tf.TensorShape(info.tensor_shape)
    if dtype not in _TRITON or shape.rank is None:
        raise ConfigError(f"Triton can't have {kind} {key!r} of {signature}: {dtype.name} of shape {shape}")
    dims = ", ".join(str(-1 if size is None else size) for size in shape.as_list() or [1])
    return f'{kind} [ {{ name: "{key}" data_type: {_TRITON[dtype]} dims: [ {dims} ] }} ]'
