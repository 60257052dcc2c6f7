"""A door is one backend on one device, called through the public functions: what conformance tests talk to."""

from __future__ import annotations

import os
from dataclasses import dataclass
from unittest import mock

import cases
import pytest
import torch


def conformance_device(config) -> torch.device:
    name = config.getoption("--gdn-device")
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def wanted_backends(config) -> tuple[str, ...]:
    from gdn_multi import registered_backends

    return tuple(config.getoption("--gdn-backend") or registered_backends())


def reasons_unusable(name: str, device: torch.device) -> tuple[str, ...]:
    from gdn_multi.registry import registry

    try:
        return tuple(registry.get(name).reasons_unusable(device))
    except (KeyError, RuntimeError) as error:
        return (str(error),)


@dataclass(frozen=True)
class Sizes:
    """Sizes that a backend can be asked for in a test that is about something else."""

    dims: cases.Dims
    dtype: torch.dtype
    page_size: int
    lengths: tuple[int, ...]


class Door:
    """One backend on one device, called through the public functions."""

    def __init__(self, name: str, device: torch.device, small: bool) -> None:
        self.name, self.device = name, device
        self.interpreted = name == "triton" and device.type == "cpu"
        self.small = small or self.interpreted

    @property
    def sizes(self) -> Sizes:
        """K != V where the backend serves it, so that a transposed state cannot hide."""
        if self.small:
            # tl.dot on bfloat16 is wrong under the interpreter, hence float16.
            return Sizes(cases.Dims(1, 1, 2, 64, 64), torch.float16, 64, (70, 0, 6))
        if self.name == "torch":
            return Sizes(cases.Dims(2, 2, 4, 32, 48), torch.float32, 64, (100, 64, 0, 1, 193))
        if self.name == "triton":
            return Sizes(cases.Dims(2, 2, 4, 64, 128), torch.bfloat16, 64, (100, 64, 0, 1, 193))
        return Sizes(cases.Dims(2, 2, 4, 128, 128), torch.bfloat16, 64, (100, 64, 0, 1, 193))

    def must_serve(self, q: torch.Tensor, v: torch.Tensor, float8: bool = False) -> bool:
        """The contract's table of backends: torch and triton serve everything, cuda K = V = 128 and 64."""
        if self.name == "torch":
            return True
        if q.dtype == torch.float32:
            return False
        if self.device.type == "cuda" and torch.cuda.get_device_capability(self.device) < (8, 9) and float8:
            return False
        return self.name == "triton" or (self.name == "cuda" and q.shape[-1] == v.shape[-1] in (64, 128))

    def __call__(self, function, *args, may_refuse: bool = False, **kwargs):
        """The call on this backend. What the backend refuses is skipped with its reasons, unless it must serve it."""
        import gdn_multi

        kwargs["backend"] = self.name
        reasons = gdn_multi.explain(function, *args, **kwargs).reasons[self.name]
        if reasons:
            float8 = any(isinstance(x, torch.Tensor) and x.dtype in cases.FLOAT8 for x in kwargs.values())
            if may_refuse or not self.must_serve(kwargs["q"], kwargs["v"], float8):
                pytest.skip(f"{self.name}: " + "; ".join(reasons))
            pytest.fail(f"{self.name} must serve this call, and refuses: " + "; ".join(reasons))
        result = function(*args, **kwargs)
        ran = gdn_multi.last_backend()
        assert ran.backend == self.name and ran.function == function.__name__, ran
        return result

    def page_slots(self, function, **kwargs):
        """A call of gdn_paged_prefill_slots or gdn_paged_decode_slots, which have no backend argument."""
        import gdn_multi

        with mock.patch.dict(os.environ, {"GDN_MULTI_BACKEND": self.name}):
            reasons = gdn_multi.explain(function, **kwargs).reasons[self.name]
            if reasons and self.name not in ("torch", "triton", "cuda"):
                pytest.skip(f"{self.name}: " + "; ".join(reasons))
            assert not reasons, f"{self.name} must derive page-table rows, and refuses: " + "; ".join(reasons)
            result = function(**kwargs)
        assert gdn_multi.last_backend().backend == self.name
        return result
