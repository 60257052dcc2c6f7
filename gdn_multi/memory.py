"""New tensors at little host cost: torch.empty parses keywords and goes through the dispatcher, which takes longer than memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

#: _empty_strided_cuda and others: torch.empty_strided on the current device of a kind, without keywords to be parsed and
#: without the dispatcher. Used where this torch has them.
_allocators = getattr(getattr(torch._C, "_dynamo", None), "guards", None)

#: Where there are tensors on a GPU, nothing needs to be initialised before asking for the device.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def _quick(kind: str, dtype: torch.dtype) -> Callable[..., torch.Tensor] | None:
    function = getattr(_allocators, f"_empty_strided_{kind}", None) if kind in ("cpu", "cuda") else None
    return function if function is not None and _does_as_expected(function, kind, dtype) else None


@cache
def _does_as_expected(function: Callable[..., torch.Tensor], kind: str, dtype: torch.dtype) -> bool:
    try:
        made = function((2, 3), (3, 1), dtype)
    except (TypeError, RuntimeError):  # this torch's takes other arguments
        return False
    return (made.shape, made.stride(), made.dtype, made.device.type) == ((2, 3), (3, 1), dtype, kind)


class Empty:
    """Called, a new dense tensor of ``shape`` and ``dtype`` on ``device``, its contents undefined."""

    __slots__ = ("shape", "strides", "dtype", "device", "_index", "_quick")

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device):
        strides = [1] * len(shape)
        for i in range(len(shape) - 1, 0, -1):
            strides[i - 1] = strides[i] * max(shape[i], 1)
        self.shape, self.strides, self.dtype, self.device = tuple(shape), tuple(strides), dtype, device
        self._quick = _quick(device.type, dtype)
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
        device of the kind; and on the device."""
        anywhere: tuple[Callable[..., torch.Tensor], tuple] = self.anywhere, ()
        return (anywhere if self._quick is None else (self._quick, (self.shape, self.strides, self.dtype))), anywhere
