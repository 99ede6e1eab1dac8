"""A step of a beam search over a trie of codes, beside tries of Python's dictionaries.

    gmeta bench trie --json FILE
    gmeta bench trie --items 10000 10000000 --json FILE
    gmeta bench trie --device gpu --json FILE

Items have four digits of 256 values. 64 users have 50 beams each at nodes of random items, the best beam
first as a step gives them, and logits of all 256 values of the next digit. A step normalises over the valid
children and keeps the 50 best. Beside it, for up to a million items,

Python's dictionaries    nested dictionaries give each beam a mask of all values; NumPy does the rest
Python alone             the same dictionaries, child by child, without any array

On the CPU a step is a call of `gmeta.ops.trie_step`. Ten are taken one after another, because in a search
the logits have just been written, and so are in the cache; a value is the median over rounds of a tenth of
their time. On the GPU a step is a call of the CUDA library's C interface: NumPy and that library are all
that it needs. Steps are queued one after another, each with another batch's beams and logits; a value is the
time between two CUDA events around them, a step, the median over rounds. Python runs on the CPU there too.
Results are compared before they are reported. The first value is the median of the levels', and `search`
their sum.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

import gmeta  # noqa: F401, E402  (before TensorFlow)
import numpy as np  # noqa: E402
from gmeta.core.data.code_trie import CodeTrie  # noqa: E402
from gmeta.testing.gpu.cuda_library import Event, Stream, why_missing  # noqa: E402
from gmeta.testing.gpu.gpu_trie import GpuTrieLevel, GpuTrieStep  # noqa: E402
from harness import Result, interleave, parser, report  # noqa: E402
from numpy.typing import NDArray  # noqa: E402
from parts.python_tries import PythonTrie  # noqa: E402

USERS, BEAMS, CODES, LEVELS = 64, 50, 256, 4
_MOST_FOR_PYTHON = 1_000_000  # whose dictionaries take some hundreds of megabytes
_IN_A_ROW = 10  # steps of the CPU's op
_BATCHES, _QUEUED = 8, 200  # of the GPU
_PEERS = {"numpy": "Python's dictionaries", "alone": "Python alone"}


class Batch(NamedTuple):
    """Beams at nodes of a level.

    Attributes:
      logits: float32 (users, beams, codes).
      scores: float32 (users, beams), descending.
      nodes: int64 (users, beams).
      prefixes: The digits of each beam's node.
    """

    logits: NDArray[np.float32]
    scores: NDArray[np.float32]
    nodes: NDArray[np.int64]
    prefixes: list[list[list[int]]]


def draw_codes(items: int, random: np.random.Generator) -> NDArray[np.int32]:
    """Draw distinct codes of four digits."""
    numbers = np.unique(random.integers(0, CODES**LEVELS, int(1.02 * items) + 100))
    numbers = random.permutation(numbers)[:items]
    return np.stack([numbers // CODES**place % CODES for place in range(LEVELS)[::-1]], 1).astype(np.int32)


def draw_batch(codes: NDArray[np.int32], trie: CodeTrie, level: int, random: np.random.Generator) -> Batch:
    """Draw the beams of a batch: they stand where items are, and a search begins with one."""
    beams = BEAMS if level else 1
    at = random.integers(0, len(codes), (USERS, beams))
    nodes = trie.walk(codes[at.ravel()][:, :level]).reshape(at.shape)
    scores = -np.sort(random.exponential(5, at.shape)).astype(np.float32)
    logits = random.normal(0, 2, (*at.shape, CODES)).astype(np.float32)
    return Batch(logits, scores, nodes, codes[at][:, :, :level].tolist())


def check(trie: CodeTrie, level: int, batch: Batch, python: PythonTrie, ours: Sequence[NDArray[Any]]) -> None:
    """Compare the scores and the digits of all steps, child by child."""
    found = python.step_alone(batch.logits.tolist(), batch.scores.tolist(), batch.prefixes)
    best = python.step_with_numpy(batch.logits, batch.scores, batch.prefixes)
    for user, expected in enumerate(found):
        scores, nodes, beams = (each[user] for each in ours)
        count = len(expected)
        np.testing.assert_allclose(scores[:count], [each[0] for each in expected], rtol=1e-4, atol=1e-4)
        ours_of_user = set(
            zip(beams[:count].tolist(), trie.digits[level][nodes[:count]].tolist(), strict=True)
        )
        theirs = (
            {each[1:] for each in expected},
            {divmod(each, CODES) for each in best[user, :count].tolist()},
        )
        if (
            min(len(ours_of_user & each) for each in theirs) < count - 2
        ):  # the last may be as good as the next
            raise AssertionError(f"level {level}, user {user}: the steps keep other children")


def cpu_step(trie: CodeTrie, level: int, batch: Batch) -> Callable[[], list[NDArray[Any]]]:
    """Make the step of the CPU's op."""
    import tensorflow as tf
    from gmeta.ops import trie_step

    tf.config.set_visible_devices([], "GPU")
    inputs = [tf.constant(each) for each in (*batch[:3], trie.starts[level], trie.digits[level])]
    return lambda: list(trie_step(*inputs, k=BEAMS))


