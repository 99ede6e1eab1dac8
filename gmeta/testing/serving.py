"""Asks an exported model in a process that has TensorFlow and nothing of gmeta."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gmeta.training.export import PADDING

# As TensorFlow Serving loads it: the graph of one tag, variables, the initializers of tables, a signature.
_SCRIPT = """
import sys
import numpy as np
class NoGmeta:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "gmeta":
            raise ImportError("gmeta isn't here")
sys.meta_path.insert(0, NoGmeta())
import tensorflow as tf
def answer(folder, signature, inputs, outputs):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        model = tf.compat.v1.saved_model.load(session, ["serve"], folder)
        definition = model.signature_def[signature]
        given = np.load(inputs, allow_pickle=True)
        assert set(given) == set(definition.inputs), (set(given), set(definition.inputs))
        feed = {definition.inputs[name].name: given[name] for name in given}
        fetch = {name: tensor.name for name, tensor in definition.outputs.items()}
        found = session.run(fetch, feed)
        # NumPy's own strings would lose the zeros that a string of bytes ends with.
        texts = {name: np.array(value, object) for name, value in found.items() if type(value) is bytes}
        np.savez(outputs, **{**found, **texts})
    graph = model.graph_def
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    assert not [node.op for node in nodes if "Gmeta" in node.op]
for start in range(1, len(sys.argv), 4):
    answer(*sys.argv[start : start + 4])
assert "gmeta" not in sys.modules
"""


Request = tuple[Path, str, Mapping[str, npt.NDArray[np.generic]]]
"""A SavedModel's folder, the name of a signature, and name -> array of the signature's dtypes; a string is an
array of one object."""

Answer = dict[str, npt.NDArray[np.generic]]


def ask(folder: Path, signature: str, inputs: Mapping[str, npt.NDArray[np.generic]]) -> Answer:
    """What a signature answers; see `Request`.

    Raises:
      RuntimeError: The process failed; with what it wrote.
    """
    return ask_all([(folder, signature, inputs)])[0]


def ask_all(requests: Sequence[Request]) -> list[Answer]:
    """What is answered to each request, by one process.

    Raises:
      RuntimeError: The process failed; with what it wrote.
    """
    with tempfile.TemporaryDirectory() as scratch:
        words: list[str] = []
        for number, (folder, signature, inputs) in enumerate(requests):
            files = [str(Path(scratch, f"{part}-{number}.npz")) for part in ("inputs", "outputs")]
            np.savez(files[0], **inputs)
            words += [str(folder), signature, *files]
        process = subprocess.run(
            [sys.executable, "-I", "-c", _SCRIPT, *words],
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
            capture_output=True,
            text=True,
            check=False,
        )
        if process.returncode:
            raise RuntimeError(process.stderr)
        return [_read(outputs) for outputs in words[3::4]]


def _read(path: str) -> Answer:
    with np.load(path, allow_pickle=True) as arrays:
        return dict(arrays)


def padded(features: Mapping[str, Any]) -> dict[str, npt.NDArray[np.generic]]:
    """Features as a client sends them: ragged ids as a matrix, its rows filled up."""
    return {
        name: (value.to_tensor(PADDING).numpy() if isinstance(value, tf.RaggedTensor) else np.asarray(value))
        for name, value in features.items()
    }
