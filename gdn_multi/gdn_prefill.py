"""Chunked prefill on sequence-ordered states or on a pool addressed by slots."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .dispatch import serve
from .flashinfer_names import missing
from .validate import prefill_request


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    output: Tensor | None = None,
    output_state: Tensor | None = None,
    state_checkpoints: Tensor | None = None,
    checkpoint_cu_starts: Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    use_cp: str | bool = "auto",
    state_indices: Tensor | None = None,
    backend: str = "auto",
    max_seqlen: int | None = None,
    *,
    gate_domain: str = "linear",
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    beta_is_logit: bool = False,
    cu_seqlens_cpu: None | Sequence[int] | Tensor = None,
    output_state_indices: Tensor | None = None,
    checkpoint_state_indices: Tensor | None = None,
    prefix_lens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Gated delta rule over packed sequences, chunk by chunk.

    For each sequence and each of ``Ho = max(Hq, Hv)`` state heads, with S [V, K] the state (Yang et al., "Gated Delta
    Networks: Improving Mamba2 with Delta Rule", 2024)::

        S = alpha_t * S
        S = S + beta_t * (v_t - S k_t) k_t^T
        o_t = scale * S q_t

    Parameters
    ----------
    q, k, v : [T, Hq, K], [T, Hk, K], [T, Hv, V], bfloat16, float16 or float32, one dtype
        The packed tokens. Either ``Hq == Hk`` and ``Hv`` a multiple of it (GVA: state head h uses q and k head
        ``h // (Hv // Hq)``), or ``Hk == Hv`` and ``Hq`` a multiple (GQA: k and v head ``h // (Hq // Hk)``). May be
        strided views whose last dimension is contiguous; they are not copied.
    g : [T, Ho] float32, optional
        alpha itself, >= 0 (``gate_domain="linear"``), or its natural logarithm (``"log"``). None is alpha 1. With
        ``use_gate_in_kernel`` a raw gate, float32 or q's dtype: alpha = exp(-exp(A_log) * softplus(g + dt_bias)).
    beta : [T, Ho] float32, optional
        None is beta 1. With ``beta_is_logit`` float32 or q's dtype: a sigmoid is applied in float32 and rounded to
        beta's dtype.
    scale : float, optional
        Default ``K ** -0.5``.
    initial_state : [N, Ho, V, K], optional
        float32, bfloat16, float16, float8_e4m3fn or float8_e5m2; K contiguous. None is zero. With ``state_indices``
        a pool [rows, Ho, V, K].
    output_final_state : bool
        Return the states after each sequence's last token too.
    cu_seqlens : [N + 1] int32 or int64
        Offsets of the sequences in the tokens. Required. Zero-length sequences write nothing.
    use_qk_l2norm_in_kernel : bool
        Divide each q and k head by sqrt(sum(x^2) + 1e-6), in float32, rounded to q's dtype.
    output : [T, Ho, V] of q's dtype, optional
        Written where tokens belong to a sequence; other rows keep their contents. Allocated when None, zero there.
    output_state : [N, Ho, V, K] or, with ``state_indices``, a pool, optional
        Where final states go, rounded once to its dtype (float8 saturates). May be ``initial_state``. Allocated when
        None and ``state_indices`` is None, in float32; a zero-length sequence's row is then its initial state.
    state_checkpoints : [rows, Ho, V, K], optional
        Where the states at checkpoints go; needed with ``checkpoint_every_n_tokens > 0``. May be the pool.
    checkpoint_cu_starts : [N + 1] (or [N] with ``checkpoint_state_indices``) int32 or int64, optional
        Checkpoint j of sequence i goes to row ``checkpoint_cu_starts[i] + j``.
    checkpoint_every_n_tokens : int
        Store the state every so many tokens, a multiple of 64; 0 for never.
    use_cp : "auto", True or False
        Split sequences over the card: demanded (True), forbidden (False), or as the backend's heuristics say.
    state_indices : [N] int32 or int64, optional
        Pool row that each sequence reads, -1 for the zero state, and writes unless ``output_state_indices`` is given.
    backend : str
        "auto" or a registered name; a name is a demand.
    max_seqlen : int, optional
        An upper bound on the longest sequence, in tokens: a hint for planning.
    gate_domain, use_gate_in_kernel, beta_is_logit
        How to read g and beta, see there.
    A_log, dt_bias : [Ho] float32, float16 or bfloat16, optional
        Needed with ``use_gate_in_kernel``.
    cu_seqlens_cpu : sequence of int or CPU tensor, optional
        The values of cu_seqlens on the host: a hint for planning.
    output_state_indices : [N] int32 or int64, optional
        Pool row of each final state, -1 to skip it. Needs ``state_indices``, ``output_state``, ``output_final_state``.
    checkpoint_state_indices : 1-D int32 or int64, optional
        Checkpoint j of sequence i goes to row ``checkpoint_state_indices[checkpoint_cu_starts[i] + j]``, -1 to skip.
    prefix_lens : [N] int32 or int64, optional
        Tokens of each sequence before this call: checkpoints and chunks then lie at absolute positions.

    Returns
    -------
    output [T, Ho, V], or (output, final_state) with ``output_final_state=True``.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, RuntimeError
        As docs/contract.md lists them. A refused call changes nothing.
    """
    request = serve(prefill_request, locals())
    return (request.output, request.final_state) if output_final_state else request.output


def __getattr__(name: str):
    missing(__name__, name)
