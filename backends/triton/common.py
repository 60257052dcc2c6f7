"""Device functions that the kernels of this backend share: norms, gates, and the conversion of a stored state.

Everything here works on float32 values of any shape, on a GPU and under Triton's interpreter.
"""

import triton
import triton.language as tl

#: A decay of 2^-126 or less (the smallest normal float32) is a decay to zero.
LOG2_ZERO = tl.constexpr(-126.0)

_LOG2_E = tl.constexpr(1.4426950408889634)
_MIN_NORMAL = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), without overflow for large -x."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), without overflow for large x and to full relative precision for small ones."""
    e = tl.exp(-tl.abs(x))
    series = e * (1.0 - e * (0.5 - e * (0.3333333333 - e * 0.25)))
    return tl.where(x > 0, x, 0.0) + tl.where(e < 0.01, series, tl.log(1.0 + e))


@triton.jit
def log2_near_one(x):
    """log2(x) for x >= 0, with its relative precision kept where x is close to 1; very negative for x = 0.

    The hardware's logarithm has an absolute error of about 2^-22. Decays lie close to 1 and thousands of them
    are summed, so that error would show.
    """
    d = x - 1.0
    s = d / (d + 2.0)
    s2 = s * s
    series = s * (2.0 + s2 * (0.6666666667 + s2 * (0.4 + s2 * (0.2857142857 + s2 * 0.2222222222))))
    near = (d > -0.25) & (d < 0.25)
    coarse = tl.where(x < _MIN_NORMAL, 2.0 * LOG2_ZERO, tl.log2(tl.where(x < _MIN_NORMAL, 1.0, x)))
    return tl.where(near, series * _LOG2_E, coarse)


@triton.jit
def raw_log_decay(gate, A_log, dt_bias):
    """log(alpha) of a raw gate: -exp(A_log) * softplus(gate + dt_bias)."""
    return -tl.exp(A_log) * softplus(gate + dt_bias)


@triton.jit
def log2_decay(gate, A_log, dt_bias, KIND: tl.constexpr):
    """log2(alpha) in float32 for a gate of the kind "linear", "log" or "raw" (A_log and dt_bias count for "raw").

    At or below LOG2_ZERO it stands for alpha = 0; it may be minus infinity there.
    """
    if KIND == "linear":
        return log2_near_one(gate)
    elif KIND == "log":
        return gate * _LOG2_E
    else:
        tl.static_assert(KIND == "raw", "unknown kind of gate")
        return raw_log_decay(gate, A_log, dt_bias) * _LOG2_E


@triton.jit
def inverse_norm(x, AXIS: tl.constexpr):
    """1 / sqrt(sum(x^2) + 1e-6) of float32 ``x`` along ``AXIS``."""
    return tl.rsqrt(tl.sum(x * x, axis=AXIS) + 1e-6)


#: Whether the kernels of this process are interpreted: Triton decides it when it decorates them.
INTERPRETED = tl.constexpr(not isinstance(sigmoid, triton.JITFunction))


@triton.jit
def _on_grid(x, MIN_NORMAL: tl.constexpr, ULP: tl.constexpr):
    """``x`` rounded to nearest even on the grid of an 8-bit float; ULP is its step at 1."""
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    magic = tl.where(power > MIN_NORMAL, power, MIN_NORMAL) * (ULP * 12582912.0)  # 1.5 * 2^23 steps
    return (x + magic) - magic


@triton.jit
def to_state(x, DTYPE: tl.constexpr):
    """Float32 ``x`` rounded to a state's dtype, to nearest even; 8-bit floats saturate, NaN stays NaN."""
    E4M3: tl.constexpr = DTYPE == tl.float8e4nv
    E5M2: tl.constexpr = DTYPE == tl.float8e5
    if E4M3:
        x = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
    if E5M2:
        x = tl.where(x > 57344.0, 57344.0, tl.where(x < -57344.0, -57344.0, x))
    if INTERPRETED and (E4M3 or E5M2):
        # The interpreter's conversion mishandles a carry out of the mantissa, and NaN.
        rounded = _on_grid(x, 0.015625, 0.125) if E4M3 else _on_grid(x, 6.103515625e-05, 0.25)
        bits = rounded.to(DTYPE).to(tl.uint8, bitcast=True)
        return tl.where(x != x, 0x7F, bits).to(tl.uint8).to(DTYPE, bitcast=True)
    if INTERPRETED and DTYPE == tl.bfloat16:
        # The interpreter truncates.
        bits = x.to(tl.int32, bitcast=True)
        x = tl.where(x == x, (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True), x)
    return x.to(DTYPE)
