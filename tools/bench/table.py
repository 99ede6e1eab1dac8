"""The dynamic table compared with TFRA's CuckooHashTable and with a dense variable, the physical limit.

    python tools/bench/table.py --json FILE
    python tools/bench/table.py --rows 10000000 --dims 64
    python tools/bench/table.py --bytes-alone --rows 64000 256000 1000000 4000000 --dims 16 64

One table at a time is filled with random int64 keys and its optimizer's slots (Adam), in an index made for
their number, with a load of 0.54 to 0.75 in each shard, 0.63 on average. Calls take batches of 65,536 keys.
Rates are keys per second of the call, medians of interleaved rounds.

lookup   rows of existing keys; peers: TFRA's lookup, tf.gather of row numbers
miss     absent keys, without insertion; peer: TFRA's lookup with its default value
insert   new keys into a table of this size; peer: TFRA's insert of zeros, thrice where rows have moments
update   fused Adam, one call; peers: TFRA's weights and both moments looked up, Adam in TensorFlow, all three
         inserted again; gather, Adam, scatter on three dense variables
lookup with deduplication   `HashTable.lookup`, which finds the distinct ids first (no peer does)
bytes beside record   the most memory that a row takes besides its header, weights and moments while another
         table, made for no particular number of rows, grows to this size from a quarter of it. Read after
         each of some hundred batches; it includes indexes, those that a growth has just left, directories,
         and partly filled blocks and chunks. --bytes-alone measures only this

The peer's weights and moments would be three tables. Here they are three sets of keys of one table: the same
calls, in a third of the memory and so never slower. A peer that doesn't fit into the machine's memory beside
the table is left out, which the first object of the JSON notes.

TFRA isn't a dependency; to measure it: pip install --no-deps tensorflow-recommenders-addons==0.8.1
'typeguard<3'
"""

from __future__ import annotations

import importlib.metadata
import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import gmeta.ops as ops
from gmeta import initializers, optimizers

import numpy as np
import tensorflow as tf
from harness import ROUNDS, WARM_UP, Result, interleave, parser, report

BATCH = 65_536
MOST_MEMORY = 0.85
"""The share of the machine's memory for the contenders of one comparison."""
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

    @property
    def own_bytes(self) -> int:
        """The approximate bytes of our table with Adam's moments."""
        return self.rows * (8 + 3 * 4 * self.dim + 28)

    @property
    def tfra_bytes(self) -> int:
        """The bytes of TFRA's table: buckets of four, a power of two of them."""
        buckets = 1 << math.ceil(math.log2(tfra_size(self) / 4))
        return buckets * 4 * (4 * self.dim + 12)

    @property
    def dense_bytes(self) -> int:
        """The bytes of a dense variable."""
        return self.rows * 4 * self.dim


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


def measure(case: Case, rounds: int, left_out: list[str]) -> Iterator[Result]:
    """All operations of one case; ``left_out`` collects the names of peers that don't fit in memory."""
    bench = Bench(case, rounds, left_out)
    yield from bench.lookup()
    yield from bench.lookup_with_deduplication()
    yield from bench.miss()
    yield from bench.update()
    yield bench.load_factor()
    yield from bench.insert()


