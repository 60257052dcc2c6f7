"""The prefill kernels.

One chunk is 64 tokens at absolute positions 64 j .. 64 j + 63 of its sequence. For a chunk and a state head, with
``gamma_t`` the decay from the chunk's start to the end of token t, and ``D[t, s] = gamma_t / gamma_s`` for s <= t,
else 0:

    T = (I + tril(diag(beta) (K K^T * D), -1))^-1 diag(beta)        [64, 64]
    P = scale * tril(Q K^T * D)                                     [64, 64]

and with S the state [V, K] before the chunk, everything transposed so that the left operand of each product comes from
registers and the right one is a tile as it lies in memory:

    U^T = (V^T - gamma * (S K^T)) T^T                               [V, 64]
    O^T = scale * gamma * (S Q^T) + U^T P^T                         [V, 64]
    S  := gamma_63 * S + (U^T * gamma_63 / gamma) K                 [V, K]

``prepare`` makes T, P and the decays of every chunk, all chunks at once; it also applies the L2 norm. ``recur`` walks
along the chunks of a sequence, each program with a block of rows of one head's state. A long sequence can be cut into
segments of chunks: ``recur`` then first finds each segment's end state from a zero start, and its transition (the
[K, K] matrix M with S_end = S_start M + S_local: the same recurrence over K more rows that start as the identity and
have v = 0); ``scan`` turns these into the true start of every segment; ``recur`` runs again from there.

From sm_90 on these are dependent launches: a kernel's programs may start while the one before is still running (AFTER,
RELEASE). Until they wait for its end they read only what was there before the call: lengths, page tables, states.

Work areas are indexed by slots. Sequence i owns the chunk slots from ``(cu[i] - cu[0]) // 64 + EXTRA * i`` on, which
needs nothing from the host but bounds: chunks that are cut at both ends make at most two slots more than tokens / 64.
Segments likewise.
"""

import triton
import triton.language as tl

from .common import LOG2_ZERO, inverse_norm, log2_decay, sigmoid, to_state

CHUNK = tl.constexpr(64)

#: How prefix lengths reach a kernel.
NO_PREFIX = tl.constexpr(0)
PREFIX_LENS = tl.constexpr(1)  # ``prefixes`` holds them
PAGES = tl.constexpr(2)  # ``prefixes`` is page_indptr, ``last_page_len`` is given

#: What a run of ``recur`` is for.
WHOLE = tl.constexpr(0)  # sequences in one piece
LOCAL = tl.constexpr(1)  # segments from zero, with their transitions
FINAL = tl.constexpr(2)  # segments from their true start


_COUNTS = [
    "num_tokens", "num_seqs", "num_heads", "q_group", "k_group", "v_group", "page_size", "checkpoint_every",
    "segment_chunks", "g_stride_t", "g_stride_h", "beta_stride_t", "beta_stride_h",
]  # fmt: skip
_INDICES = [
    "g", "beta", "A_log", "dt_bias", "cu_seqlens", "prefixes", "last_page_len", "read_rows", "write_rows",
    "checkpoint_starts", "checkpoint_rows",
]  # fmt: skip


