"""SASRec's and LiGR's blocks are their formulas, history by history."""

import itertools

import numpy as np
import tensorflow as tf

from gmeta.models.zoo.softmax_blocks import LiGRBlock, SASRec, SASRecBlock
from gmeta.ops import Jagged


def softmax_attention(block, x):
    """One history, by the formula."""
    weight = {name: value.numpy().astype(float) for name, value in block.kernels.items()}
    bias = {name: value.numpy().astype(float) for name, value in block.biases.items()}

    def norm(rows):
        centred = rows - rows.mean(axis=1, keepdims=True)
        return centred / np.sqrt(np.square(centred).mean(axis=1, keepdims=True) + 1e-6)

    asking = norm(x)
    q = asking @ weight["query"] + bias["query"]
    k, v = (x @ weight[name] + bias[name] for name in ("key", "value"))
    d, found = block.attention_dim, []
    for i in range(len(x)):
        heads = []
        for h in range(block.heads):
            part = slice(h * d, (h + 1) * d)
            weights = np.exp(k[: i + 1, part] @ q[i, part] / np.sqrt(d))
            heads.append(weights @ v[: i + 1, part] / weights.sum())
        found.append(np.concatenate(heads))
    asked = norm(asking + np.array(found) @ weight["output"] + bias["output"])
    hidden = np.maximum(asked @ weight["ffn1"] + bias["ffn1"], 0)
    return asked + hidden @ weight["ffn2"] + bias["ffn2"]


def test_sasrec_is_its_formula_whatever_else_is_in_the_batch():
    block = SASRecBlock(heads=2, attention_dim=4, value_dim=4, max_length=9)
    random = np.random.default_rng(0)
    lengths = [3, 0, 1, 7]
    x, offsets = random.normal(size=[sum(lengths), 8]), np.cumsum([0, *lengths])
    found = block(Jagged(tf.constant(x, tf.float32), tf.constant(offsets))).values
    for value in block.biases.values():  # they start at 0, where a missing one isn't seen
        value.assign(random.normal(size=value.shape))
    found = block(Jagged(tf.constant(x, tf.float32), tf.constant(offsets))).values
    expected = [softmax_attention(block, x[a:b]) for a, b in itertools.pairwise(offsets) if b > a]
    np.testing.assert_allclose(found, np.concatenate(expected), rtol=1e-4, atol=1e-5)


def ligr(block, x):
    """One history, by the formula."""
    weight = {name: value.numpy().astype(float) for name, value in block.kernels.items()}
    bias = {name: value.numpy().astype(float) for name, value in block.biases.items()}

    def norm(rows):
        centred = rows - rows.mean(axis=1, keepdims=True)
        return centred / np.sqrt(np.square(centred).mean(axis=1, keepdims=True) + 1e-6)

    def linear(name, rows):
        return rows @ weight[name] + bias[name]

    def gate(name, rows):
        return 1 / (1 + np.exp(-linear(name, rows)))

    q, k, v = (linear(name, norm(x)) for name in ("query", "key", "value"))
    found = []
    for i in range(len(x)):
        weights = np.exp(k[: i + 1] @ q[i] / np.sqrt(q.shape[1]))
        found.append(weights @ v[: i + 1] / weights.sum())
    y = x + linear("output", np.array(found)) * gate("attention_gate", x)
    first = norm(y) @ weight["ffn1"]
    hidden = first / (1 + np.exp(-first)) * (norm(y) @ weight["ffn2"])
    return y + hidden @ weight["ffn3"] * gate("ffn_gate", y)


def test_ligr_is_its_formula():
    block = LiGRBlock(heads=1, attention_dim=8, value_dim=8, max_length=9)
    random = np.random.default_rng(0)
    x, offsets = random.normal(size=[7, 8]), np.array([0, 3, 7])
    tokens = Jagged(tf.constant(x, tf.float32), tf.constant(offsets))
    block(tokens)
    for value in block.biases.values():
        value.assign(random.normal(size=value.shape))
    expected = [ligr(block, x[a:b]) for a, b in itertools.pairwise(offsets)]
    np.testing.assert_allclose(block(tokens).values, np.concatenate(expected), rtol=1e-4, atol=1e-5)


def test_sasrec_reads_on_as_it_reads_whole_sequences():
    stack = SASRec(blocks=2, heads=2, attention_dim=3, value_dim=4, max_length=9)
    random = np.random.default_rng(0)
    offsets, own = np.array([0, 4, 5]), random.normal(size=(2, 3, 2, 6)).astype(np.float32)
    values = tf.constant(random.normal(size=(5, 6)), tf.float32)
    _, reading = stack.read(Jagged(values, tf.constant(offsets)))
    parents = np.array([[2, 0, 0], [1, 1, 2]])
    _, reading = stack.read_on(own[:, :, 0], reading)
    found, _ = stack.read_on(own[:, :, 1], reading, parents)
    for user, beam in np.ndindex(2, 3):
        before = values[offsets[user] : offsets[user + 1]]
        whole = tf.concat([before, own[user, parents[user, beam], :1], own[user, beam, 1:]], 0)
        again = stack(Jagged(whole, tf.constant([0, len(whole)], tf.int64))).values[-1]
        np.testing.assert_allclose(found[user, beam], again, rtol=1e-4, atol=1e-5)
