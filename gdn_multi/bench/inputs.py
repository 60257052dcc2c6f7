"""The tensors of a row, drawn as a GDN model would make them.

Gates as GDN models initialise them: A uniform in [1, 16] a head, dt log-uniform in [1e-3, 0.1] a head (its inverse
softplus is dt_bias), a small raw gate a token; alpha = exp(-A * softplus(a + dt_bias)). Eight heads' errors depend on
their eight dt; with «dt of a token» alpha = exp(-A * dt), dt drawn like that a head and token. The two other kinds of
gates of the accuracy table are uniform in their range. Everything a call needs in any form lies here, so that all forms of a
call (alpha or log alpha or raw gates, beta or logits, normalised or raw q and k) have one right answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .rows import DecodeRow, PrefillRow


def _heads_and_steps(heads: int, steps: tuple[int, ...], generator: torch.Generator, device: torch.device):
    """A of each head and dt of each head, or of each head and token, float32."""
    A = 1 + 15 * torch.rand(heads, generator=generator, device=device)
    low, high = torch.tensor(1e-3).log().item(), torch.tensor(0.1).log().item()
    return A, torch.exp(low + (high - low) * torch.rand(steps, generator=generator, device=device))


def _gate_parameters(heads: int, generator: torch.Generator, device: torch.device):
    """A_log and dt_bias of a freshly initialised model, float32."""
    A, dt = _heads_and_steps(heads, (heads,), generator, device)
    return torch.log(A), dt + torch.log(-torch.expm1(-dt))


def _normalise(x: torch.Tensor) -> torch.Tensor:
    x32 = x.float()
    return (x32 * torch.rsqrt((x32 * x32).sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


@dataclass
class Pages:
    """A page table whose sequences have a prefix, by default one full page, and the pool behind it."""

    pool: torch.Tensor
    page_indices: torch.Tensor
    page_indptr: torch.Tensor
    last_page_len: torch.Tensor
    page_size: int
    read: list[int]  #: page that holds each sequence's initial state
    last: list[int]  #: page that holds each sequence's final state


@dataclass
class PrefillInputs:
    row: PrefillRow
    q_raw: torch.Tensor
    k_raw: torch.Tensor
    q: torch.Tensor  #: normalised, rounded to the row's dtype
    k: torch.Tensor
    v: torch.Tensor
    alpha: torch.Tensor  #: float32
    log_alpha: torch.Tensor  #: float32
    beta: torch.Tensor  #: float32; rounded through the row's dtype as a sigmoid in the kernel rounds it
    a: torch.Tensor | None  #: raw gate of the row's dtype; None where gates were drawn as alpha
    b: torch.Tensor  #: beta's logits, of the row's dtype
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    cu_seqlens: torch.Tensor  #: int32
    cu_seqlens_64: torch.Tensor
    initial_state: torch.Tensor  #: [N, H, V, K]
    initial_state_kv: torch.Tensor  #: [N, H, K, V], for peers that keep states that way
    max_seqlen: int
    scale: float
    output: torch.Tensor  #: poisoned before each check
    final_state: torch.Tensor
    pages: Pages | None

    @property
    def num_seqs(self) -> int:
        return len(self.row.lengths)


def draw_prefill(row: PrefillRow, device: torch.device, seed: int, page_size: int) -> PrefillInputs:
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, row.dtype)
    tokens, hq, hv, d = row.tokens, row.q_heads, row.v_heads, row.head_size

    def randn(*shape):
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32)

    q_raw, k_raw, v = (randn(tokens, h, d).to(dtype) for h in (hq, hq, hv))
    b = randn(tokens, hv).to(dtype)
    beta = torch.sigmoid(b.float()).to(dtype).float()
    a = a_log = dt_bias = None
    if row.gates == "model":
        a_log, dt_bias = _gate_parameters(hv, generator, device)
        a = (0.1 * randn(tokens, hv)).to(dtype)
        log_alpha = (-a_log.double().exp() * F.softplus(a.double() + dt_bias.double())).float()
        alpha = log_alpha.double().exp().float()
    elif row.gates == "token":
        A, dt = _heads_and_steps(hv, (tokens, hv), generator, device)
        log_alpha = (-A.double() * dt.double()).float()
        alpha = log_alpha.double().exp().float()
    else:
        low = 0.9999 if row.gates == "slow" else 0.5
        alpha = low + (1 - low) * torch.rand(tokens, hv, generator=generator, device=device)
        log_alpha = alpha.double().log().float()
    bounds = torch.tensor((0,) + row.lengths).cumsum(0)
    initial = (0.25 * randn(len(row.lengths), hv, d, d)).to(getattr(torch, row.state_dtype))
    inputs = PrefillInputs(
        row=row, q_raw=q_raw, k_raw=k_raw, q=_normalise(q_raw), k=_normalise(k_raw), v=v,
        alpha=alpha, log_alpha=log_alpha, beta=beta, a=a, b=b, A_log=a_log, dt_bias=dt_bias,
        cu_seqlens=bounds.to(device, torch.int32), cu_seqlens_64=bounds.to(device, torch.int64),
        initial_state=initial, initial_state_kv=initial.transpose(-1, -2).contiguous(),
        max_seqlen=max(row.lengths), scale=d**-0.5,
        output=torch.empty(tokens, hv, d, device=device, dtype=dtype),
        final_state=torch.empty_like(initial), pages=None,
    )  # fmt: skip
    inputs.pages = _prefill_pages(inputs, page_size, seed)
    return inputs


def _prefill_pages(inputs: PrefillInputs, page_size: int, seed: int) -> Pages:
    row, device = inputs.row, inputs.q.device
    prefixes = row.prefixes or (page_size,) * len(row.lengths)
    totals = [prefix + length for prefix, length in zip(prefixes, row.lengths)]
    counts = [-(-tokens // page_size) for tokens in totals]
    total = sum(counts)
    ids = torch.randperm(total + 1, generator=torch.Generator().manual_seed(seed))[:total]  # one page stays unused
    indptr = torch.tensor([0] + counts).cumsum(0)
    last_len = torch.tensor([(tokens - 1) % page_size + 1 for tokens in totals])
    # A prefix has at least one token: its state is in the page that holds the last of them.
    read = ids[indptr[:-1] + torch.tensor([(prefix - 1) // page_size for prefix in prefixes])].tolist()
    last = ids[indptr[1:] - 1].tolist()
    shape = (total + 1,) + inputs.initial_state.shape[1:]
    pool = torch.full(shape, float("nan"), device=device, dtype=inputs.initial_state.dtype)
    pool[torch.tensor(read, device=device)] = inputs.initial_state
    to = lambda t: t.to(device, torch.int32)  # noqa: E731
    return Pages(pool, to(ids), to(indptr), to(last_len), page_size, read, last)


@dataclass
class DecodeInputs:
    row: DecodeRow
    q: torch.Tensor  #: [B, 1, H, K]
    k: torch.Tensor
    v: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    a: torch.Tensor  #: [B, 1, HV], of the row's dtype
    b: torch.Tensor
    states: torch.Tensor  #: [B, HV, V, K], the states before the token
    scale: float
    output: torch.Tensor
    pages: Pages
    read_rows: torch.Tensor  #: int32 [B]
    write_rows: torch.Tensor


def draw_decode(row: DecodeRow, device: torch.device, seed: int, page_size: int) -> DecodeInputs:
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype, state_dtype = getattr(torch, row.dtype), getattr(torch, row.state_dtype)
    batch, hq, hv, d = row.batch, row.q_heads, row.v_heads, row.head_size

    def randn(*shape):
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32)

    a_log, dt_bias = _gate_parameters(hv, generator, device)
    states = (0.25 * randn(batch, hv, d, d)).to(state_dtype)
    opens = [i % 8 == 7 for i in range(batch)]  # one sequence in eight opens a new page with this token
    counts = [2 if new else 1 for new in opens]
    total = sum(counts)
    ids = torch.randperm(total + 1, generator=torch.Generator().manual_seed(seed))[:total]
    indptr = torch.tensor([0] + counts).cumsum(0)
    last_len = torch.tensor([1 if new else 2 + i % (page_size - 2) for i, new in enumerate(opens)])
    read, write = ids[indptr[:-1]], ids[indptr[1:] - 1]
    pool = torch.full((total + 1, hv, d, d), float("nan"), device=device, dtype=state_dtype)
    pool[read.to(device)] = states
    to = lambda t: t.to(device, torch.int32)  # noqa: E731
    pages = Pages(pool, to(ids), to(indptr), to(last_len), page_size, read.tolist(), write.tolist())
    return DecodeInputs(
        row=row, q=randn(batch, 1, hq, d).to(dtype), k=randn(batch, 1, hq, d).to(dtype),
        v=randn(batch, 1, hv, d).to(dtype), A_log=a_log, dt_bias=dt_bias, a=(0.1 * randn(batch, 1, hv)).to(dtype),
        b=randn(batch, 1, hv).to(dtype), states=states, scale=d**-0.5,
        output=torch.empty(batch, 1, hv, d, device=device, dtype=dtype), pages=pages,
        read_rows=to(read), write_rows=to(write),
    )  # fmt: skip
