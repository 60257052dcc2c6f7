"""Holds what was served against the float64 reference, and the shared pages against what they were."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from gdn_multi import reference

from .engine import Engine, Request
from .layer import Layer, Projected

#: Largest error allowed, by the dtype of the tokens and by that of the states (the larger one counts). An error is
#: max |x - reference| / max |reference| over a request's prefill outputs, over its decode outputs, and over each page.
TOLERANCES = {
    torch.float32: 2e-5,
    torch.float16: 3e-3,
    torch.bfloat16: 2e-2,
}

#: Tokens that the reference takes at a time, since it returns the states in between too. Divides every page size.
PIECE = 64


def tolerance(dtype: torch.dtype, state_dtype: torch.dtype) -> float:
    return max(TOLERANCES[dtype], TOLERANCES[state_dtype])


def error_of(x: torch.Tensor, expected: torch.Tensor) -> float:
    """max |x - expected| / max |expected|; infinite where x is not finite."""
    difference = (x.double().cpu() - expected).abs()
    if not torch.isfinite(difference).all():
        return float("inf")
    return (difference.max() / expected.abs().max().clamp(min=1e-30)).item()


class Checker:
    """The reference's own run of the requests, in the order they were served, on what the layer fed to the calls.

    It runs each distinct token once: where a request reused cached pages, its reference goes on from the float64
    state that the reference reached over those same tokens, never from a page of the pool.
    """

    def __init__(self, layer: Layer, engine: Engine) -> None:
        self._layer, self._engine = layer, engine
        self._A_log, self._dt_bias = layer.A_log.cpu(), layer.dt_bias.cpu()
        self._states: dict[bytes, torch.Tensor] = {}

    def largest_error(self, request: Request) -> float:
        page_size, heads, size = self._engine.page_size, self._layer.v_heads, self._layer.head_size
        position = request.reused
        zero = torch.zeros(heads, size, size, dtype=torch.float64)
        state = self._states[request.tokens[:position]] if position else zero
        errors: list[float] = []
        for run, fed, served in (
            (self._prefill, request.prefill_fed, request.prefill_out),
            (self._decode, request.decode_fed, request.decode_out),
        ):
            expected: list[torch.Tensor] = []
            for piece in _pieces(fed, position):
                output, state = run(piece, state)
                expected.append(output)
                position += output.shape[0]
                page_ends = position % page_size == 0
                if page_ends:
                    self._states.setdefault(request.tokens[:position], state)
                if page_ends or position == len(request.tokens):
                    page = request.pages[(position - 1) // page_size]
                    errors.append(error_of(self._engine.pool[page], state))
            if served:
                errors.append(error_of(torch.cat(served), torch.cat(expected)))
        return max(errors)

    def _prefill(self, fed: Projected, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output, states = reference.prefill(
            *self._engine.prefill_arguments(fed),
            cu_seqlens=torch.tensor([0, fed.q.shape[0]]),
            initial_state=state[None],
            **{**self._engine.prefill_options, "A_log": self._A_log, "dt_bias": self._dt_bias},
        )
        return output, states[0][-1]

    def _decode(self, fed: Projected, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, a, b = (x[None] for x in fed)
        output, states = reference.decode(q, k, v, self._A_log, a, self._dt_bias, b, state=state[None])
        return output[0], states[0, -1]


def _pieces(fed: Sequence[Projected], position: int) -> Iterator[Projected]:
    """``fed`` in order, on the CPU, cut at absolute multiples of PIECE; ``position`` is that of its first token."""
    if not fed:
        return
    whole = Projected(*(torch.cat(parts).cpu() for parts in zip(*fed)))
    start, total = 0, whole.q.shape[0]
    while start < total:
        end = min(total, start + PIECE - (position + start) % PIECE)
        yield Projected(*(x[start:end] for x in whole))
        start = end


def changed_pages(engine: Engine) -> list[int]:
    """Complete pages that are no longer what they were when they were completed, to the bit."""
    return [page for page, was in engine.complete.items() if not _same_bits(engine.pool[page], was)]


def touched_spare_pages(engine: Engine) -> list[int]:
    """Pages that no request was given and that were written all the same."""
    return [page for page in engine.spare if not engine.pool[page].isnan().all()]


def _same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
