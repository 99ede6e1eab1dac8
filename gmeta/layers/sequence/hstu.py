"""HSTU, the Hierarchical Sequential Transduction Unit, in its two published forms."""

from __future__ import annotations

import functools
import math
from typing import Any, Literal

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.graph import assert_first
from gmeta.layers.sequence.block import SequenceBlock
from gmeta.layers.sequence.reading import AppendedPlace, Kept, SequenceView
from gmeta.layers.sequence.stack import SequenceStack
from gmeta.ops.hstu_layer import hstu_mix, layer_norm, norm_and_pass, residual
from gmeta.ops.jagged_attention import appended_attention, kept_attention

_STDDEV = 0.02
_normal = functools.partial(tf.keras.initializers.RandomNormal, stddev=_STDDEV)


def _uniform_by(fan_in: int) -> Any:
    limit = 1 / math.sqrt(fan_in)
    return functools.partial(tf.keras.initializers.RandomUniform, -limit, limit)


def _wide_uv(columns: int, seed: int) -> Any:
    """Return an initialiser at N(0, 0.02²), but for the first columns, of U and V, at N(0, 1 / in)."""
    normal = tf.keras.initializers.RandomNormal(stddev=1.0, seed=seed)

    def start(shape: Any, dtype: Any = None, **kwargs: Any) -> tf.Tensor:
        stddev = tf.where(tf.range(shape[1]) < columns, 1 / math.sqrt(shape[0]), _STDDEV)
        return normal(shape, dtype, **kwargs) * tf.cast(stddev, dtype or tf.float32)

    return start


