"""A step of a beam search over a trie of codes, beside tries of Python dictionaries, and steps that draw.

    python tools/bench/trie.py --json FILE
    python tools/bench/trie.py --items 10000 10000000 --json FILE
    python tools/bench/trie.py --device gpu --json FILE

Items have four digits of 256 values. 64 users have 50 beams each at nodes of random items, the best beam
first as a step returns them, and logits of all 256 values of the next digit. A step normalises over the valid
children and keeps the 50 best. Its peers, for up to a million items, are

Python's dictionaries    nested dictionaries give each beam a mask of all values; NumPy does the rest
Python alone             the same dictionaries, child by child, without any array

`sample` draws a child of each beam, all 50 of a user at the root in the first level; `gumbel` draws the 50 by
a step of stochastic beam search from the same beams as a step. These have no peer.

On the CPU a step is a call of an op of `gmeta.ops`. Ten are taken one after another, because in a search the
logits have just been written, and so are in the cache; a value is the median over rounds of a tenth of their
time. On the GPU a step is a call of the CUDA library's C interface, which requires only NumPy and that
library. Steps are queued one after another, each with another batch's beams and logits; a value is the time
between two CUDA events around them, a step, the median over rounds. Python runs on the CPU there too. Results
are compared before they are reported, those of draws with NumPy. The first value is the median of the
levels', and `search` their sum.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

import gmeta  # noqa: F401, E402  (before TensorFlow)
from gmeta.models.generative.code_tables import CodeTrie  # noqa: E402
from support.gpu.cuda_library import why_missing  # noqa: E402

import numpy as np  # noqa: E402
from harness import Result, interleave, parser, report  # noqa: E402
from numpy.typing import NDArray  # noqa: E402
from parts.python_tries import PythonTrie  # noqa: E402
from parts.trie_steps import Batch, check_draws, cpu_step, queued_steps  # noqa: E402

USERS, BEAMS, CODES, LEVELS = 64, 50, 256, 4
_MOST_FOR_PYTHON = 1_000_000  # whose dictionaries take some hundreds of megabytes
_IN_A_ROW = 10  # steps of the CPU's op
_BATCHES = 8  # of the GPU
_DRAWS = ("sample", "gumbel")
_PEERS = {"numpy": "Python's dictionaries", "alone": "Python alone"}


def draw_codes(items: int, random: np.random.Generator) -> NDArray[np.int32]:
    """Draw distinct codes of four digits."""
    numbers = np.unique(random.integers(0, CODES**LEVELS, int(1.02 * items) + 100))
    numbers = random.permutation(numbers)[:items]
    return np.stack([numbers // CODES**place % CODES for place in range(LEVELS)[::-1]], 1).astype(np.int32)


def draw_batch(
    codes: NDArray[np.int32], trie: CodeTrie, level: int, random: np.random.Generator, beams: int
) -> Batch:
    """Draw the beams of a batch, at nodes of items."""
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


def measure(items: int, device: str, rounds: int) -> list[Result]:
    """Measure the steps of a catalogue."""
    random = np.random.default_rng(0)
    codes = draw_codes(items, random)
    trie = CodeTrie.of(codes)
    python = PythonTrie(codes, BEAMS) if items <= _MOST_FOR_PYTHON else None
    steps = [measure_step(codes, trie, level, python, device, rounds, random) for level in range(LEVELS)]
    where = f"{device}/items{_short(items)}"
    results = _of_search(f"trie/step/{where}", steps, _PEERS["numpy"])
    for kind in _DRAWS:
        draws = [measure_draw(kind, codes, trie, level, device, rounds, random) for level in range(LEVELS)]
        results += _of_search(f"trie/{kind}/{where}", draws)
    return results


def measure_step(
    codes: NDArray[np.int32],
    trie: CodeTrie,
    level: int,
    python: PythonTrie | None,
    device: str,
    rounds: int,
    random: np.random.Generator,
) -> dict[str, float]:
    """Milliseconds of a step, and of the peers'; a search begins with one beam."""
    beams = BEAMS if level else 1
    batches = [
        draw_batch(codes, trie, level, random, beams) for _ in range(_BATCHES if device == "gpu" else 1)
    ]
    first = batches[0]
    contenders: dict[str, Callable[[int], object]] = {}
    if python is not None:
        lists = first.logits.tolist(), first.scores.tolist()
        contenders["numpy"] = lambda _: python.step_with_numpy(first.logits, first.scores, first.prefixes)
        contenders["alone"] = lambda _: python.step_alone(*lists, first.prefixes)
    if device == "gpu":
        ours, results = queued_steps("step", trie, level, batches, BEAMS, rounds)
        took = {"gmeta": ours, **interleave(contenders, rounds=min(rounds, 3), warm_up=1)}
    else:
        step = cpu_step("step", trie, level, first, BEAMS)
        results = [each.numpy() for each in step()]
        took = interleave({"gmeta": _in_a_row(step), **contenders}, rounds=rounds)
        took["gmeta"] /= _IN_A_ROW
    if python is not None:
        check(trie, level, first, python, results)
    return {name: 1e3 * value for name, value in took.items()}


def measure_draw(
    kind: str,
    codes: NDArray[np.int32],
    trie: CodeTrie,
    level: int,
    device: str,
    rounds: int,
    random: np.random.Generator,
) -> dict[str, float]:
    """Milliseconds of a step that draws."""
    beams = BEAMS if level or kind == "sample" else 1
    batches = [
        draw_batch(codes, trie, level, random, beams) for _ in range(_BATCHES if device == "gpu" else 1)
    ]
    if device == "gpu":
        took, results = queued_steps(kind, trie, level, batches, BEAMS, rounds)
    else:
        step = cpu_step(kind, trie, level, batches[0], BEAMS)
        results = [each.numpy() for each in step()]
        took = interleave({"gmeta": _in_a_row(step)}, rounds=rounds)["gmeta"] / _IN_A_ROW
    check_draws(kind, trie, level, batches[0], results)
    return {"gmeta": 1e3 * took}


def _in_a_row(step: Callable[[], object]) -> Callable[[int], object]:
    return lambda _: [step() for _ in range(_IN_A_ROW)]


def _of_search(path: str, of_levels: Sequence[dict[str, float]], peer: str | None = None) -> list[Result]:
    middle = {name: statistics.median(each[name] for each in of_levels) for name in of_levels[0]}
    whole = {name: sum(each[name] for each in of_levels) for name in of_levels[0]}
    named = [
        (path, middle),
        (f"{path}/search", whole),
        *((f"{path}/level{level}", each) for level, each in enumerate(of_levels)),
    ]
    return [result for name, times in named for result in _results(name, times, peer)]


def _results(name: str, times: dict[str, float], peer: str | None) -> list[Result]:
    """A step with both peers, or alone if they aren't measured."""
    if peer is None:
        return [Result(name, times["gmeta"], "ms")]
    beside = [Result(name, times["gmeta"], "ms", peer, times.get("numpy"))]
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