def _kernel(function):
    """``triton.jit`` that compiles nothing again for another batch: counts and index tensors are not specialised on."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return triton.jit(
        do_not_specialize=[name for name in _COUNTS if name in names],
        do_not_specialize_on_alignment=[name for name in _INDICES if name in names],
    )(function)


# --- where things are ----------------------------------------------------------------------------


@triton.jit
def _sequence(i, cu_seqlens, prefixes, last_page_len, page_size, PREFIX: tl.constexpr):
    """(first token, token after the last one, tokens before this call) of sequence i, in int64."""
    begin = tl.load(cu_seqlens + i).to(tl.int64)
    end = tl.load(cu_seqlens + i + 1).to(tl.int64)
    prefix = begin * 0
    if PREFIX == PREFIX_LENS:
        prefix = tl.load(prefixes + i).to(tl.int64)
    if PREFIX == PAGES:
        first_page, last_page, filled = _pages(i, prefixes, last_page_len)
        prefix = (last_page - first_page).to(tl.int64) * page_size + filled - (end - begin)
    return begin, end, prefix


@triton.jit
def _pages(i, page_indptr, last_page_len):
    """(entry of the first page, entry of the last page, tokens in that one) of sequence i, in int32."""
    first_page = tl.load(page_indptr + i).to(tl.int32)
    last_page = tl.load(page_indptr + i + 1).to(tl.int32) - 1
    return first_page, last_page, tl.load(last_page_len + i).to(tl.int32)


@triton.jit
def _first_slot(begin, first_token, i, slot_tokens, EXTRA: tl.constexpr):
    return (begin - first_token) // slot_tokens + EXTRA * i


@triton.jit
def _sequence_of_chunk(
    slot, cu_seqlens, prefixes, last_page_len, num_seqs, PREFIX: tl.constexpr, EXTRA: tl.constexpr
):  # fmt: skip
    """The last sequence whose first chunk slot is not after ``slot``."""
    BLOCK: tl.constexpr = 128
    NEVER: tl.constexpr = -0x80000000
    first_token = tl.load(cu_seqlens).to(tl.int64)
    found = 0
    for i0 in range(0, num_seqs, BLOCK):
        i = i0 + tl.arange(0, BLOCK)
        begin = tl.load(cu_seqlens + i, mask=i < num_seqs, other=0).to(tl.int64)
        before = (i < num_seqs) & (_first_slot(begin, first_token, i, CHUNK, EXTRA) <= slot)
        # Always true: this asks for the lines that are read when the sequence is known, while cu_seqlens is on its way.
        if PREFIX != NO_PREFIX:
            before = before & (tl.load(prefixes + i, mask=i < num_seqs, other=0) != NEVER)
        if PREFIX == PAGES:
            before = before & (tl.load(last_page_len + i, mask=i < num_seqs, other=0) != NEVER)
        found += tl.sum(before.to(tl.int32), axis=0)
    return found - 1


@triton.jit
def _sequence_of_segment(slot, cu_seqlens, num_seqs, slot_tokens, EXTRA: tl.constexpr):
    """The same for a segment's slot, by bisection: after a reduction the assembler no longer knows that the threads of
    a warp are together, and ``recur`` would then move the descriptors of all its products to where they must be, again
    for every chunk."""
    first_token = tl.load(cu_seqlens).to(tl.int64)
    low = 0
    high = tl.minimum(num_seqs - 1, slot // EXTRA)
    while low < high:
        i = (low + high + 1) // 2
        if _first_slot(tl.load(cu_seqlens + i).to(tl.int64), first_token, i, slot_tokens, EXTRA) <= slot:
            low = i
        else:
            high = i - 1
    return low


@triton.jit
def _release(ON: tl.constexpr):
    """Let the next kernel's programs start where there is room, once all programs of this one have come here."""
    if ON:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _wait(ON: tl.constexpr):
    """Wait until the kernel before has ended. Every program comes here, also one that has nothing to do: the kernel
    after this one takes its end for that of all before it."""
    if ON:
        tl.extra.cuda.gdc_wait()


# --- T, P and the decays -------------------------------------------------------------------------


@triton.jit
def _dot(a, b, c, PRECISION: tl.constexpr):
    """c + a b of float32 tensors: with float16 operands, or with the input precision of that name."""
    if PRECISION == "fp16":
        return tl.dot(a.to(tl.float16), b.to(tl.float16), c)
    else:
        return tl.dot(a, b, c, input_precision=PRECISION)


