"""FuXi-α: attention in three channels over one set of values, and a two-stage feed-forward network."""

from __future__ import annotations

import functools
import math
from typing import Any

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.layers.sequence.block import SequenceBlock
from gmeta.layers.sequence.reading import SequenceView
from gmeta.layers.sequence.stack import SequenceStack
from gmeta.ops import RelativeBias, hstu_attention
from gmeta.ops.hstu_layer import residual, rms_norm
from gmeta.ops.jagged_attention import bias_attention


@tf.keras.saving.register_keras_serializable("gmeta")
class FuXiBlock(SequenceBlock):
    r"""A block of FuXi-α over jagged sequences (Ye et al., WWW 2025, section 3.3).

    Adaptive multi-channel self-attention weighs the same values in three ways: by the tokens' content
    (latent), by their distance in position, and by their distance in time. The layers above see each
    channel's weights separately, which they couldn't with a bias inside one score:

    .. math::
       U, V, Q, K &= \mathrm{SiLU}(\mathrm{RMS}(X) W) \\
       P_i &= \sum_{j \in V(i)} p_{j - i}\, v_j, \quad T_i = \sum_{j \in V(i)} t_{b(\tau_i - \tau_j)}\, v_j,
       \quad A_i = \frac{1}{n} \sum_{j \in V(i)} \mathrm{SiLU}(q_i \cdot k_j)\, v_j \\
       H &= U \odot \mathrm{RMS}([P, T, A])

    The multi-stage feed-forward network first joins the channels, then mixes each token's numbers by SwiGLU:

    .. math::
       O &= \mathrm{dropout}(H)\, W_0 + b_0 + X \\
       Z &= \mathrm{dropout}(\mathrm{RMS}(O)), \quad Y = (\mathrm{SiLU}(Z W_1) \odot Z W_3)\, W_2 + O

    RMS has no weights, and ε is 1e-6. As in the published code, the channels of a head are adjacent; only the
    latent channel is divided by n; W and the tables p and t start at N(0, 0.02²), the other kernels by
    Xavier's uniform rule, and b_0 at :math:`U(-1/\sqrt{in}, 1/\sqrt{in})`. n is a constant, so a sequence's
    output doesn't depend on the other sequences in its batch.

    Args:
      heads: Number of heads.
      attention_dim: Width of a query and of a key, per head.
      value_dim: Width of a value, per head; a gate is three times as wide.
      max_length: n. The block accepts longer sequences; distances beyond n - 1 share a weight.
      ffn_multiply: Width of the second stage, as a multiple of a token's width.
      dropout: The share of numbers that are dropped in training.
      bias_by_place: Whether there is the channel for distances in position.
      bias_by_time: Whether there is the channel for distances in time; calls then need ``times``.
      mask: Which tokens see which. None: a token sees those before it.
      seed: Seed of the initial values and of dropout.

    Shapes:
      `gmeta.ops.Jagged` of values (total, dim) -> the same. A call also takes ``contexts``, ``targets`` and
      ``times`` (`SequenceBlock.call`).

    Raises:
      ConfigError: Settings are invalid, or a call lacks the times that it needs.

    Example:
      >>> block = FuXiBlock(heads=2, attention_dim=4, value_dim=8, max_length=50)
      >>> histories = Jagged(tf.random.normal([5, 16]), tf.constant([0, 2, 5], tf.int64))
      >>> block(histories, times=tf.constant([3, 9, 1, 4, 4])).values.shape
      TensorShape([5, 16])
    """

    _SETTINGS = (*SequenceBlock._SETTINGS, "ffn_multiply")

    def __init__(self, *, ffn_multiply: float = 1, **kwargs: Any) -> None:
        if kwargs.get("horizon") is not None:
            raise ConfigError("FuXiBlock: its tables are weights, not scores: leave out horizon=")
        super().__init__(**kwargs)
        if ffn_multiply <= 0:
            raise ConfigError(f"{self.name}: ffn_multiply must be above 0, got {ffn_multiply}")
        self.ffn_multiply = ffn_multiply

    def build(self, input_shape: Any) -> None:
        """Create the weights for tokens of the given width."""
        dim, channels = self.width(input_shape), 1 + self.bias_by_place + self.bias_by_time
        value, query = self.heads * self.value_dim, self.heads * self.attention_dim
        hidden, limit = max(1, int(dim * self.ffn_multiply)), 1 / math.sqrt(channels * value)
        self.sizes = [channels * value, value, query, query]
        normal = functools.partial(tf.keras.initializers.RandomNormal, stddev=0.02)
        uniform = functools.partial(tf.keras.initializers.RandomUniform, -limit, limit)
        glorot = tf.keras.initializers.GlorotUniform
        self.uvqk = self.weight("uvqk/kernel", [dim, sum(self.sizes)], normal)
        self.joined_kernel = self.weight("joined/kernel", [channels * value, dim], glorot)
        self.joined_bias = self.weight("joined/bias", [dim], uniform)
        self.gate_kernel = self.weight("ffn/gate", [dim, hidden], glorot)
        self.up_kernel = self.weight("ffn/up", [dim, hidden], glorot)
        self.down_kernel = self.weight("ffn/down", [hidden, dim], glorot)
        super().build(input_shape)

    def transform(
        self, values: tf.Tensor, offsets: tf.Tensor, view: SequenceView, training: bool | None
    ) -> tf.Tensor:
        """Transform the tokens, (total, dim) -> (total, dim)."""
        mixed = tf.nn.silu(tf.matmul(rms_norm(values), self.uvqk))
        u, v, q, k = tf.split(mixed, self.sizes, axis=1)
        attended = tf.concat(
            self._channels(self.by_head(q), self.by_head(k), self.by_head(v), offsets, view), axis=2
        )
        gated = u * rms_norm(tf.reshape(attended, [-1, self.sizes[0]]))
        joined = tf.matmul(self.drop(gated, training=training), self.joined_kernel)
        joined = residual(values, joined, self.joined_bias)
        z = self.drop(rms_norm(joined), training=training)
        hidden = tf.nn.silu(tf.matmul(z, self.gate_kernel)) * tf.matmul(z, self.up_kernel)
        return residual(joined, tf.matmul(hidden, self.down_kernel))

    def _channels(
        self, q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, offsets: tf.Tensor, view: SequenceView
    ) -> list[tf.Tensor]:
        """Compute the channels of position, time and content, (total, heads, value_dim) each."""
        positions, buckets, *times = self.bias_tables(view)
        found = []
        if positions is not None:
            bias = RelativeBias(positions=positions)
            found.append(bias_attention(v, offsets, view.visible, scale=1.0, bias=bias))
        if buckets is not None:
            bias = RelativeBias(None, buckets, *times)
            found.append(bias_attention(v, offsets, view.visible, scale=1.0, bias=bias))
        return [*found, hstu_attention(q, k, v, offsets, view.visible, scale=1 / self.max_length)]


@tf.keras.saving.register_keras_serializable("gmeta")
class FuXi(SequenceStack):
    """Blocks of FuXi-α, one after another.

    Args:
      blocks: Number of blocks.
      **settings: As for `FuXiBlock`. Each block has its own weights and its own seed.

    Shapes:
      `gmeta.ops.Jagged` of values (total, dim) -> the same. A call takes the same arguments as a `FuXiBlock`.

    Example:
      >>> fuxi = FuXi(blocks=2, heads=2, attention_dim=4, value_dim=8, max_length=50)
      >>> histories = Jagged(tf.random.normal([5, 16]), tf.constant([0, 2, 5], tf.int64))
      >>> jagged.last(fuxi(histories, times=tf.constant([3, 9, 1, 4, 4]))).shape
      TensorShape([2, 16])
    """

    BLOCK = FuXiBlock
