"""Items found by an index, compared with exact scoring of the whole catalogue: recall, rates and times.

    taskset -c 0-1 python tools/bench/nearest.py --json FILE
    taskset -c 0-1 python tools/bench/nearest.py --items 10000000 --probes 64 --json FILE

The 100 best of generated vectors of 64 numbers and length 1. Each lies around one of V / 1,000 centres, whose
shares of the items are Zipf's. Its distance from the centre is ``--noise`` times that of the centres from 0,
and the variance of coordinate i falls as 1 / i. A query is an item's vector plus a random one of
``--query-noise`` times its length. The peer of rates and times is exact scoring, block by block.

Values are the time to build, the index's bytes without the vectors, and those of the vectors, which are a
mapped file in service; the recall of ``--compared`` users; users a second, by the median of a batch's time,
without filters and, as ``filtered``, with half of the items in stock and ``--blocked`` a user; and the 50th
and 99th percentiles of single requests. Needs Faiss: pip install 'gmeta[nearest]'
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

import gmeta  # noqa: F401, E402  (before TensorFlow)
from gmeta.models.sequence.nearest_items import NearestItems  # noqa: E402

import faiss  # noqa: E402
import numpy as np  # noqa: E402
import numpy.typing as npt  # noqa: E402
from harness import Result, interleave, parser, report  # noqa: E402

DIM, K, USERS = 64, 100, 1000
_BLOCK = 1 << 18

Floats = npt.NDArray[np.float32]


def draw(items: int, noise: float, query_noise: float, seed: int = 0) -> tuple[Floats, Floats]:
    """Draw vectors of items, (items, 64), and of users, (1000, 64)."""
    random = np.random.default_rng(seed)
    scale = (np.arange(1, DIM + 1) ** -0.5).astype(np.float32)
    centres = random.standard_normal((max(items // 1000, 4), DIM), dtype=np.float32)
    shares = 1 / random.permutation(np.arange(1, len(centres) + 1))
    vectors = np.empty((items, DIM), np.float32)
    for begin in range(0, items, _BLOCK):
        block = vectors[begin : begin + _BLOCK]
        block[:] = noise * random.standard_normal(block.shape, dtype=np.float32)
        block += centres[random.choice(len(centres), len(block), p=shares / shares.sum())]
        block *= scale
        block /= np.linalg.norm(block, axis=1, keepdims=True)
    off = random.standard_normal((USERS, DIM), dtype=np.float32) * scale
    off *= query_noise / np.linalg.norm(off, axis=1, keepdims=True)
    return vectors, vectors[random.integers(0, items, USERS)] + off


def measure(
    items: int,
    noise: float,
    query_noise: float,
    probes: list[int],
    *,
    rounds: int,
    singles: int,
    blocked: int,
    compared: int,
) -> list[Result]:
    """Measure a catalogue."""
    vectors, queries = draw(items, noise, query_noise)
    k, name = min(K, items), f"nearest/items{_short(items)}/noise{noise:g}"
    start = time.perf_counter()
    index = NearestItems(vectors, probes=1)
    results = [Result(f"{name}/lists{index.lists}/build", time.perf_counter() - start, "s")]
    with tempfile.TemporaryDirectory() as folder:
        index.save(Path(folder, "index"))
        sizes = {path.name: path.stat().st_size for path in Path(folder, "index").iterdir()}
        del index, vectors
        index = NearestItems.load(Path(folder, "index"))
        kept = sizes.pop("vectors.npy")
        results += [Result(f"{name}/index", sum(sizes.values()), "B"), Result(f"{name}/vectors", kept, "B")]
        few = queries[:64]
        exact = interleave({"exact": lambda _: index.exact(few, k)}, rounds=3, warm_up=1)["exact"]
        alone = _times(lambda i: index.exact(queries[i : i + 1], k), 20)
        leave_out = np.random.default_rng(1).integers(0, items, (USERS, blocked))
        in_stock = np.random.default_rng(2).random(items) < 0.5
        for count in probes:
            index.probes = min(count, index.lists)
            of = f"{name}/probes{index.probes}"
            results.append(Result(f"{of}/recall@{k}", index.recall(queries[:compared], k), ""))
            seconds = interleave(
                {
                    "users": lambda _: index.search(queries, k),
                    "filtered": lambda _: index.search(queries, k, leave_out=leave_out, allow=in_stock),
                },
                rounds=rounds,
            )
            for each, taken in seconds.items():
                peer = ("exact scoring", len(few) / exact) if each == "users" else ()
                results.append(Result(f"{of}/{each}", USERS / taken, "users/s", *peer))
            found = _times(lambda i: index.search(queries[i : i + 1], k), singles)
            for percent in (50, 99):
                late = [float(np.percentile(each, percent)) for each in (found, alone)]
                results.append(Result(f"{of}/request/p{percent}", late[0], "ms", "exact scoring", late[1]))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return [*results, Result(f"{name}/peak_memory", peak, "B")]


def _times(request: object, count: int) -> list[float]:
    """Return the milliseconds of requests, one after the other, after a tenth of them as a warm-up."""
    found = []
    for number in range(-(count // 10), count):
        start = time.perf_counter()
        request(number % USERS)  # type: ignore[operator]
        if number >= 0:
            found.append(1e3 * (time.perf_counter() - start))
    return found


def _short(items: int) -> str:
    return f"{items // 10**6}M" if items % 10**6 == 0 else f"{items // 1000}k"


def main() -> None:
    """Measure catalogues of several sizes."""
    options = parser(__doc__)
    options.add_argument("--items", type=int, nargs="+", default=[10**6], help="(default: 10^6)")
    options.add_argument("--noise", type=float, default=0.7, help="(default: %(default)s)")
    options.add_argument("--query-noise", type=float, default=0.4, help="(default: %(default)s)")
    options.add_argument("--probes", type=int, nargs="+", default=[32, 64, 128], help="(default: 32 64 128)")
    options.add_argument("--singles", type=int, default=1000, help="single requests (default: %(default)s)")
    options.add_argument(
        "--compared", type=int, default=USERS, help="users whose recall is measured (default: %(default)s)"
    )
    options.add_argument("--blocked", type=int, default=20, help="of a user (default: %(default)s)")
    given = options.parse_args()
    sizes, probes, singles = given.items, given.probes, given.singles
    if given.smoke:
        sizes, probes, singles = [5000], [4], 20
    how = {
        "rounds": given.rounds,
        "singles": singles,
        "blocked": given.blocked,
        "compared": given.compared,
    }
    results = [
        result for items in sizes for result in measure(items, given.noise, given.query_noise, probes, **how)
    ]
    facts = {"faiss": faiss.__version__, "users": USERS, "k": K, "query_noise": given.query_noise}
    report("Items found by an index", results, given.json, **facts)


if __name__ == "__main__":
    main()
