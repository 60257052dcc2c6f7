"""The Triton backend: every argument of the contract, on any GPU that Triton knows.

``prefill.py`` plans a prefill and launches the kernels of ``prefill_kernels.py``; ``decode.py`` and ``slots.py`` hold
the other two doors; ``heuristics.py`` and ``decode_heuristics.py`` the tuning choices. On a CPU the same kernels run
under Triton's interpreter (``TRITON_INTERPRET=1``), which is for tests.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Callable
from functools import cache

import torch

from gdn_multi.backend import Backend, Reasons
from gdn_multi.request import DecodeRequest, PrefillRequest, Request, SlotsRequest

_NO_TRITON = "Triton is not installed; install it with: pip install triton"
_NO_GPU = (
    "Triton needs a GPU, and q is on the CPU; its interpreter, for tests, runs there with TRITON_INTERPRET=1 set "
    "before the first import of triton"
)
_WRONG_PRODUCTS = "Triton's interpreter multiplies bfloat16 matrices wrongly; take float16 or float32 inputs under TRITON_INTERPRET=1"
_OLD_PTXAS = (
    "on sm_107 the Triton kernels need a ptxas of CUDA 13.4 or newer on PATH or in TRITON_PTXAS_BLACKWELL_PATH, "
    "since older ones do not know sm_107a; found {found}"
)


class TritonBackend(Backend):
    name = "triton"
    priority = 200
    summary = "Triton kernels: prefill, decode and page tables, every head size up to 256, on any GPU Triton supports"

    def reasons_unusable(self, device: torch.device) -> Reasons:
        return _reasons_unusable(device.type, device.index)

    def reasons_against(self, request: Request) -> Reasons:
        if isinstance(request, PrefillRequest):
            from .common import INTERPRETED
            from .prefill import reasons_against_prefill

            if INTERPRETED.value and request.q.dtype == torch.bfloat16:
                return (_WRONG_PRODUCTS, *reasons_against_prefill(request))
            return reasons_against_prefill(request)
        if isinstance(request, DecodeRequest):
            from .decode import reasons_against_decode

            return reasons_against_decode(request)
        return ()

    def detail(self, request: Request) -> str:
        if isinstance(request, PrefillRequest):
            from .prefill import plan_for

            return plan_for(request).path
        return ""

    def compilations(self) -> int:
        """Kernels that Triton keeps compiled, over all devices; none under the interpreter."""
        count = 0
        for name in ("prefill_kernels", "decode", "slots"):
            module = sys.modules.get(f"{__name__}.{name}")
            for kernel in vars(module).values() if module is not None else ():
                caches = getattr(kernel, "device_caches", {})
                count += sum(len(cache[0]) for cache in caches.values())
        return count

    def prefill(self, request: PrefillRequest) -> None:
        from .prefill import prefill

        prefill(request)

    def decode(self, request: DecodeRequest) -> None:
        from .decode import decode

        decode(request)

    def express_decode(self, request: DecodeRequest) -> Callable[..., bool] | None:
        from .decode import express_decode

        return express_decode(request)

    def page_slots(self, request: SlotsRequest) -> None:
        from .slots import page_slots

        page_slots(request)


@cache
def _reasons_unusable(kind: str, index: int | None) -> Reasons:
    if importlib.util.find_spec("triton") is None:
        return (_NO_TRITON,)
    if kind != "cuda":
        from .common import INTERPRETED

        if kind != "cpu":
            return (f"the Triton kernels run on CUDA and ROCm devices, got a device of type {kind!r}",)
        return () if INTERPRETED.value else (_NO_GPU,)
    if torch.version.hip is None and torch.cuda.get_device_capability(index) == (10, 7):
        return _reasons_sm107()
    return ()


def _reasons_sm107() -> Reasons:
    """() when Triton has, or can be pointed to, an assembler that knows sm_107a."""
    try:
        from triton import knobs

        tool = knobs.nvidia.ptxas_blackwell  # TRITON_PTXAS_BLACKWELL_PATH, else the one that came with Triton
        if _version(tool.version) >= (13, 4):
            return ()
        found = f"{tool.path} of CUDA {tool.version}"
        path = shutil.which("ptxas")
        on_path = knobs.NvidiaTool.from_path(path) if path else None
        if on_path is not None:
            if _version(on_path.version) >= (13, 4):
                knobs.nvidia.ptxas_blackwell = path
                return ()
            found += f" and {on_path.path} of CUDA {on_path.version}"
    except (ImportError, AttributeError, RuntimeError) as error:
        found = f"none ({error})"
    return (_OLD_PTXAS.format(found=found),)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))
