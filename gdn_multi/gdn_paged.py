"""Prefill and decode on a paged recurrent-state pool.

The pool is [num_pages, H, V, K]; a sequence owns a list of page ids in CSR form, and page j of a sequence holds the
state after that page's last token. A request that shares a full-page prefix with another starts from the last shared
page, which no call ever writes.
"""

from __future__ import annotations

from torch import Tensor

from .dispatch import serve, short_ways
from .slots import GDNPagedDecodeSlots, GDNPagedPrefillSlots
from .validate import decode_slots_request, paged_decode_request, paged_prefill_request, prefill_slots_request

_short = short_ways["gated_delta_rule_decode_paged"]

__all__ = [
    "GDNPagedDecodeSlots",
    "GDNPagedPrefillSlots",
    "chunk_gated_delta_rule_paged",
    "gated_delta_rule_decode_paged",
    "gdn_paged_decode_slots",
    "gdn_paged_prefill_slots",
]


def gdn_paged_prefill_slots(
    cu_seqlens: Tensor, page_indices: Tensor, page_indptr: Tensor, page_size: int, last_page_len: Tensor
) -> GDNPagedPrefillSlots:
    """The pool rows that :func:`chunk_gated_delta_rule_paged` derives from a page table, in one launch.

    They depend on the batch only: compute them once a step and pass them as ``slots`` to every layer's call.
    Parameters as there; returns four contiguous int32 [num_seqs] tensors. Nothing waits for the device.
    """
    return GDNPagedPrefillSlots(*serve(prefill_slots_request, locals()).out)


def gdn_paged_decode_slots(
    page_indices: Tensor, page_indptr: Tensor, last_page_len: Tensor
) -> GDNPagedDecodeSlots:
    """The pool rows that :func:`gated_delta_rule_decode_paged` derives from a page table, in one launch.

    Parameters as there; returns two contiguous int32 [B] tensors, to be passed as ``slots`` to every layer's call.
    """
    return GDNPagedDecodeSlots(*serve(decode_slots_request, locals()).out)


def chunk_gated_delta_rule_paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    *,
    cu_seqlens: Tensor,
    state_pool: Tensor,
    page_indices: Tensor,
    page_indptr: Tensor,
    page_size: int,
    last_page_len: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    output: Tensor | None = None,
    gate_domain: str = "linear",
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    beta_is_logit: bool = False,
    slots: GDNPagedPrefillSlots | None = None,
    backend: str = "auto",
    max_seqlen: int | None = None,
) -> Tensor:
    """Chunked prefill that reads and writes a paged state pool.

    Sequence b owns the pages ``page_indices[page_indptr[b]:page_indptr[b + 1]]`` and has
    ``(pages - 1) * page_size + last_page_len[b]`` tokens after the call. Its new tokens are the last of them; those
    before are its prefix, of any length. The call reads the page that holds the last prefix token (an empty prefix
    starts from zero), writes the state at every page boundary that the new tokens cross to the page that ends there,
    and the final state to the last page. Pages that end at or before the prefix are never written.

    Parameters
    ----------
    q, k, v, g, beta, scale, use_qk_l2norm_in_kernel, output, gate_domain, use_gate_in_kernel, A_log, dt_bias, beta_is_logit
        As in :func:`gdn_multi.chunk_gated_delta_rule`.
    cu_seqlens : [N + 1] int32 or int64
        Offsets of each sequence's new tokens. A sequence without new tokens leaves the pool unchanged.
    state_pool : [num_pages, Ho, V, K]
        float32, bfloat16, float16, float8_e4m3fn or float8_e5m2, updated in place. Rows are dense blocks; the row
        stride may be padded.
    page_indices : 1-D int32 or int64
        Page ids, in any order; -1 is not a padding value here.
    page_indptr : [N + 1] int32 or int64
    page_size : int
        Tokens a page, a positive multiple of 64.
    last_page_len : [N] int32 or int64
        Tokens in each sequence's last page after the call, in [1, page_size].
    slots : GDNPagedPrefillSlots, optional
        The result of :func:`gdn_paged_prefill_slots` for the same batch; compared with the page table under ``GDN_MULTI_CHECK=1`` only.
    backend : str
        "auto" or a registered name; a name is a demand.
    max_seqlen : int, optional
        An upper bound on the longest sequence's new tokens: a hint for planning, as in :func:`gdn_multi.chunk_gated_delta_rule`.

    Returns
    -------
    output [T, Ho, V]

    Notes
    -----
    A page that one sequence writes must not be read or written by another of the same call
    (``GDN_MULTI_CHECK=1`` verifies it). To pad a batch, give each padded sequence one scratch page and no new token.
    """
    return serve(paged_prefill_request, locals()).output


def gated_delta_rule_decode_paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    use_qk_l2norm: bool = True,
    *,
    state_pool: Tensor,
    page_indices: Tensor,
    page_indptr: Tensor,
    last_page_len: Tensor,
    backend: str = "auto",
    slots: GDNPagedDecodeSlots | None = None,
) -> Tensor:
    """One token for each of B sequences on a paged state pool.

    The token is the last of its sequence. When it opens a page (``last_page_len[b] == 1``) the state is read from the
    page before and written to the new one; otherwise the last page is updated in place.

    Parameters
    ----------
    q, k, v, A_log, a, dt_bias, b, scale, output, use_qk_l2norm
        As in :func:`gdn_multi.gated_delta_rule_decode_pretranspose` with T = 1.
    state_pool : [num_pages, HV, V, K] float32, bfloat16 or float16
        Updated in place.
    page_indices, page_indptr : 1-D and [B + 1], int32 or int64
        The page table, as in :func:`chunk_gated_delta_rule_paged`.
    last_page_len : [B] int32 or int64
        Tokens in each sequence's last page, the decoded one included.
    backend : str
        "auto" or a registered name; a name is a demand.
    slots : GDNPagedDecodeSlots, optional
        The result of :func:`gdn_paged_decode_slots` for the same batch; compared with the page table under ``GDN_MULTI_CHECK=1`` only.

    Returns
    -------
    output [B, 1, HV, V]

    Notes
    -----
    Every sequence holds at least one token before the decoded one, so one that opens a page owns at least two. To pad
    a batch, give each padded sequence a scratch page of its own and ``last_page_len >= 2``.
    """
    if slots is None:
        call = (scale, use_qk_l2norm, None, backend, output, q, k, v, A_log, a, dt_bias, b, state_pool, None, None, None,
                page_indices, page_indptr, last_page_len)  # fmt: skip
    elif type(slots) is GDNPagedDecodeSlots:
        call = (scale, use_qk_l2norm, None, backend, output, q, k, v, A_log, a, dt_bias, b, state_pool, slots[0], slots[1],
                None, None, None, None)  # fmt: skip
    else:
        return serve(paged_decode_request, locals()).output
    out = _short.newest(call)
    if out is None:
        out = _short.other(call)
    if out is not None:
        return out
    del call, out
    return serve(paged_decode_request, locals()).output
