"""How close is close enough, by dtype: the one place that says so.

Every comparison is ``|x - ref| / |ref|`` (Euclidean norms, in float64) against ``gdn_multi.reference``, taken for each
sequence and each state separately, so that a fault in one of them is not averaged away.
"""

from __future__ import annotations

import torch

#: Chunked prefill: rounding the output to the dtype costs 1.7e-3 for bfloat16 and 2e-4 for float16; operands of that
#: dtype inside a kernel cost two to three times as much again. float32 inputs are computed in float32 throughout.
PREFILL = {torch.float32: 1e-5, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}

#: Decode computes in float32 whatever the inputs: only the output's own rounding is left.
DECODE = {torch.float32: 1e-5, torch.float16: 4e-4, torch.bfloat16: 3e-3}

#: What storing a state in the dtype may add, round to nearest even.
STORE = {
    torch.float32: 0.0,
    torch.float16: 4e-4,
    torch.bfloat16: 3e-3,
    torch.float8_e4m3fn: 5e-2,
    torch.float8_e5m2: 9e-2,
}


def prefill_output(dtype: torch.dtype) -> float:
    return PREFILL[dtype]


def prefill_state(dtype: torch.dtype, stored: torch.dtype) -> float:
    """A state after a prefill of ``dtype`` inputs, stored as ``stored``."""
    return PREFILL[dtype] + STORE[stored]


def decode_output(dtype: torch.dtype) -> float:
    return DECODE[dtype]


def decode_state(stored: torch.dtype) -> float:
    return DECODE[torch.float32] + STORE[stored]


#: References of a smaller norm count as zero: float32 has underflowed there.
NOTHING = 1e-30


def relative_error(x: torch.Tensor, ref: torch.Tensor) -> float:
    """Norm of the difference over the norm of ``ref``; NaN or infinite where either holds a NaN or infinity."""
    x, ref = x.detach().double().cpu(), ref.detach().double().cpu()
    assert x.shape == ref.shape, f"shapes differ: {tuple(x.shape)} and {tuple(ref.shape)}"
    norm, error = torch.linalg.vector_norm(ref), torch.linalg.vector_norm(x - ref)
    if norm > NOTHING:
        return float(error / norm)
    return float("inf") if error > NOTHING else 0.0 * float(error)


def assert_close(x: torch.Tensor, ref: torch.Tensor, tolerance: float, what: str) -> None:
    error = relative_error(x, ref)
    assert error <= tolerance, f"{what}: relative error {error:.3e}, allowed {tolerance:.1e}"  # false for NaN too


def between(tolerance: float) -> float:
    """Two answers that are each allowed ``tolerance`` from the reference."""
    return 2 * tolerance
