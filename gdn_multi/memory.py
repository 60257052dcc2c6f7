"""New tensors at little host cost: what torch.empty takes for its keywords and its dispatch is longer than the allocation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

#: _empty_strided_cuda and others: torch.empty_strided on the current device of a kind, without keywords to be parsed and
#: without the dispatcher. Used where this torch has them.
_allocators = getattr(getattr(torch._C, "_dynamo", None), "guards", None)

#: Where there are tensors on a GPU, nothing needs to be initialised before asking for the device.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


#: Whether a quick function does with a dtype what it should.
_tried: dict[tuple[Callable[..., torch.Tensor], torch.dtype], bool] = {}


def _quick(device: torch.device, dtype: torch.dtype) -> Callable[..., torch.Tensor] | None:
    kind = device.type
    function = getattr(_allocators, f"_empty_strided_{kind}", None) if kind in ("cpu", "cuda") else None
    if function is None or _tried.get((function, dtype)) is False:
        return None
    if (function, dtype) not in _tried:
        try:
            with torch.cuda.device(device) if kind == "cuda" else nullcontext():  # no context on a device that nobody uses
                made = function((2, 3), (3, 1), dtype)
        except TypeError:  # this torch's takes other arguments
            _tried[function, dtype] = False
            return None
        except RuntimeError:  # no memory, say
            return None
        _tried[function, dtype] = (made.shape, made.stride(), made.dtype, made.device.type) == ((2, 3), (3, 1), dtype, kind)
    return function if _tried[function, dtype] else None


class Empty:
    """Called, a new dense tensor of ``shape`` and ``dtype`` on ``device``, its contents undefined."""

    __slots__ = ("shape", "strides", "dtype", "device", "_index", "_quick")

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device):
        strides = [1] * len(shape)
        for i in range(len(shape) - 1, 0, -1):
            strides[i - 1] = strides[i] * max(shape[i], 1)
        self.shape, self.strides, self.dtype, self.device = tuple(shape), tuple(strides), dtype, device
        self._quick = _quick(device, dtype)
        #: None where a kind has one device, and any is current.
        self._index = device.index if device.type != "cpu" else None

    def __call__(self) -> torch.Tensor:
        if self._quick is not None and (self._index is None or self._index == current_device()):
            return self._quick(self.shape, self.strides, self.dtype)
        return self.anywhere()

    def anywhere(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def calls(self) -> tuple[tuple[Callable[..., torch.Tensor], tuple[Any, ...]], ...]:
        """Two functions, with their arguments, that make such a tensor: as quickly as can be, which may be on the current
        device of the kind; and on the device. The same twice where there is no quick way."""
        anywhere: tuple[Callable[..., torch.Tensor], tuple] = self.anywhere, ()
        return (anywhere if self._quick is None else (self._quick, (self.shape, self.strides, self.dtype))), anywhere
