"""Which of our backends ``backend="auto"`` asks first: the measured choices, one row each.

The order of the names in a row replaces the order that their ``priority`` gives, for the calls that the row is about; other
backends keep their places. Where no row holds, priorities decide and nothing has been measured. ``explain`` quotes the row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from .request import PrefillRequest, Request


class Choice(NamedTuple):
    kind: str  #: "prefill" or "decode"
    capability: tuple[int, int]  #: of the cards that it was measured on
    when: str  #: the calls, in words
    holds: Callable[[Request], bool]  #: the same, for a request of that kind
    order: tuple[str, ...]  #: names of backends, the fastest first
    measured: str  #: on what, with what outcome; docs/performance.md has the tables


def _tensor_cores(r: PrefillRequest) -> bool:
    return r.head_size_k == 128 and r.head_size_v == 128 and r.q.dtype != torch.float32


#: The first row that holds counts.
CHOICES = (
    Choice(
        "prefill", (9, 0), "K = V = 128, bfloat16 or float16", _tensor_cores, ("cuda", "triton"),
        "H200: Triton takes 1.60 times as long in the geometric mean of 32 rows (2/8 to 16/64 heads), 0.98 to 2.29",
    ),
    Choice(
        "prefill", (9, 0), "other head sizes, float32", lambda r: True, ("triton", "cuda"),
        "H200, 2/8 heads, 32768 tokens: the portable CUDA path took 2.35 ms, Triton 0.36",
    ),
    Choice(
        "decode", (9, 0), "every call", lambda r: True, ("cuda", "triton"),
        "H200: Triton takes 0.90 to 1.06 times as long, the better of FlashInfer and FLA 1.00 to 1.25; host time 8 us against 21",
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
