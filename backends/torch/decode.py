"""Decode: the recurrence token by token, vectorised over sequences and heads, the state in float32."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from gdn_multi.request import DecodeRequest

from .rows import load_rows, round_to, store_rows

#: Sequences taken at a time, so that the float32 copies of their states stay small.
_BLOCK_BYTES = 64 << 20


def decode(request: DecodeRequest) -> None:
    heads, size_v, size_k = request.num_heads, request.head_size_v, request.head_size_k
    block = max(1, _BLOCK_BYTES // (4 * heads * size_v * size_k))
    if request.batch_invariant:
        block = 1  # every operation then has the same shape, whatever the batch
    if block >= request.batch:
        _decode(request)
        return
    for start in range(0, request.batch, block):
        part = slice(start, start + block)
        rows = dict(read_rows=_part(request.read_rows, part), write_rows=_part(request.write_rows, part))
        names = ("q", "k", "v", "a", "b", "output")
        tensors = {name: getattr(request, name)[part] for name in names}
        buffer = _part(request.intermediate_states, part)
        state = request.state if request.read_rows is not None else request.state[part]
        _decode(
            replace(request, batch=tensors["q"].shape[0], state=state, intermediate_states=buffer, **rows, **tensors)
        )


def _part(tensor, part):
    return None if tensor is None else tensor[part]


def _decode(r: DecodeRequest) -> None:
    shape = (r.num_heads, r.head_size_v, r.head_size_k)
    padding = None
    if r.read_rows is not None:
        padding = (r.read_rows < 0) | (r.write_rows < 0)
    read = r.read_rows if padding is None else torch.where(padding, torch.full_like(r.read_rows, -1), r.read_rows)
    S = load_rows(r.state, read, r.batch, r.q, shape).flatten(0, 1)  # [B * HV, V, K]

    alpha = torch.exp(-torch.exp(r.A_log.float()) * F.softplus(r.a.float() + r.dt_bias.float()))
    beta = torch.sigmoid(r.b.float())
    q, k, v = r.q.float(), r.k.float(), r.v.float()
    if r.use_qk_l2norm:
        q, k = q * _inverse_norm(q), k * _inverse_norm(k)
    group = r.num_heads // r.num_q_heads

    for t in range(r.num_tokens):
        # [B * HV, ...] of this token
        qt, kt = (x[:, t].repeat_interleave(group, dim=1).flatten(0, 1) for x in (q, k))
        vt, at, bt = v[:, t].flatten(0, 1), alpha[:, t].flatten(), beta[:, t].flatten()
        S.mul_(at[:, None, None])
        u = bt[:, None] * (vt - torch.bmm(S, kt[:, :, None])[:, :, 0])
        S.baddbmm_(u[:, :, None], kt[:, None, :])
        o = r.scale * torch.bmm(S, qt[:, :, None])[:, :, 0]
        o = o.view(r.batch, r.num_heads, r.head_size_v)
        if padding is not None:
            o = o.masked_fill(padding[:, None, None], 0.0)
        r.output[:, t] = o.to(r.output.dtype)
        if r.intermediate_states is not None:
            _keep(r.intermediate_states[:, t], S.view(r.batch, *shape), padding)

    if r.update_state:
        S = S.view(r.batch, *shape)
        if padding is None:
            r.state.copy_(round_to(S, r.state.dtype))
        else:
            store_rows(r.state, torch.where(padding, torch.full_like(r.write_rows, -1), r.write_rows), S)


def _keep(target: Tensor, values: Tensor, padding) -> None:
    """Copy all but the padded sequences."""
    rounded = round_to(values, target.dtype)
    if padding is not None:
        rounded = torch.where(padding.view(-1, 1, 1, 1), target, rounded)
    target.copy_(rounded)


def _inverse_norm(x: Tensor) -> Tensor:
    return torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
