"""What a measured call looks like to the runner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch


class Unavailable(Exception):
    """This contender cannot run this row, or cannot run here; the message says why."""


@dataclass
class Call:
    """One call, ready to run: everything that is not the call itself was prepared before."""

    run: Callable[[], object]
    #: Output and states of the last run, as [T, H, V] and [N, H, V, K] (decode: [B, 1, HV, V] and [B, HV, V, K]).
    read: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    #: Puts inputs that the call changed back and fills what it must write with NaN.
    reset: Callable[[], None] = lambda: None
    note: str = ""


@dataclass
class Contender:
    """Something that can be measured. ``prefill`` and ``decode`` make the call of a row, or raise Unavailable."""

    name: str
    is_ours: bool
    prefill: Callable[[object], Call] | None = None
    decode: Callable[[object], Call] | None = None
    title: str = ""  #: for table heads; the name where empty
    #: False: it has no state pool, or is paged; "best peer" of a prefill row is the best of those with True.
    counts_as_best: bool = True
    versions: dict[str, str] = field(default_factory=dict)
    #: Row names (patterns) that it runs on; None for all.
    only_rows: tuple[str, ...] | None = None

    @property
    def heading(self) -> str:
        return self.title or self.name
