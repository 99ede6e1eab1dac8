"""The requests a second of a generative retriever, compared with exact scoring of the whole catalogue.

    python tools/bench/retrieval.py --json FILE
    python tools/bench/retrieval.py --items 10000 10000000 --device GPU --json FILE

64 users have 50 events each. Both return the 10 best of the catalogue and share the trunk, one block of HSTU
of width 64; the retriever's items have three codes of 256, predicted as digits, and one more digit, and it
keeps 50 beams. Codes are drawn evenly, so no level is clustered: 10^7 items first take some minutes and 13
GiB. The peer is `recommend` of the same model, whose scores are products with all items' vectors. Weights are
untrained, which takes as long as trained ones. Values are requests (users) a second, by the median of a
batch's time, and the 99th percentile of that time; batches take turns.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

import gmeta  # noqa: F401, E402  (before TensorFlow)
from gmeta.core.semantic_ids import Codebooks, SemanticIds  # noqa: E402
from gmeta.layers import HSTU, EmbeddingCollection, FeatureConfig  # noqa: E402
from gmeta.models import GenerativeRetriever  # noqa: E402

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from harness import Result, parser, report  # noqa: E402
from trie import CODES, draw_codes  # noqa: E402

USERS, EVENTS, DIM, K, BEAM = 64, 50, 64, 10, 50
_WARM_UP = 3


def make_model(items: int) -> GenerativeRetriever:
    """Make a retriever of this many items."""
    books = Codebooks(tuple(np.zeros((CODES, 1), np.float32) for _ in range(3)))
    digits = draw_codes(items, np.random.default_rng(0))
    ids = SemanticIds(np.arange(items), digits, books, "kmeans")
    block = {"heads": 1, "attention_dim": DIM, "value_dim": DIM, "max_length": EVENTS}
    backbone = HSTU(blocks=1, **block, bias_by_time=False)
    collection = EmbeddingCollection([FeatureConfig("item", dim=DIM)])
    return GenerativeRetriever(collection, backbone, ids, max_length=EVENTS, beam=BEAM, ks=(K,))


def measure(items: int, batches: int, device: str) -> list[Result]:
    """Measure a catalogue."""
    random = np.random.default_rng(1)
    with tf.device(device):
        model = make_model(items)
        vectors = model.item_vectors()  # first, as it takes more memory than it leaves
        rows = model.item_rows()
        spec = [tf.TensorSpec([None, EVENTS], tf.int64)]

        @tf.function(input_signature=spec)
        def retrieve(histories: tf.Tensor) -> tf.Tensor:
            return model.retrieve({"item": tf.RaggedTensor.from_tensor(histories)}, K, rows=rows)[0]

        @tf.function(input_signature=spec)
        def score(histories: tf.Tensor) -> tf.Tensor:
            return model.recommend({"item": tf.RaggedTensor.from_tensor(histories)}, K, vectors=vectors)[0]

        seconds: dict[str, list[float]] = {"retrieve": [], "score": []}
        for number in range(_WARM_UP + batches):
            histories = tf.constant(random.integers(0, items, (USERS, EVENTS)))
            for name, answer in (("retrieve", retrieve), ("score", score)):
                start = time.perf_counter()
                answer(histories).numpy()
                if number >= _WARM_UP:
                    seconds[name].append(time.perf_counter() - start)
    peer, where = "exact scoring", f"{device.split(':')[0].lower()}/items{_short(items)}"
    rate = [USERS / float(np.median(seconds[name])) for name in ("retrieve", "score")]
    late = [1e3 * float(np.percentile(seconds[name], 99)) for name in ("retrieve", "score")]
    return [
        Result(f"retrieval/users{USERS}/{where}", rate[0], "requests/s", peer, rate[1]),
        Result(f"retrieval/users{USERS}/{where}/p99", late[0], "ms", peer, late[1]),
    ]


def _short(items: int) -> str:
    return f"{items // 10**6}M" if items % 10**6 == 0 else f"{items // 1000}k"


def main() -> None:
    """Measure catalogues of several sizes."""
    options = parser(__doc__)
    options.add_argument(
        "--items", type=int, nargs="+", default=[10**4, 10**5, 10**6], help="(default: 10^4 to 10^6)"
    )
    options.add_argument(
        "--batches", type=int, default=200, help="timed batches of each (default: %(default)s)"
    )
    options.add_argument("--device", default="CPU:0", help="TensorFlow's name (default: %(default)s)")
    given = options.parse_args()
    sizes, batches = ([2000], given.rounds) if given.smoke else (given.items, given.batches)
    results = [result for items in sizes for result in measure(items, batches, given.device)]
    report("Retrieval beside exact scoring", results, given.json, users=USERS, beams=BEAM, events=EVENTS)


if __name__ == "__main__":
    main()
