"""What an inference engine does around the GDN calls: pages, prefix reuse, chunked prefill, padded decode batches.

It calls the public functions of gdn_multi and nothing else. Every batch has the same number of rows, as a captured
graph would; a row without a request gets a scratch page of its own.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

import gdn_multi

from .layer import Layer, Projected


@dataclass
class Request:
    """One prompt and the tokens that are decoded after it; filled in while it is served."""

    name: str
    tokens: bytes  #: prompt and decoded tokens
    prompt: int  #: how many of them are prefilled

    pages: list[int] = field(default_factory=list)
    reused: int = 0  #: tokens taken from cached pages
    done: int = 0  #: tokens whose state is in the pool
    read: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)
    opened: int = 0  #: pages that decode opened
    backends: list[str] = field(default_factory=list)
    seconds: float = 0.0  #: from its admission to its last token
    #: what the layer fed to the calls, and what came back, kept for the check
    prefill_fed: list[Projected] = field(default_factory=list)
    prefill_out: list[torch.Tensor] = field(default_factory=list)
    decode_fed: list[Projected] = field(default_factory=list)
    decode_out: list[torch.Tensor] = field(default_factory=list)

    def ran_on(self, backend: str) -> None:
        if backend not in self.backends:
            self.backends.append(backend)


class Engine:
    """Serves requests from one paged state pool."""

    #: Most tokens of one request in one prefill step.
    MOST_TOKENS = 448
    #: Pages that are never handed out; they must end as they began.
    SPARE_PAGES = 3

    def __init__(
        self,
        layer: Layer,
        *,
        num_pages: int,
        page_size: int,
        rows: int,
        state_dtype: torch.dtype,
        device: torch.device,
        backend: str,
        seed: int,
        say: Callable[[str], None],
    ) -> None:
        self.layer, self.page_size, self.rows, self.device, self.backend = layer, page_size, rows, device, backend
        total = num_pages + rows + self.SPARE_PAGES
        shape = (total, layer.v_heads, layer.head_size, layer.head_size)
        # NaN everywhere: a row that is read before it was written shows at once.
        self.pool = torch.full(shape, float("nan"), dtype=state_dtype, device=device)
        self._random = random.Random(seed)
        ids = list(range(total))
        self._random.shuffle(ids)  # page ids come in any order
        self.spare, ids = ids[: self.SPARE_PAGES], ids[self.SPARE_PAGES :]
        self._scratch, self._free = ids[:rows], ids[rows:]
        #: A page that is complete, by all the tokens up to its end.
        self._cache: dict[bytes, int] = {}
        #: Its contents when it was completed; nothing may change it from then on.
        self.complete: dict[int, torch.Tensor] = {}
        self._say = say
        self._steps = 0

    def explain(self) -> Iterator[gdn_multi.Explanation]:
        """Which backend would serve this engine's prefill and decode calls, without running anything."""
        fed = self.layer(bytes(self.rows))
        table = {
            "state_pool": self.pool,
            "page_indices": self._ints(self._scratch),
            "page_indptr": self._ints(range(self.rows + 1)),
            "last_page_len": self._ints([2] * self.rows),
            "backend": self.backend,
        }
        yield gdn_multi.explain(
            gdn_multi.chunk_gated_delta_rule_paged,
            *self.prefill_arguments(fed),
            cu_seqlens=self._ints(range(self.rows + 1)),
            page_size=self.page_size,
            **table,
            **self.prefill_options,
        )
        decoded = Projected(*(x.unsqueeze(1) for x in fed))
        yield gdn_multi.explain(gdn_multi.gated_delta_rule_decode_paged, *self.decode_arguments(decoded), **table)

    # --- serving -----------------------------------------------------------------------------

    def serve(self, requests: Sequence[Request]) -> None:
        """Serve requests together, at most ``rows`` of them: reuse cached pages, prefill in chunks, decode."""
        started = time.perf_counter()
        for request in requests:
            self._reuse_pages(request)
        while any(request.done < request.prompt for request in requests):
            self._prefill_step([(request, self._next_chunk(request)) for request in requests])
            self._mark_time(requests, started)
        steps, first = 0, time.perf_counter()
        while True:
            active = [request for request in requests if request.done < len(request.tokens)]
            if not active:
                break
            self._decode_step(active)
            self._mark_time(active, started)
            steps += 1
        if steps:
            took = (time.perf_counter() - first) / steps * 1e3
            opened = sum(request.opened for request in requests)
            self._say(f"  decode   {steps} steps of {self.rows} rows, {opened} new pages, {took:.1f} ms a step")

    def _mark_time(self, requests: Sequence[Request], started: float) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # for the clock only
        for request in requests:
            request.seconds = time.perf_counter() - started

    def _reuse_pages(self, request: Request) -> None:
        # At least the prompt's last token is computed: its output is what the first decoded token comes from.
        for end in range(self.page_size, request.prompt, self.page_size):
            page = self._cache.get(request.tokens[:end])
            if page is None:
                break
            request.pages.append(page)
            request.reused = request.done = end

    def _next_chunk(self, request: Request) -> int:
        """Uneven on purpose, and sometimes nothing: a chunk may end at any token."""
        left = request.prompt - request.done
        return min(left, 0 if self._random.random() < 0.1 else self._random.randint(1, self.MOST_TOKENS))

    def _prefill_step(self, work: Sequence[tuple[Request, int]]) -> None:
        started = time.perf_counter()
        text = b"".join(request.tokens[request.done : request.done + new] for request, new in work)
        if not text:
            return
        lengths = [new for _, new in work] + [0] * (self.rows - len(work))
        table = self._page_table([(r, r.done + new) for r, new in work], padding_tokens=1)
        cu_seqlens = self._ints(_cumulative(lengths))
        # The rows depend on the batch only: a model computes them once a step and hands them to every layer.
        slots = gdn_multi.gdn_paged_prefill_slots(cu_seqlens, page_size=self.page_size, **table)
        fed = self.layer(text)
        output = gdn_multi.chunk_gated_delta_rule_paged(
            *self.prefill_arguments(fed),
            cu_seqlens=cu_seqlens,
            state_pool=self.pool,
            page_size=self.page_size,
            slots=slots,
            max_seqlen=max(lengths),
            backend=self.backend,
            **table,
            **self.prefill_options,
        )
        backend = gdn_multi.last_backend().backend

        read, write = slots.state_indices.tolist(), slots.output_state_indices.tolist()
        starts, indices = slots.checkpoint_cu_starts.tolist(), table["page_indices"].tolist()
        bounds = _cumulative(lengths)
        for row, (request, new) in enumerate(work):
            if new == 0:
                continue
            crossed = (request.done + new) // self.page_size - request.done // self.page_size
            request.read.update(page for page in (read[row],) if page >= 0)
            request.written.update(page for page in (write[row],) if page >= 0)
            request.written.update(indices[starts[row] : starts[row] + crossed])
            mine = slice(bounds[row], bounds[row + 1])
            request.prefill_fed.append(Projected(*(x[mine] for x in fed)))
            request.prefill_out.append(output[mine])
            request.ran_on(backend)
            self._advance(request, new)
        self._steps += 1
        took = (time.perf_counter() - started) * 1e3
        parts = "+".join(str(length) for length in lengths)
        self._say(f"  prefill  step {self._steps:<3} {parts} = {len(text)} tokens, {backend}, {took:.1f} ms")

    def _decode_step(self, active: Sequence[Request]) -> None:
        # A padded row repeats some byte; its state lives in its scratch page, and its output is dropped.
        text = bytes(r.tokens[r.done] for r in active) + bytes(self.rows - len(active))
        before = [len(request.pages) for request in active]
        table = self._page_table([(r, r.done + 1) for r in active], padding_tokens=2)
        fed = Projected(*(x.unsqueeze(1) for x in self.layer(text)))
        output = gdn_multi.gated_delta_rule_decode_paged(
            *self.decode_arguments(fed), state_pool=self.pool, backend=self.backend, **table
        )
        backend = gdn_multi.last_backend().backend
        for row, request in enumerate(active):
            opens = len(request.pages) > before[row]
            request.opened += opens
            request.read.add(request.pages[-2 if opens else -1])
            request.written.add(request.pages[-1])
            request.decode_fed.append(Projected(*(x[row] for x in fed)))
            request.decode_out.append(output[row])
            request.ran_on(backend)
            self._advance(request, 1)

    # --- the calls' arguments ----------------------------------------------------------------

    @property
    def prefill_options(self) -> dict:
        layer = self.layer
        return {
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "A_log": layer.A_log,
            "dt_bias": layer.dt_bias,
            "beta_is_logit": True,
        }

    @staticmethod
    def prefill_arguments(fed: Projected) -> tuple:
        return fed.q, fed.k, fed.v, fed.a, fed.b

    def decode_arguments(self, fed: Projected) -> tuple:
        return fed.q, fed.k, fed.v, self.layer.A_log, fed.a, self.layer.dt_bias, fed.b

    # --- pages -------------------------------------------------------------------------------

    def _page_table(self, sequences: Sequence[tuple[Request, int]], padding_tokens: int) -> dict[str, torch.Tensor]:
        """The page table after a call that brings each request to so many tokens, padded to ``rows`` with scratch
        pages; pages that the new tokens need are taken from the free ones."""
        pages: list[list[int]] = []
        last: list[int] = []
        for request, total in sequences:
            while len(request.pages) * self.page_size < total:
                request.pages.append(self._free.pop())
            pages.append(request.pages)
            last.append(total - (len(request.pages) - 1) * self.page_size)
        for page in self._scratch[len(pages) :]:
            pages.append([page])
            last.append(padding_tokens)
        return {
            "page_indices": self._ints([page for row in pages for page in row]),
            "page_indptr": self._ints(_cumulative(len(row) for row in pages)),
            "last_page_len": self._ints(last),
        }

    def _advance(self, request: Request, new: int) -> None:
        """``new`` more tokens are in the pool; pages that they completed may be shared from now on."""
        first, request.done = request.done // self.page_size, request.done + new
        for index in range(first, request.done // self.page_size):
            page = request.pages[index]
            self.complete[page] = self.pool[page].clone()
            self._cache.setdefault(request.tokens[: (index + 1) * self.page_size], page)

    def _ints(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self.device)


def _cumulative(lengths: Iterable[int]) -> list[int]:
    sums = [0]
    for length in lengths:
        sums.append(sums[-1] + length)
    return sums