def bytes_beside_record(case: Case) -> Result:
    """The most bytes of a row besides its record of header, weights and two moments, while a table grows."""
    table = ops.HashTable(
        case.dim, optimizer=optimizers.Adam(), initializer=initializers.Zeros(), name="memory"
    )
    record, worst = 8 + 4 * 3 * case.dim, 0.0
    for numbers in np.array_split(np.arange(case.rows), max(case.rows // BATCH, 400)):
        table.lookup_keys(tf.constant(scramble(numbers)))
        now = table.statistics()
        if int(now.size) >= case.rows // 4:
            worst = max(worst, int(now.bytes) / int(now.size) - record)
    return Result(case.name("bytes_beside_record"), worst, "bytes/row")


class Bench:
    """The contenders of one case, filled with its keys."""

    def __init__(self, case: Case, rounds: int, left_out: list[str]) -> None:
        self.case, self.rounds, self.left_out = case, rounds, left_out
        self.calls = rounds + WARM_UP
        self.rows = batches(case, self.calls, seed=1)
        self.table: Any = ops.HashTable(
            case.dim, optimizer=optimizers.Adam(1e-3), initializer=initializers.Uniform(), name="bench"
        )
        self.table.reserve(case.rows)
        for numbers in fill(case):
            self.table.lookup_keys(scramble(numbers))
        self.dense: Any = None
        if self.fits("a dense variable", case.dense_bytes):
            self.dense = tf.Variable(tf.zeros([case.rows, case.dim]), trainable=False)
        self.tfra = find_tfra()
        self.peer: Any = None
        if self.tfra and self.fits(TFRA, case.tfra_bytes + case.dense_bytes):
            self.peer = make_tfra(self.tfra, case)

    def fits(self, what: str, beside: int) -> bool:
        """Whether the machine has room for this many bytes beside our table."""
        needed = self.case.own_bytes + beside
        if needed <= MOST_MEMORY * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            return True
        self.left_out.append(f"{self.case.name('*')}: {what} needs {needed / 1e9:.1f} GB with the table")
        return False

    def compare(
        self,
        operation: str,
        keys: float,
        own: Callable[[int], object],
        peer: Callable[[int], object] | None,
        dense: Callable[[int], object] | None = None,
    ) -> Iterator[Result]:
        """Rates of the available contenders; ``keys`` in a call."""
        contenders = {"gmeta": own}
        if peer and self.peer:
            contenders[TFRA] = peer
        if dense:
            contenders[DENSE] = dense
        rate = {name: keys / s for name, s in interleave(contenders, rounds=self.rounds).items()}
        if peer:
            yield Result(self.case.name(operation), rate["gmeta"], "keys/s", TFRA, rate.get(TFRA))
        if dense:
            yield Result(self.case.name(operation), rate["gmeta"], "keys/s", DENSE, rate[DENSE])

    def unseen(self, block: int) -> list[tf.Tensor]:
        """Batches of keys that neither another block nor the table has."""
        first = (1 + block) * 2 * self.case.rows
        return [tf.constant(scramble(first + k * BATCH + np.arange(BATCH))) for k in range(self.calls)]

    def lookup(self) -> Iterator[Result]:
        """Look up existing keys."""
        keys = [tf.constant(scramble(batch)) for batch in self.rows]
        indices = [tf.constant(batch) for batch in self.rows]
        yield from self.compare(
            "lookup",
            BATCH,
            lambda k: self.table.lookup_keys(keys[k], insert=False),
            lambda k: self.peer.lookup(keys[k]),
            (lambda k: tf.gather(self.dense, indices[k])) if self.dense is not None else None,
        )

    def lookup_with_deduplication(self) -> Iterator[Result]:
        """Look up as a training step does."""
        keys = [tf.constant(scramble(batch)) for batch in self.rows]
        seconds = interleave({"gmeta": lambda k: self.table.lookup(keys[k])}, rounds=self.rounds)
        yield Result(self.case.name("lookup_with_deduplication"), BATCH / seconds["gmeta"], "keys/s")

    def miss(self) -> Iterator[Result]:
        """Look up missing keys, which stay missing."""
        keys = self.unseen(0)
        yield from self.compare(
            "miss",
            BATCH,
            lambda k: self.table.lookup_keys(keys[k], insert=False),
            lambda k: self.peer.lookup(keys[k]),
        )

    def update(self) -> Iterator[Result]:
        """Adam on distinct keys, as a lookup gives them; one peer after another, to save memory."""
        distinct = [np.unique(batch) for batch in self.rows]
        dim = self.case.dim
        gradients = [tf.random.stateless_normal([len(d), dim], [1, k]) for k, d in enumerate(distinct)]
        keys = [tf.constant(scramble(d)) for d in distinct]
        indices = [tf.constant(d) for d in distinct]
        count = float(np.median([len(d) for d in distinct]))

        def own(k: int) -> object:
            return self.table.apply_gradients(keys[k], gradients[k])

        self.dense = None
        shifts = [part * self.case.rows // 3 for part in range(3)]
        others = [[tf.constant(scramble((d + by) % self.case.rows)) for by in shifts] for d in distinct]

        def upsert(k: int) -> None:
            found = [self.peer.lookup(part) for part in others[k]]
            for part, new in zip(others[k], adam(*found, gradients[k]), strict=True):
                self.peer.insert(part, new)

        yield from self.compare("update_adam", count, own, upsert)
        self.drop_tfra()
        if not self.fits("three dense variables", 3 * self.case.dense_bytes):
            return
        variables = [tf.Variable(tf.zeros([self.case.rows, dim]), trainable=False) for _ in range(3)]

        def scatter(k: int) -> None:
            found = [tf.gather(variable, indices[k]) for variable in variables]
            for variable, new in zip(variables, adam(*found, gradients[k]), strict=True):
                variable.scatter_update(tf.IndexedSlices(new, indices[k]))

        yield from self.compare("update_adam", count, own, None, scatter)

    def load_factor(self) -> Result:
        """Updates of the table, which is deleted here to make room."""
        load = float(self.table.statistics().load_factor)
        self.table = None
        return Result(self.case.name("load_factor"), load, "keys/slot")

    def insert(self) -> Iterator[Result]:
        """New keys; the peer gets rows made beforehand, and a table for each moment."""
        made = tf.zeros([BATCH, self.case.dim])
        for name, optimizer, blocks in (
            ("insert_without_slots", optimizers.SGD(), (1,)),
            ("insert_adam", optimizers.Adam(), (1, 2, 3)),
        ):
            keys = [self.unseen(block) for block in blocks]
            table = self.new_table(optimizer, initializers.Zeros())
            if self.tfra and self.fits(TFRA, self.case.tfra_bytes):
                self.peer = make_tfra(self.tfra, self.case)

            def insert_all(k: int, keys: list[list[tf.Tensor]] = keys) -> None:
                for part in keys:
                    self.peer.insert(part[k], made)

            yield from self.compare(
                name,
                BATCH,
                lambda k, table=table, keys=keys: table.lookup_keys(keys[0][k]),  # type: ignore[misc]
                insert_all,
            )
            del table
            self.drop_tfra()
        fresh = self.unseen(1)
        table = self.new_table(optimizers.Adam(), initializers.Normal())
        seconds = interleave({"gmeta": lambda k: table.lookup_keys(fresh[k])}, rounds=self.rounds)
        yield Result(self.case.name("insert_adam_normal_rows"), BATCH / seconds["gmeta"], "keys/s")

    def drop_tfra(self) -> None:
        """Free TFRA's table, which outlives its Python object."""
        if self.peer:
            tf.raw_ops.DestroyResourceOp(resource=self.peer.resource_handle)
        self.peer = None

    def new_table(
        self, optimizer: optimizers.SparseOptimizer, initializer: initializers.Initializer
    ) -> ops.HashTable:
        """The case's keys, and room for more as in the peer's table, so that neither waits for memory."""
        table = ops.HashTable(self.case.dim, optimizer=optimizer, initializer=initializer, name="insert")
        table.reserve(self.case.rows + self.calls * BATCH)
        for numbers in fill(self.case):
            table.lookup_keys(scramble(numbers))
        return table


def fill(case: Case) -> Iterator[np.ndarray]:
    """The case's row numbers, in pieces."""
    for start in range(0, case.rows, 10 * BATCH):
        yield np.arange(start, min(start + 10 * BATCH, case.rows))


def tfra_size(case: Case) -> int:
    """The number of keys that TFRA's table is made for: all of a run, so that it never grows while timed."""
    return 3 * case.rows // 2 + 3 * BATCH * (ROUNDS + WARM_UP)


def make_tfra(module: Any, case: Case) -> Any:
    """A TFRA table of the case's keys."""
    peer = module.CuckooHashTable(
        tf.int64, tf.float32, tf.zeros([case.dim]), init_size=tfra_size(case), name=f"peer{next(_NUMBERS)}"
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
    options.add_argument("--bytes-alone", action="store_true", help="only bytes beside a record")
    given = options.parse_args()
    rows, dims = ([20_000], [8]) if given.smoke else (given.rows, given.dims)
    results: list[Result] = []
    left_out: list[str] = []
    for size in rows:
        for dim in dims:
            for keys in given.keys:
                if not given.bytes_alone:
                    results += measure(Case(size, dim, keys), given.rounds, left_out)
            results.append(bytes_beside_record(Case(size, dim, "uniform")))
    tfra = importlib.metadata.version("tensorflow-recommenders-addons") if find_tfra() else None
    about = {"tensorflow": tf.__version__, "tfra": tfra, "batch": BATCH, "left_out": sorted(set(left_out))}
    report("table", results, given.json, **about)


if __name__ == "__main__":
    main()
