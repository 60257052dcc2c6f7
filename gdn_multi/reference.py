"""The recurrence of the contract in float64, token by token: it defines what is right.

Slow on purpose, short on purpose. No result of the package is computed with it; tests, the demo, ``compare`` and
GDN_MULTI_CHECK hold results and rows against it. Inputs may have any dtype and device; results are new float64 tensors on
the same device, and nothing is written in place. The only roundings are those that the contract asks for (a normalised q or k to q's
dtype, the sigmoid of a beta logit to beta's dtype); a stored state is rounded by whoever compares.
"""

from __future__ import annotations

import torch
from torch import Tensor


def step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One token: S [..., V, K], q and k [..., K], v [..., V], alpha and beta [...] -> (o [..., V], new S)."""
    S = alpha[..., None, None] * S
    u = beta[..., None] * (v - (S @ k[..., None])[..., 0])
    S = S + u[..., :, None] * k[..., None, :]
    return scale * (S @ q[..., None])[..., 0], S


def raw_gate(g: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """alpha = exp(-exp(A_log) * softplus(g + dt_bias)), float64."""
    x = g.double() + dt_bias.double()
    softplus = torch.logaddexp(x, torch.zeros_like(x))
    return torch.exp(-torch.exp(A_log.double()) * softplus)


def normalise(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last dimension, float64."""
    x = x.double()
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def expand_heads(x: Tensor, heads: int) -> Tensor:
    """[..., H, D] -> [..., heads, D]: state head h reads head h // (heads // H)."""
    return x.repeat_interleave(heads // x.shape[-2], dim=-2)


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    *,
    cu_seqlens: Tensor,
    initial_state: Tensor | None = None,
    gate_domain: str = "linear",
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    beta_is_logit: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """All tokens of all sequences.

    q [T, Hq, K], k [T, Hk, K], v [T, Hv, V], g and beta [T, Ho], cu_seqlens [N + 1], initial_state [N, Ho, V, K] or
    None for zeros, with Ho = max(Hq, Hv). Returns the output [T, Ho, V] (zero for tokens of no sequence) and, for each
    sequence, the states [length + 1, Ho, V, K] before its first token and after each of them.
    """
    heads = max(q.shape[1], v.shape[1])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if g is None:
        alpha = q.new_ones(q.shape[0], heads, dtype=torch.float64)
    elif use_gate_in_kernel:
        alpha = raw_gate(g, A_log, dt_bias)
    else:
        alpha = torch.exp(g.double()) if gate_domain == "log" else g.double()
    if beta is None:
        weight = torch.ones_like(alpha)
    elif beta_is_logit:
        weight = torch.sigmoid(beta.float()).to(beta.dtype).double()
    else:
        weight = beta.double()
    if use_qk_l2norm_in_kernel:
        q, k = normalise(q).to(q.dtype), normalise(k).to(k.dtype)
    q, k, v = (expand_heads(x.double(), heads) for x in (q, k, v))

    output = q.new_zeros(q.shape[0], heads, v.shape[-1])
    states = []
    bounds = cu_seqlens.tolist()
    for i, (start, end) in enumerate(zip(bounds, bounds[1:])):
        S = q.new_zeros(heads, v.shape[-1], q.shape[-1]) if initial_state is None else initial_state[i].double()
        after = [S]
        for t in range(start, end):
            output[t], S = step(S, q[t], k[t], v[t], alpha[t], weight[t], scale)
            after.append(S)
        states.append(torch.stack(after))
    return output, states


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    *,
    state: Tensor,
    use_qk_l2norm: bool = True,
) -> tuple[Tensor, Tensor]:
    """T tokens for each of B sequences.

    q and k [B, T, H, K], v [B, T, HV, V], a and b [B, T, HV], A_log and dt_bias [HV], state [B, HV, V, K]. Returns the
    output [B, T, HV, V] and the state after each token [B, T, HV, V, K].
    """
    heads = v.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    alpha, beta = raw_gate(a, A_log, dt_bias), torch.sigmoid(b.double())
    if use_qk_l2norm:
        q, k = normalise(q), normalise(k)
    q, k, v = expand_heads(q.double(), heads), expand_heads(k.double(), heads), v.double()
    S, outputs, states = state.double(), [], []
    for t in range(q.shape[1]):
        o, S = step(S, q[:, t], k[:, t], v[:, t], alpha[:, t], beta[:, t], scale)
        outputs.append(o)
        states.append(S)
    return torch.stack(outputs, 1), torch.stack(states, 1)


def prefill_slots(
    cu_seqlens: Tensor, page_indices: Tensor, page_indptr: Tensor, page_size: int, last_page_len: Tensor
) -> dict[str, list]:
    """Rows of a paged prefill: lists over sequences ``read``, ``write``, ``starts``, ``prefix`` as in
    GDNPagedPrefillSlots, and ``checkpoints``, the page of each boundary that the new tokens cross."""
    pages, indptr, last, cu = (x.tolist() for x in (page_indices, page_indptr, last_page_len, cu_seqlens))
    rows: dict[str, list] = {"read": [], "write": [], "starts": [], "prefix": [], "checkpoints": []}
    for i in range(len(last)):
        first, end, new = indptr[i], indptr[i + 1], cu[i + 1] - cu[i]
        total = (end - first - 1) * page_size + last[i]
        prefix = total - new
        start = first + prefix // page_size
        rows["prefix"].append(prefix)
        rows["starts"].append(start)
        rows["read"].append(pages[first + (prefix - 1) // page_size] if prefix > 0 else -1)
        rows["write"].append(pages[end - 1] if new > 0 and total % page_size != 0 else -1)
        rows["checkpoints"].append(pages[start : first + total // page_size] if new > 0 else [])
    return rows


def decode_slots(page_indices: Tensor, page_indptr: Tensor, last_page_len: Tensor) -> tuple[list[int], list[int]]:
    """Rows of a paged decode: (read, write), lists over sequences."""
    pages, indptr, last = page_indices.tolist(), page_indptr.tolist(), last_page_len.tolist()
    read = [pages[end - 2] if n == 1 else pages[end - 1] for end, n in zip(indptr[1:], last)]
    return read, [pages[end - 1] for end in indptr[1:]]