@triton.jit
def _unit_lower_inverse(L, PRECISION: tl.constexpr):
    """The inverse X of I + L for a strictly lower triangular L [64, 64].

    Inverses of diagonal blocks of b rows give those of 2 b rows: the inverse of [[A, 0], [B, C]] is
    [[A^-1, 0], [-C^-1 B A^-1, C^-1]], which is X - X B X with the blocks A^-1 and C^-1 on the diagonal of X. Unlike a
    product of powers of L this stays accurate when neighbouring keys are alike and the powers are huge.
    """
    # Up to 16 rows: the four diagonal blocks at once, a warp each.
    blocks = tl.reshape(L, (4, 16, 4, 16))
    on_diagonal = tl.arange(0, 4)[:, None, None, None] == tl.arange(0, 4)[None, None, :, None]
    own = tl.sum(tl.where(on_diagonal, blocks, 0.0), axis=2)
    row = tl.arange(0, 16)[None, :, None]
    col = tl.arange(0, 16)[None, None, :]
    zero = tl.zeros((4, 16, 16), tl.float32)
    X = tl.where(row == col, 1.0, tl.where(row // 2 == col // 2, -own, 0.0))
    for level in tl.static_range(1, 4):
        below = (row >> (level + 1) == col >> (level + 1)) & (row >> level > col >> level)
        X = _dot(-X, _dot(tl.where(below, own, 0.0), X, zero, PRECISION), X, PRECISION)
    X = tl.reshape(tl.where(on_diagonal, tl.reshape(X, (4, 16, 1, 16)), 0.0), (64, 64))
    # 32 and 64 rows.
    zero = tl.zeros((64, 64), tl.float32)
    row = tl.arange(0, 64)[:, None]
    col = tl.arange(0, 64)[None, :]
    for level in tl.static_range(4, 6):
        below = (row >> (level + 1) == col >> (level + 1)) & (row >> level > col >> level)
        X = _dot(-X, _dot(tl.where(below, L, 0.0), X, zero, PRECISION), X, PRECISION)
    return X


@triton.jit
def _normed(x):
    """The rows of ``x`` divided by their L2 norms."""
    wide = x.to(tl.float32)
    return (wide * inverse_norm(wide, 1)[:, None]).to(x.dtype)


@_kernel
def prepare(
    q, k, g, beta, A_log, dt_bias, cu_seqlens, prefixes, last_page_len,
    records, q_normed, k_normed, output,
    q_stride_h: tl.int64, k_stride_h: tl.int64,
    g_stride_t: tl.int64, g_stride_h: tl.int64, beta_stride_t: tl.int64, beta_stride_h: tl.int64,
    o_stride_t: tl.int64, o_stride_h: tl.int64,
    num_tokens: tl.int32, num_seqs: tl.int32, num_heads: tl.int32, q_group: tl.int32, k_group: tl.int32,
    page_size: tl.int32, scale: tl.float32,
    Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, Q_NORMED_STRIDE: tl.constexpr, K_NORMED_STRIDE: tl.constexpr,
    HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    GATE: tl.constexpr, BETA: tl.constexpr, L2NORM: tl.constexpr, PREFIX: tl.constexpr,
    ZERO_OUTSIDE: tl.constexpr, EXTRA: tl.constexpr, RECORD: tl.constexpr,
    DOT: tl.constexpr, INVERSE: tl.constexpr, RELEASE: tl.constexpr, HEADS_PADDED: tl.constexpr,
):  # fmt: skip
    """Records of one chunk for HEADS state heads that share a q and a k head. Grid: slots x head blocks.

    A record is T and P [64, 64] in q's dtype, then gamma and gamma_63 / gamma [64] in float32.
    BETA is "none", "plain" or "logit". DOT and INVERSE are the input precisions of float32 products.
    """
    _release(RELEASE)
    head_blocks = num_heads // HEADS
    pid = tl.program_id(0)
    slot = pid // head_blocks
    first_head = (pid % head_blocks) * HEADS
    dtype = q.dtype.element_ty
    r = tl.arange(0, CHUNK)

    if ZERO_OUTSIDE:
        # Tokens of no sequence; every token of [0, num_tokens) has a slot here. There are none in most calls.
        t = slot.to(tl.int64) * CHUNK + r
        covered = (t >= tl.load(cu_seqlens).to(tl.int64)) & (t < tl.load(cu_seqlens + num_seqs).to(tl.int64))
        bare = (t < num_tokens) & (covered == 0)
        if tl.sum(bare.to(tl.int32), axis=0) > 0:
            for bare_head in range(first_head, first_head + HEADS):
                for v0 in range(0, V, BLOCK_V):
                    d = v0 + tl.arange(0, BLOCK_V)
                    at = output + t[:, None] * o_stride_t + bare_head * o_stride_h + d[None, :]
                    tl.store(at, tl.zeros((CHUNK, BLOCK_V), dtype), mask=bare[:, None] & (d < V)[None, :])

    i = _sequence_of_chunk(slot, cu_seqlens, prefixes, last_page_len, num_seqs, PREFIX, EXTRA)
    begin, end, prefix = _sequence(i, cu_seqlens, prefixes, last_page_len, page_size, PREFIX)
    chunk = slot - _first_slot(begin, tl.load(cu_seqlens).to(tl.int64), i, CHUNK, EXTRA)
    first = begin - prefix % CHUNK + chunk * CHUNK
    if (first >= end) | (begin == end):
        return
    # Rows of the chunk that hold tokens of the sequence: [low, high).
    low = tl.maximum(begin - first, 0).to(tl.int32)
    high = tl.minimum(end - first, CHUNK).to(tl.int32)
    inside = (r >= low) & (r < high)

    d = tl.arange(0, BLOCK_K)
    mask = inside[:, None]
    if K != BLOCK_K:
        mask = mask & (d < K)[None, :]
    k_head = (first_head // k_group).to(tl.int64)
    q_head = (first_head // q_group).to(tl.int64)
    t = first + r
    k += first * K_STRIDE + k_head * k_stride_h
    q += first * Q_STRIDE + q_head * q_stride_h
    # Nothing reads them again where they are normalised.
    POLICY: tl.constexpr = "evict_first" if L2NORM else ""
    tile_k = tl.load(k + (r[:, None] * K_STRIDE + d[None, :]), mask=mask, other=0.0, eviction_policy=POLICY)
    tile_q = tl.load(q + (r[:, None] * Q_STRIDE + d[None, :]), mask=mask, other=0.0, eviction_policy=POLICY)
    # The gates are asked for here, so that they come with the tiles.
    is_head = tl.arange(0, HEADS_PADDED) < HEADS
    h = first_head + tl.arange(0, HEADS_PADDED)
    here = is_head[:, None] & inside[None, :]
    if GATE != "none":
        gate = tl.load(g + t[None, :] * g_stride_t + h[:, None] * g_stride_h, mask=here, other=0.0)
    a = 0.0
    bias = 0.0
    if GATE == "raw":
        a = tl.load(A_log + h, mask=is_head, other=0.0).to(tl.float32)[:, None]
        bias = tl.load(dt_bias + h, mask=is_head, other=0.0).to(tl.float32)[:, None]
    if BETA != "none":
        b = tl.load(beta + t[None, :] * beta_stride_t + h[:, None] * beta_stride_h, mask=here, other=0.0)
    if L2NORM:
        # Or the assembler begins with k's norm while q and the gates are not asked for yet.
        tl.debug_barrier()
        tile_k = _normed(tile_k)
        tile_q = _normed(tile_q)
        if first_head % k_group == 0:
            k_normed += first * K_NORMED_STRIDE + k_head * K
            tl.store(k_normed + (r[:, None] * K_NORMED_STRIDE + d[None, :]), tile_k, mask=mask)
        if first_head % q_group == 0:
            q_normed += first * Q_NORMED_STRIDE + q_head * K
            tl.store(q_normed + (r[:, None] * Q_NORMED_STRIDE + d[None, :]), tile_q, mask=mask)
    row = r[:, None]
    col = r[None, :]
    wide_slot = slot.to(tl.int64)
    # What is one value a token, for all heads at once. A conversion between the layouts that this wants and those of
    # the products would be a trip through shared memory with two barriers, for each value and head. They go through the
    # place of T instead, where every thread then finds what it needs.
    first_record = records + (wide_slot * num_heads + first_head) * RECORD
    spares = first_record.to(tl.pointer_type(tl.float32), bitcast=True)
    spares += tl.arange(0, HEADS_PADDED)[:, None] * (RECORD // 4) + col
    vectors = spares + (RECORD // 4 - 2 * CHUNK)
    if GATE == "none":
        ones = tl.full((HEADS_PADDED, CHUNK), 1.0, tl.float32)
        tl.store(vectors, ones, mask=is_head[:, None])
        tl.store(vectors + CHUNK, ones, mask=is_head[:, None])
    else:
        decay = tl.where(here, log2_decay(gate.to(tl.float32), a, bias, GATE), 0.0)
        # A decay to zero is counted rather than summed: the others keep their precision, and 0 - 0 is no NaN.
        stop = decay <= LOG2_ZERO
        decay = tl.cumsum(tl.where(stop, 0.0, decay), axis=1)
        stops = tl.cumsum(stop.to(tl.int32), axis=1)
        last = tl.sum(tl.where(col == CHUNK - 1, decay, 0.0), axis=1)[:, None]
        last_stops = tl.sum(tl.where(col == CHUNK - 1, stops, 0), axis=1)[:, None]
        tl.store(vectors, tl.where(stops == 0, tl.exp2(decay), 0.0), mask=is_head[:, None])
        rest = tl.where(stops == last_stops, tl.exp2(last - decay), 0.0)
        tl.store(vectors + CHUNK, rest, mask=is_head[:, None])
        tl.store(spares, decay, mask=is_head[:, None])
        tl.store(spares + CHUNK, stops.to(tl.float32), mask=is_head[:, None])
    if BETA != "none":
        if BETA == "logit":
            b = sigmoid(b.to(tl.float32)).to(beta.dtype.element_ty)
        tl.store(spares + 2 * CHUNK, tl.where(here, b.to(tl.float32), 0.0), mask=is_head[:, None])
    if GATE != "none" or BETA != "none":
        tl.debug_barrier()
    # Products take a left operand from shared memory if it was loaded or is carried by a loop, and otherwise from registers, with a
    # third tile in shared memory and loads from there for every head. So tiles that were computed are carried by a loop of one
    # turn, of which the compiler does not know.
    turns = 1
    if L2NORM:
        turns = tl.minimum(num_heads, 1)
    for _ in range(turns):
        keys = tl.trans(tile_k)
        for j in range(HEADS):
            record = first_record + j * RECORD
            T_out = record.to(tl.pointer_type(dtype), bitcast=True)
            P_out = T_out + CHUNK * CHUNK
            spare = record.to(tl.pointer_type(tl.float32), bitcast=True)

            # All heads have the same Q K^T and K K^T, but making them again from the tiles in shared memory is cheaper than
            # keeping them in registers: a zero that looks new in every turn keeps the compiler from moving them ahead.
            zero = tl.zeros((CHUNK, CHUNK), tl.float32)
            if HEADS > 1:
                zero += j * 0.0
            lower = row >= col
            D = 1.0
            if GATE != "none":
                lower = lower & (tl.load(spare + CHUNK + row) == tl.load(spare + CHUNK + col))
                D = tl.exp2(tl.load(spare + row) - tl.load(spare + col))
            if BETA == "none":
                b_row = tl.where(inside, 1.0, 0.0)[:, None]
                b_col = tl.where(inside, 1.0, 0.0)[None, :]
            else:
                b_row = tl.load(spare + 2 * CHUNK + row)
                b_col = tl.load(spare + 2 * CHUNK + col)
            qk = tl.dot(tile_q, keys, zero, input_precision=DOT) * D
            tl.store(P_out + row * CHUNK + col, tl.where(lower, qk * scale, 0.0).to(dtype))

            kk = tl.dot(tile_k, keys, zero, input_precision=DOT) * D
            X = _unit_lower_inverse(tl.where(lower & (row != col), kk * b_row, 0.0), INVERSE)
            tl.store(T_out + row * CHUNK + col, (X * b_col).to(dtype))
        if L2NORM:
            tile_q = tl.zeros((CHUNK, BLOCK_K), dtype)
            tile_k = tl.zeros((CHUNK, BLOCK_K), dtype)


# --- along the sequence --------------------------------------------------------------------------


@triton.jit
def _places(BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr):
    """(rows [n, 1], columns [n, 2]) of the pairs of neighbours in a state block, dealt out so that a thread gets those
    that it has as accumulators of a product (16 rows a warp, 8 rows and 8 columns at a time). Float32 states go this way:
    a warp then reads and writes whole sectors of 32 bytes, and nothing goes through shared memory, so that a state may
    still be on its way when the first tiles are asked for."""
    WARPS: tl.constexpr = BLOCK_V // 16
    n = tl.arange(0, BLOCK_V * BLOCK_K // 2)[:, None]
    rows = (n // 32 % WARPS) * 16 + (n // (32 * WARPS) % 2) * 8 + n // 4 % 8
    return rows, n // (64 * WARPS) * 8 + n % 4 * 2 + tl.arange(0, 2)[None, :]


@triton.jit
def _gathered(x, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr):
    """The block [BLOCK_V, BLOCK_K] whose elements lie in ``x`` as ``_places`` deals them."""
    x = tl.reshape(x, (BLOCK_K // 8, 2, BLOCK_V // 16, 8, 4, 2))
    return tl.reshape(tl.permute(x, (2, 1, 3, 0, 4, 5)), (BLOCK_V, BLOCK_K))


@triton.jit
def _dealt(S, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr):
    """The inverse of ``_gathered``."""
    S = tl.reshape(S, (BLOCK_V // 16, 2, 8, BLOCK_K // 8, 4, 2))
    return tl.reshape(tl.permute(S, (3, 1, 0, 2, 4, 5)), (BLOCK_V * BLOCK_K // 2, 2))


@triton.jit
def _load_block(states, stride_v, first_row, limit, FULL: tl.constexpr, K: tl.constexpr, BLOCK_V: tl.constexpr,
                BLOCK_K: tl.constexpr):  # fmt: skip
    """Rows from ``first_row`` on of the state head at ``states``, in float32; zero from row ``limit`` on, which no row
    reaches where FULL."""
    if states.dtype.element_ty == tl.float32:
        rows, cols = _places(BLOCK_V, BLOCK_K)
        at = states + first_row * stride_v + (rows * stride_v + cols)
        if FULL:
            x = tl.load(at)
        else:
            x = tl.load(at, mask=(first_row + rows < limit) & (cols < K), other=0.0)
        return _gathered(x, BLOCK_V, BLOCK_K)
    else:
        rows = first_row + tl.arange(0, BLOCK_V)[:, None]
        cols = tl.arange(0, BLOCK_K)[None, :]
        return tl.load(states + rows * stride_v + cols, mask=(rows < limit) & (cols < K), other=0.0).to(tl.float32)


@triton.jit
def _store_block(S, states, stride_v, first_row, limit, FULL: tl.constexpr, K: tl.constexpr, BLOCK_V: tl.constexpr,
                 BLOCK_K: tl.constexpr):  # fmt: skip
    """The same way back into float32 states."""
    rows, cols = _places(BLOCK_V, BLOCK_K)
    at = states + first_row * stride_v + (rows * stride_v + cols)
    if FULL:
        tl.store(at, _dealt(S, BLOCK_V, BLOCK_K))
    else:
        tl.store(at, _dealt(S, BLOCK_V, BLOCK_K), mask=(first_row + rows < limit) & (cols < K))


@triton.jit
def _store_state(
    S, states, row, stride_r, stride_h, stride_v, head, first_row, limit,
    FULL: tl.constexpr, K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Rows of a state head. Other types than float32 go 32 columns at a time: a larger piece would need registers and
    shared memory that the loop over chunks, of which this is a part, wants."""
    states += row * stride_r + head * stride_h
    if states.dtype.element_ty == tl.float32:
        _store_block(S, states, stride_v, first_row, limit, FULL, K, BLOCK_V, BLOCK_K)
    else:
        _store_narrow(S, states, stride_v, first_row + tl.arange(0, BLOCK_V), limit, K, BLOCK_V, BLOCK_K)


@triton.jit
def _store_narrow(S, states, stride_v, rows, limit, K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr):
    WIDTH: tl.constexpr = 32 if BLOCK_K > 32 else BLOCK_K
    PIECES: tl.constexpr = BLOCK_K // WIDTH
    at = rows[:, None].to(tl.int64) * stride_v + tl.arange(0, WIDTH)[None, :]
    pieces = tl.reshape(S, (BLOCK_V, PIECES, WIDTH))
    which = tl.arange(0, PIECES)[None, :, None]
    for piece in tl.static_range(PIECES):
        x = tl.sum(tl.where(which == piece, pieces, 0.0), axis=1)
        mask = (rows < limit)[:, None]
        if K != BLOCK_K:
            mask = mask & (piece * WIDTH + tl.arange(0, WIDTH) < K)[None, :]
        tl.store(states + piece * WIDTH + at, to_state(x, states.dtype.element_ty), mask=mask)


@triton.jit
def _checkpoint_row(checkpoint, chunk, full_chunks, checkpoint_rows, LISTED: tl.constexpr):
    """The row of the checkpoint behind ``chunk``; -1 where it is to be skipped, or the sequence ends before."""
    exists = chunk < full_chunks
    if LISTED:
        return tl.load(checkpoint_rows + checkpoint, mask=exists, other=-1).to(tl.int64)
    else:
        return tl.where(exists, checkpoint, -1)


@_kernel
def recur(
    q, k, v, records, output, segments,
    initial, read_rows, final, write_rows, checkpoints, checkpoint_starts, checkpoint_rows,
    cu_seqlens, prefixes, last_page_len,
    q_stride_h: tl.int64, k_stride_h: tl.int64, v_stride_h: tl.int64, o_stride_h: tl.int64,
    initial_stride_r: tl.int64, initial_stride_h: tl.int64, initial_stride_v: tl.int64,
    final_stride_r: tl.int64, final_stride_h: tl.int64, final_stride_v: tl.int64,
    checkpoint_stride_r: tl.int64, checkpoint_stride_h: tl.int64, checkpoint_stride_v: tl.int64,
    num_seqs: tl.int32, num_heads: tl.int32, q_group: tl.int32, k_group: tl.int32, v_group: tl.int32,
    page_size: tl.int32, checkpoint_every: tl.int32, segment_chunks: tl.int32, scale: tl.float32,
    Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, O_STRIDE: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PART: tl.constexpr, PREFIX: tl.constexpr, EXTRA: tl.constexpr, RECORD: tl.constexpr,
    INITIAL: tl.constexpr, READ_ROWS: tl.constexpr, FINAL_STATE: tl.constexpr, WRITE_ROWS: tl.constexpr,
    FILL_EMPTY: tl.constexpr, CHECKPOINTS: tl.constexpr, CHECKPOINT_ROWS: tl.constexpr,
    DOT: tl.constexpr, AFTER: tl.constexpr, RELEASE: tl.constexpr,
):  # fmt: skip
    """BLOCK_V rows of one head's state along a sequence (or a segment of it).

    The token strides of q, k, v and the output are constants, so that a tile's addresses are one address and offsets
    known to the compiler; they depend on the model, not on the batch.

    Grid: sequences (or segment slots) x heads x row blocks; LOCAL has the row blocks of V and then those of K.
    ``segments`` is [slots, heads, V + K, K] in float32: in slot j of a sequence the state before its segment j, and the
    transition of segment j - 1. For PAGES, ``checkpoint_rows`` is page_indices, and all rows follow from the table.
    """
    V_BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    K_BLOCKS: tl.constexpr = (K + BLOCK_V - 1) // BLOCK_V if PART == LOCAL else 0
    pid = tl.program_id(0)
    _release(RELEASE)
    block = pid % (V_BLOCKS + K_BLOCKS)
    pid = pid // (V_BLOCKS + K_BLOCKS)
    h = (pid % num_heads).to(tl.int64)
    place = pid // num_heads

    if PART == WHOLE:
        # The last sequence first: what ``prepare`` left of it is the freshest in the L2.
        place = num_seqs - 1 - place
        i = place
    else:
        i = _sequence_of_segment(place, cu_seqlens, num_seqs, segment_chunks * CHUNK, EXTRA)
    begin, end, prefix = _sequence(i, cu_seqlens, prefixes, last_page_len, page_size, PREFIX)
    first_token = tl.load(cu_seqlens).to(tl.int64)
    if PREFIX == PAGES:
        first_page, last_page, filled = _pages(i, prefixes, last_page_len)
    shift = (prefix % CHUNK).to(tl.int32)
    length = (end - begin).to(tl.int32)
    num_chunks = tl.where(length > 0, (length + shift + CHUNK - 1) // CHUNK, 0)
    from_chunk = 0
    to_chunk = num_chunks
    segment = 0
    if PART != WHOLE:
        segment = (place - _first_slot(begin, first_token, i, segment_chunks * CHUNK, EXTRA)).to(tl.int32)
        from_chunk = segment * segment_chunks
        to_chunk = tl.minimum(from_chunk + segment_chunks, num_chunks)
        if (from_chunk >= num_chunks) & (segment > 0):
            _wait(AFTER)
            return
    is_last = to_chunk == num_chunks

    # Rows of this program: of the state, or of the transition, which lies below it in ``segments``.
    d = tl.arange(0, BLOCK_K)
    is_transition = block >= V_BLOCKS
    if PART == LOCAL:
        first_row = (block - tl.where(is_transition, V_BLOCKS, 0)) * BLOCK_V
        limit = tl.where(is_transition, K, V)
        v_limit = tl.where(is_transition, 0, V)  # the tokens of a transition have v = 0
        if is_transition & ((segment == 0) | is_last):
            _wait(AFTER)
            return
    else:
        first_row = block * BLOCK_V
        limit = V
        v_limit = V
    rows = first_row + tl.arange(0, BLOCK_V)
    FULL: tl.constexpr = K == BLOCK_K and V % BLOCK_V == 0 and (PART != LOCAL or K % BLOCK_V == 0)
    segment_head = (place.to(tl.int64) * num_heads + h) * (V + K)

    S = tl.zeros((BLOCK_V, BLOCK_K), tl.float32)
    if PART == LOCAL:
        if is_transition:
            S = tl.where(rows[:, None] == d[None, :], 1.0, 0.0)
    if INITIAL and PART != FINAL:
        if segment == 0:
            row = i.to(tl.int64)
            if PREFIX == PAGES:
                # The page that holds the token before the first new one. In 32 bits: a division of 64 is a call, for
                # which the compiler takes registers from the loop.
                row = last_page
                if filled <= length:
                    row = last_page - 1 - (length - filled) // page_size
                row = tl.load(checkpoint_rows + row, mask=prefix > 0, other=-1).to(tl.int64)
            elif READ_ROWS:
                row = tl.load(read_rows + i).to(tl.int64)
            at = initial + row * initial_stride_r + h * initial_stride_h
            if row >= 0:
                S = _load_block(at, initial_stride_v, first_row, limit, FULL, K, BLOCK_V, BLOCK_K)
    # The entry of the next checkpoint, the chunk that it follows, and its row, which is asked for long before.
    checkpoint = begin * 0
    checkpoint_chunk = 0
    checkpoint_row = checkpoint
    checkpoint_chunks = checkpoint_every // CHUNK
    STORES: tl.constexpr = CHECKPOINTS and PART != LOCAL
    if STORES:
        full_chunks = (length + shift) // CHUNK
        chunks_before = (prefix // CHUNK).to(tl.int32)
        passed = (chunks_before + from_chunk) // checkpoint_chunks
        checkpoint_chunk = (passed + 1) * checkpoint_chunks - chunks_before - 1
        if PREFIX == PAGES:
            checkpoint = first_page.to(tl.int64) + passed
        else:
            checkpoint = tl.load(checkpoint_starts + i).to(tl.int64) + passed - chunks_before // checkpoint_chunks
        checkpoint_row = _checkpoint_row(
            checkpoint, checkpoint_chunk, full_chunks, checkpoint_rows, PREFIX == PAGES or CHECKPOINT_ROWS
        )
    final_row = i.to(tl.int64)
    if FINAL_STATE and PART != LOCAL:
        store_final = is_last
        if PREFIX == PAGES:
            store_final = store_final & (length > 0) & (filled != page_size)
            final_row = tl.load(checkpoint_rows + last_page, mask=store_final, other=-1).to(tl.int64)
        else:
            if FILL_EMPTY == 0:
                store_final = store_final & (length > 0)
            if WRITE_ROWS:
                final_row = tl.load(write_rows + i).to(tl.int64)

    # What was read so far was there before the call.
    _wait(AFTER)
    if PART == FINAL:
        S = _load_block(segments + segment_head * K, K, first_row, limit, FULL, K, BLOCK_V, BLOCK_K)
    if PART == LOCAL:
        if segment == 0:
            _store_block(S, segments + segment_head * K, K, first_row, limit, FULL, K, BLOCK_V, BLOCK_K)
        if is_last:
            return

    dtype = q.dtype.element_ty
    r = tl.arange(0, CHUNK)
    first_slot = _first_slot(begin, first_token, i, CHUNK, EXTRA)
    record = records + (first_slot * num_heads + h) * RECORD
    record_step = num_heads.to(tl.int64) * RECORD
    q += (h // q_group) * q_stride_h
    k += (h // k_group) * k_stride_h
    v += (h // v_group) * v_stride_h
    output += h * o_stride_h
    # The tile of v and the output's are read and written with their tokens dealt out in another order, tokens 0, 1, 8,
    # 9, ... first, and put in order in registers: the two bits of a token's number that the products' layout has in the
    # lanes are then in a thread's own values, and the other way round. A conversion of layouts goes through shared
    # memory once for each value of the bits that both have in registers, with two barriers each time.
    dealt = (r & 1) | ((r & 14) << 2) | ((r & 48) >> 3)
    for chunk in range(from_chunk, to_chunk):
        offset = chunk * CHUNK - shift
        first = begin + offset
        # One comparison for both ends: before the sequence's first token the difference wraps around.
        inside = (r + offset).to(tl.uint32, bitcast=True) < length.to(tl.uint32, bitcast=True)
        mask = inside[:, None]
        if K != BLOCK_K:
            mask = mask & (d < K)[None, :]
        mask_v = ((dealt + offset).to(tl.uint32, bitcast=True) < length.to(tl.uint32, bitcast=True))[None, :]
        if PART == LOCAL or V % BLOCK_V != 0:
            mask_v = mask_v & (rows < v_limit)[:, None]
        T_at = (record + chunk * record_step).to(tl.pointer_type(dtype), bitcast=True)
        P_at = T_at + CHUNK * CHUNK
        vectors = (P_at + CHUNK * CHUNK).to(tl.pointer_type(tl.float32), bitcast=True)
        tile_k = tl.load(k + first * K_STRIDE + (r[:, None] * K_STRIDE + d[None, :]), mask=mask, other=0.0)
        tile_v = tl.load(v + first * V_STRIDE + (dealt[None, :] * V_STRIDE + rows[:, None]), mask=mask_v, other=0.0)
        tile_v = tl.reshape(tl.permute(tl.reshape(tile_v, (BLOCK_V, 4, 8, 2)), (0, 2, 1, 3)), (BLOCK_V, CHUNK))
        tile_T = tl.load(T_at + r[:, None] * CHUNK + r[None, :])
        gamma = tl.load(vectors + r)[None, :]
        decay = tl.load(vectors + CHUNK - 1)

        S_low = S.to(dtype)
        X = tl.dot(S_low, tl.trans(tile_k), input_precision=DOT)
        R = (tile_v.to(tl.float32) - gamma * X).to(dtype)
        U = tl.dot(R, tl.trans(tile_T), input_precision=DOT)
        if PART != LOCAL:
            tile_q = tl.load(q + first * Q_STRIDE + (r[:, None] * Q_STRIDE + d[None, :]), mask=mask, other=0.0)
            tile_P = tl.load(P_at + r[:, None] * CHUNK + r[None, :])
            O = tl.dot(S_low, tl.trans(tile_q), input_precision=DOT) * (gamma * scale)
            O = tl.dot(U.to(dtype), tl.trans(tile_P), O, input_precision=DOT)
            O = tl.reshape(tl.permute(tl.reshape(O.to(dtype), (BLOCK_V, 8, 4, 2)), (0, 2, 1, 3)), (BLOCK_V, CHUNK))
            tl.store(output + first * O_STRIDE + (dealt[None, :] * O_STRIDE + rows[:, None]), O, mask=mask_v)
        # Not earlier: registers are scarce.
        rest = tl.load(vectors + CHUNK + r)[None, :]
        S = tl.dot((U * rest).to(dtype), tile_k, S * decay, input_precision=DOT)
        if STORES:
            # In the loop, so that the next chunks' tiles come in meanwhile.
            if chunk == checkpoint_chunk:
                if checkpoint_row >= 0:
                    _store_state(
                        S, checkpoints, checkpoint_row, checkpoint_stride_r, checkpoint_stride_h, checkpoint_stride_v,
                        h, first_row, limit, FULL, K, BLOCK_V, BLOCK_K,
                    )  # fmt: skip
                checkpoint += 1
                checkpoint_chunk += checkpoint_chunks
                checkpoint_row = _checkpoint_row(
                    checkpoint, checkpoint_chunk, full_chunks, checkpoint_rows, PREFIX == PAGES or CHECKPOINT_ROWS
                )

    if PART == LOCAL:
        at = segment_head + num_heads.to(tl.int64) * (V + K) + tl.where(is_transition, V, 0)
        _store_block(S, segments + at * K, K, first_row, limit, FULL, K, BLOCK_V, BLOCK_K)
    elif FINAL_STATE:
        if store_final & (final_row >= 0):
            _store_state(
                S, final, final_row, final_stride_r, final_stride_h, final_stride_v, h, first_row, limit,
                FULL, K, BLOCK_V, BLOCK_K,
            )  # fmt: skip


@_kernel
def scan(
    segments, cu_seqlens, prefixes, last_page_len,
    num_heads: tl.int32, page_size: tl.int32, segment_chunks: tl.int32,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PREFIX: tl.constexpr, EXTRA: tl.constexpr, DOT: tl.constexpr, AFTER: tl.constexpr, RELEASE: tl.constexpr,
):  # fmt: skip
    """S_j = S_{j-1} M_j + S_j over the segments of a sequence, in place. Grid: sequences x heads x row blocks."""
    V_BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    rows = (pid % V_BLOCKS) * BLOCK_V + tl.arange(0, BLOCK_V)
    pid = pid // V_BLOCKS
    h = (pid % num_heads).to(tl.int64)
    i = pid // num_heads
    _release(RELEASE)
    begin, end, prefix = _sequence(i, cu_seqlens, prefixes, last_page_len, page_size, PREFIX)
    slot = _first_slot(begin, tl.load(cu_seqlens).to(tl.int64), i, segment_chunks * CHUNK, EXTRA)
    _wait(AFTER)
    if begin == end:
        return
    num_chunks = ((end - begin + prefix % CHUNK + CHUNK - 1) // CHUNK).to(tl.int32)
    num_segments = (num_chunks + segment_chunks - 1) // segment_chunks

    if num_segments <= 2:
        return

    d = tl.arange(0, BLOCK_K)
    state_mask = (rows < V)[:, None] & (d < K)[None, :]
    square_mask = (d < K)[:, None] & (d < K)[None, :]
    step = num_heads.to(tl.int64) * (V + K) * K
    state = segments + (slot * num_heads + h) * (V + K) * K + rows[:, None] * K + d[None, :]
    transition = segments + ((slot * num_heads + h) * (V + K) + V) * K + d[:, None] * K + d[None, :]
    S = tl.load(state + step, mask=state_mask, other=0.0)
    for j in range(2, num_segments):
        M = tl.load(transition + j * step, mask=square_mask, other=0.0)
        S = tl.dot(S, M, tl.load(state + j * step, mask=state_mask, other=0.0), input_precision=DOT)
        tl.store(state + j * step, S, mask=state_mask)
