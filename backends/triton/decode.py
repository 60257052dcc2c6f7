"""Decode: one kernel for a batch of one or a few new tokens a sequence.

A program owns ``BV`` rows of one state head of one sequence: it loads them once, keeps them in float32 registers over
all new tokens, and stores them once. Rows of a state are independent, so programs never meet. Everything else of a
call is in the same launch: gates, sigmoid and L2 norm, and the pool rows of a page table.

For one token, with S the loaded tile,

    u = beta * (v - alpha * S k)        o = scale * (alpha * S q + (k . q) * u)        S = alpha * S + u k^T

so that both reductions over K read the loaded tile and can run side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from gdn_multi.request import DecodeRequest, PageTable

from .common import inverse_norm, raw_log_decay, sigmoid
from .decode_heuristics import tile
from .launch import Launch

#: Where the pool rows of a sequence come from.
ROWS_ARE_SEQUENCES, ROWS_GIVEN, ROWS_OF_PAGES = 0, 1, 2

#: Elements of the longest state row that one program holds.
MAX_HEAD_SIZE_K = 1024


@triton.jit
def _token(q_at, k_at, v_at, a_at, b_at, cols, rows, A_log, dt_bias, scale,
           K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, L2NORM: tl.constexpr):  # fmt: skip
    """One token's scale * q, k, v, k . scale * q, alpha and beta in float32."""
    if K == BK:
        q = tl.load(q_at + cols)
        k = tl.load(k_at + cols)
    else:
        q = tl.load(q_at + cols, mask=cols < K, other=0.0)
        k = tl.load(k_at + cols, mask=cols < K, other=0.0)
    if V % BV == 0:
        v = tl.load(v_at + rows)
    else:
        v = tl.load(v_at + rows, mask=rows < V, other=0.0)
    a = tl.load(a_at).to(tl.float32)
    b = tl.load(b_at).to(tl.float32)
    q = q.to(tl.float32)
    k = k.to(tl.float32)
    if L2NORM:
        q *= inverse_norm(q, 0)
        k *= inverse_norm(k, 0)
    q *= scale
    return q, k, v.to(tl.float32), tl.sum(q * k, 0), tl.exp(raw_log_decay(a, A_log, dt_bias)), sigmoid(b)