@tf.keras.saving.register_keras_serializable("gmeta")
class HSTUBlock(SequenceBlock):
    r"""A block of HSTU over jagged sequences (Zhai et al., "Actions Speak Louder than Words", ICML 2024, 3).

    The research form follows equations 1 to 3 and the code that reproduces the paper's public results:

    .. math::
       U, V, Q, K &= \mathrm{SiLU}(\mathrm{LN}(X) W) \\
       A_i &= \frac{1}{n} \sum_{j \in V(i)} \mathrm{SiLU}(q_i \cdot k_j + \mathrm{rab}_{ij})\, v_j \\
       Y &= \mathrm{dropout}(U \odot \mathrm{LN}(A))\, W_o + b_o + X

    LN has no weights, and ε is 1e-6. rab is a bias for distances in position and in time, the same for all
    heads (`gmeta.ops.RelativeBias`). W starts at N(0, 0.02²), W_o by Xavier's uniform rule, b_o at
    :math:`U(-1/\sqrt{in}, 1/\sqrt{in})`, and the bias tables at N(0, 0.02²).

    The production form follows the published code for ranking:

    .. math::
       U', V, Q, K &= \mathrm{LN}(X) W + b, \qquad U = \mathrm{SiLU}(U') \\
       A_i &= \frac{1}{n} \sum_{j \in V(i)}
              \mathrm{SiLU}(q_i \cdot k_j / \sqrt{d} + \mathrm{rab}_{ij})\, v_j \\
       Y &= X + \mathrm{dropout}([U, A, U \odot \mathrm{LN}(A)])\, W_o

    LN has weights; W and W_o start by Xavier's uniform rule, biases at 0. The published code has no rab; set
    ``bias_by_place=False, bias_by_time=False`` to leave it out.

    n is a constant, so a sequence's output doesn't depend on the other sequences in its batch.

    From such small initial values, training is slow to find that recent events matter more than old ones: the
    whole of a long history has equal weight, gates and values are near 0, and what attention adds is lost
    beside X. With a ``horizon`` h, a token at first sees mostly what is at most about h old: rab starts at
    ln(h / Δ), and not below -8 (`gmeta.layers.sequence.block.RelativeBiasTables`), and, in the research
    form, the columns of W that make U and V start at N(0, 1 / in). Q and K start as without it, so that
    content doesn't outweigh recency at first. All of it is learned from there.

    Args:
      heads: Number of heads.
      attention_dim: d, the width of a query and of a key, per head.
      value_dim: Width of a value and of a gate, per head.
      max_length: n, the longest history to provide for. The block accepts longer sequences; distances beyond
        n - 1 share a bias.
      form: ``"research"`` or ``"production"``.
      horizon: h, in the unit of the times; with ``bias_by_time`` only. None: start as published.
      dropout: The share of numbers that are dropped in training, before W_o.
      bias_by_place: Whether rab covers distances in position.
      bias_by_time: Whether rab covers distances in time; calls then need ``times``.
      mask: Which tokens see which. None: a token sees those before it.
      seed: Seed of the initial values and of dropout.

    Shapes:
      `gmeta.ops.Jagged` of values (total, dim) -> the same. A call also takes ``contexts``, ``targets`` and
      ``times`` (`SequenceBlock.call`).

    Raises:
      ConfigError: Settings are invalid, or a call lacks the times that it needs.

    Example:
      >>> block = HSTUBlock(heads=2, attention_dim=4, value_dim=8, max_length=50)
      >>> histories = Jagged(tf.random.normal([5, 16]), tf.constant([0, 2, 5], tf.int64))
      >>> block(histories, times=tf.constant([3, 9, 1, 4, 4])).values.shape
      TensorShape([5, 16])
    """

    READS_ON = EXTENDS = True
    _SETTINGS = (*SequenceBlock._SETTINGS, "form", "horizon")

    def __init__(
        self,
        *,
        form: Literal["research", "production"] = "research",
        horizon: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(horizon=horizon, **kwargs)
        if form not in ("research", "production"):
            raise ConfigError(f"{self.name}: form must be 'research' or 'production', got {form!r}")
        self.form, self.horizon = form, horizon
        self.norm_scale = self.norm_offset = self.attended_scale = self.attended_offset = None

    def build(self, input_shape: Any) -> None:
        """Create the weights for tokens of the given width."""
        dim = self.width(input_shape)
        gate, query = self.heads * self.value_dim, self.heads * self.attention_dim
        self.sizes = [gate, gate, query, query]
        glorot = tf.keras.initializers.GlorotUniform
        if self.form == "research":
            start = _normal if self.horizon is None else functools.partial(_wide_uv, 2 * gate)
            self.uvqk = self.weight("uvqk/kernel", [dim, sum(self.sizes)], start)
            self.output_kernel = self.weight("output/kernel", [gate, dim], glorot)
            self.output_bias = self.weight("output/bias", [dim], _uniform_by(gate))
        else:
            self.uvqk = self.weight("uvqk/kernel", [dim, sum(self.sizes)], glorot)
            self.uvqk_bias = self.weight("uvqk/bias", [sum(self.sizes)], "zeros")
            self.output_kernel = self.weight("output/kernel", [3 * gate, dim], glorot)
            self.norm_scale = self.weight("norm/scale", [dim], "ones")
            self.norm_offset = self.weight("norm/offset", [dim], "zeros")
            self.attended_scale = self.weight("attended_norm/scale", [gate], "ones")
            self.attended_offset = self.weight("attended_norm/offset", [gate], "zeros")
        super().build(input_shape)

    def transform(
        self, values: tf.Tensor, offsets: tf.Tensor, view: SequenceView, training: bool | None
    ) -> tf.Tensor:
        """Transform the tokens, (total, dim) -> (total, dim)."""
        normed, values = norm_and_pass(values, self.norm_scale, self.norm_offset)
        if self.form == "research":
            mixed = self._mix(normed, offsets, view, self.uvqk)
        else:
            mixed = self._mix(self._project(normed), offsets, view)
        return self._leave(values, self.drop(mixed, training=training))

    def read(
        self, values: tf.Tensor, offsets: tf.Tensor, view: SequenceView, training: bool | None
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Transform the tokens, and return their keys and values too, (total, heads, d) each."""
        normed, values = norm_and_pass(values, self.norm_scale, self.norm_offset)
        projected = self._project(normed)
        _, v, _, k = self._parts(projected)
        mixed = self._mix(projected, offsets, view)
        return self._leave(values, self._dropped(mixed, training)), self.by_head(k), self.by_head(v)

    def read_on(
        self, values: tf.Tensor, kept: Kept, place: AppendedPlace, training: bool | None
    ) -> tuple[tf.Tensor, Kept]:
        """Transform one appended token of each beam, (batch, beams, dim)."""
        rows, u, q, k, v = self._appended(values)
        kept = kept.append(k, v)
        bias = self.bias_tables
        attended = appended_attention(
            q, *kept, *place.biases(bias.positions, bias.time_buckets), scale=self._scale, alpha=self._alpha
        )
        return self._gated(values, rows, u, attended, training), kept

    def extend(
        self, values: tf.Tensor, kept: Kept, place: AppendedPlace
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Transform a stretch of tokens that is appended to each sequence, (batch, n, dim)."""
        rows, u, q, k, v = self._appended(values)
        keys, own = (tf.transpose(each, [0, 2, 1, 3]) for each in (k, v))
        bias = self.bias_tables
        added, own_added = place.biases(bias.positions, bias.time_buckets)
        attended = kept_attention(q, kept.keys, kept.values, added, alpha=self._alpha)
        attended += kept_attention(q, keys, own, own_added, alpha=self._alpha)
        attended = tf.cast(self._scale * attended, q.dtype)
        return self._gated(values, rows, u, attended, training=False), keys, own

    def _appended(self, values: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """Return appended tokens as rows, and their U, and Q, K and V, (batch, n, heads, d)."""
        normed, rows = norm_and_pass(
            tf.reshape(values, [-1, values.shape[-1]]), self.norm_scale, self.norm_offset
        )
        u, v, q, k = self._parts(self._project(normed))
        batch, count = tf.unstack(tf.shape(values)[:2])
        q, k = (tf.reshape(x, [batch, count, self.heads, self.attention_dim]) for x in (q, k))
        return rows, u, q, k, tf.reshape(v, [batch, count, self.heads, self.value_dim])

    def _gated(
        self, values: tf.Tensor, rows: tf.Tensor, u: tf.Tensor, attended: tf.Tensor, training: bool | None
    ) -> tf.Tensor:
        attended = tf.reshape(attended, [-1, self.heads * self.value_dim])
        gated = layer_norm(attended, self.attended_scale, self.attended_offset)
        gated = u * gated if self.form == "research" else tf.concat([u, attended, u * gated], axis=1)
        return tf.reshape(self._leave(rows, self._dropped(gated, training)), tf.shape(values))

    @property
    def _scale(self) -> float:
        return 1 / self.max_length

    @property
    def _alpha(self) -> float:
        return 1.0 if self.form == "research" else 1 / math.sqrt(self.attention_dim)

    def _project(self, normed: tf.Tensor) -> tf.Tensor:
        product = tf.matmul(normed, self.uvqk)
        return product if self.form == "research" else residual(None, product, self.uvqk_bias)

    def _parts(self, projected: tf.Tensor) -> list[tf.Tensor]:
        """Split into U, V, Q and K, activated."""
        if self.form == "research":
            return tf.split(tf.nn.silu(projected), self.sizes, axis=1)
        u, *others = tf.split(projected, self.sizes, axis=1)
        return [tf.nn.silu(u), *others]

    def _mix(
        self, projected: tf.Tensor, offsets: tf.Tensor, view: SequenceView, kernel: Any = None
    ) -> tf.Tensor:
        return hstu_mix(
            projected,
            offsets,
            view.visible,
            heads=self.heads,
            attention_dim=self.attention_dim,
            value_dim=self.value_dim,
            scale=self._scale,
            alpha=self._alpha,
            form=self.form,
            norm_scale=self.attended_scale,
            norm_offset=self.attended_offset,
            bias=self.bias_tables(view),
            kernel=kernel,
        )

    def _leave(self, values: tf.Tensor, mixed: tf.Tensor) -> tf.Tensor:
        out = tf.matmul(mixed, self.output_kernel)
        return residual(values, out, self.output_bias if self.form == "research" else None)


@tf.keras.saving.register_keras_serializable("gmeta")
class HSTU(SequenceStack):
    """Blocks of HSTU, one after another.

    Args:
      blocks: Number of blocks.
      **settings: As for `HSTUBlock`. Each block has its own weights, rab included, and its own seed.

    Shapes:
      `gmeta.ops.Jagged` of values (total, dim) -> the same. A call takes the same arguments as an
      `HSTUBlock`. The stack doesn't norm its output; the next layer must do that. The research form's code
      uses an L2 norm.

    Example:
      >>> hstu = HSTU(blocks=2, heads=2, attention_dim=4, value_dim=8, max_length=50, bias_by_time=False)
      >>> histories = Jagged(tf.random.normal([5, 16]), tf.constant([0, 2, 5], tf.int64))
      >>> out = hstu(histories, targets=tf.constant([0, 1]))
      >>> jagged.last(out).shape
      TensorShape([2, 16])
    """

    BLOCK = HSTUBlock


# Layer norm with the weights of a token's domain.


def _of_each(weight: tf.Tensor, domains: tf.Tensor) -> tf.Tensor:
    """Gather a domain's row for each token: (domains, dim) -> (total, dim).

    Thousands of tokens share a row. Its gradient is their sum, taken as a matrix product: a sum by segments
    would make a GPU's threads wait for each other, and add in another order in each run.
    """

    @tf.custom_gradient
    def gather(weight: tf.Tensor) -> tuple[tf.Tensor, Any]:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            chosen = tf.one_hot(domains, tf.shape(weight)[0], dtype=upstream.dtype)
            return tf.matmul(chosen, upstream, transpose_a=True)

        return tf.gather(weight, domains), gradient

    return gather(weight)


@tf.keras.saving.register_keras_serializable("gmeta")
class GroupLayerNorm(tf.keras.layers.Layer):
    r"""Layer norm for tokens of several domains, such as contexts, clicks, purchases and targets.

    .. math::
       y_i = \gamma_{g(i)} \odot \frac{x_i - \bar{x_i}}{\sqrt{\mathrm{var}(x_i) + \epsilon}} + \beta_{g(i)}

    Tokens of different domains differ in scale. With each domain's own weights they become alike in scale,
    and attention can compare them (MTGR, Han et al., arXiv 2505.18654, 2025; MTGenRec, section 2). The
    statistics cover only the token's own numbers, so no token depends on other tokens.

    Args:
      domains: Number of domains.
      eps: ε.

    Shapes:
      Values (total, dim) and domains, (total,) integers in [0, domains) or one for all -> (total, dim).

    Raises:
      ConfigError: There is less than one domain, or a call's one domain isn't in [0, domains).
      InvalidArgumentError: A token's domain isn't in [0, domains).

    Example:
      >>> norm = GroupLayerNorm(domains=3)
      >>> norm(tf.random.normal([5, 8]), tf.constant([0, 1, 1, 1, 2])).shape
      TensorShape([5, 8])
    """

    def __init__(self, domains: int, *, eps: float = 1e-6, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if domains < 1:
            raise ConfigError(f"{self.name}: domains must be at least 1, got {domains}")
        self.domains, self.eps = domains, eps

    def build(self, input_shape: Any) -> None:
        """Create γ and β for tokens of the given width."""
        shape = [self.domains, int(tf.TensorShape(input_shape)[-1])]
        self.gamma = self.add_weight(name="gamma", shape=shape, initializer="ones")
        self.beta = self.add_weight(name="beta", shape=shape, initializer="zeros")
        super().build(input_shape)

    def call(self, values: tf.Tensor, domains: tf.Tensor | int) -> tf.Tensor:
        """Normalise each token.

        Args:
          values: (total, dim) float.
          domains: (total,) integers, each token's domain; or that of all tokens, which is faster.
        """
        weights = [tf.convert_to_tensor(weight) for weight in (self.gamma, self.beta)]
        if isinstance(domains, int):
            if not 0 <= domains < self.domains:
                raise ConfigError(f"{self.name}: the domain must be in [0, {self.domains}), got {domains}")
            return layer_norm(values, weights[0][domains], weights[1][domains], self.eps)
        domains = tf.convert_to_tensor(domains)
        with tf.device("CPU:0"):  # on a GPU, gather silently returns zeros for indices that are out of range
            domains = assert_first(
                domains,
                (domains >= 0) & (domains < self.domains),
                [f"{self.name}: domains must be in [0, {self.domains}), got", domains],
            )
        scale, offset = (_of_each(weight, domains) for weight in weights)
        return layer_norm(values, scale, offset, self.eps)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this layer."""
        return {**super().get_config(), "domains": self.domains, "eps": self.eps}
