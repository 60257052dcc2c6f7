"""Random calls with what they must give: inputs, poisoned pools, page tables, expected results.

Everything that a call must not read is NaN or infinite, everything that it must not write is compared to the bit.
All randomness comes from a CPU generator, so a case is the same on every device.

    Tokens       q, k, v, gates and betas of packed sequences, and the reference's answer for them
    Pool         a state pool with poisoned rows and, on request, padding between them
    PagedBatch   a paged prefill, built a sequence at a time, with its page table and the expected pages
    DecodeStep   q, k, v, a, b of a decode call, and the reference's answer
    PagedDecode  a paged decode, built a sequence at a time
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import tolerances
import torch

from gdn_multi import reference

NAN, INF = float("nan"), float("inf")
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
INT_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Dims(NamedTuple):
    """Heads of q, k and v and the two head sizes."""

    q: int = 2
    k: int = 2
    v: int = 4
    K: int = 64
    V: int = 64

    @property
    def heads(self) -> int:
        return max(self.q, self.v)


# --- bits -----------------------------------------------------------------------------------------


def bits(x: torch.Tensor) -> torch.Tensor:
    """A copy of x's bits as integers, so that NaN equals NaN and -0 differs from 0."""
    return x.detach().contiguous().view(INT_OF_SIZE[x.element_size()]).cpu().clone()


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.dtype == y.dtype and torch.equal(bits(x), bits(y))