@triton.jit(
    do_not_specialize=[
        "num_tokens", "q_b", "q_t", "q_h", "k_b", "k_t", "k_h", "v_b", "v_t", "v_h", "a_b", "a_t", "a_h",
        "b_b", "b_t", "b_h", "out_b", "out_t", "out_h", "s_row", "s_h", "s_v", "i_b", "i_t", "i_h", "i_v",
    ],
    do_not_specialize_on_alignment=[
        "v_ptr", "a_ptr", "b_ptr", "A_log_ptr", "dt_bias_ptr", "out_ptr", "read_ptr", "write_ptr", "last_ptr",
    ],
)  # fmt: skip
def decode_kernel(
    q_ptr, k_ptr, state_ptr, inter_ptr, v_ptr, a_ptr, b_ptr, A_log_ptr, dt_bias_ptr, out_ptr,
    # ROWS_GIVEN: rows to read, rows to write, -. ROWS_OF_PAGES: page_indices, page_indptr, last_page_len.
    read_ptr, write_ptr, last_ptr,
    scale: tl.float32, num_tokens: tl.int32,
    # Strides; those of q and k in units of QK_UNIT elements, those of states in units of STATE_UNIT.
    q_b: tl.int64, q_t: tl.int64, q_h: tl.int64, k_b: tl.int64, k_t: tl.int64, k_h: tl.int64,
    v_b: tl.int64, v_t: tl.int64, v_h: tl.int64, a_b: tl.int64, a_t: tl.int64, a_h: tl.int64,
    b_b: tl.int64, b_t: tl.int64, b_h: tl.int64, out_b: tl.int64, out_t: tl.int64, out_h: tl.int64,
    s_row: tl.int64, s_h: tl.int64, s_v: tl.int64,
    i_b: tl.int64, i_t: tl.int64, i_h: tl.int64, i_v: tl.int64,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    QK_UNIT: tl.constexpr, STATE_UNIT: tl.constexpr, DENSE: tl.constexpr, ROWS: tl.constexpr,
    ONE_TOKEN: tl.constexpr, L2NORM: tl.constexpr, UPDATE: tl.constexpr, INTER: tl.constexpr,
    LOAD_POLICY: tl.constexpr, STORE_POLICY: tl.constexpr,
):  # fmt: skip
    # Neighbouring programs own neighbouring rows of the pool.
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    h = (pid // BLOCKS) % HV
    seq = (pid // (BLOCKS * HV)).to(tl.int64)
    rows = (pid % BLOCKS) * BV + tl.arange(0, BV)
    cols = tl.arange(0, BK)

    # The loads of the pool rows are asked for first: the state waits for them, and the token's data come meanwhile.
    if ROWS == 1:
        read = tl.load(read_ptr + seq).to(tl.int64)
        write = tl.load(write_ptr + seq).to(tl.int64)
    elif ROWS == 2:
        first = tl.load(write_ptr + seq).to(tl.int64)
        last = tl.load(write_ptr + seq + 1).to(tl.int64) - 1
        opens_page = tl.load(last_ptr + seq) == 1
        write = tl.load(read_ptr + last).to(tl.int64)
        # A page before the first does not exist; the clamp keeps a wrong table from reading beside the others.
        read = tl.load(read_ptr + tl.maximum(tl.where(opens_page, last - 1, last), first)).to(tl.int64)
    else:
        read = seq
        write = seq
    live = tl.full([1], 0, tl.int64) + tl.minimum(read, write) >= 0  # a block: the interpreter mistypes scalar masks

    A_log = tl.load(A_log_ptr + h).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + h).to(tl.float32)
    q_at = q_ptr + (seq * q_b + (h // GROUP) * q_h) * QK_UNIT
    k_at = k_ptr + (seq * k_b + (h // GROUP) * k_h) * QK_UNIT
    v_at = v_ptr + seq * v_b + h * v_h
    a_at = a_ptr + seq * a_b + h * a_h
    b_at = b_ptr + seq * b_b + h * b_h
    out_at = out_ptr + seq * out_b + h * out_h
    q, k, v, kq, alpha, beta = _token(
        q_at, k_at, v_at, a_at, b_at, cols, rows, A_log, dt_bias, scale, K, V, BK, BV, L2NORM
    )

    if DENSE:
        state_tile = rows[:, None] * K + cols[None, :]
        inter_tile = state_tile
    else:
        state_tile = rows[:, None] * (s_v * STATE_UNIT) + cols[None, :]
        inter_tile = rows[:, None] * (i_v * STATE_UNIT) + cols[None, :]
    mask = (live & (cols < K))[None, :]
    if V % BV != 0:
        mask = mask & (rows < V)[:, None]
    # A padded sequence reads zeros: what its row holds must not reach the output.
    state_at = state_ptr + (read * s_row + h * s_h) * STATE_UNIT
    S = tl.load(state_at + state_tile, mask=mask, other=0.0, eviction_policy=LOAD_POLICY).to(tl.float32)

    for t in range(1 if ONE_TOKEN else num_tokens):
        sk = tl.sum(S * k[None, :], 1)
        sq = tl.sum(S * q[None, :], 1)
        u = beta * (v - alpha * sk)
        o = tl.where(live, alpha * sq + kq * u, 0.0)
        S = alpha * S + u[:, None] * k[None, :]
        if V % BV == 0:
            tl.store(out_at + t * out_t + rows, o.to(out_ptr.dtype.element_ty))
        else:
            tl.store(out_at + t * out_t + rows, o.to(out_ptr.dtype.element_ty), mask=rows < V)
        if INTER:
            inter_at = inter_ptr + (seq * i_b + t * i_t + h * i_h) * STATE_UNIT
            tl.store(inter_at + inter_tile, S.to(inter_ptr.dtype.element_ty), mask=mask)
        if not ONE_TOKEN:
            n = tl.minimum(t + 1, num_tokens - 1).to(tl.int64)
            q, k, v, kq, alpha, beta = _token(
                q_at + n * q_t * QK_UNIT, k_at + n * k_t * QK_UNIT, v_at + n * v_t, a_at + n * a_t, b_at + n * b_t,
                cols, rows, A_log, dt_bias, scale, K, V, BK, BV, L2NORM,
            )  # fmt: skip

    if UPDATE:
        state_at = state_ptr + (write * s_row + h * s_h) * STATE_UNIT
        tl.store(state_at + state_tile, S.to(state_ptr.dtype.element_ty), mask=mask, eviction_policy=STORE_POLICY)


def reasons_against_decode(request: DecodeRequest) -> tuple[str, ...]:
    """Why these kernels do not serve ``request``: () or sentences."""
    if request.head_size_k > MAX_HEAD_SIZE_K:
        return (f"decode serves head sizes K up to {MAX_HEAD_SIZE_K}, got {request.head_size_k}",)
    return ()


#: Key of a call's shapes, strides, dtypes and options -> its launch.
_LAUNCHES: dict[tuple[Any, ...], Launch] = {}
_MAX_LAUNCHES = 4096


def decode(request: DecodeRequest) -> None:
    """Fill ``request.output`` and write the states, in one launch."""
    r = request
    launch = _launch_for(r)
    if launch is not None:
        inter = r.state if r.intermediate_states is None else r.intermediate_states
        launch(r.q, r.k, r.state, inter, r.v, r.a, r.b, r.A_log, r.dt_bias, r.output, *_rows(r)[1:])


def express_decode(request: DecodeRequest) -> Callable[..., bool] | None:
    """Calls like ``request`` from their tensors alone; see ``Backend.express_decode``."""
    r = request
    launch = _launch_for(r)
    steps = r.intermediate_states
    if launch is None or _skewed(r.q, r.k, r.state, r.state if steps is None else steps):
        return None
    pages = r.pages or PageTable(None, None, None)  # type: ignore[arg-type]
    rows = r.read_rows, r.write_rows, pages.page_indices, pages.page_indptr, pages.last_page_len
    has_steps = steps is not None
    has_rows, has_pages = r.read_rows is not None, r.pages is not None
    # Sizes, steps, types and places of the tensors: those that every call has, then those that it may have.
    alike = tuple(
        fact
        for x in (r.q, r.k, r.v, r.A_log, r.a, r.dt_bias, r.b, r.state, r.output)
        for fact in (x.shape, x.stride(), x.dtype, x.device)
    )
    alike_rows = tuple(None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in (*rows, steps))

    def again(q, k, v, A_log, a, dt_bias, b, state, read, write, steps, indices, indptr, last, output) -> bool:
        try:
            if (
                q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device,
                v.shape, v.stride(), v.dtype, v.device, A_log.shape, A_log.stride(), A_log.dtype, A_log.device,
                a.shape, a.stride(), a.dtype, a.device, dt_bias.shape, dt_bias.stride(), dt_bias.dtype, dt_bias.device,
                b.shape, b.stride(), b.dtype, b.device, state.shape, state.stride(), state.dtype, state.device,
                output.shape, output.stride(), output.dtype, output.device,
            ) != alike:  # fmt: skip
                return False
            if tuple(
                [
                    None if x is None else (x.shape, x.stride(), x.dtype, x.device)
                    for x in (read, write, indices, indptr, last, steps)
                ]
            ) != alike_rows:  # fmt: skip
                return False
        except RuntimeError:  # a sparse or nested tensor, without sizes or strides
            return False
        inter = steps if has_steps else state
        if (q.data_ptr() | k.data_ptr() | state.data_ptr() | inter.data_ptr()) & 15:
            return False
        if has_pages:
            launch(q, k, state, inter, v, a, b, A_log, dt_bias, output, indices, indptr, last)
        elif has_rows:
            launch(q, k, state, inter, v, a, b, A_log, dt_bias, output, read, write, read)
        else:
            launch(q, k, state, inter, v, a, b, A_log, dt_bias, output, state, state, state)
        return True

    return again


def _rows(r: DecodeRequest) -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where the pool rows come from, and the kernel's three tensors for that; the state stands in for absent ones."""
    if r.pages is not None:
        return ROWS_OF_PAGES, r.pages.page_indices, r.pages.page_indptr, r.pages.last_page_len
    if r.read_rows is not None:
        return ROWS_GIVEN, r.read_rows, r.write_rows, r.read_rows
    return ROWS_ARE_SEQUENCES, r.state, r.state, r.state


def _skewed(*tensors: torch.Tensor) -> tuple[bool, ...]:
    """Which of these are not divisible by 16, for Triton specialises on that; () for none."""
    address = 0
    for tensor in tensors:
        address |= tensor.data_ptr()
    return () if address % 16 == 0 else tuple(x.data_ptr() % 16 != 0 for x in tensors)


def _launch_for(r: DecodeRequest) -> Launch | None:
    """The launch that serves ``r`` and calls like it; None when there is nothing to do."""
    q, k, v, a, b, state, output = r.q, r.k, r.v, r.a, r.b, r.state, r.output
    rows, first, second, third = _rows(r)
    has_inter = r.intermediate_states is not None
    inter = r.intermediate_states if has_inter else state
    skewed = _skewed(q, k, state, inter)
    key = (
        q.shape, v.shape, q.stride(), k.stride(), v.stride(), a.stride(), b.stride(), state.stride(), inter.stride(),
        output.stride(), q.dtype, state.dtype, a.dtype, b.dtype, r.A_log.dtype, r.dt_bias.dtype, first.dtype,
        second.dtype, third.dtype, rows, has_inter, r.update_state, r.use_qk_l2norm, r.scale, skewed, r.device,
    )  # fmt: skip
    launch = _LAUNCHES.get(key)
    if launch is None and r.batch > 0 and r.num_tokens > 0:
        if len(_LAUNCHES) >= _MAX_LAUNCHES:
            _LAUNCHES.clear()
        launch = _LAUNCHES[key] = _make_launch(r, rows, inter, has_inter, skewed)
    return launch


def _strides(tensor: torch.Tensor, dims: int) -> tuple[int, ...]:
    """The leading strides, 0 where a dimension has one entry and the stride no meaning."""
    return tuple(0 if size == 1 else step for size, step in zip(tensor.shape[:dims], tensor.stride()[:dims]))


def _unit(itemsize: int, aligned: bool, *sizes: int) -> int:
    """Elements of a 16-byte access when every size is a multiple of them, else 1."""
    unit = 16 // itemsize
    return unit if aligned and all(size % unit == 0 for size in sizes) else 1


def _make_launch(r: DecodeRequest, rows: int, inter: torch.Tensor, has_inter: bool, skewed: tuple[bool, ...]) -> Launch:
    size_k, size_v, heads = r.head_size_k, r.head_size_v, r.num_heads
    q, k, state = _strides(r.q, 3), _strides(r.k, 3), _strides(r.state, 3)
    buffer = _strides(inter, 4) if has_inter else (0, 0) + state[1:]
    qk_unit = _unit(r.q.element_size(), not any(skewed[:2]), *q, *k)
    dense = size_v == 1 or (state[2] == size_k and buffer[3] == size_k)
    state_unit = _unit(r.state.element_size(), not any(skewed[2:]), *state, *buffer)
    block_k = triton.next_power_of_2(size_k)
    shape = tile(block_k, size_v, r.state.element_size())
    fixed = (
        r.scale,
        r.num_tokens,
        *(step // qk_unit for step in q + k),
        *_strides(r.v, 3),
        *_strides(r.a, 3),
        *_strides(r.b, 3),
        *_strides(r.output, 3),
        *(step // state_unit for step in state + buffer),
        # constants
        heads,
        heads // r.num_q_heads,
        size_k,
        size_v,
        block_k,
        shape.block_v,
        qk_unit,
        state_unit,
        dense,
        rows,
        r.num_tokens == 1,
        r.use_qk_l2norm,
        r.update_state,
        has_inter,
        shape.load_policy,
        shape.store_policy,
    )
    grid = (r.batch * heads * triton.cdiv(size_v, shape.block_v),)
    return Launch(decode_kernel, grid, r.device, fixed, num_warps=shape.num_warps)
