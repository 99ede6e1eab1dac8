r"""Ask a server for predictions whose rows are in a store, without gmeta or TensorFlow: copy this file.

    python tools/dev/row_client.py http://localhost:8501/v1/models/scores redis://localhost:6379/scores \
        user,item '{"user": [7, 8], "item": [3, 5]}'

asks TensorFlow Serving which ids the request reads, gets their rows from the store at once, and sends both.
`gmeta/export/row_stores.py` describes the keys and values.
"""

from __future__ import annotations

import base64
import json
import sys
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import numpy as np


class Rows:
    """Rows in ``redis://host:port/prefix``, where the host may be any node of a cluster, or ``rocksdb:///path``."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme == "rocksdb":
            import rocksdict as rocks

            kind = rocks.AccessType.secondary(tempfile.mkdtemp())
            self._store = rocks.Rdict(parts.path, rocks.Options(raw_mode=True), access_type=kind)
            self._prefix, self._many = None, self._store.get
        else:
            import redis

            server, self._prefix = f"{parts.scheme}://{parts.netloc.split(',')[0]}", parts.path.strip("/")
            self._many = redis.Redis.from_url(server).mget
            if redis.Redis.from_url(server).info("cluster")["cluster_enabled"]:
                self._many = redis.RedisCluster.from_url(server).mget_nonatomic

    def get(self, ids: Mapping[str, Sequence[int]]) -> dict[str, list[bytes]]:
        """Map each table to the values of its ids, by one multi-get; empty where there is no row."""
        if self._prefix is None:
            self._store.try_catch_up_with_primary()
        keys = [key for table, of in ids.items() for key in self._keys(table, np.array(of, np.int64))]
        values = iter(self._many(keys) if keys else [])
        return {table: [next(values) or b"" for _ in of] for table, of in ids.items()}

    def _keys(self, table: str, ids: np.ndarray) -> list[bytes]:
        if self._prefix is None:
            return [
                table.encode() + b"\0" + number.to_bytes(8, "big", signed=True) for number in ids.tolist()
            ]
        buckets = (ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(57)
        pairs = zip(buckets.tolist(), ids.tolist(), strict=True)
        return [f"{self._prefix}:{{{bucket}}}:{table}:{number}".encode() for bucket, number in pairs]


def predict(server: str, rows: Rows, tables: Sequence[str], inputs: dict[str, Any], name: str) -> Any:
    """Return the answer of the signature ``name`` of a server's model, ``http://host:8501/v1/models/model``."""
    asked = ask(server, f"{name}_ids", inputs)
    asked = asked if isinstance(asked, dict) else {f"{tables[0]}_ids": asked}  # a single output has no name
    found = rows.get({table: asked[f"{table}_ids"] for table in tables})
    texts = {
        table: [{"b64": base64.b64encode(value).decode()} for value in of] for table, of in found.items()
    }
    return ask(server, name, {**inputs, **asked, **{f"{table}_rows": of for table, of in texts.items()}})


def ask(server: str, signature: str, inputs: dict[str, Any]) -> Any:
    """Send a request over REST."""
    body = json.dumps({"signature_name": signature, "inputs": inputs}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{server}:predict", body)) as answer:
        return json.load(answer)["outputs"]


if __name__ == "__main__":
    of = sys.argv[3].split(",")
    print(predict(sys.argv[1], Rows(sys.argv[2]), of, json.loads(sys.argv[4]), "serving_default"))
