"""Which of our backends ``backend="auto"`` asks first: the measured choices, one row each.

The order of the names in a row replaces the order that their ``priority`` gives, for the calls that the row is about; other
backends keep their places. Where no row holds, priorities decide and nothing has been measured. ``explain`` quotes the row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from .request import DecodeRequest, PrefillRequest, Request


class Choice(NamedTuple):
    kind: str  #: "prefill" or "decode"
    capability: tuple[int, int]  #: of the cards that it was measured on
    when: str  #: the calls, in words
    holds: Callable[[Request], bool]  #: the same, for a request of that kind
    order: tuple[str, ...]  #: names of backends, the fastest first
    measured: str  #: on what, with what outcome; docs/performance.md has the tables


def _tensor_cores(r: PrefillRequest) -> bool:
    return r.head_size_k == 128 and r.head_size_v == 128 and r.q.dtype != torch.float32


def _long_decode(r: DecodeRequest) -> bool:
    # Another batch may not change a sequence's bits where that has been asked for.
    large = r.num_tokens == 1 and r.batch * r.num_heads >= 32 * 64
    return large and r.state.dtype == torch.float32 and not r.batch_invariant


#: The first row that holds counts.
CHOICES = (
    Choice(
        "prefill", (9, 0), "K = V = 128, bfloat16 or float16", _tensor_cores, ("cuda", "triton"),
        "H200: Triton takes 1.33 times as long in the geometric mean of 16 rows (2/8 and 4/16 heads), 0.89 to 1.63",
    ),
    Choice(
        "prefill", (9, 0), "other head sizes, float32", lambda r: True, ("triton", "cuda"),
        "H200, 2/8 heads, 32768 tokens: the portable CUDA path took 2.35 ms, Triton 0.36",
    ),
    Choice(
        "decode", (9, 0), "one token, float32 states, 32 sequences x 64 heads and more", _long_decode, ("triton", "cuda"),
        "H200, 16/64 heads: Triton moves 4.00 and 4.05 TB/s at 128 and 256 sequences, CUDA 3.92 and 3.98",
    ),
    Choice(
        "decode", (9, 0), "everything else", lambda r: True, ("cuda", "triton"),
        "H200: as fast or faster in most rows, and half the host time of a call",
    ),
)  # fmt: skip


def choice_for(request: Request, capability: tuple[int, int] | None) -> Choice | None:
    kind = getattr(request, "kind", None)
    for choice in CHOICES:
        if choice.kind == kind and choice.capability == capability and choice.holds(request):
            return choice
    return None


def apply(ranked: list[str], choice: Choice) -> list[str]:
    """``ranked``, with the names of the choice in its order, in the places that these names have between them."""
    named = iter([name for name in choice.order if name in ranked])
    return [next(named) if name in choice.order else name for name in ranked]
