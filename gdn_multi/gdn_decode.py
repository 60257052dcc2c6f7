"""Decode on one state a sequence or on a pool addressed by indices."""

from __future__ import annotations

from torch import Tensor

from .dispatch import serve, short_ways
from .flashinfer_names import missing
from .validate import decode_request

_short = short_ways["gated_delta_rule_decode_pretranspose"]


def gated_delta_rule_decode_pretranspose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    use_qk_l2norm: bool = True,
    initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    output_state_indices: Tensor | None = None,
    intermediate_states_buffer: Tensor | None = None,
    disable_state_update: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """One or a few tokens for each of B sequences, each stepping its own state.

    ``alpha = exp(-exp(A_log) * softplus(a + dt_bias))``, ``beta = sigmoid(b)``, and the recurrence of
    :func:`gdn_multi.chunk_gated_delta_rule`, all in float32 with the state rounded once, when it is stored.

    Parameters
    ----------
    q, k, v : [B, T, H, K], [B, T, H, K], [B, T, HV, V], bfloat16, float16 or float32, one dtype
        HV is a multiple of H; state head h uses q and k head ``h // (HV // H)``. Last dimension contiguous.
    state : [B, HV, V, K] float32, bfloat16 or float16, or None
        One state a sequence, K contiguous, updated in place. None when ``initial_state`` is given.
    A_log, dt_bias : [HV] float32, float16 or bfloat16
    a, b : [B, T, HV] float32, float16 or bfloat16
    scale : float, optional
        Default ``K ** -0.5``.
    output : [B, T, HV, V] of q's dtype, optional
    use_qk_l2norm : bool
        Divide each q and k head by sqrt(sum(x^2) + 1e-6).
    initial_state : [rows, HV, V, K], optional
        A pool, updated in place; needs ``initial_state_indices``.
    initial_state_indices, output_state_indices : [B] int32 or int64, optional
        Row that each sequence reads and row that it writes (by default the same). A negative entry in either marks
        padding: that sequence's output is zero and no row is touched.
    intermediate_states_buffer : [B, >= T, HV, V, K] of the state's dtype, optional
        ``[b, t]`` gets the state after token t.
    disable_state_update : bool
        Leave the state or pool as it is (verification of speculated tokens).
    backend : str
        "auto" or a registered name; a name is a demand.

    Returns
    -------
    (output [B, T, HV, V], state or pool)

    Raises
    ------
    TypeError, ValueError, NotImplementedError, RuntimeError
        As docs/contract.md lists them. A refused call changes nothing.
    """
    if (state is None) != (initial_state is None):
        pool = state if initial_state is None else initial_state
        write = initial_state_indices if output_state_indices is None else output_state_indices
        call = (scale, use_qk_l2norm, disable_state_update, backend, output, q, k, v, A_log, a, dt_bias, b, pool,
                initial_state_indices, write, intermediate_states_buffer, None, None, None)  # fmt: skip
        out = _short.newest(call)
        if out is None:
            out = _short.other(call)
        if out is not None:
            return out, pool
        del pool, write, call, out
    request = serve(decode_request, locals())
    return request.output, request.state


def __getattr__(name: str):
    missing(__name__, name)
