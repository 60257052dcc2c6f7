"""The ``torch`` backend: everything in the contract, on any device, in plain PyTorch.

``prefill.py`` computes chunk by chunk, vectorised over sequences and heads; ``decode.py`` steps over the tokens of a
decode; ``rows.py`` moves states between pools and float32 and derives rows from page tables. Nothing here waits for a
device: on a GPU every size comes from shapes, so that a call can be captured in a CUDA graph.
"""

from __future__ import annotations

import contextlib

import torch

from gdn_multi.backend import Backend
from gdn_multi.request import DecodeRequest, PrefillRequest, Request, SlotsRequest


class TorchBackend(Backend):
    name = "torch"
    priority = 100
    summary = "everything in the contract, every head size and dtype, on any device; chunked PyTorch"

    def reasons_against(self, request: Request):
        if isinstance(request, PrefillRequest) and request.use_cp is True:
            return ("use_cp=True: the torch backend has no split-sequence path; pass use_cp='auto' or False",)
        return ()

    def prefill(self, request: PrefillRequest) -> None:
        from .prefill import prefill

        with _plain_float32():
            prefill(self.with_slots(request))

    def decode(self, request: DecodeRequest) -> None:
        from .decode import decode

        with _plain_float32():
            decode(self.with_slots(request))

    def page_slots(self, request: SlotsRequest) -> None:
        from .rows import page_slots

        page_slots(request)


@contextlib.contextmanager
def _plain_float32():
    """float32 products in float32, whatever precision or autocast the caller has switched on."""
    precision = torch.get_float32_matmul_precision()
    if precision != "highest":
        torch.set_float32_matmul_precision("highest")
    try:
        with torch.no_grad(), torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            yield
    finally:
        if precision != "highest":
            torch.set_float32_matmul_precision(precision)
