"""A GDN layer small enough to read: bytes in, the arguments of the GDN functions out. Fixed random weights."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch


class Projected(NamedTuple):
    """What the layer feeds the GDN functions for T tokens; q, k and v are slices of one projection, not copies."""

    q: torch.Tensor  # [T, q_heads, head_size]
    k: torch.Tensor  # [T, q_heads, head_size]
    v: torch.Tensor  # [T, v_heads, head_size]
    a: torch.Tensor  # [T, v_heads], raw gate
    b: torch.Tensor  # [T, v_heads], beta's logit


class Layer:
    """Byte embedding and one fused projection to q, k, v, a and b, with gates initialised as GDN models do it."""

    HIDDEN = 256

    def __init__(
        self, q_heads: int, v_heads: int, head_size: int, *, dtype: torch.dtype, device: torch.device, seed: int
    ) -> None:
        self.q_heads, self.v_heads, self.head_size = q_heads, v_heads, head_size
        # Drawn on the CPU in float32, so that the weights are the same on every device.
        random = torch.Generator().manual_seed(seed)
        widths = (q_heads * head_size, q_heads * head_size, v_heads * head_size, v_heads, v_heads)
        embedding = torch.randn(256, self.HIDDEN, generator=random)
        weight = torch.randn(self.HIDDEN, sum(widths), generator=random) / math.sqrt(self.HIDDEN)
        # A in [1, 16], and dt log-uniform in [1e-3, 0.1], of which dt_bias is the inverse softplus
        A = 1 + 15 * torch.rand(v_heads, generator=random)
        low, high = math.log(1e-3), math.log(0.1)
        dt = torch.exp(low + (high - low) * torch.rand(v_heads, generator=random))
        self._widths = widths
        self._embedding = embedding.to(device, dtype)
        self._weight = weight.to(device, dtype)
        self.A_log = A.log().to(device)
        self.dt_bias = torch.log(torch.expm1(dt)).to(device)

    def __call__(self, text: bytes) -> Projected:
        ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self._embedding.device, torch.long)
        q, k, v, a, b = (self._embedding[ids] @ self._weight).split(self._widths, dim=-1)
        heads = (self.q_heads, self.q_heads, self.v_heads)
        q, k, v = (x.unflatten(-1, (n, self.head_size)) for x, n in zip((q, k, v), heads))
        return Projected(q, k, v, a, b)
