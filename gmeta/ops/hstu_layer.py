"""The part of an HSTU layer between its two matrix products: activation, attention, norm and gate."""

from __future__ import annotations

from typing import Any, Literal

import tensorflow as tf

from gmeta.core.native import load_op_library
from gmeta.ops.attention_inputs import RelativeBias
from gmeta.ops.device import has_row_kernels, is_native, is_portable, on_gpu, portable_forms
from gmeta.ops.jagged_attention import batch_inputs, hstu_attention

# Norms of single tokens, so tokens are independent of each other.

_native = load_op_library("ops")
_WIDEST = 4096  # the maximum width that the GPU kernels support


def layer_norm(
    x: tf.Tensor, scale: tf.Tensor | None = None, offset: tf.Tensor | None = None, eps: float = 1e-6
) -> tf.Tensor:
    r"""Compute layer norm, :math:`\gamma (x - \bar{x}) / \sqrt{\mathrm{var}(x) + \epsilon} + \beta`.

    Statistics are computed in at least float32 for any dtype of x. On a GPU, bfloat16 and float16 matrices
    take one pass over memory, and one for the gradient.

    Args:
      x: (..., d) float.
      scale: γ, (d,) or one for each token, (..., d). None: 1.
      offset: β, (d,) or one for each token, (..., d). None: 0.
      eps: ε.

    Returns:
      (..., d) of the dtype of x.
    """
    if _has_kernel(x, scale, offset):
        return _norm(x, scale, offset, eps, passes=False).y
    if not _has_kernel(x, None, None):
        return _plain(x, scale, offset, eps)
    normed = _norm(x, None, None, eps, passes=False).y
    normed = normed if scale is None else normed * scale
    return normed if offset is None else normed + offset


def norm_and_pass(
    x: tf.Tensor, scale: tf.Tensor | None = None, offset: tf.Tensor | None = None, eps: float = 1e-6
) -> tuple[tf.Tensor, tf.Tensor]:
    """Compute `layer_norm` of x, and also return x for a second use, such as a residual connection.

    On a GPU, the pass that computes the norm's gradient also adds the gradient of the second use.

    Args:
      x: (..., d) float.
      scale: As in `layer_norm`.
      offset: As in `layer_norm`.
      eps: As in `layer_norm`.

    Returns:
      The normed x, and x.
    """
    if _has_kernel(x, scale, offset):
        found = _norm(x, scale, offset, eps, passes=True)
        return found.y, found.passed
    return _plain(x, scale, offset, eps), x


def _norm(x: tf.Tensor, scale: tf.Tensor | None, offset: tf.Tensor | None, eps: float, passes: bool) -> Any:
    none = tf.zeros([0], x.dtype)
    weights = [none if each is None else tf.cast(each, x.dtype) for each in (scale, offset)]
    return _native.gmeta_row_norm(x, *weights, epsilon=eps, passes=passes)


def _has_kernel(x: tf.Tensor, scale: tf.Tensor | None, offset: tf.Tensor | None) -> bool:
    if not has_row_kernels(x) or x.shape[1] > _WIDEST or (scale is None) != (offset is None):
        return False
    return scale is None or scale.shape.rank == 1


def _plain(x: tf.Tensor, scale: tf.Tensor | None, offset: tf.Tensor | None, eps: float) -> tf.Tensor:
    exact = _exact(x)
    centred = exact - tf.reduce_mean(exact, axis=-1, keepdims=True)
    normed = tf.cast(_over_root_mean_square(centred, eps), x.dtype)
    normed = normed if scale is None else normed * scale
    return normed if offset is None else normed + offset


def rms_norm(x: tf.Tensor, eps: float = 1e-6) -> tf.Tensor:
    r"""Divide by the root of the mean square, :math:`x / \sqrt{\overline{x^2} + \epsilon}`.

    Args:
      x: (..., d) float.
      eps: ε.

    Returns:
      (..., d) of the dtype of x.
    """
    return tf.cast(_over_root_mean_square(_exact(x), eps), x.dtype)


