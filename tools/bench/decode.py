"""Decoding by a small decoder and in the flat form, with earlier keys and values kept or recomputed.

    python tools/bench/decode.py --device GPU:0 --json FILE
    python tools/bench/decode.py --length 256 --json FILE
    python tools/bench/decode.py --no-again --json FILE

Histories have 2,048 items of 100,000, each with three codes of 256 and one more digit; the backbone is two
blocks of HSTU of width 64 with two heads. All keep 200 beams at each digit and find as many items.

decoder    `GenerativeRetriever`: a token for each item; a decoder predicts digits from the backbone's vector
flat       `FlatRetriever`: a token for each of 4 digits; those of beams come after the history's, whose keys
           and values are kept
digits     the decoder's steps alone, after the histories

`decoder` is compared with `flat`, and both with running the backbone again over the whole history for each
digit of each beam, a user at a time (not with ``--no-again``); `digits`, which keeps keys and values of a
beam's digits, with computing these digits again. A value is the median milliseconds of a batch; contenders
take turns. The benchmark fails unless both ways find items of the same probabilities.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

import gmeta  # noqa: F401, E402  (before TensorFlow)
from gmeta.core.semantic_ids import Codebooks, SemanticIds  # noqa: E402
from gmeta.layers import HSTU, EmbeddingCollection, FeatureConfig  # noqa: E402
from gmeta.models import FlatRetriever, GenerativeRetriever  # noqa: E402

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from harness import Result, interleave, parser, report  # noqa: E402
from parts.decode_again import DigitsAgain, HistoriesAgain  # noqa: E402
from trie import CODES, draw_codes  # noqa: E402

DIM, LEVELS = 64, 3


def make_backbone(tokens: int) -> HSTU:
    """Make a backbone for this many tokens."""
    block = {"heads": 2, "attention_dim": DIM // 2, "value_dim": DIM // 2, "max_length": tokens}
    return HSTU(blocks=2, **block, bias_by_time=False)


def make_ids(items: int) -> SemanticIds:
    """Draw codes of this many items."""
    books = Codebooks(tuple(np.zeros((CODES, 1), np.float32) for _ in range(LEVELS)))
    return SemanticIds(np.arange(items), draw_codes(items, np.random.default_rng(0)), books, "kmeans")


def measure(users: int, given: argparse.Namespace) -> list[Result]:
    """Measure a batch of users."""
    length, beams = given.length, given.beams
    with tf.device(given.device):
        ids, own = make_ids(given.items), {"max_length": length, "beam": beams, "ks": (1,)}
        collection = EmbeddingCollection([FeatureConfig("item", dim=DIM)])
        decoder = GenerativeRetriever(collection, make_backbone(length), ids, **own)
        flat = FlatRetriever(make_backbone((LEVELS + 1) * (length + 1) + 1), ids, dim=DIM, **own)
        rows = decoder.item_rows()
        items = tf.constant(np.random.default_rng(1).integers(0, given.items, (users, length)))
        x = {"item": tf.RaggedTensor.from_tensor(items)}
        h = decoder(x)
        contenders: dict[str, Callable[[], Any]] = {
            "decoder": lambda: decoder.retrieve(x, beams, rows=rows),
            "flat": lambda: flat.retrieve(x, beams),
            "digits": lambda: DigitsAgain(decoder, h, x, rows).search(beams, kept=True),
            "digits again": lambda: DigitsAgain(decoder, h, x, rows).search(beams, kept=False),
        }
        if given.again:
            contenders["flat again"] = lambda: HistoriesAgain(flat, x, users).search(beams)
        graphs = {name: tf.function(each) for name, each in contenders.items()}
        for name in [each for each in graphs if f"{each} again" in graphs]:
            kept, again = (graphs[each]()[1] for each in (name, f"{name} again"))
            np.testing.assert_allclose(kept, again, rtol=1e-3, atol=1e-3)
        took = interleave(
            {name: lambda _, run=run: run()[0].numpy() for name, run in graphs.items()},
            rounds=given.rounds,
            warm_up=1,
        )
    milliseconds = {name: 1e3 * seconds for name, seconds in took.items()}
    where = f"users{users}/beams{beams}"
    return [
        Result(f"decode/{name}{where}", milliseconds[which], "ms", peer, milliseconds[of_peer])
        for name, which, peer, of_peer in (
            ("", "decoder", "the flat form, run again for each digit", "flat again"),
            ("decoder/", "decoder", "the flat form, its keys and values kept", "flat"),
            ("flat/", "flat", "the flat form, run again for each digit", "flat again"),
            ("digits/", "digits", "a beam's digits computed again", "digits again"),
        )
        if of_peer in milliseconds
    ]


def main() -> None:
    """Measure batches of several sizes."""
    options = parser(__doc__)
    options.add_argument("--users", type=int, nargs="+", default=[16, 1], help="(default: 16 1)")
    options.add_argument("--beams", type=int, default=200, help="(default: %(default)s)")
    options.add_argument("--length", type=int, default=2048, help="in items (default: %(default)s)")
    options.add_argument("--items", type=int, default=100_000, help="(default: %(default)s)")
    options.add_argument("--device", default="CPU:0", help="TensorFlow's name (default: %(default)s)")
    options.add_argument(
        "--again",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether to run the flat form again for each digit, which is slow",
    )
    given = options.parse_args()
    if given.smoke:
        given.users, given.beams, given.length, given.items = [2], 5, 16, 2000
    results = [result for users in given.users for result in measure(users, given)]
    facts = {name: getattr(given, name) for name in ("device", "items", "length")}
    report("Decoding by a decoder and as flat codes", results, given.json, **facts)


if __name__ == "__main__":
    main()
