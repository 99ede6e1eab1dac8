r"""HSTU's attention over jagged sequences: SiLU in place of softmax, or softmax itself, and no padding.

.. math:: o_i = s \sum_{j \in V(i)} \mathrm{SiLU}(\alpha\, q_i \cdot k_j + \mathrm{rab}_{ij})\, v_j

A token's weights aren't normalised over the tokens that it sees. The number of other tokens, in its sequence
or in others of the batch, therefore doesn't change them (Zhai et al., "Actions Speak Louder than Words", ICML
2024, section 3.2). This requires the scale s to be constant: 1/n for the longest allowed history, never for
the longest in a batch.

With ``form="softmax"`` the weights are a softmax over the tokens that a token sees, as in other transformers.

If the native op isn't available (in exported graphs, in float64, and on devices without the op),
`padded_attention` computes the same in plain TensorFlow. It builds every (length, length) matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.native import load_op_library
from gmeta.ops.attention_inputs import RelativeBias, bucket_starts, time_bucket
from gmeta.ops.device import is_native, is_portable

Form = Literal["silu", "softmax"]
"""How scores become weights."""

# The inputs of native attention other than its heads: a plan of the batch, and a bias.

_native = load_op_library("ops")
tf.no_gradient("GmetaHstuPlan")
tf.no_gradient("GmetaHstuTimeMap")


def batch_inputs(offsets: tf.Tensor, visible: tf.Tensor, bias: RelativeBias | None) -> dict[str, Any]:
    """Create the native ops' inputs and attribute for a batch; an absent bias term has no elements.

    On a GPU, a plan lists the scores to compute, and a map contains the bucket of every pair's times: one
    byte for each pair that may see each other. All layers share them; a graph computes them once.
    """
    bias = bias or RelativeBias()
    plan = _native.gmeta_hstu_plan(offsets=offsets, visible=visible)
    tables = [tf.zeros([0]) if x is None else tf.cast(x, tf.float32) for x in bias[:2]]
    times = [tf.zeros([0], tf.int64) if x is None else x for x in bias[2:]]
    starts = bucket_starts().tolist()
    time_map = tf.zeros([0], tf.uint8)
    if bias.time_buckets is not None:
        rows, columns = times
        time_map = _native.gmeta_hstu_time_map(
            offsets=offsets, plan=plan, row_times=rows, column_times=columns, bucket_starts=starts
        )
    named = dict(zip(RelativeBias._fields, [*tables, *times], strict=True))
    return {
        "offsets": offsets,
        "visible": visible,
        "plan": plan,
        "time_map": time_map,
        "bucket_starts": starts,
        **named,
    }


_OF_OUT = 11  # index of the output's gradient among the gradient op's inputs
_PORTABLE_PAIRS = 2**21  # pairs at a time in an exported graph: memory doesn't grow with long histories
_MOST_PAIRS = 2**28  # maximum of padded scores: a gigabyte; the plain form keeps half a dozen such tensors


def hstu_attention(
    q: tf.Tensor,
    k: tf.Tensor,
    v: tf.Tensor,
    offsets: tf.Tensor,
    visible: tf.Tensor,
    *,
    scale: float,
    alpha: float = 1.0,
    bias: RelativeBias | None = None,
    form: Form = "silu",
) -> tf.Tensor:
    r"""Attend within each sequence.

    With ``form="softmax"``, it computes

    .. math:: o_i = s \sum_{j \in V(i)} p_{ij}\, v_j, \quad
       p_{ij} = \frac{\exp(\alpha\, q_i \cdot k_j + \mathrm{rab}_{ij})}
                {\sum_{l \in V(i)} \exp(\alpha\, q_i \cdot k_l + \mathrm{rab}_{il})}

    Args:
      q: (total, heads, d) float, the concatenated tokens of all sequences.
      k: (total, heads, d).
      v: (total, heads, dv).
      offsets: (batch + 1,) int64, where sequences begin and end.
      visible: (total, 3) int32, from `AttentionMask.visible`.
      scale: s, a constant such as 1/n; 1 is usual with softmax. In float16, softmax loses digits of its
        gradient if s makes outputs subnormal.
      alpha: α, the factor of the scores; 1 in the research form, 1/√d in the production form and with
        softmax, where it must be at least 0.
      bias: The bias to add to the scores; None: no bias.
      form: How scores become weights: ``"silu"`` or ``"softmax"``.

    Returns:
      (total, heads, dv) of v's dtype. A CPU computes it in float32. A GPU of compute capability 9.0 computes
      it in bfloat16 or float16 with sums in float32, for heads of width 64, 128 and 256. In other cases on a
      GPU, plain TensorFlow computes it, or the CPU if the GPU's memory might be too small. For float64, plain
      TensorFlow computes it everywhere.

    Raises:
      ConfigError: ``form`` isn't one of the two, or it is ``"softmax"`` and α is negative.
      InvalidArgumentError: Shapes don't match, or offsets don't increase from 0 to total.

    Example:
      >>> q = tf.ones([3, 1, 4])
      >>> visible = AttentionMask().visible([0, 1, 3])
      >>> hstu_attention(q, q, q, tf.constant([0, 1, 3], tf.int64), visible, scale=0.5).numpy()[:, 0, 0]
      array([1.9640275, 1.9640275, 3.928055 ], dtype=float32)
      >>> v = tf.reshape([1.0, 2.0, 4.0], [3, 1, 1])
      >>> offsets = tf.constant([0, 1, 3], tf.int64)
      >>> hstu_attention(q, q, v, offsets, visible, scale=1, alpha=0.5, form="softmax").numpy().ravel()
      array([1., 2., 3.], dtype=float32)
    """
    if form not in get_args(Form):
        raise ConfigError(f"hstu_attention: form must be one of {', '.join(get_args(Form))}, got {form!r}")
    if form == "softmax" and alpha < 0:
        raise ConfigError(
            f"hstu_attention: form='softmax' takes an alpha of at least 0, got {alpha}: negate q instead"
        )
    return _attention(q, k, v, offsets, visible, scale, alpha, bias, form)


def bias_attention(
    v: tf.Tensor, offsets: tf.Tensor, visible: tf.Tensor, *, scale: float, bias: RelativeBias
) -> tf.Tensor:
    r"""Attend with only the bias as weights, :math:`o_i = s \sum_{j \in V(i)} \mathrm{rab}_{ij} v_j`.

    These are the channels of position and of time in a FuXi-α block (Ye et al., WWW 2025, section 3.3).

    Args:
      v: (total, heads, dv) float.
      offsets: (batch + 1,) int64.
      visible: (total, 3) int32, from `AttentionMask.visible`.
      scale: s.
      bias: The weights.

    Returns:
      (total, heads, dv) of v's dtype. A GPU computes it like `hstu_attention`.
    """
    return _attention(None, None, v, offsets, visible, scale, 1.0, bias, "silu")


def _attention(
    q: tf.Tensor | None,
    k: tf.Tensor | None,
    v: tf.Tensor,
    offsets: tf.Tensor,
    visible: tf.Tensor,
    scale: float,
    alpha: float,
    bias: RelativeBias | None,
    form: Form,
) -> tf.Tensor:
    arguments = (q, k, v, offsets, visible, scale, alpha, bias, form)
    if is_portable() or v.dtype == tf.float64:
        return _pad(*arguments)
    if is_native(None if q is None else q.shape[-1], v.shape[-1], v.dtype):
        return _by_kernel(*arguments)
    # The GPU has no kernel for the case: use plain TensorFlow on the GPU, or the CPU's kernel if the plain
    # form might need more memory than the GPU has.
    lengths = offsets[1:] - offsets[:-1]
    pairs = tf.size(lengths, tf.int64) * tf.reduce_max(tf.concat([lengths, [0]], 0)) ** 2
    fits = pairs * tf.shape(v, tf.int64)[1] <= _MOST_PAIRS
    return tf.cond(fits, lambda: _pad(*arguments), lambda: _on_cpu(*arguments))


def _on_cpu(*arguments: Any) -> tf.Tensor:
    with tf.device("CPU:0"):
        return _by_kernel(*arguments)


def _by_kernel(
    q: tf.Tensor | None,
    k: tf.Tensor | None,
    v: tf.Tensor,
    offsets: tf.Tensor,
    visible: tf.Tensor,
    scale: float,
    alpha: float,
    bias: RelativeBias | None,
    form: Form,
) -> tf.Tensor:
    heads = [tf.zeros([0], v.dtype) if x is None else tf.cast(x, v.dtype) for x in (q, k)]
    return _native.gmeta_hstu_attention(
        q=heads[0],
        k=heads[1],
        v=v,
        **batch_inputs(offsets, visible, bias),
        scale=scale,
        alpha=alpha,
        form=form,
    ).out


def _pad(
    q: tf.Tensor | None,
    k: tf.Tensor | None,
    v: tf.Tensor,
    offsets: tf.Tensor,
    visible: tf.Tensor,
    scale: float,
    alpha: float,
    bias: RelativeBias | None,
    form: Form,
) -> tf.Tensor:
    """Compute attention in plain TensorFlow, in float32 at least."""
    dtype = tf.float64 if v.dtype == tf.float64 else tf.float32
    wide_q, wide_k, wide_v = (None if x is None else tf.cast(x, dtype) for x in (q, k, v))
    out = padded_attention(
        wide_q,
        wide_k,
        wide_v,
        offsets,
        visible,
        scale=scale,
        alpha=alpha,
        bias=bias,
        form=form,
        pairs=_PORTABLE_PAIRS if is_portable() else None,
    )
    return tf.cast(out, v.dtype)


@tf.RegisterGradient("GmetaHstuAttention")
def _gradient(op: tf.Operation, of_out: tf.Tensor, _: tf.Tensor | None) -> list[tf.Tensor | None]:
    settings = {name: op.get_attr(name) for name in ("scale", "alpha", "bucket_starts", "form")}
    with tf.device(op.outputs[0].device):  # a GPU may not use results of the CPU
        # With SiLU, the gradient doesn't need the output, whose memory may then be reused.
        kept = (
            op.outputs
            if tf.compat.as_str(settings["form"]) == "softmax"
            else [tf.zeros([0], of_out.dtype), tf.zeros([0])]
        )
        found = _native.gmeta_hstu_attention_gradient(
            *op.inputs, of_out=of_out, out=kept[0], log_sums=kept[1], **settings
        )
    return [*found[:3], None, None, *found[3:], None, None, None, None]


@tf.RegisterGradient("GmetaHstuAttentionGradient")
def _second_gradient(op: tf.Operation, *upstream: tf.Tensor) -> list[tf.Tensor | None]:
    """Differentiate the plain form. Only inner loops that adapt weights below attention need this; few do."""
    of_out = op.inputs[_OF_OUT]
    floats = [op.inputs[i] for i in (0, 1, 2, 5, 6)]
    with tf.GradientTape() as outer:
        outer.watch([*floats, of_out])
        with tf.GradientTape() as inner:
            inner.watch(floats)
            out = _plain(op, floats)
        first = inner.gradient(out, floats, of_out, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        first = [tf.convert_to_tensor(each) for each in first]
    found = outer.gradient(
        first, [*floats, of_out], list(upstream), unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    of_floats: Sequence[tf.Tensor] = [tf.convert_to_tensor(each) for each in found]
    return [*of_floats[:3], None, None, *of_floats[3:5], None, None, None, None, of_floats[5], None, None]


def _plain(op: tf.Operation, floats: Sequence[tf.Tensor]) -> tf.Tensor:
    q, k, v, *tables = floats
    positions, buckets = (None if table.shape == [0] else table for table in tables)
    scored = q.shape.rank == 3
    return _pad(
        q if scored else None,
        k if scored else None,
        v,
        op.inputs[3],
        op.inputs[4],
        op.get_attr("scale"),
        op.get_attr("alpha"),
        RelativeBias(positions, buckets, op.inputs[7], op.inputs[8]),
        tf.compat.as_str(op.get_attr("form")),
    )


# HSTU's attention of tokens appended to sequences with cached keys and values.


def appended_attention(
    q: tf.Tensor,
    keys: tf.Tensor,
    values: tf.Tensor,
    own_keys: tf.Tensor,
    own_values: tf.Tensor,
    added: tf.Tensor,
    own_added: tf.Tensor,
    *,
    scale: float,
    alpha: float = 1.0,
) -> tf.Tensor:
    r"""Compute `hstu_attention` of one new token for each of several continuations of a sequence.

    .. math:: o = s \sum_j \mathrm{SiLU}(\alpha\, q \cdot k_j + a_j)\, v_j

    over the tokens of the sequence, whose keys and values all its continuations share, and over those that
    were appended to the same continuation, including the new token. TensorFlow ops compute it in at least
    float32, and take memory for batch × heads × beams × longest numbers.

    Args:
      q: (batch, beams, heads, d).
      keys: (batch, heads, longest, d), of the sequences.
      values: (batch, heads, longest, dv).
      own_keys: (batch, beams, heads, t, d), of appended tokens.
      own_values: (batch, beams, heads, t, dv).
      added: (batch, beams or 1, longest) float32, added to scores; far below 0 for hidden tokens.
      own_added: (batch or 1, beams or 1, t) float32.
      scale: s.
      alpha: α.

    Returns:
      (batch, beams, heads, dv) of q's dtype.
    """
    dtype = tf.float64 if q.dtype == tf.float64 else tf.float32
    wide, own_keys, own_values = (tf.cast(x, dtype) for x in (q, own_keys, own_values))
    found = kept_attention(wide, keys, values, added, alpha=alpha)
    own_added = tf.cast(own_added, dtype)[:, :, tf.newaxis]
    own = tf.nn.silu(tf.linalg.matvec(own_keys, alpha * wide) + own_added)
    found += tf.linalg.matvec(own_values, own, transpose_a=True)
    return tf.cast(scale * found, q.dtype)


def kept_attention(
    q: tf.Tensor, keys: tf.Tensor, values: tf.Tensor, added: tf.Tensor, *, alpha: float = 1.0
) -> tf.Tensor:
    r"""Compute :math:`\sum_j \mathrm{SiLU}(\alpha\, q \cdot k_j + a_j)\, v_j` of queries over kept tokens.

    Args:
      q: (batch, queries, heads, d).
      keys: (batch, heads, longest, d).
      values: (batch, heads, longest, dv).
      added: (batch or 1, queries or 1, longest), added to scores; far below 0 for hidden tokens.
      alpha: α.

    Returns:
      (batch, queries, heads, dv), in at least float32.
    """
    dtype = tf.float64 if q.dtype == tf.float64 else tf.float32
    q, keys, values, added = (tf.cast(x, dtype) for x in (q, keys, values, added))
    scores = tf.matmul(tf.transpose(alpha * q, [0, 2, 1, 3]), keys, transpose_b=True)
    weights = tf.nn.silu(scores + added[:, tf.newaxis])
    return tf.transpose(tf.matmul(weights, values), [0, 2, 1, 3])


def dense_mask(visible: tf.Tensor, offsets: tf.Tensor) -> tf.Tensor:
    """Build the pairwise attention mask of padded sequences.

    Args:
      visible: (total, 3) int32, from `AttentionMask.visible`.
      offsets: (batch + 1,) int64.

    Returns:
      (batch, longest, longest) bool. Padding sees itself.
    """
    padded = tf.RaggedTensor.from_row_splits(visible, offsets).to_tensor()
    places = tf.range(tf.shape(padded)[1])
    return _sees(padded, places, places)


def _sees(visible: tf.Tensor, rows: tf.Tensor, columns: tf.Tensor) -> tf.Tensor:
    """Build a (batch, rows, columns) bool mask from (batch, rows, 3) ``visible`` and the rows' places."""
    first, begin, end = (visible[:, :, part, tf.newaxis] for part in range(3))
    return (columns < first) | ((columns >= begin) & (columns < end)) | (rows[:, tf.newaxis] == columns)


