"""A process with TensorFlow Serving's REST interface, for the newest version in a base path.

As TensorFlow Serving does, it looks for new versions every second, and answers by the earlier one until a new
one is loaded. A version is loaded into a session, by TensorFlow's own ops.
"""

from __future__ import annotations

import base64
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

_POLL = 1.0  # seconds, as --file_system_poll_wait_seconds


class Loaded:
    """A version of the model in a session.

    Args:
      folder: The SavedModel.
      threads: Threads of TensorFlow; 0: as many as there are cores.
    """

    def __init__(self, folder: Path, threads: int) -> None:
        graph = tf.Graph()
        config = tf.compat.v1.ConfigProto(
            intra_op_parallelism_threads=threads, inter_op_parallelism_threads=threads
        )
        self._session = tf.compat.v1.Session(graph=graph, config=config)
        with graph.as_default():
            model = tf.compat.v1.saved_model.load(self._session, ["serve"], str(folder))
        nodes = [*model.graph_def.node]
        nodes += [node for function in model.graph_def.library.function for node in function.node_def]
        assert not [node.op for node in nodes if "Gmeta" in node.op]
        self._signatures = model.signature_def

    def answer(self, inputs: dict[str, Any], signature_name: str = "serving_default") -> Any:
        """Answer a request in the columnar form (https://www.tensorflow.org/tfx/serving/api_rest)."""
        signature = self._signatures[signature_name]
        feed = {}
        for name, tensor in signature.inputs.items():
            given = inputs[name]
            text = isinstance(given, dict)
            kind = object if text else tf.as_dtype(tensor.dtype).as_numpy_dtype
            feed[tensor.name] = np.array(base64.b64decode(given["b64"]) if text else given, kind)
        found = self._session.run({name: tensor.name for name, tensor in signature.outputs.items()}, feed)
        answers = {name: value.tolist() for name, value in found.items()}
        return answers if len(answers) > 1 else next(iter(answers.values()))

    def close(self) -> None:
        """Release the memory."""
        self._session.close()


def newest_in(base: Path) -> int:
    """Return the newest version in a base path; 0 if there is none."""
    return max([0, *(int(path.name) for path in base.glob("*") if path.name.isdigit())])


def serve(base: str, port: int, threads: int = 0) -> None:
    """Serve the newest version below a base path, at any model's name, until the process ends."""
    loaded: dict[int, Loaded] = {}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                code, said = 200, {"outputs": loaded[max(loaded)].answer(**asked)}
            except ValueError:
                code, said = 404, {"error": "no version is loaded"}
            except Exception as error:  # any error is reported to the client
                code, said = 400, {"error": f"{type(error).__name__}: {error}"}
            data = json.dumps(said).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while True:
        newest = newest_in(Path(base))
        if newest and newest not in loaded:
            loaded[newest] = Loaded(Path(base) / str(newest), threads)
            for version in [version for version in loaded if version != newest]:
                loaded.pop(version).close()
        time.sleep(_POLL)
