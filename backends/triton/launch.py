"""Launching one Triton kernel again and again at little host cost.

``kernel[grid](...)`` looks at every argument to find the compiled kernel that fits, and the decode kernel has more than
fifty. Here the arguments that only depend on shapes, strides and dtypes are fixed once, and once Triton has compiled
and launched the kernel, further launches go straight to what it compiled. ``tune_decode`` prints the host time of both.

For this to be right, whoever keeps a ``Launch`` must key it by everything that Triton specialises on: the dtypes and
presence of the tensors, the constants, and whether a pointer that is not marked ``do_not_specialize_on_alignment`` is
divisible by 16. Integer arguments must be annotated and ``do_not_specialize``, so that their values never matter.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from gdn_multi.memory import current_device

_data_ptr = torch.Tensor.data_ptr

#: As Triton's launcher would find it, but without looking for the current device first.
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def supports_dependent_launch(device: torch.device) -> bool:
    """Whether a kernel may start while the one before it still runs (option ``launch_pdl``; gdc_wait waits for it)."""
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    try:
        from triton.backends.nvidia.compiler import CUDAOptions
        from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # noqa: F401
    except ImportError:
        return False
    return "launch_pdl" in CUDAOptions.__dataclass_fields__


#: Compiled kernels take all arguments, constants included, from Triton 3.3 on.
_DIRECT = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 3)

#: Where Triton keeps the hooks of profilers; None where it is elsewhere, before 3.4.
_runtime = getattr(getattr(triton, "knobs", None), "runtime", None)


def _hooked() -> bool:
    """Whether a profiler wants to hear of launches: then they go the way that tells it."""
    if _runtime is None:
        return True
    for hook in (_runtime.launch_enter_hook, _runtime.launch_exit_hook):
        # A chain of hooks, which may be empty, or a function.
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False


class Launch:
    """A kernel with its grid and its fixed arguments; called with the tensors, which come first."""

    __slots__ = ("kernel", "grid", "device", "fixed", "options", "_compiled", "_run", "_middle")

    def __init__(self, kernel, grid: tuple[int, ...], device: torch.device, fixed: tuple[Any, ...], **options: Any):
        self.kernel = kernel
        self.grid = grid + (1,) * (3 - len(grid))
        self.device = None
        if device.type == "cuda":
            self.device = torch.cuda.current_device() if device.index is None else device.index
        self.fixed = fixed
        # A multiplication and an addition make one FMA; Triton's default for this differs between versions.
        self.options: dict[str, Any] = {"enable_fp_fusion": True, **options}
        self._compiled = None  # with what hooks are told
        self._run = self._middle = None  # without

    def __call__(self, *tensors: torch.Tensor) -> None:
        run(((self, tensors),))

    def _launch(self, tensors: tuple[torch.Tensor, ...], hooked: bool) -> None:
        """On the current device, which must be the launch's."""
        if self._compiled is not None:
            # Addresses instead of tensors: the launcher then asks the driver nothing about them.
            stream = _raw_stream(self.device)
            if hooked:
                self._compiled(*map(_data_ptr, tensors), *self.fixed, stream=stream)
            else:
                self._run(*self.grid, stream, *self._middle, *map(_data_ptr, tensors), *self.fixed)
            return
        compiled = self.kernel[self.grid](*tensors, *self.fixed, **self.options)
        if _DIRECT and _raw_stream is not None and hasattr(compiled, "__getitem__"):  # None under the interpreter
            # As JITFunction.run calls it, with nothing for the launch's metadata and no hooks.
            self._run = compiled.run
            self._middle = (compiled.function, compiled.packed_metadata, None, None, None)
            self._compiled = compiled[self.grid]


def run(launches: tuple[tuple[Launch, tuple[torch.Tensor, ...]], ...]) -> None:
    """Launch one after another, each with its tensors; all are of one device."""
    device = launches[0][0].device
    if device is not None and device != current_device():
        with torch.cuda.device(device):  # Triton launches on the current device and its current stream
            run(launches)
        return
    hooked = _hooked()
    for launch, tensors in launches:
        launch._launch(tensors, hooked)
