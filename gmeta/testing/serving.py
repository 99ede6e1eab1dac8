"""Asks an exported model in a process that has TensorFlow and nothing of gmeta."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

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
folder, signature, inputs, outputs = sys.argv[1:]
with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    model = tf.compat.v1.saved_model.load(session, ["serve"], folder)
    definition = model.signature_def[signature]
    given = np.load(inputs)
    assert set(given) == set(definition.inputs), (set(given), set(definition.inputs))
    feed = {definition.inputs[name].name: given[name] for name in given}
    fetch = {name: tensor.name for name, tensor in definition.outputs.items()}
    np.savez(outputs, **session.run(fetch, feed))
graph = model.graph_def
nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
assert not [node.op for node in nodes if "Gmeta" in node.op]
assert "gmeta" not in sys.modules
"""


def ask(
    folder: Path, signature: str, inputs: Mapping[str, npt.NDArray[np.generic]]
) -> dict[str, npt.NDArray[np.generic]]:
    """What a signature answers.

    Args:
      folder: A SavedModel.
      signature: Its name.
      inputs: Name -> array, of the signature's dtypes.

    Raises:
      RuntimeError: The process failed; with what it wrote.
    """
    with tempfile.TemporaryDirectory() as scratch:
        given, answered = Path(scratch, "inputs.npz"), Path(scratch, "outputs.npz")
        np.savez(given, **inputs)
        process = subprocess.run(
            [sys.executable, "-I", "-c", _SCRIPT, str(folder), signature, str(given), str(answered)],
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
            capture_output=True,
            text=True,
            check=False,
        )
        if process.returncode:
            raise RuntimeError(process.stderr)
        with np.load(answered) as arrays:
            return dict(arrays)