def padded_attention(
    q: tf.Tensor | None,
    k: tf.Tensor | None,
    v: tf.Tensor,
    offsets: tf.Tensor,
    visible: tf.Tensor,
    *,
    scale: float,
    alpha: float = 1.0,
    bias: RelativeBias | None = None,
    form: Form = "silu",
    pairs: int | None = None,
) -> tf.Tensor:
    """Compute `gmeta.ops.hstu_attention`, or without q and k `bias_attention`, in plain TensorFlow.

    It takes memory for batch x heads x longest² numbers, several times over. With ``pairs``, it takes memory
    for heads x ``pairs`` numbers, because it computes the outputs block by block.

    Args:
      q: As in `gmeta.ops.hstu_attention`.
      k: As in `gmeta.ops.hstu_attention`.
      v: As in `gmeta.ops.hstu_attention`.
      offsets: As in `gmeta.ops.hstu_attention`.
      visible: As in `gmeta.ops.hstu_attention`.
      scale: As in `gmeta.ops.hstu_attention`.
      alpha: As in `gmeta.ops.hstu_attention`.
      bias: As in `gmeta.ops.hstu_attention`.
      form: As in `gmeta.ops.hstu_attention`.
      pairs: Number of pairs of tokens, over all sequences, in memory at a time. A block has at least one
        token of each sequence, paired with all others. None: all pairs.
    """
    values = _padded(v, offsets)
    size = tf.shape(values)[1]
    keys = None if k is None else _padded(k, offsets)
    times: tuple[tf.Tensor | None, ...] = (None, None)
    if bias is not None and bias.time_buckets is not None:
        times = bias.row_times, bias.column_times
    looked_at = None if times[1] is None else _padded(times[1], offsets)
    # The inputs with one entry per row, each sliced in the same way for a block of rows.
    own = {"visible": visible, "q": q, "times": times[0]}
    of_rows = {name: _padded(each, offsets) for name, each in own.items() if each is not None}

    def look(begin: tf.Tensor, rows: dict[str, tf.Tensor]) -> tf.Tensor:
        """Compute the outputs of rows whose places start at ``begin``: (batch, rows, heads, dv)."""
        places = begin + tf.range(tf.shape(rows["visible"])[1])
        seen = _sees(rows["visible"], places, tf.range(size))
        added = _rab(bias, places, size, rows.get("times"), looked_at, v.dtype)
        if keys is None:
            weights = tf.where(seen, added, 0) * tf.constant(scale, v.dtype)
            return tf.einsum("bij,bjhd->bihd", weights, values)
        scores = alpha * tf.einsum("bihd,bjhd->bhij", rows["q"], keys) + added[:, tf.newaxis]
        seen = seen[:, tf.newaxis]
        if form == "softmax":
            # Rows that fill a block see nothing: their scores must be finite.
            weights = tf.nn.softmax(tf.where(seen, scores, scores.dtype.min))
        else:
            weights = tf.nn.silu(scores)
        weights = tf.where(seen, weights, 0) * tf.constant(scale, v.dtype)
        return tf.einsum("bhij,bjhd->bihd", weights, values)

    outputs = look(tf.constant(0), of_rows) if pairs is None else _by_blocks(look, of_rows, values, pairs)
    lengths = offsets[1:] - offsets[:-1]
    return tf.ensure_shape(tf.RaggedTensor.from_tensor(outputs, lengths).values, [None, *v.shape[1:]])