def saturated(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x as ``dtype``, round to nearest even; float8 saturates instead of overflowing."""
    if dtype in FLOAT8:
        top = torch.finfo(dtype).max
        x = x.float().clamp(-top, top)
    return x.to(dtype)


# --- inputs ---------------------------------------------------------------------------------------


def model_alpha(rng: torch.Generator, tokens: int, heads: int) -> torch.Tensor:
    """Linear gates as GDN models initialise them: A in [1, 16], dt log-uniform in [1e-3, 0.1]."""
    A = 1 + 15 * torch.rand(heads, generator=rng)
    dt = torch.exp(torch.rand(tokens, heads, generator=rng) * math.log(100.0) + math.log(1e-3))
    return torch.exp(-A * dt)


def unit(x: torch.Tensor) -> torch.Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def poison_rows(x: torch.Tensor, start: int, end: int) -> None:
    """NaN, infinity and minus infinity in turn."""
    for t in range(start, end):
        x[t] = (NAN, INF, -INF)[t % 3]


class Tokens:
    """Packed tokens of several sequences.

    ``before`` and ``after`` add poisoned tokens that belong to no sequence. ``fused`` makes q, k, v (and g, beta)
    slices of one projection whose other columns are poisoned. Gates: none, linear, log, raw (float32), raw_half (raw
    in q's dtype). Betas: none, plain, logit (float32), logit_half.
    """

    def __init__(
        self,
        dims: Dims,
        lengths: Sequence[int],
        *,
        device="cpu",
        dtype=torch.float32,
        gate: str = "linear",
        beta: str = "plain",
        l2norm: bool = False,
        scale: float | None = None,
        before: int = 0,
        after: int = 0,
        fused: bool = False,
        index_dtype=torch.int32,
        seed: int = 0,
    ) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.dims, self.lengths, self.dtype, self.device = dims, list(lengths), dtype, torch.device(device)
        self.scale, self.l2norm = scale, l2norm
        bounds = [before]
        for length in lengths:
            bounds.append(bounds[-1] + length)
        self.bounds = bounds
        T = self.num_tokens = bounds[-1] + after
        H = dims.heads

        q, k = torch.randn(T, dims.q, dims.K, generator=rng), torch.randn(T, dims.k, dims.K, generator=rng)
        v = torch.randn(T, dims.v, dims.V, generator=rng)
        if l2norm:
            q, k = 3 * q, 0.5 * k  # lengths that a missing norm would show at once
        else:
            q, k = unit(q), unit(k)
        alpha, logit = model_alpha(rng, T, H), torch.randn(T, H, generator=rng)

        self.A_log = self.dt_bias = None
        if gate == "none":
            g = None
        elif gate == "linear":
            g = alpha
        elif gate == "log":
            g = torch.log(alpha)
        elif gate in ("raw", "raw_half"):
            self.A_log = torch.log(1 + 15 * torch.rand(H, generator=rng))
            dt = torch.exp(torch.rand(H, generator=rng) * math.log(100.0) + math.log(1e-3))
            self.dt_bias = dt + torch.log(-torch.expm1(-dt))  # the inverse of softplus
            g = torch.randn(T, H, generator=rng)
            if gate == "raw_half":
                g = g.to(dtype)
        else:
            raise ValueError(gate)
        self.gate = gate
        self.beta_kind = beta
        b = {"none": None, "plain": torch.sigmoid(logit), "logit": logit, "logit_half": logit.to(dtype)}[beta]

        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        for x in (q, k, v, g, b):
            if x is not None:
                poison_rows(x, 0, before)
                poison_rows(x, bounds[-1], T)
        if fused:
            q, k, v = self._slices(q, k, v)
            if g is not None and b is not None and g.dtype == b.dtype:
                g, b = self._slices(g, b)
        self.q, self.k, self.v, self.g, self.beta = (self._move(x) for x in (q, k, v, g, b))
        self.A_log, self.dt_bias = self._move(self.A_log), self._move(self.dt_bias)
        self.cu_seqlens = torch.tensor(bounds, dtype=index_dtype, device=self.device)

    def _move(self, x: torch.Tensor | None) -> torch.Tensor | None:
        """x on the device with its strides (``Tensor.to`` would make a slice of a projection dense)."""
        if x is None or self.device.type == "cpu":
            return x
        if x.is_contiguous():
            return x.to(self.device)
        return x._base.to(self.device).as_strided(x.shape, x.stride(), x.storage_offset())

    @staticmethod
    def _slices(*parts: torch.Tensor) -> list[torch.Tensor]:
        """Views of one wide tensor [T, ...] in which 8 poisoned columns follow each part."""
        T = parts[0].shape[0]
        widths = [math.prod(x.shape[1:]) for x in parts]
        wide = torch.full((T, sum(widths) + 8 * len(parts)), NAN, dtype=parts[0].dtype)
        views, at = [], 0
        for x, width in zip(parts, widths):
            wide[:, at : at + width] = x.reshape(T, width)
            strides = (wide.stride(0), *x.stride()[1:])
            views.append(wide.as_strided(x.shape, strides, at))
            at += width + 8
        return views

    @property
    def num_seqs(self) -> int:
        return len(self.lengths)

    def span(self, i: int) -> slice:
        return slice(self.bounds[i], self.bounds[i + 1])

    def gates(self) -> dict:
        """The arguments of both prefill functions that say how gates and betas are to be read."""
        extra: dict = {"use_qk_l2norm_in_kernel": self.l2norm}
        if self.gate == "log":
            extra["gate_domain"] = "log"
        if self.gate in ("raw", "raw_half"):
            extra.update(use_gate_in_kernel=True, A_log=self.A_log, dt_bias=self.dt_bias)
        if self.beta_kind in ("logit", "logit_half"):
            extra["beta_is_logit"] = True
        return extra

    def arguments(self, **more) -> dict:
        """Keyword arguments of ``chunk_gated_delta_rule``."""
        return dict(
            q=self.q, k=self.k, v=self.v, g=self.g, beta=self.beta, scale=self.scale, cu_seqlens=self.cu_seqlens,
            **self.gates(), **more,
        )  # fmt: skip

    def reference(self, initial: torch.Tensor | None = None):
        """(output [T, Ho, V], states a sequence), float64 on the CPU; ``initial`` has one row a sequence."""
        arguments = {n: x.cpu() if isinstance(x, torch.Tensor) else x for n, x in self.arguments().items()}
        return reference.prefill(**arguments, initial_state=None if initial is None else initial.cpu().double())

    def check_output(self, output: torch.Tensor, expected: torch.Tensor, *, untouched=None) -> None:
        """Each sequence's rows against ``expected``; the rows of no sequence are zero, or as in ``untouched``."""
        assert output.shape == (self.num_tokens, self.dims.heads, self.dims.V), tuple(output.shape)
        assert output.dtype == self.dtype, output.dtype
        for i in range(self.num_seqs):
            if self.lengths[i]:
                allowed = tolerances.prefill_output(self.dtype)
                tolerances.assert_close(
                    output[self.span(i)], expected[self.span(i)], allowed, f"output of sequence {i}"
                )
        outside = [t for t in range(self.num_tokens) if not self.bounds[0] <= t < self.bounds[-1]]
        wanted = torch.zeros_like(output) if untouched is None else untouched
        for t in outside:
            assert same_bits(output[t], wanted[t]), f"output of token {t}, which belongs to no sequence"

    def new_output(self, *, padded: bool = False) -> torch.Tensor:
        """An output to be given to a call: NaN everywhere, so that a row that is not written shows."""
        H, V = self.dims.heads, self.dims.V
        if padded:
            wide = torch.full((self.num_tokens, H * V + 24), NAN, dtype=self.dtype, device=self.device)
            return wide[:, : H * V].unflatten(1, (H, V))
        return torch.full((self.num_tokens, H, V), NAN, dtype=self.dtype, device=self.device)


def random_states(rows: int, dims: Dims, seed: int = 1) -> torch.Tensor:
    """Random states, far from symmetric, float32 [rows, Ho, V, K] on the CPU."""
    rng = torch.Generator().manual_seed(seed)
    return 0.3 * torch.randn(rows, dims.heads, dims.V, dims.K, generator=rng)


class Pool:
    """A state pool in which every row is poison until it is set, with ``padding`` poisoned elements after each row."""

    def __init__(self, rows: int, dims: Dims, dtype=torch.float32, device="cpu", *, padding: int = 0) -> None:
        self.dims, self.dtype = dims, dtype
        block = dims.heads * dims.V * dims.K
        flat = torch.full((rows, block + padding), NAN, dtype=torch.float32)
        if dtype != torch.float8_e4m3fn:  # which has no infinity
            flat[1::2, ::3] = INF
        self.storage = flat.to(dtype).to(device)
        self.tensor = self.storage.as_strided((rows, dims.heads, dims.V, dims.K), self._strides(block + padding))
        self._snapshot: torch.Tensor | None = None

    def _strides(self, row: int):
        return (row, self.dims.V * self.dims.K, self.dims.K, 1)

    def set(self, row: int, value: torch.Tensor) -> None:
        self.tensor[row].copy_(saturated(value, self.dtype))

    def rows(self, indices: Sequence[int]) -> torch.Tensor:
        """Float64 copies of some rows on the CPU; zeros for a negative one. What a call would read."""
        dims = self.dims
        zero = torch.zeros(dims.heads, dims.V, dims.K, dtype=torch.float64)
        picked = [self.tensor[i].cpu().double() if i >= 0 else zero for i in indices]
        return torch.stack(picked) if picked else zero[None][:0]

    def remember(self) -> Pool:
        self._snapshot = bits(self.storage)
        return self

    def check(self, written: dict[int, torch.Tensor], tolerance: float) -> None:
        """The rows in ``written`` against their expected values, and every other bit unchanged since remember()."""
        assert self._snapshot is not None, "remember() was not called before the call"
        now, block = bits(self.storage), self.dims.heads * self.dims.V * self.dims.K
        for row in range(self.tensor.shape[0]):
            changed = now[row] != self._snapshot[row]
            assert not changed[block:].any(), f"the padding after row {row} was written"
            if row in written:
                tolerances.assert_close(self.tensor[row], written[row], tolerance, f"row {row} of the pool")
            else:
                assert not changed.any(), f"row {row} of the pool was written, and must not be"

    def check_unchanged(self) -> None:
        self.check({}, 0.0)


def index(values: Iterable[int], dtype=torch.int32, device="cpu") -> torch.Tensor:
    return torch.tensor(list(values), dtype=dtype, device=device)


# --- paged prefill --------------------------------------------------------------------------------


@dataclass
class PagedSequence:
    """One sequence of a paged batch: its tokens and the pages that it owns."""

    prefix: int
    new: int
    pages: list[int]

    @property
    def total(self) -> int:
        return self.prefix + self.new


class PagedBatch:
    """A paged prefill and what it must do.

        batch = PagedBatch(dims, page_size=64).add(prefix=100, new=37).add(prefix=128, new=9, shares=0)
        batch.build(device, seed=3).run(door)

    Page ids are drawn in random order from a pool that has more pages than needed. Only the pages that the call must
    read hold numbers; all others are poison.
    """

    def __init__(self, dims: Dims, page_size: int = 64) -> None:
        self.dims, self.page_size = dims, page_size
        self.sequences: list[PagedSequence] = []
        self._shares: list[int | None] = []

    def add(self, *, prefix: int = 0, new: int = 0, shares: int | None = None) -> PagedBatch:
        """A sequence; with ``shares`` its full prefix pages are those of that earlier sequence, as far as they go."""
        self.sequences.append(PagedSequence(prefix, new, []))
        self._shares.append(shares)
        return self

    def build(
        self, device="cpu", *, pool_dtype=torch.float32, padding: int = 0, spare: int = 3, index_dtype=torch.int32,
        seed: int = 0, page_ids: Sequence[int] | None = None, **tokens,
    ) -> PagedBatch:  # fmt: skip
        rng = torch.Generator().manual_seed(seed + 1000)
        size = self.page_size
        needed = 0
        for i, s in enumerate(self.sequences):
            own = self._pages(s)
            other = self._shares[i]
            if other is not None:
                # Only pages that are full before the call, in both sequences, may be shared.
                shared = min(s.prefix // size, self.sequences[other].prefix // size)
                s.pages = [-1] * shared
                own -= shared
            needed += own
        ids = list(page_ids) if page_ids is not None else torch.randperm(needed + spare, generator=rng).tolist()
        rows = max(ids) + 1 + (spare if page_ids is not None else 0)
        fresh = iter(ids)
        for i, s in enumerate(self.sequences):
            shared = len(s.pages)
            if shared:
                s.pages = self.sequences[self._shares[i]].pages[:shared]
            s.pages = s.pages + [next(fresh) for _ in range(self._pages(s) - shared)]

        lengths = [s.new for s in self.sequences]
        self.tokens = Tokens(self.dims, lengths, device=device, index_dtype=index_dtype, seed=seed, **tokens)
        self.pool = Pool(rows, self.dims, pool_dtype, device, padding=padding)
        states = random_states(rows, self.dims, seed + 1)
        self.read = [s.pages[(s.prefix - 1) // size] if s.prefix else -1 for s in self.sequences]
        for s, row in zip(self.sequences, self.read):
            if row >= 0 and s.new:
                self.pool.set(row, states[row])
        indptr = [0]
        for s in self.sequences:
            indptr.append(indptr[-1] + len(s.pages))
        self.page_indices = index([p for s in self.sequences for p in s.pages], index_dtype, device)
        self.page_indptr = index(indptr, index_dtype, device)
        self.last_page_len = index([self._last(s) for s in self.sequences], index_dtype, device)
        return self

    def _pages(self, s: PagedSequence) -> int:
        return max(1, -(-s.total // self.page_size))

    def _last(self, s: PagedSequence) -> int:
        # An empty sequence is a padded one: a scratch page with any number of tokens that are not there.
        return s.total - (self._pages(s) - 1) * self.page_size if s.total else 1

    def table(self) -> dict:
        return dict(
            page_indices=self.page_indices, page_indptr=self.page_indptr, page_size=self.page_size,
            last_page_len=self.last_page_len,
        )  # fmt: skip

    def arguments(self, **more) -> dict:
        """Keyword arguments of ``chunk_gated_delta_rule_paged``."""
        return self.tokens.arguments(state_pool=self.pool.tensor, **self.table(), **more)

    def expected(self):
        """(output, page -> state). To be taken before the call: it reads the pool."""
        initial = self.pool.rows([row if s.new else -1 for s, row in zip(self.sequences, self.read)])
        output, states = self.tokens.reference(initial)
        pages: dict[int, torch.Tensor] = {}
        for s, after in zip(self.sequences, states):
            for n in range(1, s.new + 1):
                position = s.prefix + n
                if position % self.page_size == 0 or n == s.new:
                    pages[s.pages[(position - 1) // self.page_size]] = after[n]
        return output, pages

    def run(self, door, **more) -> torch.Tensor:
        """Call, compare outputs and pages, and make sure that nothing else changed; returns the output."""
        import gdn_multi

        expected, pages = self.expected()
        self.pool.remember()
        untouched = more["output"].clone() if "output" in more else None
        output = door(gdn_multi.chunk_gated_delta_rule_paged, **self.arguments(**more))
        self.tokens.check_output(output, expected, untouched=untouched)
        self.pool.check(pages, tolerances.prefill_state(self.tokens.dtype, self.pool.dtype))
        return output


# --- decode ---------------------------------------------------------------------------------------


class DecodeStep:
    """Inputs of a decode call: B sequences, T tokens each, gates as GDN models initialise them."""

    def __init__(
        self, dims: Dims, batch: int, steps: int = 1, *, device="cpu", dtype=torch.float32, l2norm: bool = True,
        scale: float | None = None, gate_dtype=None, parameter_dtype=torch.float32, fused: bool = False,
        seed: int = 0,
    ) -> None:  # fmt: skip
        rng = torch.Generator().manual_seed(seed)
        self.dims, self.batch, self.steps, self.dtype = dims, batch, steps, dtype
        self.device, self.l2norm, self.scale = torch.device(device), l2norm, scale
        H = dims.heads
        B, T = batch, steps
        q, k = torch.randn(B, T, dims.q, dims.K, generator=rng), torch.randn(B, T, dims.k, dims.K, generator=rng)
        v = torch.randn(B, T, dims.v, dims.V, generator=rng)
        q, k = (3 * q, 0.5 * k) if l2norm else (unit(q), unit(k))
        dt = torch.exp(torch.rand(H, generator=rng) * math.log(100.0) + math.log(1e-3))
        a, b = torch.randn(B, T, H, generator=rng), torch.randn(B, T, H, generator=rng)
        gate_dtype = gate_dtype or dtype
        q, k, v, a, b = q.to(dtype), k.to(dtype), v.to(dtype), a.to(gate_dtype), b.to(gate_dtype)
        if fused:
            q, k, v = (x.unflatten(0, (B, T)) for x in Tokens._slices(*(x.flatten(0, 1) for x in (q, k, v))))
            a, b = (x.unflatten(0, (B, T)) for x in Tokens._slices(a.flatten(0, 1), b.flatten(0, 1)))
        self.A_log = torch.log(1 + 15 * torch.rand(H, generator=rng)).to(parameter_dtype).to(self.device)
        self.dt_bias = (dt + torch.log(-torch.expm1(-dt))).to(parameter_dtype).to(self.device)
        self.q, self.k, self.v, self.a, self.b = (Tokens._move(self, x) for x in (q, k, v, a, b))

    def arguments(self, **more) -> dict:
        """Keyword arguments of both decode functions, the state excepted."""
        return dict(
            q=self.q, k=self.k, v=self.v, A_log=self.A_log, a=self.a, dt_bias=self.dt_bias, b=self.b, scale=self.scale,
            use_qk_l2norm=self.l2norm, **more,
        )  # fmt: skip

    def reference(self, state: torch.Tensor):
        """(output [B, T, HV, V], states [B, T, HV, V, K]), float64 on the CPU."""
        arguments = {n: x.cpu() if isinstance(x, torch.Tensor) else x for n, x in self.arguments().items()}
        return reference.decode(**arguments, state=state.cpu().double())

    def check_output(self, output: torch.Tensor, expected: torch.Tensor, padded: Sequence[int] = ()) -> None:
        """Each sequence's rows; those of a padded one are zero."""
        assert output.shape == (self.batch, self.steps, self.dims.heads, self.dims.V), tuple(output.shape)
        assert output.dtype == self.dtype, output.dtype
        for i in range(self.batch):
            if i in padded:
                assert not bits(output[i]).any(), f"the output of padded sequence {i} is not zero"
            else:
                tolerances.assert_close(
                    output[i], expected[i], tolerances.decode_output(self.dtype), f"output of sequence {i}"
                )

    def new_output(self) -> torch.Tensor:
        shape = (self.batch, self.steps, self.dims.heads, self.dims.V)
        return torch.full(shape, NAN, dtype=self.dtype, device=self.device)


class PagedDecode:
    """A paged decode and what it must do: one new token for each sequence added, ``total`` tokens with it."""

    def __init__(self, dims: Dims, page_size: int = 64) -> None:
        self.dims, self.page_size = dims, page_size
        self.totals: list[int] = []

    def add(self, total: int) -> PagedDecode:
        assert total >= 2, "a sequence holds at least one token before the decoded one"
        self.totals.append(total)
        return self

    def build(
        self, device="cpu", *, pool_dtype=torch.float32, padding: int = 0, index_dtype=torch.int32, seed: int = 0,
        spare: int = 3, **step,
    ) -> PagedDecode:  # fmt: skip
        rng = torch.Generator().manual_seed(seed + 1000)
        counts = [-(-total // self.page_size) for total in self.totals]
        ids = torch.randperm(sum(counts) + spare, generator=rng).tolist()
        self.step = DecodeStep(self.dims, len(self.totals), device=device, seed=seed, **step)
        self.pool = Pool(len(ids), self.dims, pool_dtype, device, padding=padding)
        states = random_states(len(ids), self.dims, seed + 1)
        self.read, self.write, indptr, owned = [], [], [0], []
        for total, count in zip(self.totals, counts):
            pages, ids = ids[:count], ids[count:]
            owned += pages
            indptr.append(len(owned))
            self.write.append(pages[-1])
            self.read.append(pages[(total - 2) // self.page_size])
            self.pool.set(self.read[-1], states[self.read[-1]])
        last = [total - (count - 1) * self.page_size for total, count in zip(self.totals, counts)]
        self.page_indices, self.page_indptr = index(owned, index_dtype, device), index(indptr, index_dtype, device)
        self.last_page_len = index(last, index_dtype, device)
        return self

    def table(self) -> dict:
        return dict(page_indices=self.page_indices, page_indptr=self.page_indptr, last_page_len=self.last_page_len)

    def arguments(self, **more) -> dict:
        """Keyword arguments of ``gated_delta_rule_decode_paged``."""
        return self.step.arguments(state_pool=self.pool.tensor, **self.table(), **more)

    def expected(self):
        """(output, page -> state). To be taken before the call: it reads the pool."""
        output, states = self.step.reference(self.pool.rows(self.read))
        return output, {page: states[i, -1] for i, page in enumerate(self.write)}

    def run(self, door, **more) -> torch.Tensor:
        import gdn_multi

        expected, pages = self.expected()
        self.pool.remember()
        output = door(gdn_multi.gated_delta_rule_decode_paged, **self.arguments(**more))
        self.step.check_output(output, expected)
        self.pool.check(pages, tolerances.decode_state(self.pool.dtype))
        return output
