"""The GPU table and deduplication on the GPU, by the library's C interface.

    python tools/bench/gpu_table.py --json FILE

find      rows of existing keys; the peer is torch.index_select of as many rows by their numbers
upsert    the same, counting uses (find or insert); distinct: keys are promised to occur once
insert    rows of new keys, of normal initial weights
adam      the optimizer's step on the rows of distinct keys
unique    the distinct ids of a batch and their inverse; the peer is torch.unique(return_inverse=True)
step      a training step's sparse part with Adam: 1 M ids, 350 k of them distinct, dim 128: unique, upsert of
          the distinct, rows to positions, gradients of positions back to rows, Adam

A call has 1 M keys. load is the load of the index. "% of copy" is relative to the bandwidth of a large copy
on the same GPU, counting the bytes of rows that must be read and written, and no others: 2 * 4 * dim a key
found, 7 * 4 * dim a row updated by Adam. half: of a table of TwoPrecisions whose rows are all halves, (2 + 4)
* dim a key found, (4 + 6 * 2) * dim a row updated. Values are medians of 50 calls after 10, timed by CUDA
events; keys change from call to call. It requires PyTorch.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from gmeta.optimizers import SGD, Adam  # noqa: E402
from support.gpu.cuda_library import call, library, why_missing  # noqa: E402
from support.gpu.gpu_table import GpuTable  # noqa: E402

from harness import Result, parser, report  # noqa: E402

NORMAL = SimpleNamespace(kind="normal", parameters=(0.0, 0.05))
OPTIMIZERS = {"sgd": SGD(), "adam": Adam()}
BATCH, SETS, ZIPF = 1 << 20, 8, 1.05
NEVER = 1 << 30  # uses, before a row is stored in full


def why_absent() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "PyTorch isn't installed"
    return why_missing()


def at(tensor: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def stream() -> ctypes.c_void_p:
    import torch

    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def keys_of(numbers: Any) -> Any:
    """Keys that look random, a different one for each number."""
    return numbers * 0x1E3779B97F4A7C15


def draw(rows: int, form: str, count: int = BATCH) -> Any:
    """Numbers below ``rows``, uniform or by Zipf's law."""
    import torch

    if form == "uniform":
        return torch.randint(0, rows, (count,), device="cuda")
    u, power = torch.rand(count, device="cuda", dtype=torch.float64), 1.0 - ZIPF
    return (((rows**power - 1) * u + 1) ** (1 / power)).long().clamp(1, rows) - 1