def _by_blocks(
    look: Callable[[tf.Tensor, dict[str, tf.Tensor]], tf.Tensor],
    of_rows: dict[str, tf.Tensor],
    values: tf.Tensor,
    pairs: int,
) -> tf.Tensor:
    """Apply ``look`` to all rows, block by block. The output has the shape of ``values``."""
    batch, size = tf.unstack(tf.shape(values)[:2])
    of_one = tf.maximum(tf.cast(batch, tf.int64) * tf.cast(size, tf.int64), 1)
    block = tf.cast(tf.clip_by_value(pairs // of_one, 1, tf.cast(tf.maximum(size, 1), tf.int64)), tf.int32)
    count = tf.maximum((size + block - 1) // block, 1)  # with 0 blocks, TensorFlow couldn't infer the shape

    def fill(rows: tf.Tensor) -> tf.Tensor:
        return tf.pad(rows, [[0, 0], [0, count * block - size], *[[0, 0]] * (rows.shape.rank - 2)])

    every = {name: fill(rows) for name, rows in of_rows.items()}

    def one(number: tf.Tensor) -> tf.Tensor:
        begin = number * block
        return look(begin, {name: rows[:, begin : begin + block] for name, rows in every.items()})

    form = tf.TensorSpec([None, None, *values.shape[2:]], values.dtype)
    parts = tf.map_fn(one, tf.range(count), fn_output_signature=form, parallel_iterations=1)
    wide = tf.transpose(parts, [1, 0, 2, 3, 4])
    return tf.reshape(wide, [batch, count * block, *values.shape[2:]])[:, :size]


def _padded(values: tf.Tensor, offsets: tf.Tensor) -> tf.Tensor:
    return tf.RaggedTensor.from_row_splits(values, offsets).to_tensor()


def _rab(
    bias: RelativeBias | None,
    rows: tf.Tensor,
    length: tf.Tensor,
    row_times: tf.Tensor | None,
    column_times: tf.Tensor | None,
    dtype: tf.DType,
) -> tf.Tensor:
    """Compute the bias of the scores: (batch or 1, rows or 1, length or 1)."""
    added = tf.zeros([1, 1, 1], dtype)
    if bias is None:
        return added
    if bias.positions is not None:
        n = (tf.size(bias.positions) + 1) // 2
        apart = tf.range(length) - rows[:, tf.newaxis]
        of_places = tf.cast(bias.positions, dtype)
        added += tf.gather(of_places, tf.clip_by_value(apart + n - 1, 0, 2 * n - 2))
    if row_times is not None and column_times is not None:
        of_times = tf.cast(bias.time_buckets, dtype)
        apart_in_time = row_times[:, :, tf.newaxis] - column_times[:, tf.newaxis]
        added += tf.gather(of_times, time_bucket(apart_in_time))
    return added
