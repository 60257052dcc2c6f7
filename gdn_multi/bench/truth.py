"""What the answer of a row is, in float64, fast enough to be asked for each row.

The recurrence of ``gdn_multi.reference`` in its chunked form: the same algebra, float64 throughout, all sequences at
once, 64 tokens a step. tests/backends/test_bench.py holds it to the token-by-token reference within 1e-10. Tables of
speed ask for two heads only (the first and the last), the table of accuracy for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from .inputs import DecodeInputs, PrefillInputs

CHUNK = 64


def chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_alpha: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    lengths: Sequence[int],
    initial_state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [T, H, V] and final states [N, H, V, K] in float64; every tensor has H heads, log_alpha is finite."""
    device, n = q.device, len(lengths)
    chunks = max(1, -(-max(lengths) // CHUNK))
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)

    def spread(x):  # [T, H, *] -> [N, H, chunks, CHUNK, *], padded with zeros: alpha 1 and beta 0 change nothing
        out = torch.zeros((n, chunks * CHUNK) + x.shape[1:], dtype=torch.float64, device=device)
        for i, length in enumerate(lengths):
            out[i, :length] = x[bounds[i] : bounds[i + 1]]
        return out.unflatten(1, (chunks, CHUNK)).movedim(3, 1)

    q, k, v, gate, b = spread(q), spread(k), spread(v), spread(log_alpha), spread(beta)
    total = gate.cumsum(-1)  # log of the decay since the chunk began
    difference = total[..., :, None] - total[..., None, :]
    decay = torch.exp(difference.tril()).tril()  # decay from token j to token i >= j
    strictly = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=device).tril(-1)
    lower = (b[..., None] * (k @ k.mT) * decay).where(strictly, 0.0)
    eye = torch.eye(CHUNK, dtype=torch.float64, device=device)
    right = torch.cat((b[..., None] * v, (b * total.exp())[..., None] * k), dim=-1)
    solved = torch.linalg.solve_triangular(eye + lower, right, upper=False, unitriangular=True)
    u, w = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    scores = scale * (q @ k.mT) * decay
    q_in = scale * q * total.exp()[..., None]
    k_out = k * torch.exp(total[..., -1:] - total)[..., None]
    last = total[..., -1].exp()
    state = initial_state.to(torch.float64)
    outputs = torch.empty_like(u)
    for c in range(chunks):
        new = u[:, :, c] - w[:, :, c] @ state.mT
        outputs[:, :, c] = q_in[:, :, c] @ state.mT + scores[:, :, c] @ new
        state = last[:, :, c, None, None] * state + new.mT @ k_out[:, :, c]
    packed = outputs.movedim(1, 3).flatten(1, 2)
    return torch.cat([packed[i, :length] for i, length in enumerate(lengths)]), state


def prefill_truth(inputs: PrefillInputs, heads: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [T, len(heads), V] and final state [N, len(heads), V, K] of the given state heads."""
    index = torch.tensor(list(heads), device=inputs.q.device)
    group = inputs.row.v_heads // inputs.row.q_heads
    log_alpha = inputs.log_alpha[:, index]
    if inputs.a is not None:  # from the raw gate itself, unrounded
        raw = inputs.a[:, index].double() + inputs.dt_bias[index].double()
        log_alpha = -inputs.A_log[index].double().exp() * F.softplus(raw)
    return chunked(
        inputs.q[:, index // group], inputs.k[:, index // group], inputs.v[:, index], log_alpha,
        inputs.beta[:, index], inputs.scale, inputs.row.lengths, inputs.initial_state[:, index],
    )  # fmt: skip


def decode_truth(inputs: DecodeInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B, 1, HV, V] and states [B, HV, V, K] after the token."""
    group = inputs.row.v_heads // inputs.row.q_heads
    q, k = (x.double().squeeze(1).repeat_interleave(group, dim=1) for x in (inputs.q, inputs.k))
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    v, a, b = (x.double().squeeze(1) for x in (inputs.v, inputs.a, inputs.b))
    alpha = torch.exp(-inputs.A_log.double().exp() * F.softplus(a + inputs.dt_bias.double()))
    state = alpha[..., None, None] * inputs.states.double()
    delta = b.sigmoid()[..., None] * (v - (state @ k[..., None]).squeeze(-1))
    state = state + delta[..., None] * k[..., None, :]
    return inputs.scale * (state @ q[..., None]).squeeze(-1)[:, None], state


def relative_error(x: torch.Tensor, right: torch.Tensor) -> float:
    """Norm of the difference over the norm of the truth; NaN or infinity anywhere gives infinity."""
    difference = (x.double() - right).norm() / right.norm().clamp_min(1e-300)
    value = difference.item()
    return value if value == value else float("inf")
