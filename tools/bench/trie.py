"""A step of a beam search over a trie of codes, on the CPU, beside a trie of Python's dictionaries.

    gmeta bench trie --json FILE
    gmeta bench trie --items 10000 10000000 --json FILE

Items have four digits of 256 values. 64 users have 50 beams each at nodes of random items, and logits of
all 256 values of the next digit. A step normalises over the valid children and keeps the 50 best. The peer
is our own form of what Hugging Face's `generate` does with `prefix_allowed_tokens_fn` and a trie: for each
beam it walks nested dictionaries by the beam's digits and writes a mask of all values; NumPy does the rest.
A value is the median over rounds, for each level from 0 on, and the median of the levels' medians.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

import gmeta  # noqa: F401, E402  (before TensorFlow)
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from gmeta.core.data.code_trie import CodeTrie  # noqa: E402
from gmeta.ops import trie_step  # noqa: E402
from harness import Result, interleave, parser, report  # noqa: E402
from numpy.typing import NDArray  # noqa: E402

USERS, BEAMS, CODES, LEVELS = 64, 50, 256, 4
_MOST_FOR_PYTHON = 1_000_000  # whose dictionaries take some hundreds of megabytes


class PythonTrie:
    """Nested dictionaries by digits."""

    def __init__(self, codes: NDArray[np.int32]) -> None:
        self._root: dict[int, Any] = {}
        for code in codes.tolist():
            node = self._root
            for digit in code:
                node = node.setdefault(digit, {})

    def step(
        self, logits: NDArray[np.float32], scores: NDArray[np.float32], prefixes: list[list[list[int]]]
    ) -> None:
        """Take a step for all users."""
        mask = np.full(logits.shape, -np.inf, np.float32)
        for user, beams in enumerate(prefixes):
            for beam, prefix in enumerate(beams):
                node = self._root
                for digit in prefix:
                    node = node[digit]
                mask[user, beam, list(node)] = 0
        valid = logits + mask
        valid -= valid.max(axis=2, keepdims=True)
        valid -= np.log(np.exp(valid).sum(axis=2, keepdims=True))
        every = (scores[:, :, None] + valid).reshape(len(scores), -1)
        best = np.argpartition(-every, BEAMS, axis=1)[:, :BEAMS]
        np.take_along_axis(best, np.argsort(-np.take_along_axis(every, best, axis=1), axis=1), axis=1)


def draw_codes(items: int, random: np.random.Generator) -> NDArray[np.int32]:
    """Draw distinct codes of four digits."""
    numbers = np.unique(random.integers(0, CODES**LEVELS, int(1.02 * items) + 100))
    numbers = random.permutation(numbers)[:items]
    return np.stack([numbers // CODES**place % CODES for place in range(LEVELS)[::-1]], 1).astype(np.int32)


def measure(items: int, rounds: int) -> list[Result]:
    """Measure the steps of a catalogue."""
    random = np.random.default_rng(0)
    codes = draw_codes(items, random)
    trie = CodeTrie.of(codes)
    python = PythonTrie(codes) if items <= _MOST_FOR_PYTHON else None
    results, times = [], {"gmeta": [], "python": []}
    for level in range(LEVELS):
        beams = BEAMS if level else 1  # a search begins with one
        at = random.integers(0, items, (USERS, beams))  # beams stand where items are
        nodes = trie.walk(codes[at.ravel()][:, :level]).reshape(at.shape)
        scores = -random.exponential(5, (USERS, beams)).astype(np.float32)
        logits = random.normal(0, 2, (USERS, beams, CODES)).astype(np.float32)
        ours = [tf.constant(each) for each in (logits, scores, nodes, trie.starts[level], trie.digits[level])]
        contenders = {"gmeta": lambda _, ours=ours: trie_step(*ours, k=BEAMS)}
        if python is not None:
            prefixes = codes[at][:, :, :level].tolist()
            contenders["python"] = lambda _, logits=logits, scores=scores, prefixes=prefixes: python.step(
                logits, scores, prefixes
            )
        took = {name: 1e3 * value for name, value in interleave(contenders, rounds=rounds).items()}
        for name, value in took.items():
            times[name].append(value)
        name = f"trie/step/cpu/items{_short(items)}/level{level}"
        results.append(Result(name, took["gmeta"], "ms", "Python's dictionaries", took.get("python")))
    middle = {name: statistics.median(values) for name, values in times.items() if values}
    name = f"trie/step/cpu/items{_short(items)}"
    whole = Result(name, middle["gmeta"], "ms", "Python's dictionaries", middle.get("python"))
    return [whole, *results]


def _short(items: int) -> str:
    return f"{items // 10**6}M" if items % 10**6 == 0 else f"{items // 1000}k"


def main() -> None:
    """Measure catalogues of several sizes."""
    options = parser(__doc__)
    options.add_argument(
        "--items", type=int, nargs="+", default=[10**4, 10**5, 10**6, 10**7], help="(default: 10^4 to 10^7)"
    )
    given = options.parse_args()
    sizes = [2000] if given.smoke else given.items
    results = [result for items in sizes for result in measure(items, given.rounds)]
    report("Steps over a trie", results, given.json, users=USERS, beams=BEAMS)


if __name__ == "__main__":
    main()
