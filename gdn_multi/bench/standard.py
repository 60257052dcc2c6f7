"""The standard calls of ``compare``: one of each kind, small enough for the float64 reference.

Each is a public function's name and its arguments. Rows that a call must not read hold NaN.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

Made = tuple[str, dict]


class Maker:
    """Draws arguments; ``large`` for a GPU, small for a CPU."""

    def __init__(self, device: torch.device, large: bool, seed: int = 0, dtype: torch.dtype = torch.bfloat16):
        self.device, self.large, self.dtype = device, large, dtype
        self.hq, self.hv, self.d = (2, 8, 128) if large else (1, 2, 64)
        self.page = 256 if large else 64
        self.generator = torch.Generator().manual_seed(seed)

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def to(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return x.to(self.device, dtype or self.dtype)

    def index(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def gates(self) -> tuple[torch.Tensor, torch.Tensor]:
        a = 1 + 15 * torch.rand(self.hv, generator=self.generator)
        dt = 1e-3 * 100 ** torch.rand(self.hv, generator=self.generator)
        return a.log(), dt + torch.log(-torch.expm1(-dt))

    def tokens(self, lengths: list[int], raw: bool = False) -> dict:
        t, d = sum(lengths), self.d
        q, k, v = self.randn(t, self.hq, d), self.randn(t, self.hq, d), self.randn(t, self.hv, d)
        a_log, dt_bias = self.gates()
        a, b = 0.1 * self.randn(t, self.hv), self.randn(t, self.hv)
        bounds = [0]
        for length in lengths:
            bounds.append(bounds[-1] + length)
        common = dict(v=self.to(v), cu_seqlens=self.index(bounds))
        if raw:
            return dict(
                common, q=self.to(q), k=self.to(k), g=self.to(a), beta=self.to(b), A_log=a_log.to(self.device),
                dt_bias=dt_bias.to(self.device), use_gate_in_kernel=True, beta_is_logit=True,
                use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
        alpha = torch.exp(-a_log.exp() * F.softplus(a + dt_bias))
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        return dict(
            common, q=self.to(q), k=self.to(k), g=alpha.to(self.device), beta=b.sigmoid().to(self.device)
        )  # fmt: skip

    def states(self, rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.to(0.25 * self.randn(rows, self.hv, self.d, self.d), dtype)

    def lengths(self) -> list[int]:
        return [1500, 64, 333] if self.large else [130, 64, 17]

    # --- the calls ---------------------------------------------------------------------------

    def plain(self) -> Made:
        states = self.states(len(self.lengths()))
        return "chunk_gated_delta_rule", dict(
            self.tokens(self.lengths()), initial_state=states, output_final_state=True
        )

    def model(self) -> Made:
        states = self.states(len(self.lengths()))
        return "chunk_gated_delta_rule", dict(
            self.tokens(self.lengths(), raw=True), initial_state=states, output_final_state=True
        )

    def paged(self) -> Made:
        """An empty prefix, a prefix that ends inside a page, and one that ends with a page."""
        page = self.page
        lengths, prefixes = [2 * page + 40, page, 33], [0, 50, 2 * page]
        pages, indptr, last, read = [], [0], [], []
        free = [int(i) for i in torch.randperm(24, generator=self.generator)]
        for new, prefix in zip(lengths, prefixes):
            count = -(-(new + prefix) // page)
            own = [free.pop() for _ in range(count)]
            pages += own
            indptr.append(len(pages))
            last.append((new + prefix - 1) % page + 1)
            if prefix:
                read.append(own[(prefix - 1) // page])
        pool = torch.full((24, self.hv, self.d, self.d), float("nan"), device=self.device)
        pool[torch.tensor(read, device=self.device)] = self.states(len(read))
        return "chunk_gated_delta_rule_paged", dict(
            self.tokens(lengths), state_pool=pool, page_indices=self.index(pages), page_indptr=self.index(indptr),
            page_size=page, last_page_len=self.index(last),
        )  # fmt: skip

    def checkpoints(self) -> Made:
        lengths, every = self.lengths(), self.page
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length // every)
        kept = torch.full((max(1, starts[-1]), self.hv, self.d, self.d), float("nan"), device=self.device)
        return "chunk_gated_delta_rule", dict(
            self.tokens(lengths), initial_state=self.states(len(lengths)), output_final_state=True,
            state_checkpoints=kept, checkpoint_cu_starts=self.index(starts), checkpoint_every_n_tokens=every,
        )  # fmt: skip

    def _decode(self, batch: int) -> dict:
        d = self.d
        a_log, dt_bias = self.gates()
        return dict(
            q=self.to(self.randn(batch, 1, self.hq, d)), k=self.to(self.randn(batch, 1, self.hq, d)),
            v=self.to(self.randn(batch, 1, self.hv, d)), a=self.to(0.1 * self.randn(batch, 1, self.hv)),
            b=self.to(self.randn(batch, 1, self.hv)), A_log=a_log.to(self.device), dt_bias=dt_bias.to(self.device),
        )  # fmt: skip

    def decode(self) -> Made:
        return "gated_delta_rule_decode_pretranspose", dict(self._decode(5), state=self.states(5))

    def decode_paged(self) -> Made:
        """One sequence in place, one that opens a page, one in place again."""
        pool = torch.full((8, self.hv, self.d, self.d), float("nan"), device=self.device)
        pool[torch.tensor([5, 1, 6], device=self.device)] = self.states(3)
        return "gated_delta_rule_decode_paged", dict(
            self._decode(3), state_pool=pool, page_indices=self.index([5, 1, 2, 6]),
            page_indptr=self.index([0, 1, 3, 4]), last_page_len=self.index([7, 1, 64]),
        )  # fmt: skip


CALLS: dict[str, Callable[[Maker], Made]] = {
    "plain": Maker.plain,
    "model": Maker.model,
    "paged": Maker.paged,
    "checkpoints": Maker.checkpoints,
    "decode": Maker.decode,
    "decode_paged": Maker.decode_paged,
}
