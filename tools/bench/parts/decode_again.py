"""Walks down the trie that recompute at each digit what a search keeps."""

from __future__ import annotations

from typing import Any

from gmeta.models import FlatRetriever, GenerativeRetriever
from gmeta.models.generative.code_model import SeenItems
from gmeta.models.generative.digit_decoder import CodeWalk, likeliest
from gmeta.ops import Jagged, jagged

import tensorflow as tf

Found = tuple[tf.Tensor, tf.Tensor]


class _Told:
    """The digits of each beam."""

    def __init__(self, users: int) -> None:
        self._digits = tf.zeros([users, 1, 0], tf.int32)

    def follow(self, beams: tf.Tensor, digits: tf.Tensor) -> tf.Tensor:
        """Give each beam the digits of its predecessor, and one more: (users, beams, digits)."""
        before = tf.gather(self._digits, tf.maximum(beams, 0), axis=1, batch_dims=1)
        self._digits = tf.concat([before, digits[:, :, tf.newaxis]], axis=2)
        return self._digits


class HistoriesAgain:
    """A walk of the flat form that reads the whole history again for each digit of each beam."""

    def __init__(self, model: FlatRetriever, x: dict[str, Any], users: int) -> None:
        self.tables, self.users, self.levels, self._model = model.codes, users, model.codes.levels, model
        ids, _ = model._sequences(x, model.max_length)
        self._place = tf.gather(model.places, jagged.lengths(ids))
        tokens, _ = model._tokens(ids, None)
        self._tokens = jagged.to_padded(tokens)  # equal lengths
        self._told, self.level = _Told(users), 0

    def search(self, beams: int) -> Found:
        """Find this many items."""
        return likeliest(self, beams, beams)

    def logits(self, nodes: tf.Tensor, beams: Any = None, digits: Any = None) -> tf.Tensor:
        """Compute the logits of the children of nodes, a user at a time."""
        model, level = self._model, self.level
        self.level += 1
        if beams is None:
            queries = self._read(self._tokens)[:, tf.newaxis]
        else:
            told = self._told.follow(beams, self.tables.digits_at(level, nodes))
            of_levels = [
                tf.gather(model.scorer.of_level(number), told[:, :, number]) for number in range(level)
            ]
            own = tf.stack(of_levels, axis=2) * model.dim**0.5 + self._place[:, tf.newaxis, tf.newaxis]
            queries = tf.stack([self._of_user(user, own[user]) for user in range(self.users)])
        found = model.scorer.code_logits(level, tf.reshape(queries, [-1, model.dim]))
        return tf.reshape(found, [self.users, tf.shape(nodes)[1], self.tables.sizes[level]])

    def _of_user(self, user: int, own: tf.Tensor) -> tf.Tensor:
        before = tf.repeat(self._tokens[user : user + 1], tf.shape(own)[0], axis=0)
        return self._read(tf.concat([before, own], axis=1))

    def _read(self, tokens: tf.Tensor) -> tf.Tensor:
        """(n, tokens, d) -> (n, d)."""
        count, length = tf.unstack(tf.shape(tokens, tf.int64)[:2])
        flat = Jagged(tf.reshape(tokens, [-1, self._model.dim]), length * tf.range(count + 1))
        return self._model._norm(jagged.last(self._model.backbone(flat, training=False)))


class DigitsAgain:
    """A walk of a decoder after known histories, which can compute a beam's digits again at each step."""

    def __init__(self, model: GenerativeRetriever, h: tf.Tensor, x: dict[str, Any], rows: tf.Tensor) -> None:
        ids, _ = model._sequences(x, model.max_length)
        self._walk: CodeWalk = model._walk(h, SeenItems(ids, model.items), rows)
        self.tables, self.users, self.levels = self._walk.tables, self._walk.users, self._walk.levels
        self._told = _Told(h.shape[0])

    def search(self, beams: int, *, kept: bool) -> Found:
        """Find this many items."""
        return likeliest(self._walk if kept else self, beams, beams)

    def logits(self, nodes: tf.Tensor, beams: Any = None, digits: Any = None) -> tf.Tensor:
        """Compute the logits of the children of nodes, from all digits that lead to them."""
        walk, many = self._walk, tf.shape(nodes)[1]
        level, decoder = walk.level, walk.decoder
        walk.level += 1
        users = tf.repeat(tf.range(self.users), many)
        tokens = tf.gather(walk._entered, users)[:, tf.newaxis] + decoder.places[: level + 1]
        if beams is not None:
            told = self._told.follow(beams, self.tables.digits_at(level, nodes))
            told = tf.ensure_shape(tf.reshape(told, [-1, level]), [None, level])
            of_levels = [tf.gather(decoder.codes[number], told[:, number]) for number in range(level)]
            tokens += tf.stack([tf.zeros_like(of_levels[0]), *of_levels], axis=1)
        out, _ = decoder._transform(tokens, (), False)
        query = tf.gather(walk.h, users) + tf.matmul(out[:, -1], decoder.leave[level])
        at = tf.reshape(tf.maximum(nodes, 0), [-1])
        found = walk._logits(level, query, at, tf.cast(users, tf.int64))
        return tf.reshape(found, [self.users, many, self.tables.sizes[level]])
