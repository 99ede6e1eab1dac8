"""The dynamic table beside TFRA's CuckooHashTable and beside a dense variable, the physical limit.

    gmeta bench table --json FILE
    gmeta bench table --rows 10000000 --dims 64

One table at a time is filled with random int64 keys and its optimizer's slots (Adam). Calls take batches of
65,536 keys. Rates are keys per second of the call, medians of interleaved rounds.

lookup   rows of keys that are there; peers: TFRA's lookup, tf.gather of row numbers
miss     keys that aren't there, without insertion; peer: TFRA's lookup with its default value
insert   new keys into a table of this size; peer: TFRA's insert of zeros, into three tables where rows have
         Adam's moments
update   fused Adam, one call; peers: TFRA's weights and both moments looked up, Adam in TensorFlow, all three
         inserted again; gather, Adam, scatter on three dense variables
lookup with deduplication   `HashTable.lookup`, which finds the distinct ids first (no peer does)

TFRA isn't a dependency; to see it: pip install --no-deps tensorflow-recommenders-addons==0.8.1 'typeguard<3'
"""

from __future__ import annotations

import importlib.metadata
import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import gmeta.ops as ops
import numpy as np
import tensorflow as tf
from harness import WARM_UP, Result, interleave, parser, report

BATCH = 65_536
MEMORY_ROWS = 1_000_000
_NUMBERS = itertools.count()
TFRA, DENSE = "TFRA CuckooHashTable", "dense variable"


@dataclass(frozen=True)
class Case:
    """One table size and key distribution."""

    rows: int
    dim: int
    keys: str

    def name(self, operation: str) -> str:
        """The result's path."""
        size = f"{self.rows / 10**6:g}M" if self.rows >= 10**6 else f"{self.rows / 1000:g}k"
        return f"table/{operation}/{self.keys}/dim{self.dim}/rows{size}"


def scramble(numbers: np.ndarray) -> np.ndarray:
    """Row numbers as keys that are spread over all of int64 (a bijection: SplitMix64's finaliser)."""
    z = numbers.astype(np.uint64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))).view(np.int64)


def batches(case: Case, count: int, seed: int) -> list[np.ndarray]:
    """Row numbers of ``count`` batches: uniform, or Zipf with exponent 1.05 over all rows."""
    rng = np.random.default_rng(seed)
    if case.keys == "uniform":
        return [rng.integers(0, case.rows, BATCH) for _ in range(count)]
    cumulative = np.cumsum(np.arange(1, case.rows + 1, dtype=np.float64) ** -1.05)
    ranks = [np.searchsorted(cumulative, rng.random(BATCH) * cumulative[-1]) for _ in range(count)]
    # A rank's row is anywhere, so that hot rows don't lie side by side in the dense variable.
    order = rng.permutation(case.rows)
    return [order[np.minimum(rank, case.rows - 1)] for rank in ranks]


