"""The prefill: from a request to two launches, or four where long sequences are cut into segments.

What follows from shapes, strides and dtypes is worked out once and kept as a plan; a call then allocates its work area
and launches. Nothing here depends on the contents of a tensor.

From sm_90 on the launches behind the first are dependent launches: their programs take their places, and read what was
there before the call, while the kernel before is still ending.

The work area of a call, in bytes
    16896 for each chunk of 64 tokens and head with 16-bit inputs (264 a token and head; 33280 with float32), with a
    chunk more for each sequence, two with prefixes;
    q and k once more where they are normalised;
    where sequences are cut, 4 K (K + V) for each segment and head, with a segment or two more for each sequence.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton

from gdn_multi.dispatch import forget_accepted
from gdn_multi.memory import Empty
from gdn_multi.request import CHUNK, PrefillRequest

from . import heuristics
from . import prefill_kernels as kernels
from .common import INTERPRETED
from .launch import Launch, run

#: Plans by key; the oldest is dropped when there are too many.
plans: dict[tuple, Plan] = {}
_MAX_PLANS = 4096
_LARGEST_HEAD = 256
#: A transition of K x K in float32 must fit in shared memory.
_LARGEST_CUT_HEAD = 128
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class Plan(NamedTuple):
    prepare: Launch
    recur: Launch  #: WHOLE, or FINAL
    local: Launch | None  #: LOCAL, where sequences are cut
    scan: Launch | None
    records: Empty
    normed: tuple[Empty, Empty] | None  #: the normalised q and k
    segments: Empty | None
    path: str  #: for ``explain``


def reasons_against_prefill(request: PrefillRequest) -> tuple[str, ...]:
    """Why these kernels do not serve ``request``: () or sentences."""
    reasons = []
    for name, size in (("K", request.head_size_k), ("V", request.head_size_v)):
        if size > _LARGEST_HEAD:
            reasons.append(f"prefill serves head sizes up to {_LARGEST_HEAD}, got {name} = {size}")
    if request.device.type == "cuda" and request.q.dtype == torch.float32 and request.head_size_k > 128:
        reasons.append(f"float32 inputs with K above 128 do not fit into shared memory, got K = {request.head_size_k}")
    if request.use_cp is True and request.head_size_k > _LARGEST_CUT_HEAD:
        reasons.append(f"use_cp=True cuts sequences for K up to {_LARGEST_CUT_HEAD}, got K = {request.head_size_k}")
    if request.use_cp is True and request.batch_invariant:
        reasons.append("use_cp=True cuts sequences, which changes bits; GDN_MULTI_BATCH_INVARIANT=1 forbids that")
    if request.device.type == "cuda" and not _has_float8(request.device):
        states = (request.initial_state, request.final_state, request.state_checkpoints)
        if any(x is not None and x.dtype in _FLOAT8 for x in states):
            reasons.append("float8 states need a GPU of compute capability 8.9 or newer")
    return tuple(reasons)


@cache
def _has_float8(device: torch.device) -> bool:
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 9)


def prefill(request: PrefillRequest) -> None:
    """Fill ``request.output`` and write the states."""
    run(steps(request, plan_for(request)))


def steps(request: PrefillRequest, plan: Plan) -> tuple[tuple[Launch, tuple[torch.Tensor, ...]], ...]:
    """The launches of a call in order, each with its tensors; allocates the work area."""
    r = request
    q, k, v, output, pages = r.q, r.k, r.v, r.output, r.pages
    # Where an argument is absent the kernel does not look at it, and q stands in.
    if pages is None:
        prefixes, last_page_len, rows = r.prefix_lens, None, r.checkpoint_rows
    else:
        prefixes, last_page_len, rows = pages.page_indptr, pages.last_page_len, pages.page_indices
    lengths = (r.cu_seqlens, q if prefixes is None else prefixes, q if last_page_len is None else last_page_len)
    records = plan.records()
    q_normed, k_normed = q, k
    if plan.normed is not None:
        q_normed, k_normed = plan.normed[0](), plan.normed[1]()
    gates = (
        q if r.g is None else r.g,
        q if r.beta is None else r.beta,
        # One value a head: making them dense costs nothing where they are so already.
        q if r.A_log is None else r.A_log.contiguous(),
        q if r.dt_bias is None else r.dt_bias.contiguous(),
    )
    prepare = (plan.prepare, (q, k, *gates, *lengths, records, q_normed, k_normed, output))
    states = (
        r.initial_state, r.read_rows, r.final_state, r.write_rows, r.state_checkpoints, r.checkpoint_starts, rows
    )  # fmt: skip
    states = tuple(q if x is None else x for x in states)
    if plan.local is None:
        return prepare, (plan.recur, (q_normed, k_normed, v, records, output, q, *states, *lengths))
    segments = plan.segments()
    tensors = (q_normed, k_normed, v, records, output, segments, *states, *lengths)
    return prepare, (plan.local, tensors), (plan.scan, (segments, *lengths)), (plan.recur, tensors)


def plan_for(request: PrefillRequest) -> Plan:
    # Of a call like an earlier one only addresses are unknown, and as a rule all are aligned.
    aligned, shared = _all_aligned(request), request.shared
    plan = shared.get("triton") if aligned else None
    if plan is None:
        key = _key(request)
        plan = plans.get(key)
        if plan is None:
            plan = _plan(request)
            if len(plans) >= _MAX_PLANS:
                plans.pop(next(iter(plans)), None)
            plans[key] = plan
        if aligned:
            shared["triton"] = plan
    return plan


def forget_plans() -> None:
    """For whoever changes what plans follow from."""
    plans.clear()
    forget_accepted()


def _all_aligned(r: PrefillRequest) -> bool:
    """Whether all tensors whose alignment a plan depends on are aligned to 16 bytes."""
    bits = r.q.data_ptr() | r.k.data_ptr() | r.v.data_ptr() | r.output.data_ptr()
    for x in (r.initial_state, r.final_state, r.state_checkpoints):
        if x is not None:
            bits |= x.data_ptr()
    return bits & 15 == 0


def _gate_key(x: torch.Tensor | None):
    return None if x is None else (x.dtype, x.stride())


def _state_key(x: torch.Tensor | None):
    return None if x is None else (x.dtype, x.stride(), x.data_ptr() & 15)


def _index_key(x: torch.Tensor | None):
    return None if x is None else x.dtype


def _key(r: PrefillRequest) -> tuple:
    """Everything that a plan depends on: shapes, strides, dtypes, options, and what is aligned to 16 bytes.

    The length of an index tensor does not count, nor does anything that a tensor holds.
    """
    q, k, v, output, pages = r.q, r.k, r.v, r.output, r.pages
    aligned = ((q.data_ptr() | k.data_ptr() | v.data_ptr() | output.data_ptr()) & 15) == 0
    return (
        r.num_tokens, r.num_seqs, r.num_q_heads, r.num_k_heads, r.num_v_heads, r.head_size_k, r.head_size_v,
        _longest(r), r.device, q.dtype, q.stride(), k.stride(), v.stride(), output.stride(),
        aligned or tuple(x.data_ptr() & 15 for x in (q, k, v, output)),
        r.gate, _gate_key(r.g), _gate_key(r.beta), r.beta_is_logit, _index_key(r.A_log), _index_key(r.dt_bias),
        r.use_qk_l2norm, r.scale, r.output_is_new, r.use_cp, r.batch_invariant,
        _state_key(r.initial_state), _state_key(r.final_state), r.final_state_is_new, r.cu_seqlens.dtype,
        _index_key(r.read_rows), _index_key(r.write_rows), _index_key(r.prefix_lens), r.checkpoint_every,
        None if r.checkpoint_every == 0
        else (_state_key(r.state_checkpoints), _index_key(r.checkpoint_starts), _index_key(r.checkpoint_rows)),
        None if pages is None
        else (pages.page_indptr.dtype, pages.last_page_len.dtype, pages.page_indices.dtype, pages.page_size),
    )  # fmt: skip


def _strides(x: torch.Tensor | None, dims: int) -> tuple[int, ...]:
    return (0,) * dims if x is None else tuple(x.stride())[:dims]


def _plan(r: PrefillRequest) -> Plan:
    T, N, heads, K, V = r.num_tokens, r.num_seqs, r.num_heads, r.head_size_k, r.head_size_v
    block_k = max(16, triton.next_power_of_2(K))
    tile = heuristics.tiles(r.device, r.q.element_size(), block_k, max(16, triton.next_power_of_2(V)))
    sms = heuristics.num_sms(r.device)
    has_prefix = r.pages is not None or r.prefix_lens is not None
    prefix_kind = (
        kernels.PAGES if r.pages is not None else kernels.PREFIX_LENS if has_prefix else kernels.NO_PREFIX
    ).value
    extra = 2 if has_prefix else 1
    slots = T // CHUNK + extra * N
    record = 2 * CHUNK * CHUNK * r.q.element_size() + 2 * CHUNK * 4
    page_size = r.pages.page_size if r.pages is not None else 1
    q_group, k_group, v_group = heads // r.num_q_heads, heads // r.num_k_heads, heads // r.num_v_heads

    shared = min(q_group, k_group) if r.num_q_heads == r.num_k_heads else 1
    together = heuristics.heads_per_program(tile, shared, T // CHUNK + N, heads, sms, r.batch_invariant)
    dot, inverse = _precisions(r.q.dtype)

    # Fewer registers than the assembler would take let a third program run beside two; an option of NVIDIA's alone.
    registers = {}
    if tile.prepare_regs and inverse == "fp16" and torch.version.hip is None:
        registers["maxnreg"] = tile.prepare_regs
    v_blocks, k_blocks = triton.cdiv(V, tile.block_v), triton.cdiv(K, tile.block_v)
    cut = _segment_chunks(r, v_blocks, k_blocks, sms)
    # What runs behind the first kernel: all programs, and those that surely have work where sequences fill the tokens.
    segments = T // (CHUNK * cut) + extra * N if cut else N
    full = T // (CHUNK * cut) if cut else N
    alone = segments * v_blocks * heads <= sms and not r.batch_invariant
    dependent = heuristics.dependent(r.device)
    last_early = dependent and heuristics.early(full * v_blocks * heads, alone, sms)
    local_early = dependent and heuristics.early(full * (v_blocks + k_blocks) * heads, False, sms)
    behind = {"launch_pdl": True} if dependent else {}

    strides = [x.stride() for x in (r.q, r.k, r.v, r.output)]
    if r.use_qk_l2norm:
        strides[:2] = (r.num_q_heads * K, K), (r.num_k_heads * K, K)
    token_strides, head_strides = ([stride[dim] for stride in strides] for dim in (0, 1))
    paged = r.pages is not None

    prepare = Launch(
        kernels.prepare, (slots * (heads // together),), r.device,
        (
            r.q.stride(1), r.k.stride(1), *_strides(r.g, 2), *_strides(r.beta, 2), *_strides(r.output, 2),
            T, N, heads, q_group, k_group, page_size, r.scale,
            r.q.stride(0), r.k.stride(0), *token_strides[:2], together, K, V, block_k, 32,
            r.gate, "none" if r.beta is None else "logit" if r.beta_is_logit else "plain", r.use_qk_l2norm, prefix_kind,
            r.output_is_new, extra, record, dot, inverse, local_early if cut else last_early,
            max(4, triton.next_power_of_2(together)),
        ),
        num_warps=tile.prepare_warps, num_stages=1, **registers,
    )  # fmt: skip

    def recur(part: int, programs: int) -> Launch:
        stages = tile.alone_stages if alone else tile.recur_stages
        if part == kernels.LOCAL.value:
            stages = tile.local_stages
        return Launch(
            kernels.recur, (programs * heads,), r.device,
            (
                *head_strides,
                *_strides(r.initial_state, 3), *_strides(r.final_state, 3), *_strides(r.state_checkpoints, 3),
                N, heads, q_group, k_group, v_group, page_size, max(r.checkpoint_every, CHUNK), cut, r.scale,
                *token_strides, K, V, block_k, tile.block_v, part, prefix_kind, extra, record,
                r.initial_state is not None, r.read_rows is not None, r.final_state is not None,
                r.write_rows is not None, r.final_state_is_new, r.checkpoint_every > 0,
                r.checkpoint_rows is not None or paged, dot, dependent, dependent and part == kernels.LOCAL.value,
            ),
            num_warps=tile.recur_warps, num_stages=stages, **behind,
        )  # fmt: skip

    def area(elements: int, dtype: torch.dtype) -> Empty:
        return Empty((elements,), dtype, r.device)

    records = area(slots * heads * record, torch.uint8)
    normed = (area(T * r.num_q_heads * K, r.q.dtype), area(T * r.num_k_heads * K, r.q.dtype)) if r.use_qk_l2norm else None
    if not cut:
        whole = recur(kernels.WHOLE.value, N * v_blocks)
        return Plan(prepare, whole, None, None, records, normed, None, "whole sequences")
    scan = Launch(
        kernels.scan, (N * heads * triton.cdiv(V, tile.scan_block),), r.device,
        (
            heads, page_size, cut, K, V, block_k, tile.scan_block, prefix_kind, extra, _scan_precision(r.q.dtype),
            dependent, last_early,
        ),
        num_warps=tile.scan_warps, num_stages=tile.scan_stages, **behind,
    )  # fmt: skip
    return Plan(
        prepare,
        recur(kernels.FINAL.value, segments * v_blocks),
        recur(kernels.LOCAL.value, segments * (v_blocks + k_blocks)),
        scan,
        records,
        normed,
        area(segments * heads * (V + K) * K, torch.float32),
        f"segments of {cut * CHUNK} tokens",
    )


def _segment_chunks(r: PrefillRequest, v_blocks: int, k_blocks: int, sms: int) -> int:
    if r.use_cp is False or r.batch_invariant or r.head_size_k > _LARGEST_CUT_HEAD:
        return 0
    return heuristics.segment_chunks(
        triton.cdiv(r.num_tokens, CHUNK), _longest(r), r.num_seqs, r.num_heads, v_blocks, k_blocks, sms,
        r.use_cp is True,
    )  # fmt: skip


def _longest(r: PrefillRequest) -> int:
    """A bound on the chunks of a sequence, to three significant bits: fewer plans, and no less of a hint."""
    chunks = (min(r.max_seqlen, r.num_tokens) + CHUNK - 1) // CHUNK
    shift = max(0, chunks.bit_length() - 3)
    return -(-chunks >> shift) << shift


def _precisions(dtype: torch.dtype) -> tuple[str, str]:
    """Input precision of products of q's dtype (counts for float32 only) and of those in the 64 x 64 inverse."""
    if torch.version.hip is not None or INTERPRETED.value:
        return "ieee", "ieee"
    return "tf32x3", "fp16" if dtype == torch.bfloat16 else "tf32x3"


def _scan_precision(dtype: torch.dtype) -> str:
    return _precisions(dtype)[0]
