"""The ``torch`` backend: everything in the contract, on any device, in plain PyTorch.

``prefill.py`` computes chunk by chunk, vectorised over sequences and heads; ``decode.py`` steps over the tokens of a
decode; ``rows.py`` moves states between pools and float32 and derives rows from page tables. Nothing here waits for a
device: on a GPU every size comes from shapes, so that a call can be captured in a CUDA graph.
"""

from __future__ import annotations

import contextlib
import threading

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


class _Precision:
    """Full float32 products while any call of this backend runs; the settings are the process's, so calls are counted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = 0
        self._before: list = []

    def __enter__(self) -> None:
        with self._lock:
            self._calls += 1
            if self._calls == 1:
                self._before = [(get(), put) for get, put in _settings()]
                for _, put in self._before:
                    put("ieee")

    def __exit__(self, *error) -> None:
        with self._lock:
            self._calls -= 1
            if self._calls == 0:
                for value, put in self._before:
                    put(value)


def _settings():
    """(read, write) of each setting that lets a float32 product round its operands."""
    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        for place in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
            yield (
                lambda place=place: place.fp32_precision,
                lambda value, place=place: setattr(place, "fp32_precision", value),
            )
    else:  # before torch 2.9
        yield (
            torch.get_float32_matmul_precision,
            lambda value: torch.set_float32_matmul_precision("highest" if value == "ieee" else value),
        )


_precision = _Precision()


@contextlib.contextmanager
def _plain_float32():
    """float32 products in float32, whatever precision or autocast the caller has switched on. Under inference mode, since only
    there tensors made under it can be written; others can too, and all that is made inside stays inside."""
    with _precision, torch.inference_mode(), torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
        yield
