"""Stacks of blocks over jagged sequences, and FuXi-α, a stack whose blocks need no further mechanism.

A block of FuXi-α has attention in three channels over one set of values, and a two-stage feed-forward
network. `gmeta.layers.sequence.hstu` has the other stack.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import tensorflow as tf
from tf_keras.src.mixed_precision.autocast_variable import enable_auto_cast_variables

from gmeta.core.errors import ConfigError
from gmeta.core.graph import recompute
from gmeta.layers.sequence.block import SequenceBlock, SequenceLayer
from gmeta.layers.sequence.reading import Kept, Reading, SequenceView, sequence_view
from gmeta.ops import AttentionMask, Jagged, RelativeBias, hstu_attention, jagged
from gmeta.ops.hstu_layer import residual, rms_norm
from gmeta.ops.jagged_attention import bias_attention


class SequenceStack(SequenceLayer):
    """A stack of blocks of one kind and with the same settings. It computes the attention mask once for all.

    Args:
      blocks: Number of blocks.
      recompute: ``"block"``: in training, keep only each block's input, and compute the rest again for its
        gradient. Activations then take the memory of one block, and a step one more forward pass (Chen et
        al., "Training Deep Nets with Sublinear Memory Cost", 2016). Inside ``tf.cond`` or ``tf.while_loop``,
        TensorFlow then takes gradients within the branch or loop only. None: keep all.
      mask: Which tokens see which. None: a token sees those before it.
      seed: Seed of the initial values and of dropout; each block derives its own seed from it.
      name: Name of the layer.
      dtype: Dtype, or dtype policy, of the layer and its blocks.
      trainable: Whether the layer's weights are trained.
      **settings: A block's settings.
    """

    BLOCK: ClassVar[type[SequenceBlock]]

    def __init__(
        self,
        *,
        blocks: int,
        recompute: Literal["block"] | None = None,
        mask: AttentionMask | None = None,
        seed: int = 0,
        name: str | None = None,
        dtype: Any = None,
        trainable: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(mask=mask, name=name, dtype=dtype, trainable=trainable)
        if blocks < 1:
            raise ConfigError(f"{self.name}: blocks must be at least 1, got {blocks}")
        if recompute not in ("block", None):
            raise ConfigError(f"{self.name}: recompute must be 'block' or None, got {recompute!r}")
        self.settings, self.seed, self.recompute = settings, seed, recompute
        self.blocks = [
            self.BLOCK(
                mask=self.mask,
                seed=blocks * seed + number,
                name=f"block{number}",
                dtype=self.dtype_policy,
                **settings,
            )
            for number in range(blocks)
        ]

    @property
    def needs_times(self) -> bool:
        """Whether calls need ``times``."""
        return self.blocks[0].needs_times

    def transform(
        self, values: tf.Tensor, offsets: tf.Tensor, view: SequenceView, training: bool | None
    ) -> tf.Tensor:
        """Run the blocks one after another, (total, dim) -> (total, dim)."""
        if self.recompute is not None and tf.is_tensor(training):
            training = tf.get_static_value(training)
            if training is None:
                raise ConfigError(
                    f"{self.name}: recompute='block' needs training=True or False, not a tensor"
                )
        for block in self.blocks:
            if self.recompute is None or not training:
                values = block(Jagged(values, offsets), view=view, training=training).values
            else:
                values = self._recomputed(block, values, offsets, view)
        return values

    @staticmethod
    def _recomputed(
        block: SequenceBlock, values: tf.Tensor, offsets: tf.Tensor, view: SequenceView
    ) -> tf.Tensor:
        """Run a block in training, and again for its gradient, with the same dropout."""
        seed = block.drop.draw_seed()

        def run(given: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            with block.drop.seeded(seed):
                return [block(Jagged(given[0], offsets), view=view, training=True).values]

        if not block.built:
            run([values])  # variables that the call creates aren't those that it reads
        return recompute(run, [values])[0]

    def check_reads_on(self) -> None:
        """Check that tokens can be appended to what the stack has read: `read` and `read_on`.

        Raises:
          ConfigError: The blocks can't, or what a token sees depends on the tokens after it.
        """
        if not self.BLOCK.READS_ON:
            raise ConfigError(
                f"{self.name}: {self.BLOCK.__name__} can't read on, as it keeps no keys and values: take "
                "gmeta.layers.HSTU, or define its read and read_on "
                "(gmeta.layers.sequence.block.SequenceBlock)"
            )
        mask = self.mask
        if mask.by_time or not mask.causal or mask.full_tail:
            raise ConfigError(
                f"{self.name}: to read on, what a token sees can't depend on the tokens after it, nor on "
                f"times: the mask must be causal, without by_time and full_tail, got {mask}"
            )

    def read(
        self,
        sequences: Jagged,
        times: Any = None,
        view: SequenceView | None = None,
        training: bool = False,
        contexts: int = 0,
    ) -> tuple[Jagged, Reading]:
        """Transform sequences without targets, and keep what tokens that follow need of them.

        Args:
          sequences: Values (total, dim).
          times: (total,) integers: each token's time, as for a call.
          view: The result of `sequence_view` for those, if it is already known; needed with contexts.
          training: Whether to apply dropout.
          contexts: How many contextual tokens every sequence begins with.

        Returns:
          What a call returns, and what `read_on` takes.

        Raises:
          ConfigError: As `check_reads_on`; or times are needed and missing.

        Example:
          >>> hstu = HSTU(blocks=2, heads=1, attention_dim=4, value_dim=4, max_length=9, bias_by_time=False)
          >>> offsets = tf.constant([0, 3, 5], tf.int64)
          >>> out, reading = hstu.read(Jagged(tf.random.normal([5, 8]), offsets))
          >>> hstu.read_on(tf.random.normal([2, 7, 8]), reading)[0].shape  # 7 tokens that may follow
          TensorShape([2, 7, 8])
        """
        self.check_reads_on()
        if not all(block.built for block in self.blocks):
            self(sequences, times=times, view=view, training=training)
        if view is None:
            if times is None and self.needs_times:
                raise ConfigError(f"{self.name} needs times: pass times=, when each token was")
            view = sequence_view(self.mask, sequences.offsets, times=times)
        values, kept = tf.cast(sequences.values, self.compute_dtype), []
        with self._as_in_a_call():
            for block in self.blocks:
                values, k, v = block.read(values, sequences.offsets, view, training)
                kept.append(Kept.of(k, v, sequences.offsets))
        reading = Reading.of(sequences.offsets, view.column_times, kept, contexts)
        return Jagged(values, sequences.offsets), reading

    def read_on(
        self,
        values: tf.Tensor,
        reading: Reading,
        beams: Any = None,
        times: Any = None,
        training: bool = False,
    ) -> tuple[tf.Tensor, Reading]:
        """Transform one more token of each of several continuations of each sequence.

        Nothing before it is computed again: the token attends to kept keys and values of the sequence, which
        its continuations share, and of the tokens that were appended to its own continuation.

        Args:
          values: (batch, beams, dim), a token for each continuation.
          reading: What `read`, or `read_on` for the tokens before, returned.
          beams: (batch, beams) integers: which continuation of the step before each goes on. None: its own
            number, or, after `read`, the sequence itself.
          times: (batch,) integers: when these tokens come; distances are measured from there too. Needed if
            `read` had times. For the first token after `read` also (batch, beams).
          training: Whether to apply dropout.

        Returns:
          (batch, beams, dim), and what the next step takes.

        Raises:
          ConfigError: There were times in `read` and are none here.
        """
        place, reading = reading.follow(beams, times, self.mask.window, self.name)
        values, kept = tf.cast(values, self.compute_dtype), []
        with self._as_in_a_call():
            for block, own in zip(self.blocks, reading.kept, strict=True):
                values, own = block.read_on(values, own, place, training)
                kept.append(own)
        return values, reading._replace(kept=tuple(kept))

    def extend(
        self, values: tf.Tensor, reading: Reading, row_times: Any = None, column_times: Any = None
    ) -> tuple[tf.Tensor, list[tuple[tf.Tensor, tf.Tensor]]]:
        """Transform a stretch of tokens that is appended to each sequence, without reading that again.

        Args:
          values: (batch, n, dim); shorter stretches are padded at their end.
          reading: What `read` returned.
          row_times: (batch, n) int64, the tokens' times as in `SequenceView`; needed if `read` had times.
          column_times: (batch, n) int64.

        Returns:
          (batch, n, dim), and for each block the tokens' keys and values, (batch, heads, n, d) and (batch,
          heads, n, dv).

        Raises:
          ConfigError: The blocks have no `SequenceBlock.extend`, or times are missing.
        """
        if not self.BLOCK.EXTENDS:
            raise ConfigError(
                f"{self.name}: {self.BLOCK.__name__} can't extend what it has read: take gmeta.layers.HSTU"
            )
        window = self.mask.window
        place = reading.extend(tf.shape(values)[1], row_times, column_times, window, self.name)
        values, kept = tf.cast(values, self.compute_dtype), []
        with self._as_in_a_call():
            for block, own in zip(self.blocks, reading.kept, strict=True):
                values, keys, own_values = block.extend(values, own, place)
                kept.append((keys, own_values))
        return values, kept

    def append(
        self, tokens: Jagged, reading: Reading, times: tf.Tensor | None = None
    ) -> tuple[tf.Tensor, Reading]:
        """Transform tokens that follow sequences, and keep what tokens that follow these need of them.

        Args:
          tokens: Values (total, dim), as many sequences as were read.
          reading: What `read` returned.
          times: (total,) integers: each token's time; needed if `read` had times.

        Returns:
          (batch, longest, dim), padded; and what to keep of these tokens, without those before.

        Raises:
          ConfigError: As `extend`.

        Example:
          >>> hstu = HSTU(blocks=2, heads=1, attention_dim=4, value_dim=4, max_length=9, bias_by_time=False)
          >>> one, two = (Jagged(tf.random.normal([n, 8]), tf.constant([0, n], tf.int64)) for n in (3, 2))
          >>> out, added = hstu.append(two, hstu.read(one)[1])
          >>> out.shape, added.lengths.numpy().tolist()
          (TensorShape([1, 2, 8]), [2])
        """
        rows = columns = None
        if times is not None:
            own = sequence_view(self.mask, tokens.offsets, times=times)
            rows, columns = (
                jagged.to_padded(Jagged(each, tokens.offsets)) for each in (own.row_times, own.column_times)
            )
        out, blocks = self.extend(jagged.to_padded(tokens), reading, rows, columns)
        kept = [Kept(*each) for each in blocks]
        return out, Reading.of_padded(jagged.lengths(tokens), columns, kept)

    def _as_in_a_call(self) -> Any:
        """Let weights be read in the dtype of the computation, as Keras does in a call."""
        return enable_auto_cast_variables(self._compute_dtype_object)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that recreate this layer."""
        own = {**self.settings, "blocks": len(self.blocks), "seed": self.seed}
        own |= {} if self.recompute is None else {"recompute": self.recompute}
        return {**super().get_config(), **own}


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
