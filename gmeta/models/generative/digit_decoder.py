"""A small causal transformer over the digits of a code, the probabilities of items' digits, and searches.

`DigitDecoder` is conditioned on a vector of the history. `CodeScorer` compares its queries with the vectors
of codes. A `Walk` goes down the trie of codes; searches and draws of items follow many of its paths at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf

from gmeta.core.semantic_ids import SemanticIds
from gmeta.models.generative.code_tables import CodeTables
from gmeta.ops import jagged
from gmeta.ops.hstu_layer import layer_norm
from gmeta.ops.trie import TrieStep, trie_step
from gmeta.ops.trie_draws import TrieNoise, trie_gumbel_step, trie_sample

Past = tuple[tuple[tf.Tensor, tf.Tensor], ...]
"""For each block the keys and values of the tokens so far, (n, tokens, heads, d) each."""


class DigitDecoder(tf.keras.layers.Layer):
    r"""Computes the query for each digit of a code from a history and the digits before it.

    .. math::
       x_0 &= W h + p_0, \quad x_l = W h + D_l[d_l] + p_l \\
       q_l &= h + W_l\, \mathrm{LN}(\mathrm{blocks}(x))_l

    A block is attention and then a layer of SiLU, four times as wide, both after a norm and with a residual.
    Logits are products of the queries q with the vectors of codes, and on the last level with the vectors of
    items. W_l starts at 0, so that initially a query is h.

    Args:
      sizes: The number of codes of each level but the last.
      dim: d, the width of h.
      width: The width of tokens.
      blocks: The number of blocks.
      heads: The number of attention heads; it must divide the width.
      dropout: The share of numbers that are dropped in training.
      seed: The seed of initial values and dropout.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        dim: int,
        *,
        width: int,
        blocks: int,
        heads: int,
        dropout: float,
        seed: int,
        name: str = "decoder",
    ) -> None:
        super().__init__(name=name)
        self.sizes, self.width, self.heads, self.seed = tuple(sizes), width, heads, seed
        self.drop = tf.keras.layers.Dropout(dropout, seed=seed, name="dropout")
        self.enter = self._kernel("enter", dim, width)
        self.places = self._vectors("places", len(sizes) + 1)
        self.codes = [self._vectors(f"codes{level}", size) for level, size in enumerate(sizes)]
        self.blocks = [
            {
                "attention": self._norm(f"block{number}/attention"),
                "qkv": self._kernel(f"block{number}/qkv", width, 3 * width),
                "output": self._kernel(f"block{number}/output", width, width),
                "ffn": self._norm(f"block{number}/ffn"),
                "ffn1": self._kernel(f"block{number}/ffn1", width, 4 * width),
                "ffn2": self._kernel(f"block{number}/ffn2", 4 * width, width),
            }
            for number in range(blocks)
        ]
        self.norm = self._norm("norm")
        self.leave = self.add_weight(name="leave", shape=(len(sizes) + 1, width, dim), initializer="zeros")
        self.built = True

    @property
    def levels(self) -> int:
        """L, the number of digits of a code, the last included."""
        return len(self.sizes) + 1

    def call(self, h: tf.Tensor, digits: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        """Compute the queries of all levels from known digits.

        Args:
          h: (n, d).
          digits: (n, L - 1) integers, the codes without their last digits.
          training: Whether to apply dropout.

        Returns:
          (n, L, d).
        """
        entered, tables = self.start(h), map(tf.convert_to_tensor, self.codes)
        vectors = [jagged.take(table, digits[:, level]) for level, table in enumerate(tables)]
        tokens = entered[:, tf.newaxis] + tf.stack([tf.zeros_like(entered), *vectors], axis=1)
        out, _ = self._transform(tokens + self.places, (), training)
        return h[:, tf.newaxis] + tf.einsum("nlw,lwd->nld", out, self.leave)

    def start(self, h: tf.Tensor) -> tf.Tensor:
        """Return W h, (n, width), which `step` takes."""
        return tf.matmul(h, self.enter)

    def step(
        self, h: tf.Tensor, entered: tf.Tensor, digits: tf.Tensor | None, past: Past, level: int
    ) -> tuple[tf.Tensor, Past]:
        """Compute the query of one level, without computing those before it again.

        Args:
          h: (n, d).
          entered: (n, width), the result of `start`.
          digits: (n,) integers, the digits of the level before; None at level 0.
          past: What the previous step returned, () at level 0.
          level: The level, from 0 on.

        Returns:
          (n, d), and what the next step takes.
        """
        tokens = entered + self.places[level]
        if digits is not None:
            tokens += tf.gather(self.codes[level - 1], digits)
        out, past = self._transform(tokens[:, tf.newaxis], past, False)
        return h + tf.matmul(out[:, 0], self.leave[level]), past

    def _transform(self, tokens: tf.Tensor, past: Past, training: bool | None) -> tuple[tf.Tensor, Past]:
        """Run the blocks on t tokens that follow those of the past, (n, t, width) -> (n, t, width)."""
        x, kept = self.drop(tokens, training=training), []
        for number, block in enumerate(self.blocks):
            found, here = self._attend(block, x, past[number] if past else None)
            x += self.drop(found, training=training)
            hidden = tf.nn.silu(tf.matmul(layer_norm(x, *block["ffn"]), block["ffn1"]))
            x += self.drop(tf.matmul(hidden, block["ffn2"]), training=training)
            kept.append(here)
        return layer_norm(x, *self.norm), tuple(kept)

    def _attend(self, block: dict[str, Any], x: tf.Tensor, past: Any) -> tuple[tf.Tensor, Any]:
        tokens = x.shape[1]
        mixed = tf.matmul(layer_norm(x, *block["attention"]), block["qkv"])
        shape = [-1, tokens, self.heads, self.width // self.heads]
        q, k, v = (tf.reshape(part, shape) for part in tf.split(mixed, 3, axis=-1))
        if past is not None:
            k, v = tf.concat([past[0], k], axis=1), tf.concat([past[1], v], axis=1)
        scores = tf.einsum("nqhd,nkhd->nhqk", q, k) / math.sqrt(self.width / self.heads)
        if tokens > 1:
            scores += tf.constant([[0.0 if a <= b else -1e9 for a in range(tokens)] for b in range(tokens)])
        found = tf.einsum("nhqk,nkhd->nqhd", tf.nn.softmax(scores), v)
        return tf.matmul(tf.reshape(found, [-1, tokens, self.width]), block["output"]), (k, v)

    def _seed(self) -> int:
        return 1000 * self.seed + len(self.weights)  # initialisers of equal seeds would draw equal numbers

    def _kernel(self, name: str, rows: int, columns: int) -> tf.Variable:
        initializer = tf.keras.initializers.GlorotNormal(seed=self._seed())
        return self.add_weight(name=name, shape=(rows, columns), initializer=initializer)

    def _vectors(self, name: str, rows: int) -> tf.Variable:
        initializer = tf.keras.initializers.TruncatedNormal(stddev=self.width**-0.5, seed=self._seed())
        return self.add_weight(name=name, shape=(rows, self.width), initializer=initializer)

    def _norm(self, name: str) -> tuple[tf.Variable, tf.Variable]:
        return tuple(
            self.add_weight(name=f"{name}/{part}", shape=(self.width,), initializer=start)
            for part, start in (("scale", "ones"), ("offset", "zeros"))
        )


# Beams that descend the trie of codes. The history is read once, before the first digit.

Logits = Callable[[int, tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]
"""A level, queries (n, d), their nodes (n,) and users (n,) -> logits of the nodes' children, (n, codes)."""


class Walk(Protocol):
    """The beams of a batch of users, which descend the trie by one digit per step.

    Attributes:
      tables: The codes.
      users: The number of users, () int32.
      levels: The number of levels whose logits cover all codes, including those that no item has.
    """

    tables: CodeTables
    users: tf.Tensor
    levels: int

    def logits(self, nodes: tf.Tensor, beams: Any = None, digits: Any = None) -> tf.Tensor:
        """Compute the logits of the children of nodes, and go to the next level.

        Args:
          nodes: (users, beams) int64; results at -1 are meaningless.
          beams: (users, beams) int32, the beam of the previous step that each extends; None at the root.
          digits: (users, beams) int32, the digits that lead to them. None: those of the nodes.

        Returns:
          float32 (users, beams, codes).
        """


class CodeWalk:
    """A `Walk` by a decoder, for which the history is a vector.

    Args:
      decoder: The decoder.
      tables: The codes.
      h: (users, d), the vectors of the histories.
      logits: Computes the logits of a level.
    """

    def __init__(self, decoder: DigitDecoder, tables: CodeTables, h: tf.Tensor, logits: Logits) -> None:
        self.decoder, self.tables, self.h, self._logits = decoder, tables, h, logits
        self._entered = decoder.start(h)
        self._past: Past = ()
        self.level, self.users, self.levels = 0, tf.shape(h)[0], tables.levels - 1

    def logits(self, nodes: tf.Tensor, beams: Any = None, digits: Any = None) -> tf.Tensor:
        """Compute the logits of the children of nodes, as of `Walk`."""
        level, many = self.level, tf.shape(nodes)[1]
        users = tf.repeat(tf.range(self.users), many)
        if beams is not None:
            digits = self.tables.digits_at(level, nodes) if digits is None else digits
            digits = tf.reshape(digits, [-1])
            self._past = self._follow(tf.maximum(beams, 0))
        nodes = tf.reshape(tf.maximum(nodes, 0), [-1])
        h, entered = tf.gather(self.h, users), tf.gather(self._entered, users)
        query, self._past = self.decoder.step(h, entered, digits, self._past, level)
        self.level += 1
        found = self._logits(level, query, nodes, tf.cast(users, tf.int64))
        return tf.reshape(found, [self.users, many, self.tables.sizes[level]])

    def _follow(self, beams: tf.Tensor) -> Past:
        """Give each beam the keys and values of the beam that it extends."""
        former = tf.shape(self._past[0][0])[0] // tf.maximum(self.users, 1) if self._past else 1
        rows = tf.reshape(beams + tf.range(self.users)[:, tf.newaxis] * former, [-1])
        return tuple((tf.gather(keys, rows), tf.gather(values, rows)) for keys, values in self._past)


# The vectors of codes, and the logits that they make of queries.


class CodeVectors(tf.keras.layers.Layer):
    r"""A vector of each code of each level, which start at N(0, 1 / d²), and biases of logits.

    .. math:: p(d_l \mid q) = \mathrm{softmax}(C_l q + b_l)

    over what may follow.

    Args:
      sizes: The number of codes of each level.
      depth: The number of levels with logits.
      dim: d.
      seed: The seed of initial values.
    """

    def __init__(self, sizes: Sequence[int], depth: int, dim: int, *, seed: int) -> None:
        super().__init__(name="scorer")
        self.books, self.depth, self.dim = tuple(sizes), depth, dim
        self.vectors = self.add_weight(
            name="vectors",
            shape=(sum(self.books), dim),
            initializer=tf.keras.initializers.TruncatedNormal(stddev=1 / dim, seed=seed),
        )
        self.biases = [
            self.add_weight(name=f"bias{level}", shape=(size,), initializer="zeros")
            for level, size in enumerate(self.books[:depth])
        ]
        # A last level that numbers items has more codes when items are added (`gmeta.checkpoint`).
        for grown in (self.vectors, *self.biases[-1:]):
            grown.grows = True
        self.built = True

    def code_logits(self, level: int, query: tf.Tensor) -> tf.Tensor:
        """Compute the logits of a level, (n, d) -> (n, codes)."""
        return tf.matmul(query, self.of_level(level), transpose_b=True) + self.biases[level]

    def of_level(self, level: int) -> tf.Tensor:
        """Return C of a level, (codes, d)."""
        begin = sum(self.books[:level])
        return self.vectors[begin : begin + self.books[level]]


class CodeScorer(CodeVectors):
    r"""The vectors C of codes, and the decoder whose queries are compared with them.

    .. math::
       v_j &= E[j] + \textstyle\sum_l C_l[d_{jl}], \quad
       p(d_l \mid d_1 \dots d_{l-1}, h) = \mathrm{softmax}(C_l q_l + b_l) \\
       p(j \mid d_1 \dots d_D, h) &= \mathrm{softmax}_j(q_{D+1} \cdot v_j + \beta_j)

    each over what may follow, with the queries q of `DigitDecoder`.

    Args:
      ids: The semantic ids.
      depth: D, how many codes are generated as digits.
      dim: d, the width of h and E.
      width: The width of the decoder's tokens.
      seed: The seed of initial values and dropout.
      **decoder: Further arguments of `DigitDecoder`.
    """

    def __init__(
        self, ids: SemanticIds, depth: int, dim: int, *, width: int, seed: int, **decoder: Any
    ) -> None:
        super().__init__(ids.codebooks.sizes, depth, dim, seed=seed)
        self.codes = CodeTables(ids, depth)
        self.decoder = DigitDecoder(self.books[:depth], dim, width=width, seed=seed, **decoder)

    def call(
        self,
        h: tf.Tensor,
        items: tf.Tensor,
        siblings: tf.Tensor,
        rows: tf.Tensor,
        biases: tf.Tensor,
        allowed: Any = None,
        training: bool | None = None,
    ) -> tf.Tensor:
        """Compute the logs of the probabilities of items' digits.

        Args:
          h: (n, d).
          items: (n,) numbers of items.
          siblings: (n, c), the result of `siblings`.
          rows: (n * c, d), their rows E.
          biases: (n, c), added to their logits.
          allowed: For each level bool (nodes,), as `CodeTrie.allow` returns it; None: all are allowed.
          training: Whether to apply dropout.

        Returns:
          (n, D + 1); -inf from the first digit on that leads to no allowed item.
        """
        tables, found = self.codes, []
        queries = self.decoder(h, tf.gather(tables.codes[:, : self.depth], items), training=training)
        for level in range(tables.levels):
            query = queries[:, level]
            if level < self.depth:
                logits = self.code_logits(level, query)
            else:
                logits = self.item_logits(query, siblings, rows, biases)
            found.append(tables.log_probs(level, logits, items, allowed))
        return tf.stack(found, axis=1)

    def item_logits(
        self, query: tf.Tensor, siblings: tf.Tensor, rows: tf.Tensor, biases: tf.Tensor
    ) -> tf.Tensor:
        """Compute the logits of the last level, (n, c).

        Siblings share the generated codes, which would add the same to all logits, so these aren't added.
        """
        own = tf.reshape(rows, [-1, self.codes.sizes[-1], self.dim])
        logits = tf.linalg.matvec(own, query) + biases
        for level in range(self.depth, len(self.books)):
            products = tf.matmul(query, self.of_level(level), transpose_b=True)
            logits += tf.gather(products, tf.gather(self.codes.codes[:, level], siblings), batch_dims=1)
        return logits

    def with_codes(self, rows: tf.Tensor, items: tf.Tensor) -> tf.Tensor:
        """Compute v of items, (n, d), from their rows E; of an unknown item, -1, it is the row."""
        known = tf.cast(items >= 0, rows.dtype)[:, tf.newaxis]
        codes = tf.gather(self.codes.codes, tf.maximum(items, 0)) + self.codes.begins
        vectors = jagged.take(tf.convert_to_tensor(self.vectors), codes)
        return rows + known * tf.reduce_sum(vectors, axis=1)

    def siblings(self, items: tf.Tensor) -> tf.Tensor:
        """Return the items that share the generated codes with items, padded with other items: (n, c)."""
        return self.codes.siblings(self.codes.parents(items, self.depth))


Noise = Callable[[int], TrieNoise]
"""The noise of a level."""


def likeliest(walk: Walk, k: int, beam: int, allowed: Any = None) -> tuple[tf.Tensor, tf.Tensor]:
    """Find the likeliest items by a beam search.

    Args:
      walk: A walk at the root.
      k: How many items.
      beam: How many prefixes are kept at each level, >= k.
      allowed: For each level bool (nodes,), as `CodeTrie.allow` returns it; None: all are allowed.

    Returns:
      (users, k) int64 numbers of items, the likeliest first, -1 where there are fewer; and (users, k)
      float32, the logs of their probabilities.
    """
    tables = walk.tables

    def step(level: int, *beams: Any) -> TrieStep:
        last = level + 1 == tables.levels
        return trie_step(*beams, k=k if last else min(beam, int(tables.digits[level].shape[0])))

    return _go_down(walk, 1, allowed, step)


def independent(walk: Walk, group: int, noise: Noise, allowed: Any = None) -> tuple[tf.Tensor, tf.Tensor]:
    """Draw items with replacement, each by its probability, whatever the others are.

    Args:
      walk: A walk at the root.
      group: The number of items per user.
      noise: The noise of a level.
      allowed: As for `likeliest`.

    Returns:
      As `likeliest`, in the order of draws.
    """

    def step(level: int, *beams: Any) -> TrieStep:
        return trie_sample(*beams, noise=noise(level))

    return _go_down(walk, group, allowed, step)


def distinct(walk: Walk, group: int, noise: Noise, allowed: Any = None) -> tuple[tf.Tensor, tf.Tensor]:
    """Draw items without replacement, by a stochastic beam search.

    Args:
      walk: A walk at the root.
      group: The number of items per user.
      noise: The noise of a level.
      allowed: As for `likeliest`.

    Returns:
      As `likeliest`, in the order of draws.
    """
    ranks = tf.zeros([walk.users, 1])

    def step(level: int, logits: tf.Tensor, scores: tf.Tensor, *beams: Any) -> TrieStep:
        nonlocal ranks
        *found, ranks = trie_gumbel_step(logits, scores, ranks, *beams, k=group, noise=noise(level))
        return TrieStep(*found)

    return _go_down(walk, 1, allowed, step)


def of_items(walk: Walk, items: tf.Tensor, allowed: Any = None) -> tf.Tensor:
    """Compute the logs of the probabilities of given items' digits.

    Args:
      walk: A walk at the root.
      items: (users, group) numbers of items.
      allowed: As for `likeliest`.

    Returns:
      float32 (users, group, L); -inf from the first digit on that leads to no allowed item.
    """
    tables, found, flat = walk.tables, [], tf.reshape(items, [-1])
    beams = tf.broadcast_to(tf.range(tf.shape(items)[1]), tf.shape(items))
    for level in range(tables.levels):
        logits = walk.logits(tables.parents(items, level), beams if level else None)
        logits = tf.reshape(logits, [-1, tables.sizes[level]])
        found.append(tables.log_probs(level, logits, flat, allowed))
    return tf.reshape(tf.stack(found, axis=-1), tf.concat([tf.shape(items), [tables.levels]], axis=0))


def without_trie(walk: Walk, k: int, beam: int) -> tf.Tensor:
    """Find the likeliest among all possible codes, and return which of them belong to items.

    Each digit's probabilities are normalised over all codes of its level, as in a model without a trie.

    Args:
      walk: A walk at the root.
      k: How many codes.
      beam: How many prefixes are kept at each level, >= k.

    Returns:
      bool (users, k), or fewer where there are fewer codes.
    """
    tables = walk.tables
    scores, nodes = tf.zeros([walk.users, 1]), tf.zeros([walk.users, 1], tf.int64)
    beams = digits = None
    many = 1
    for level in range(walk.levels):
        size = tables.sizes[level]
        many = min(many * size, k if level + 1 == walk.levels else beam)
        reached = scores[:, :, tf.newaxis] + tf.nn.log_softmax(walk.logits(nodes, beams, digits))
        scores, places = tf.math.top_k(tf.reshape(reached, [walk.users, tf.shape(nodes)[1] * size]), many)
        beams, digits = places // size, places % size
        nodes = tables.child(level, tf.gather(nodes, beams, batch_dims=1), digits)
    return nodes >= 0


def _go_down(
    walk: Walk, group: int, allowed: Any, step: Callable[..., TrieStep]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Take one step per level from ``group`` beams at the root; a step has the arguments of `trie_step`."""
    tables = walk.tables
    scores, nodes = tf.zeros([walk.users, group]), tf.zeros([walk.users, group], tf.int64)
    beams = None
    for level in range(tables.levels):
        may = None if allowed is None else allowed[level]
        logits = walk.logits(nodes, beams)
        scores, nodes, beams = step(
            level, logits, scores, nodes, tables.starts[level], tables.digits[level], may
        )
    return tables.items_of(nodes), scores