class _Bench:
    """Collects results."""

    def __init__(self, smoke: bool) -> None:
        from parts.gpu_timing import copy_bandwidth

        self.runs = 3 if smoke else 50
        self.smoke = smoke
        self.bandwidth = copy_bandwidth(1 if smoke else 4)
        self.results = [Result("gpu_table/copy_bandwidth", self.bandwidth, "B/s")]

    def time(self, run: Any) -> float:
        from parts.gpu_timing import timed

        return timed(run, self.runs).p50

    def rate(self, name: str, seconds: float, count: int, row_bytes: int, peer: Any = (None, None)) -> None:
        peer_name, peer_seconds = peer
        theirs = count / peer_seconds if peer_seconds else None
        self.results.append(Result(f"gpu_table/{name}", count / seconds, "keys/s", peer_name, theirs))
        share = 100 * count * row_bytes / seconds / self.bandwidth
        self.results.append(Result(f"gpu_table/{name}/share", share, "% of copy"))

    def table(self, dim: int, optimizer: str, log2_slots: int, load: float, half: bool = False) -> None:
        import torch

        most, rows = (1 << log2_slots) * 3 // 4, int(load * (1 << log2_slots))
        table = GpuTable(dim, OPTIMIZERS[optimizer], NORMAL, 1, half_below=NEVER if half else 0)
        # Of a weight found, and of one updated: float32 gradients and results, numbers as they are stored.
        found, updated = (2 + 4, 4 + 6 * 2) if half else (8, 28)
        table.reserve(most)
        out = torch.empty((BATCH, dim), device="cuda")
        numbers = torch.arange(rows, device="cuda")

        def insert(keys: Any, distinct: int = 1) -> None:
            table.call("lookup_or_insert", at(keys), len(keys), ctypes.c_int32(distinct), at(out), stream())

        for first in range(0, rows, BATCH):
            insert(keys_of(numbers[first : first + BATCH]))
        assert table.size() == rows
        place = f"dim{dim}/slots2^{log2_slots}/load{load}{'/half' if half else ''}"

        def lookups(form: str) -> None:
            chosen = [draw(rows, form) for _ in range(SETS)]
            sets = [keys_of(one) for one in chosen]
            peer: Any = (None, None)
            if form == "uniform" and not half and load == 0.75 and rows * dim * 4 < 40 << 30:
                matrix = torch.randn((rows, dim), device="cuda")
                seconds = self.time(lambda i: torch.index_select(matrix, 0, chosen[i % SETS], out=out))
                peer = ("torch.index_select", seconds)
            seconds = self.time(lambda i: table.call("lookup", at(sets[i % SETS]), BATCH, at(out), stream()))
            self.rate(f"find/{form}/{place}", seconds, BATCH, found * dim, peer)
            seconds = self.time(lambda i: insert(sets[i % SETS], 0))
            self.rate(f"upsert/{form}/{place}", seconds, BATCH, found * dim)

        for form in ("uniform", "zipf"):
            lookups(form)
        count = min(BATCH, rows)
        distinct = [keys_of(torch.randperm(rows, device="cuda")[:count]) for _ in range(SETS)]
        seconds = self.time(lambda i: insert(distinct[i % SETS]))
        self.rate(f"upsert_distinct/uniform/{place}", seconds, count, found * dim)
        if optimizer == "adam":
            gradients, rate = torch.randn((count, dim), device="cuda"), ctypes.c_float(1e-3)
            flags = (rate, ctypes.c_int32(1))
            seconds = self.time(
                lambda i: table.call("update", at(distinct[i % SETS]), at(gradients), count, *flags, stream())
            )
            self.rate(f"adam/uniform/{place}", seconds, count, updated * dim)
        if load == 0.5 and not self.smoke:
            fresh = min((most - rows) // BATCH, 20) - 10
            new = keys_of(torch.arange(rows, most, device="cuda"))
            from parts.gpu_timing import timed

            if fresh > 0:
                run = timed(lambda i: insert(new[i * BATCH : (i + 1) * BATCH]), fresh)
                self.rate(f"insert/{place}", run.p50, BATCH, found * dim)

    def unique(self, form: str) -> None:
        import torch

        sets = [keys_of(draw(10_000_000, form)) for _ in range(SETS)]
        size = library().gmeta_gpu_unique_workspace(ctypes.c_int64(BATCH), ctypes.c_int32(8))
        space = torch.empty(size, dtype=torch.uint8, device="cuda")
        keys, inverse = torch.empty_like(sets[0]), torch.empty(BATCH, dtype=torch.int32, device="cuda")
        counts = torch.empty(9, dtype=torch.int32, device="cuda")
        results = (at(keys), at(inverse))
        rest = (at(counts[8:]), at(space), ctypes.c_size_t(size))
        ours = self.time(lambda i: call("unique", at(sets[i % SETS]), BATCH, *results, *rest, stream()))
        ranks = (at(sets[0]), BATCH, ctypes.c_int32(8), *results, at(counts))
        owners = self.time(lambda i: call("unique_by_owner", at(sets[i % SETS]), *ranks[1:], *rest, stream()))
        own_size = library().gmeta_gpu_order_by_owner_workspace(ctypes.c_int64(BATCH), ctypes.c_int32(8))
        own = (at(space), ctypes.c_size_t(own_size), stream())  # which is less than for unique_by_owner
        ordered = self.time(lambda i: call("order_by_owner", at(sets[i % SETS]), *ranks[1:], *own))
        theirs = self.time(lambda i: torch.unique(sets[i % SETS], return_inverse=True))
        self.results += [
            Result(f"gpu_table/unique/{form}", ours * 1e3, "ms", "torch.unique", theirs * 1e3),
            Result(f"gpu_table/unique_by_owner/{form}/ranks8", owners * 1e3, "ms"),
            Result(f"gpu_table/order_by_owner/{form}/ranks8", ordered * 1e3, "ms"),
        ]

    def step(self) -> None:
        import torch

        dim, rows, distinct = 128, 10_000_000 if not self.smoke else 1_000_000, 376_000
        table = GpuTable(dim, OPTIMIZERS["adam"], NORMAL, 1)
        table.reserve(rows)
        out = torch.empty((BATCH, dim), device="cuda")
        for first in range(0, rows, BATCH):
            keys = keys_of(torch.arange(first, min(rows, first + BATCH), device="cuda"))
            table.call("lookup_or_insert", at(keys), len(keys), ctypes.c_int32(1), at(out), stream())
        n = 1_000_000
        sets = []
        for _ in range(4):
            pool = torch.randperm(rows, device="cuda")[:distinct]
            sets.append(keys_of(pool[torch.randint(0, distinct, (n,), device="cuda")]))
        size = library().gmeta_gpu_unique_workspace(ctypes.c_int64(n), ctypes.c_int32(0))
        space = torch.empty(size, dtype=torch.uint8, device="cuda")
        keys, inverse = torch.empty_like(sets[0]), torch.empty(n, dtype=torch.int32, device="cuda")
        count, unique_rows = torch.empty(1, dtype=torch.int32, device="cuda"), torch.empty_like(out)
        gradients = torch.randn((n, dim), device="cuda")
        found = 0

        def unique(i: int) -> None:
            nonlocal found
            where = (at(keys), at(inverse), at(count), at(space), ctypes.c_size_t(size), stream())
            call("unique", at(sets[i % 4]), n, *where)
            found = int(count.item())

        def lookup(_: int) -> None:
            flag = ctypes.c_int32(1)
            table.call("lookup_or_insert", at(keys), found, flag, at(unique_rows), stream())

        def gather(_: int) -> None:
            call("gather_rows", at(unique_rows), dim, at(inverse), n, at(out), stream())

        def update(_: int) -> None:
            sums = (at(gradients), at(inverse), n, ctypes.c_float(1e-3), stream())
            table.call("update_indexed", at(keys), found, *sums)

        def whole(i: int) -> None:
            for part in (unique, lookup, gather, update):
                part(i)

        name = f"gpu_table/step/adam/dim{dim}"
        for part in (whole, unique, lookup, gather, update):
            self.results.append(Result(f"{name}/{part.__name__}", self.time(part) * 1e3, "ms"))
        self.results.append(Result(f"{name}/distinct", found, "ids"))


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--slots", default="24,27", help="log2 of the slots of the indices (default: %(default)s)"
    )
    options.add_argument("--dims", default="8,64,128", help="widths of rows (default: %(default)s)")
    given = options.parse_args()
    absent = why_absent()
    if absent is not None:
        report(f"Not measured: {absent}", [Result("gpu_table/gpus", 0, "GPUs")], given.json)
        return
    import torch

    bench = _Bench(given.smoke)
    try:
        bench.step()
        for form in ("uniform", "zipf"):
            bench.unique(form)
        for slots in [20] if given.smoke else map(int, given.slots.split(",")):
            for dim in map(int, given.dims.split(",")):
                # Rows with Adam's slots, as long as they fit.
                adam = 12 * dim << slots < 110 << 30
                for load in (0.5, 0.75):
                    bench.table(dim, "adam" if adam else "sgd", slots, load)
                    if dim == 64 and adam:
                        bench.table(dim, "adam", slots, load, half=True)
    finally:  # also what there is when it is interrupted
        facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        report("GPU table", bench.results, given.json, **facts)


if __name__ == "__main__":
    main()