def _exact(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(x, tf.float32) if x.dtype.size < 4 else x


def _over_root_mean_square(x: tf.Tensor, eps: float) -> tf.Tensor:
    return x * tf.math.rsqrt(tf.reduce_mean(tf.square(x), axis=-1, keepdims=True) + eps)


@tf.RegisterGradient("GmetaRowNorm")
def _gradient(op: tf.Operation, of_y: tf.Tensor, _: tf.Tensor, of_passed: tf.Tensor) -> list[tf.Tensor]:
    if not op.get_attr("passes"):
        of_passed = tf.zeros([0], of_y.dtype)
    eps = op.get_attr("epsilon")
    return list(_native.gmeta_row_norm_gradient(*op.inputs, op.outputs[1], of_y, of_passed, epsilon=eps))


@tf.RegisterGradient("GmetaRowNormGradient")
def _second_gradient(op: tf.Operation, *upstream: tf.Tensor) -> list[tf.Tensor | None]:
    """Differentiate the plain form, in float32, for inner loops that adapt weights below a norm."""
    x, scale, offset, _, of_y, of_passed = op.inputs
    wide = [tf.cast(each, tf.float32) for each in (x, scale, offset, of_y)]
    with tf.GradientTape() as outer:
        outer.watch(wide)
        with tf.GradientTape() as inner:
            inner.watch(wide[:3])
            gamma, beta = wide[1:3] if scale.shape[0] else (None, None)
            y = _plain(wide[0], gamma, beta, op.get_attr("epsilon"))
        zero = tf.UnconnectedGradients.ZERO
        first = inner.gradient(y, wide[:3], wide[3], unconnected_gradients=zero)
    found = outer.gradient(
        first, wide, [tf.cast(each, tf.float32) for each in upstream], unconnected_gradients=zero
    )
    of_x, of_scale, of_offset, of_of_y = (tf.cast(each, x.dtype) for each in found)
    return [of_x, of_scale, of_offset, None, of_of_y, None if of_passed.shape == [0] else upstream[0]]


_SETTINGS = ("heads", "scale", "alpha", "epsilon", "production", "bucket_starts")
# Indices into the gradient op's inputs: those to which gradients flow, and the last one.
_FLOATS, _OF_MIXED = (0, 4, 5, 6, 7), 16


def hstu_mix(
    projected: tf.Tensor,
    offsets: tf.Tensor,
    visible: tf.Tensor,
    *,
    heads: int,
    attention_dim: int,
    value_dim: int,
    scale: float,
    alpha: float = 1.0,
    form: Literal["research", "production"] = "research",
    norm_scale: tf.Tensor | None = None,
    norm_offset: tf.Tensor | None = None,
    eps: float = 1e-6,
    bias: RelativeBias | None = None,
    kernel: tf.Tensor | None = None,
) -> tf.Tensor:
    r"""Activate, attend, norm and gate.

    .. math::
       \text{research:}\quad & [U, V, Q, K] = \mathrm{SiLU}(Z), \qquad
          Y = U \odot \mathrm{LN}(\mathrm{attend}(Q, K, V)) \\
       \text{production:}\quad & [U', V, Q, K] = Z, \quad U = \mathrm{SiLU}(U'), \quad
          A = \mathrm{attend}(Q, K, V), \qquad Y = [U, A, U \odot \mathrm{LN}(A)]

    The forms follow Zhai et al., ICML 2024, section 3, and its published ranking code. On a GPU, in bfloat16
    or float16, this is one op. It reads U, V, Q and K directly from the product. Activation, norm and gate
    take one pass over memory each, and so do their gradients. With ``kernel``, a gmeta op computes the
    product of the research form. It writes the activated values in addition to Z, so activation takes no
    pass.

    Args:
      projected: Z, (total, 2 * heads * (value_dim + attention_dim)): u, v, q, k of all heads. With
        ``kernel``, X instead of Z.
      offsets: (batch + 1,) int64, where sequences begin and end.
      visible: (total, 3) int32, from `AttentionMask.visible`.
      heads: Number of heads.
      attention_dim: The width of a query and of a key, per head.
      value_dim: The width of a value and of a gate, per head.
      scale: Factor of attention, a constant such as 1/n.
      alpha: Factor of the scores.
      form: Which of the two forms to compute.
      norm_scale: LN's γ, (heads * value_dim,). None: 1.
      norm_offset: LN's β, (heads * value_dim,). None: 0.
      eps: LN's ε.
      bias: The bias to add to scores.
      kernel: W, (dim, 2 * heads * (value_dim + attention_dim)), of :math:`Z = X W`; ``projected`` is then X,
        (total, dim). If dim isn't a multiple of 8, product and activation remain separate.

    Returns:
      (total, heads * value_dim), and three times as wide in the production form, of the dtype of Z.

    Raises:
      InvalidArgumentError: Shapes don't fit together.

    Example:
      >>> z = tf.ones([3, 8])
      >>> visible = AttentionMask().visible([0, 1, 3])
      >>> offsets = tf.constant([0, 1, 3], tf.int64)
      >>> hstu_mix(z, offsets, visible, heads=1, attention_dim=2, value_dim=2, scale=0.5).shape
      TensorShape([3, 2])
    """
    production = form == "production"
    width = heads * value_dim
    native = (
        on_gpu()
        and attention_dim == value_dim
        and width <= _WIDEST
        and not is_portable()
        and is_native(attention_dim, value_dim, projected.dtype)
    )
    none = active = tf.zeros([0], projected.dtype)
    if kernel is not None:
        # The kernel reads and writes 16 bytes of a row at a time.
        if native and not production and kernel.shape[0] is not None and kernel.shape[0] % 8 == 0:
            projected, active = _native.gmeta_silu_projection(projected, kernel, activated_from=width)
        else:
            projected = tf.matmul(projected, kernel)
    if native:
        weights = [none if x is None else tf.cast(x, projected.dtype) for x in (norm_scale, norm_offset)]
        return _native.gmeta_hstu_mix(
            projected=projected,
            norm_scale=weights[0],
            norm_offset=weights[1],
            **batch_inputs(offsets, visible, bias),
            active=active,
            heads=heads,
            scale=scale,
            alpha=alpha,
            epsilon=eps,
            production=production,
        ).mixed
    active = projected if production else tf.nn.silu(projected)
    sizes = [width, width, heads * attention_dim, heads * attention_dim]
    u, v, q, k = tf.split(active, sizes, axis=1)
    attended = hstu_attention(
        tf.reshape(q, [-1, heads, attention_dim]),
        tf.reshape(k, [-1, heads, attention_dim]),
        tf.reshape(v, [-1, heads, value_dim]),
        offsets,
        visible,
        scale=scale,
        alpha=alpha,
        bias=bias,
    )
    attended = tf.reshape(attended, [-1, width])
    normed = layer_norm(attended, norm_scale, norm_offset, eps)
    if not production:
        return u * normed
    u = tf.nn.silu(u)
    return tf.concat([u, attended, u * normed], axis=1)


@tf.RegisterGradient("GmetaSiluProjection")
def _gradient_of_projection(op: tf.Operation, of_z: tf.Tensor, _: tf.Tensor) -> list[tf.Tensor]:
    """Differentiate only with respect to Z: `hstu_mix` already includes the activation in this gradient."""
    x, kernel = op.inputs
    return [tf.matmul(of_z, kernel, transpose_b=True), tf.matmul(x, of_z, transpose_a=True)]


@tf.RegisterGradient("GmetaHstuMix")
def _mix_gradient(op: tf.Operation, of_mixed: tf.Tensor, *_: tf.Tensor) -> list[tf.Tensor | None]:
    settings = {name: op.get_attr(name) for name in _SETTINGS}
    found = _native.gmeta_hstu_mix_gradient(*op.inputs, *op.outputs, of_mixed=of_mixed, **settings)
    return [found[0], None, None, None, *found[1:], None, None, None, None]


@tf.RegisterGradient("GmetaHstuMixGradient")
def _mix_second_gradient(op: tf.Operation, *upstream: tf.Tensor) -> list[tf.Tensor | None]:
    """Differentiate the plain form, in float32, for inner loops that adapt weights below a layer."""
    projected, offsets, visible, _, gamma, beta, positions, buckets, rows, columns = op.inputs[:10]
    dtypes = [op.inputs[i].dtype for i in _FLOATS]
    wide = [tf.cast(op.inputs[i], tf.float32) for i in (*_FLOATS, _OF_MIXED)]
    heads, production = op.get_attr("heads"), op.get_attr("production")
    width = projected.shape[1] // (4 * heads)

    def there(of: tf.Tensor, value: tf.Tensor) -> tf.Tensor | None:
        return value if of.shape != [0] else None

    with portable_forms(), tf.GradientTape() as outer:
        outer.watch(wide)
        with tf.GradientTape() as inner:
            inner.watch(wide[:-1])
            mixed = hstu_mix(
                wide[0],
                offsets,
                visible,
                heads=heads,
                attention_dim=width,
                value_dim=width,
                scale=op.get_attr("scale"),
                alpha=op.get_attr("alpha"),
                form="production" if production else "research",
                norm_scale=there(gamma, wide[1]),
                norm_offset=there(beta, wide[2]),
                eps=op.get_attr("epsilon"),
                bias=RelativeBias(there(positions, wide[3]), there(buckets, wide[4]), rows, columns),
            )
        zero = tf.UnconnectedGradients.ZERO
        first = inner.gradient(mixed, wide[:-1], wide[-1], unconnected_gradients=zero)
        first = [tf.convert_to_tensor(each) for each in first]  # gradients of tables are slices
    found = outer.gradient(
        first, wide, [tf.cast(each, tf.float32) for each in upstream], unconnected_gradients=zero
    )
    of_projected, *of_tables, of_of_mixed = (
        tf.cast(tf.convert_to_tensor(each), dtype)
        for each, dtype in zip(found, [*dtypes, projected.dtype], strict=True)
    )
    nothing = [None] * 8  # times and their map, active values, and outputs
    return [of_projected, None, None, None, *of_tables, *nothing, of_of_mixed]


# The residual sum of a block: its input plus its output.


def residual(x: tf.Tensor | None, change: tf.Tensor, offset: tf.Tensor | None = None) -> tf.Tensor:
    r"""Add a block's change to its input, :math:`y = x + (c + b)`.

    On a GPU, bfloat16 and float16 matrices are read once, and the sum is rounded once. The gradient of b, a
    sum over rows for each column, is computed in float32 and then rounded. The order of summation is fixed,
    so every run returns the same result.

    Args:
      x: (rows, d) float. None: 0.
      change: c, (rows, d) float.
      offset: b, (d,). None: 0.

    Returns:
      (rows, d) of the dtype of c.

    Raises:
      InvalidArgumentError: Shapes don't fit together.

    Example:
      >>> from gmeta.ops.hstu_layer import residual
      >>> residual(tf.ones([2, 1]), tf.ones([2, 1]), tf.constant([0.5])).numpy().tolist()
      [[2.5], [2.5]]
    """
    if has_row_kernels(change):
        none = tf.zeros([0], change.dtype)
        return _native.gmeta_residual(
            none if x is None else x, change, none if offset is None else tf.cast(offset, change.dtype)
        )
    y = change if offset is None else change + offset
    return y if x is None else x + y


@tf.RegisterGradient("GmetaResidual")
def _sum_gradient(op: tf.Operation, of_y: tf.Tensor) -> list[tf.Tensor | None]:
    x, _, offset = op.inputs
    of_x = None if x.shape == [0] else of_y
    return [of_x, of_y, None if offset.shape == [0] else _native.gmeta_column_sums(of_y)]


@tf.RegisterGradient("GmetaColumnSums")
def _gradient_of_sums(op: tf.Operation, of_sums: tf.Tensor) -> tf.Tensor:
    return tf.broadcast_to(of_sums, tf.shape(op.inputs[0]))