def queued_steps(
    trie: CodeTrie, level: int, batches: Sequence[Batch], rounds: int
) -> tuple[float, list[Any]]:
    """Seconds of a step of the GPU, and the results of the first batch's."""
    on_gpu = GpuTrieLevel(trie.starts[level], trie.digits[level])
    steps = [GpuTrieStep(on_gpu, *batch[:3], BEAMS) for batch in batches]
    stream, events = Stream(), (Event(), Event())
    seconds = []
    for number in range(rounds + 2):
        events[0].record(stream)
        for i in range(_QUEUED):
            steps[i % len(steps)].run(stream)
        events[1].record(stream)
        took = events[1].seconds_since(events[0]) / _QUEUED
        if number >= 2:
            seconds.append(took)
    return statistics.median(seconds), [each.numpy() for each in steps[0].results]


def measure(items: int, device: str, rounds: int) -> list[Result]:
    """Measure the steps of a catalogue."""
    random = np.random.default_rng(0)
    codes = draw_codes(items, random)
    trie = CodeTrie.of(codes)
    python = PythonTrie(codes, BEAMS) if items <= _MOST_FOR_PYTHON else None
    of_levels: list[dict[str, float]] = []
    for level in range(LEVELS):
        batches = [draw_batch(codes, trie, level, random) for _ in range(_BATCHES if device == "gpu" else 1)]
        first = batches[0]
        contenders: dict[str, Callable[[int], object]] = {}
        if python is not None:
            lists = first.logits.tolist(), first.scores.tolist()
            contenders["numpy"] = lambda _, b=first: python.step_with_numpy(b.logits, b.scores, b.prefixes)
            contenders["alone"] = lambda _, b=first, lists=lists: python.step_alone(*lists, b.prefixes)
        if device == "gpu":
            ours, results = queued_steps(trie, level, batches, rounds)
            took = {"gmeta": ours, **interleave(contenders, rounds=min(rounds, 3), warm_up=1)}
        else:
            step = cpu_step(trie, level, first)
            results = [each.numpy() for each in step()]
            several = lambda _, step=step: [step() for _ in range(_IN_A_ROW)]  # noqa: E731
            took = interleave({"gmeta": several, **contenders}, rounds=rounds)
            took["gmeta"] /= _IN_A_ROW
        if python is not None:
            check(trie, level, first, python, results)
        of_levels.append({name: 1e3 * value for name, value in took.items()})
    path = f"trie/step/{device}/items{_short(items)}"
    middle = {name: statistics.median(each[name] for each in of_levels) for name in of_levels[0]}
    whole = {name: sum(each[name] for each in of_levels) for name in of_levels[0]}
    named = [
        (path, middle),
        (f"{path}/search", whole),
        *((f"{path}/level{level}", each) for level, each in enumerate(of_levels)),
    ]
    return [result for name, times in named for result in _results(name, times)]


def _results(name: str, times: dict[str, float]) -> list[Result]:
    """A step beside both peers; where they aren't measured, alone."""
    beside = [Result(name, times["gmeta"], "ms", _PEERS["numpy"], times.get("numpy"))]
    if "alone" in times:
        beside.append(Result(f"{name}/python", times["gmeta"], "ms", _PEERS["alone"], times["alone"]))
    return beside


def _short(items: int) -> str:
    return f"{items // 10**6}M" if items % 10**6 == 0 else f"{items // 1000}k"


def main() -> None:
    """Measure catalogues of several sizes."""
    options = parser(__doc__)
    options.add_argument(
        "--items", type=int, nargs="+", default=[10**4, 10**5, 10**6, 10**7], help="(default: 10^4 to 10^7)"
    )
    options.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="(default: %(default)s)")
    given = options.parse_args()
    absent = why_missing() if given.device == "gpu" else None
    if absent is not None:
        report(f"Not measured: {absent}", [Result("trie/step/gpus", 0, "GPUs")], given.json)
        return
    sizes = [2000] if given.smoke else given.items
    results = [result for items in sizes for result in measure(items, given.device, given.rounds)]
    report("Steps over a trie", results, given.json, users=USERS, beams=BEAMS)


if __name__ == "__main__":
    main()
