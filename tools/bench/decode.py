"""Decoding with the trunk computed once, beside running a flat trunk again for each digit.

    gmeta bench decode --device GPU:0 --json FILE
    gmeta bench decode --length 256 --beams 20 --json FILE

Histories have 2,048 tokens; the trunk is two blocks of HSTU of width 64 with two heads. Of 100,000 items with
three codes of 256 and a digit more, both keep 200 beams at each digit and find the same number of items.
`GenerativeRetriever` computes the trunk once, and then a small decoder for each digit of each beam, whose
keys and values it keeps. The flat form has no decoder: the digits of a beam are tokens after the history, and
for each digit the trunk runs over all of it again, for each beam. A value is the median milliseconds of a
batch, taken by turns.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

import gmeta  # noqa: F401, E402  (before TensorFlow)
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from gmeta.core.data.codebooks import Codebooks  # noqa: E402
from gmeta.core.data.semantic_ids import SemanticIds  # noqa: E402
from gmeta.layers import HSTU, EmbeddingCollection, FeatureConfig  # noqa: E402
from gmeta.models import GenerativeRetriever  # noqa: E402
from gmeta.ops import Jagged, jagged, trie_step  # noqa: E402
from harness import Result, interleave, parser, report  # noqa: E402
from trie import CODES, draw_codes  # noqa: E402

DIM = 64


def make_model(items: int, length: int, beams: int) -> GenerativeRetriever:
    """Make a retriever of so many items and so long histories."""
    books = Codebooks(tuple(np.zeros((CODES, 1), np.float32) for _ in range(3)))
    ids = SemanticIds(np.arange(items), draw_codes(items, np.random.default_rng(0)), books, "kmeans")
    block = {"heads": 2, "attention_dim": DIM // 2, "value_dim": DIM // 2, "max_length": length}
    backbone = HSTU(blocks=2, **block, bias_by_time=False)
    collection = EmbeddingCollection([FeatureConfig("item", dim=DIM)])
    return GenerativeRetriever(collection, backbone, ids, max_length=length, beam=beams, ks=(1,))


def search_flat(
    model: GenerativeRetriever, rows: tf.Tensor, vectors: tf.Tensor, histories: tf.Tensor, beams: int
) -> tf.Tensor:
    """Search by beams whose digits are tokens of the trunk; return the nodes found, (users, beams)."""
    scorer, users = model.scorer, tf.shape(histories)[0]
    codes, past = scorer.codes, tf.gather(vectors, histories)
    scores, nodes = tf.zeros([users, 1]), tf.zeros([users, 1], tf.int64)
    told = tf.zeros([users, 1, 0, DIM])
    for level in range(codes.levels):
        many, length = told.shape[1], histories.shape[1] + level
        tokens = tf.concat([tf.repeat(past[:, tf.newaxis], many, axis=1), told], axis=2)
        offsets = length * tf.range(users * many + 1)
        flat = Jagged(tf.reshape(tokens, [-1, DIM]), tf.cast(offsets, tf.int64))
        found = jagged.last(model.backbone(flat, training=False))
        if level < scorer.depth:
            logits = scorer.code_logits(level, found)
        else:
            siblings = codes.siblings(tf.reshape(tf.maximum(nodes, 0), [-1]))
            own = tf.gather(rows, tf.reshape(siblings, [-1]))
            logits = scorer.item_logits(found, siblings, own, tf.zeros(tf.shape(siblings)))
        logits = tf.reshape(logits, [users, many, codes.sizes[level]])
        k = min(beams, int(codes.digits[level].shape[0]))
        starts, digits = codes.starts[level], codes.digits[level]
        scores, nodes, parents = trie_step(logits, scores, nodes, starts, digits, k=k)
        if level < scorer.depth:
            digit = tf.cast(tf.gather(digits, tf.maximum(nodes, 0)), tf.int64)
            token = tf.gather(scorer.vectors, digit + codes.begins[level])[:, :, tf.newaxis]
            told = tf.concat([tf.gather(told, tf.maximum(parents, 0), batch_dims=1), token], axis=2)
            told = tf.ensure_shape(told, [None, k, level + 1, DIM])
    return nodes


def measure(users: int, beams: int, length: int, items: int, device: str, rounds: int) -> Result:
    """Measure a batch of users."""
    with tf.device(device):
        model = make_model(items, length, beams)
        rows, vectors = model.item_rows(), model.item_vectors()
        histories = tf.constant(np.random.default_rng(1).integers(0, items, (users, length)))

        @tf.function
        def once() -> tf.Tensor:
            return model.retrieve({"item": tf.RaggedTensor.from_tensor(histories)}, beams, rows=rows)[0]

        @tf.function
        def again() -> tf.Tensor:
            return search_flat(model, rows, vectors, histories, beams)

        took = interleave(
            {"once": lambda _: once().numpy(), "again": lambda _: again().numpy()}, rounds=rounds
        )
    name = f"decode/users{users}/beams{beams}"
    return Result(name, 1e3 * took["once"], "ms", "a flat trunk for each digit", 1e3 * took["again"])


def main() -> None:
    """Measure batches of several sizes."""
    options = parser(__doc__)
    options.add_argument("--users", type=int, nargs="+", default=[16, 1], help="(default: 16 1)")
    options.add_argument("--beams", type=int, default=200, help="(default: %(default)s)")
    options.add_argument("--length", type=int, default=2048, help="(default: %(default)s)")
    options.add_argument("--items", type=int, default=100_000, help="(default: %(default)s)")
    options.add_argument("--device", default="CPU:0", help="TensorFlow's name (default: %(default)s)")
    given = options.parse_args()
    if given.smoke:
        given.users, given.beams, given.length, given.items = [2], 5, 16, 2000
    results = [
        measure(users, given.beams, given.length, given.items, given.device, given.rounds)
        for users in given.users
    ]
    facts = {name: getattr(given, name) for name in ("device", "items", "length")}
    report("Decoding with the trunk once", results, given.json, **facts)


if __name__ == "__main__":
    main()
