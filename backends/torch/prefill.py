"""Chunked prefill in PyTorch.

A sequence is cut into chunks of 64 tokens at absolute positions. With S [V, K] the state that enters a chunk, gamma_t
the decay from the chunk's start to token t, D[t, s] = gamma_t / gamma_s the decay between two of its tokens and

    T = (I + strict_lower(diag(beta) (K K^T * D)))^-1          P = scale * lower(Q K^T * D)

the recurrence of the contract, summed over the chunk (the WY form of Yang et al., "Gated Delta Networks", 2024), is

    U = T diag(beta) (V - gamma * K S^T)        O = scale * gamma * Q S^T + P U        S <- gamma_C S + (U * gamma_C/gamma)^T K

T and P need no state and are made for a block of chunks at once; the three products with S follow chunk after chunk,
for all heads and for as many sequences as possible at a time ("lanes"). ``_Plan`` says which chunks those are.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gdn_multi.request import CHUNK, PrefillRequest

from . import rows as _rows
from .rows import load_rows, store_rows

#: Elements of [heads, 64, 64] matrices made at a time: bounds the temporary memory and keeps it in cache.
_BLOCK_ELEMENTS = 1 << 20
#: A lane a sequence is worth this many times the chunks that the tokens need, for the steps that it saves (on a GPU).
_WASTE = 2
#: log(0), finite so that differences of sums stay numbers; exp of it is 0 in float32 and far below its denormals.
_LOG_ZERO = -200.0


@dataclass
class _Plan:
    """The chunks of a batch, in the order in which they are computed. Tensors are [chunks] int64 on the device."""

    steps: list[tuple[int, int]]  #: (first chunk, end) of each step; lane l of a step takes chunk first + l
    sequence: Tensor
    token: Tensor  #: first token of the chunk in q
    length: Tensor  #: tokens in the chunk, 0 for one that is only there because the host can't know better
    starts_sequence: Tensor | None  #: bool; given when there is one lane, that starts anew with each sequence
    checkpoint_row: Tensor | None  #: row for the state after the chunk, negative for none
    lanes: Tensor | None  #: the sequence of each lane; None with one lane


def prefill(r: PrefillRequest) -> None:
    shape = (r.num_heads, r.head_size_v, r.head_size_k)
    cu = r.cu_seqlens.long()
    lengths = cu[1:] - cu[:-1]
    read = r.read_rows
    if read is not None:  # a sequence without tokens reads nothing, whatever its entry says
        read = torch.where((lengths > 0) | r.final_state_is_new, read, torch.full_like(read, -1))
    initial = load_rows(r.initial_state, read, r.num_seqs, r.q, shape)
    plan = _make_plan(r, cu, lengths)

    new_output = _Output(r, cu)
    if plan.lanes is None:
        S, finals = torch.zeros_like(initial[:1]), initial.clone()
    else:
        S, finals = initial.index_select(0, plan.lanes), None
    has_checkpoint = None
    if plan.checkpoint_row is not None and _rows.host_reads(r.device):
        has_checkpoint = (plan.checkpoint_row >= 0).tolist()

    for first_step, end_step in _blocks(plan.steps, r):
        low, high = plan.steps[first_step][0], plan.steps[end_step - 1][1]
        block = _Block(r, plan, low, high)
        for first, end in plan.steps[first_step:end_step]:
            part = slice(first - low, end - low)
            if plan.starts_sequence is not None:
                new = plan.starts_sequence[first:end].view(-1, 1, 1, 1)
                S = torch.where(new, initial.index_select(0, plan.sequence[first:end]), S)
            block.step(part, S[: end - first])
            if finals is not None:
                finals.index_copy_(0, plan.sequence[first:end], S)
            if plan.checkpoint_row is not None and (has_checkpoint is None or any(has_checkpoint[first:end])):
                store_rows(r.state_checkpoints, plan.checkpoint_row[first:end], S[: end - first])
        new_output.put(block)
    new_output.finish()

    if r.final_state is None:
        return
    if finals is None:
        finals = torch.empty_like(initial)
        finals.index_copy_(0, plan.lanes, S)
    empty = lengths == 0
    if r.final_state_is_new:
        rows = torch.arange(r.num_seqs, device=r.device)
        finals = torch.where(empty.view(-1, 1, 1, 1), initial, finals)
    else:
        rows = torch.arange(r.num_seqs, device=r.device) if r.write_rows is None else r.write_rows.long()
        rows = torch.where(empty, torch.full_like(rows, -1), rows)
    store_rows(r.final_state, rows, finals)


# --- which chunks ----------------------------------------------------------------------------------


def _make_plan(r: PrefillRequest, cu: Tensor, lengths: Tensor) -> _Plan:
    """Three plans. Where the host can read the lengths (CPU): one lane a sequence, longest first, each as long as it
    has chunks. On a GPU: one lane a sequence, all as long as the longest may be, if that wastes little; else one lane
    that takes all chunks of all sequences in turn. The one lane serves batch invariance too."""
    device, n = r.device, r.num_seqs
    prefix = torch.zeros_like(lengths) if r.prefix_lens is None else r.prefix_lens.long()
    lead = prefix % CHUNK
    counts = torch.where(lengths > 0, (lead + lengths + CHUNK - 1) // CHUNK, torch.zeros_like(lengths))
    on_host = _rows.host_reads(device)
    longest = (r.max_seqlen + CHUNK - 1) // CHUNK + (r.prefix_lens is not None)
    most = r.num_tokens // CHUNK + 2 * n

    lanes = None
    if r.batch_invariant or (not on_host and n * longest > _WASTE * most):
        count = int(counts.sum()) if on_host else most
        ends = counts.cumsum(0)
        chunk = torch.arange(count, device=device)
        sequence = torch.searchsorted(ends, chunk, right=True).clamp_(max=n - 1)
        index = chunk - (ends - counts)[sequence]
        steps = [(i, i + 1) for i in range(count)]
    elif on_host:
        lanes = torch.argsort(counts, descending=True, stable=True)
        chunks = counts[lanes].tolist()
        widths, width = [], n
        for j in range(chunks[0]):
            while chunks[width - 1] <= j:
                width -= 1
            widths.append(width)
        ends = list(itertools.accumulate(widths))
        steps = [(end - width, end) for end, width in zip(ends, widths)]
        sequence = torch.cat([lanes[:w] for w in widths]) if widths else lanes[:0]
        index = torch.tensor([j for j, w in enumerate(widths) for _ in range(w)], dtype=torch.int64, device=device)
    else:
        lanes = torch.arange(n, device=device)
        steps = [(j * n, (j + 1) * n) for j in range(longest)]
        sequence = lanes.repeat(longest)
        index = torch.arange(longest, device=device).repeat_interleave(n)

    if r.num_tokens == 0:
        steps = []  # upper bounds count chunks of sequences that can only be empty
    begin = prefix[sequence] - lead[sequence] + CHUNK * index  # absolute position of the chunk's first slot
    stop = torch.minimum(begin + CHUNK, (prefix + lengths)[sequence])
    begin = torch.maximum(begin, prefix[sequence])
    row = None
    if r.checkpoint_every:
        every = r.checkpoint_every
        starts = r.checkpoint_starts.long()[:n]
        entry = (starts - prefix // every - 1)[sequence] + stop // every
        here = (stop > begin) & (stop % every == 0)
        row = entry
        if r.checkpoint_rows is not None:
            row = _rows.entries(r.checkpoint_rows, entry, here)
        elif on_host and bool((entry[here] < 0).any()):
            raise IndexError("checkpoint_cu_starts holds a negative row")
        row = torch.where(here, row, torch.full_like(row, -1))
    return _Plan(
        steps=steps,
        sequence=sequence,
        token=cu[:-1][sequence] + begin - prefix[sequence],
        length=(stop - begin).clamp_(min=0),
        starts_sequence=(index == 0) if lanes is None else None,
        checkpoint_row=row,
        lanes=lanes,
    )


def _blocks(steps: list[tuple[int, int]], r: PrefillRequest):
    """Ranges of steps whose matrices are made together; a step is never cut."""
    limit = 1 if r.batch_invariant else max(1, _BLOCK_ELEMENTS // (r.num_heads * CHUNK * CHUNK))
    first = 0
    for i in range(1, len(steps) + 1):
        if i == len(steps) or steps[i][1] - steps[first][0] > limit:
            yield first, i
            first = i


# --- the work --------------------------------------------------------------------------------------


class _Block:
    """The token-parallel part of some chunks: everything that does not need the state."""

    def __init__(self, r: PrefillRequest, plan: _Plan, low: int, high: int) -> None:
        self.heads, self.scale = r.num_heads, r.scale
        slot = torch.arange(CHUNK, device=r.device)
        self.valid = slot < plan.length[low:high, None]  # [chunks, 64]
        self.token = torch.where(self.valid, plan.token[low:high, None] + slot, 0)
        flat, valid = self.token.flatten(), self.valid

        def take(x: Tensor, normalise: bool) -> Tensor:  # [T, heads, size] -> [chunks, heads, 64, size], zero where there is no token
            picked = x.index_select(0, flat)
            if normalise:
                wide = picked.float()
                picked = (wide / torch.sqrt((wide * wide).sum(-1, keepdim=True) + 1e-6)).to(x.dtype)
            picked = picked.view(*valid.shape, *x.shape[1:]).transpose(1, 2).float()
            return picked.masked_fill(~valid[:, None, :, None], 0.0)

        self.q, self.k, self.v = take(r.q, r.use_qk_l2norm), take(r.k, r.use_qk_l2norm), take(r.v, False)

        no_token = ~valid[:, None, :]
        log_alpha = self._log_alpha(r, flat)  # float64 [chunks, heads, 64]
        total = log_alpha.masked_fill(no_token, 0.0).cumsum(-1)
        self.gamma = total.exp().float()[..., None]  # [chunks, heads, 64, 1]
        self.to_end = (total[..., -1:] - total).exp().float()[..., None]
        self.gamma_end = self.gamma[:, :, -1:, :]
        # Decay between two tokens; the upper triangle is excluded before exp, where it could overflow.
        between = (total[..., :, None] - total[..., None, :]).float()
        lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=r.device).tril()
        decay = between.masked_fill_(~lower, float("-inf")).exp_()

        beta = self._beta(r, flat).masked_fill(no_token, 0.0)[..., None]
        self.beta = beta
        key_products = self._per_head(self.k @ self.k.transpose(-1, -2), self.k.shape[1])
        strict = (key_products * decay).mul_(beta).tril_(-1)
        self.inverse = _unit_lower_inverse(strict)
        grouped = _repeat(self.k, self.q.shape[1])
        scores = self._per_head(self.q @ grouped.transpose(-1, -2), self.q.shape[1])
        self.scores = scores.mul(decay).mul_(self.scale)
        # A NaN among a sequence's own tokens spreads as it must, one beyond its last token has been masked above.
        self.output = self.v.new_empty(high - low, self.heads, CHUNK, r.head_size_v)

    def _per_head(self, x: Tensor, heads: int) -> Tensor:
        return x.repeat_interleave(self.heads // heads, dim=1) if heads != self.heads else x

    def _by_head(self, x: Tensor, flat: Tensor) -> Tensor:
        return x.index_select(0, flat).view(*self.valid.shape, self.heads).transpose(1, 2)

    def _log_alpha(self, r: PrefillRequest, flat: Tensor) -> Tensor:
        if r.gate == "none":
            return self.v.new_zeros(self.valid.shape[0], self.heads, CHUNK, dtype=torch.float64)
        g = self._by_head(r.g, flat)
        if r.gate == "raw":
            rate = -torch.exp(r.A_log.float())[:, None]
            return (rate * F.softplus(g.float() + r.dt_bias.float()[:, None])).double().clamp_(min=_LOG_ZERO)
        g = g.double()
        return (g.log() if r.gate == "linear" else g).clamp(min=_LOG_ZERO)

    def _beta(self, r: PrefillRequest, flat: Tensor) -> Tensor:
        if r.beta is None:
            return self.v.new_ones(self.valid.shape[0], self.heads, CHUNK)
        beta = self._by_head(r.beta, flat)
        return (torch.sigmoid(beta.float()).to(beta.dtype) if r.beta_is_logit else beta).float()

    def step(self, part: slice, S: Tensor) -> None:
        """One chunk for each lane: writes its output, updates S [lanes, heads, V, K] in place."""
        k, q = self.k[part], self.q[part]
        gamma = self.gamma[part]
        predicted = _times_state(k, S).mul_(gamma)  # [lanes, heads, 64, V]
        v = self._per_head(self.v[part], self.v.shape[1])
        u = self.inverse[part] @ (v - predicted).mul_(self.beta[part])
        out = _times_state(q, S).mul_(gamma * self.scale)
        torch.baddbmm(
            out.flatten(0, 1), self.scores[part].flatten(0, 1), u.flatten(0, 1),
            out=self.output[part].flatten(0, 1),
        )  # fmt: skip
        S.mul_(self.gamma_end[part])
        scaled = u.mul_(self.to_end[part])
        lanes, groups = k.shape[:2]
        if groups == self.heads:
            S.flatten(0, 1).baddbmm_(scaled.flatten(0, 1).transpose(1, 2), k.flatten(0, 1))
        else:  # the heads of a group share k: one product for all their V rows
            size_v, size_k = S.shape[2:]
            stacked = scaled.view(lanes, groups, -1, CHUNK, size_v).transpose(2, 3).reshape(lanes * groups, CHUNK, -1)
            S.view(lanes * groups, -1, size_k).baddbmm_(stacked.transpose(1, 2), k.flatten(0, 1))


def _repeat(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _times_state(x: Tensor, S: Tensor) -> Tensor:
    """[lanes, groups, 64, K] x S [lanes, heads, V, K] -> [lanes, heads, 64, V]; heads of a group share x."""
    lanes, heads, size_v, size_k = S.shape
    groups = x.shape[1]
    product = x @ S.reshape(lanes, groups, -1, size_k).transpose(-1, -2)  # [lanes, groups, 64, heads / groups * V]
    if groups == heads:
        return product
    return product.view(lanes, groups, CHUNK, -1, size_v).transpose(2, 3).reshape(lanes, heads, CHUNK, size_v)


def _unit_lower_inverse(strict: Tensor, base: int = 8) -> Tensor:
    """(I + strict)^-1 for strictly lower triangular [..., 64, 64] matrices.

    Forward substitution inside diagonal blocks, then blocks are merged in pairs:
    [[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]]. Unlike a product of powers of ``strict`` this stays exact
    when keys repeat and the powers would grow like binomial coefficients.
    """
    lead, n = strict.shape[:-2], strict.shape[-1]
    strict = strict.reshape(-1, n, n)
    count = strict.shape[0]
    inverse = torch.zeros_like(strict)
    inverse.diagonal(dim1=-2, dim2=-1).fill_(1.0)

    def diagonal(x: Tensor, size: int) -> Tensor:  # [count, n / size, size, size], a view of the diagonal blocks
        return x.view(count, n // size, size, n // size, size).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)

    small, done = diagonal(strict, base), diagonal(inverse, base)
    for row in range(1, base):
        done[:, :, row, :row] = -(small[:, :, row, None, :row] @ done[:, :, :row, :row])[:, :, 0]
    size = base
    while size < n:
        blocks = diagonal(inverse, 2 * size)
        corner = diagonal(strict, 2 * size)[:, :, size:, :size]
        blocks[:, :, size:, :size] = -(blocks[:, :, size:, size:] @ corner @ blocks[:, :, :size, :size])
        size *= 2
    return inverse.view(*lead, n, n)


class _Output:
    """Puts chunk outputs at their tokens. Tokens of no sequence keep what a given output holds, or become zero."""

    def __init__(self, r: PrefillRequest, cu: Tensor) -> None:
        self.r = r
        self.cu = cu
        # On a GPU the host does not know which slots hold tokens: empty slots write to an extra row.
        self.spare = None
        if not _rows.host_reads(r.device):
            self.spare = r.output.new_empty((r.num_tokens + 1, *r.output.shape[1:]))

    def put(self, block: _Block) -> None:
        values = block.output.transpose(1, 2).to(self.r.output.dtype).flatten(0, 1)
        if self.spare is None:
            kept = block.valid.flatten().nonzero()[:, 0]
            if kept.numel() < values.shape[0]:
                values = values[kept]
            self.r.output.index_copy_(0, block.token.flatten()[kept], values)
        else:
            token = torch.where(block.valid, block.token, self.r.num_tokens)
            self.spare.index_copy_(0, token.flatten(), values)

    def finish(self) -> None:
        r, cu = self.r, self.cu
        if self.spare is None:
            if r.output_is_new:
                r.output[: int(cu[0])] = 0
                r.output[int(cu[-1]) :] = 0
            return
        token = torch.arange(r.num_tokens, device=r.device)
        covered = ((token >= cu[0]) & (token < cu[-1])).view(-1, 1, 1)
        other = r.output.new_zeros(()) if r.output_is_new else r.output
        r.output.copy_(torch.where(covered, self.spare[:-1], other))