def find_tfra() -> Any:
    """TFRA's module, or None."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from tensorflow_recommenders_addons import dynamic_embedding
    except ImportError:
        return None
    return dynamic_embedding


_ROWS = tf.TensorSpec([None, None])


@tf.function(input_signature=[_ROWS] * 4)
def adam(w: Any, m: Any, v: Any, g: Any) -> tuple[Any, Any, Any]:
    """Adam on gathered rows, which is what a table without a fused optimizer needs (its t is large)."""
    m += (g - m) * 0.1
    v += (g * g - v) * 0.001
    return w - 1e-3 * m / (tf.sqrt(v) + 1e-7), m, v


def measure(case: Case, rounds: int) -> Iterator[Result]:
    """All operations of one case."""
    bench = Bench(case, rounds)
    yield from bench.lookup()
    yield from bench.lookup_with_deduplication()
    yield from bench.miss()
    yield from bench.update()
    yield from bench.memory()
    yield from bench.insert()


class Bench:
    """The contenders of one case, filled with its keys."""

    def __init__(self, case: Case, rounds: int) -> None:
        self.case, self.rounds = case, rounds
        self.calls = rounds + WARM_UP
        self.rows = batches(case, self.calls, seed=1)
        self.table: Any = ops.HashTable(
            case.dim, optimizer=ops.Adam(1e-3), initializer=ops.Uniform(), name="bench"
        )
        for numbers in fill(case):
            self.table.lookup_keys(scramble(numbers))
        self.dense: Any = tf.Variable(tf.zeros([case.rows, case.dim]), trainable=False)
        self.tfra = find_tfra()
        self.peer: Any = make_tfra(self.tfra, case) if self.tfra else None

    def compare(
        self,
        operation: str,
        keys: float,
        own: Callable[[int], object],
        peer: Callable[[int], object] | None,
        dense: Callable[[int], object] | None = None,
    ) -> Iterator[Result]:
        """Rates of the contenders that are there; ``keys`` in a call."""
        contenders = {"gmeta": own}
        if peer and self.tfra:
            contenders[TFRA] = peer
        if dense:
            contenders[DENSE] = dense
        rate = {name: keys / s for name, s in interleave(contenders, rounds=self.rounds).items()}
        if peer:
            yield Result(self.case.name(operation), rate["gmeta"], "keys/s", TFRA, rate.get(TFRA))
        if dense:
            yield Result(self.case.name(operation), rate["gmeta"], "keys/s", DENSE, rate[DENSE])

    def unseen(self, block: int) -> list[tf.Tensor]:
        """Batches of keys that no other block has, nor the table."""
        first = (1 + block) * 2 * self.case.rows
        return [tf.constant(scramble(first + k * BATCH + np.arange(BATCH))) for k in range(self.calls)]

    def lookup(self) -> Iterator[Result]:
        """Keys that are there."""
        keys = [tf.constant(scramble(batch)) for batch in self.rows]
        indices = [tf.constant(batch) for batch in self.rows]
        yield from self.compare(
            "lookup",
            BATCH,
            lambda k: self.table.lookup_keys(keys[k], insert=False),
            lambda k: self.peer.lookup(keys[k]),
            lambda k: tf.gather(self.dense, indices[k]),
        )

    def lookup_with_deduplication(self) -> Iterator[Result]:
        """What a training step does."""
        keys = [tf.constant(scramble(batch)) for batch in self.rows]
        seconds = interleave({"gmeta": lambda k: self.table.lookup(keys[k])}, rounds=self.rounds)
        yield Result(self.case.name("lookup_with_deduplication"), BATCH / seconds["gmeta"], "keys/s")

    def miss(self) -> Iterator[Result]:
        """Keys that are not there, and stay so."""
        keys = self.unseen(0)
        yield from self.compare(
            "miss",
            BATCH,
            lambda k: self.table.lookup_keys(keys[k], insert=False),
            lambda k: self.peer.lookup(keys[k]),
        )

    def update(self) -> Iterator[Result]:
        """Adam on distinct keys, as a lookup gives them; one peer after the other, for want of memory."""
        distinct = [np.unique(batch) for batch in self.rows]
        dim = self.case.dim
        gradients = [tf.random.stateless_normal([len(d), dim], [1, k]) for k, d in enumerate(distinct)]
        keys = [tf.constant(scramble(d)) for d in distinct]
        indices = [tf.constant(d) for d in distinct]
        count = float(np.median([len(d) for d in distinct]))

        def own(k: int) -> object:
            return self.table.apply_gradients(keys[k], gradients[k])

        self.dense = None
        tables = [self.peer, *(make_tfra(self.tfra, self.case) for _ in range(2))] if self.tfra else []

        def upsert(k: int) -> None:
            found = [table.lookup(keys[k]) for table in tables]
            for table, new in zip(tables, adam(*found, gradients[k]), strict=True):
                table.insert(keys[k], new)

        yield from self.compare("update_adam", count, own, upsert)
        tables.clear()
        self.peer = None
        variables = [tf.Variable(tf.zeros([self.case.rows, dim]), trainable=False) for _ in range(3)]

        def scatter(k: int) -> None:
            found = [tf.gather(variable, indices[k]) for variable in variables]
            for variable, new in zip(variables, adam(*found, gradients[k]), strict=True):
                variable.scatter_update(tf.IndexedSlices(new, indices[k]))

        yield from self.compare("update_adam", count, own, None, scatter)

    def memory(self) -> Iterator[Result]:
        """What a row costs beside its record of header, weights and two moments.

        The worst that growth leaves while a table fills, from a tenth of the rows on. An index that has grown
        drains its old half in the batches that follow, so some are run before each reading.
        """
        table = ops.HashTable(self.case.dim, optimizer=ops.Adam(), initializer=ops.Zeros(), name="memory")
        worst, rows = 0.0, min(self.case.rows, MEMORY_ROWS)
        for numbers in np.array_split(np.arange(rows), 40):
            keys = tf.constant(scramble(numbers))
            for _ in range(30):
                table.lookup_keys(keys)
            now = table.statistics()
            if int(now.size) >= rows // 10:
                worst = max(worst, int(now.bytes) / int(now.size) - (8 + 4 * 3 * self.case.dim))
        yield Result(self.case.name("bytes_beside_record"), worst, "bytes/row")
        yield Result(self.case.name("load_factor"), float(self.table.statistics().load_factor), "keys/slot")
        self.table = None

    def insert(self) -> Iterator[Result]:
        """New keys; the peer is handed rows that were made beforehand, and a table for each moment."""
        made = tf.zeros([BATCH, self.case.dim])
        for block, (name, optimizer, peers) in enumerate(
            (("insert_without_slots", ops.SGD(), 1), ("insert_adam", ops.Adam(), 3)), start=1
        ):
            keys = self.unseen(block)
            table = self.new_table(optimizer, ops.Zeros())
            tables = [make_tfra(self.tfra, self.case) for _ in range(peers)] if self.tfra else []

            def insert_all(k: int, tables: list[Any] = tables, keys: list[tf.Tensor] = keys) -> None:
                for peer in tables:
                    peer.insert(keys[k], made)

            yield from self.compare(
                name,
                BATCH,
                lambda k, table=table, keys=keys: table.lookup_keys(keys[k]),  # type: ignore[misc]
                insert_all,
            )
        keys = self.unseen(3)
        table = self.new_table(ops.Adam(), ops.Normal())
        seconds = interleave({"gmeta": lambda k: table.lookup_keys(keys[k])}, rounds=self.rounds)
        yield Result(self.case.name("insert_adam_normal_rows"), BATCH / seconds["gmeta"], "keys/s")

    def new_table(self, optimizer: ops.SparseOptimizer, initializer: ops.Initializer) -> ops.HashTable:
        """The case's keys, and room for more: as the peer's init_size, so that neither waits for memory."""
        table = ops.HashTable(self.case.dim, optimizer=optimizer, initializer=initializer, name="insert")
        table.reserve(self.case.rows + self.calls * BATCH)
        for numbers in fill(self.case):
            table.lookup_keys(scramble(numbers))
        return table


def fill(case: Case) -> Iterator[np.ndarray]:
    """The case's row numbers, in pieces."""
    for start in range(0, case.rows, 10 * BATCH):
        yield np.arange(start, min(start + 10 * BATCH, case.rows))


def make_tfra(module: Any, case: Case) -> Any:
    """A TFRA table of the case's keys."""
    peer = module.CuckooHashTable(
        tf.int64, tf.float32, tf.zeros([case.dim]), init_size=2 * case.rows, name=f"peer{next(_NUMBERS)}"
    )
    for numbers in fill(case):
        peer.insert(tf.constant(scramble(numbers)), tf.zeros([len(numbers), case.dim]))
    return peer


def main() -> None:
    """Run the cases and report."""
    options = parser(__doc__)
    options.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 1_500_000, 10_000_000])
    options.add_argument("--dims", type=int, nargs="+", default=[16, 64, 128])
    options.add_argument("--keys", nargs="+", choices=["uniform", "zipf"], default=["uniform", "zipf"])
    given = options.parse_args()
    rows, dims = ([20_000], [8]) if given.smoke else (given.rows, given.dims)
    results = []
    for size in rows:
        for dim in dims:
            for keys in given.keys:
                results += measure(Case(size, dim, keys), given.rounds)
    tfra = importlib.metadata.version("tensorflow-recommenders-addons") if find_tfra() else None
    report("table", results, given.json, tensorflow=tf.__version__, tfra=tfra, batch=BATCH)


if __name__ == "__main__":
    main()
