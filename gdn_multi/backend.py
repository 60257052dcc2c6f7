"""The interface of a backend: four doors, of which a new backend must open the first two and one more.

A backend is an object with a ``name``. The registry makes it when it is first asked for; its heavy imports
belong into the methods below, so that importing gdn_multi stays cheap.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .request import DecodeRequest, PrefillRequest, Request, SlotsRequest

Reasons = tuple[str, ...]


class Backend:
    """Base class of all backends; see docs/adding_a_backend.md for a worked example."""

    #: The name users select it by.
    name: str = ""
    #: Place in the automatic choice, higher first; None: only by name. The policy asks backends in this order.
    priority: int | None = None
    #: One line on what it serves and where, for ``doctor``.
    summary: str = ""

    def reasons_unusable(self, device: torch.device) -> Reasons:
        """Why nothing can run here on ``device``: () or sentences, each with what would mend it.

        Asked before every choice, so it must be cheap after the first time.
        """
        return ()

    def reasons_against(self, request: Request) -> Reasons:
        """Every reason why this backend, usable as it may be, does not serve ``request``: () or sentences.

        May depend on sizes, dtypes, strides, devices, scalars and on which arguments are given, not on contents or
        addresses of tensors: the answer is remembered for calls that agree in all of that.
        """
        return ()

    def priority_for(self, request: Request) -> int | None:
        """``priority`` for this request: a backend may stand behind another where a measurement says that it is slower.
        Remembered as ``reasons_against`` is."""
        return self.priority

    def detail(self, request: Request) -> str:
        """What would run inside this backend (an engine, a kernel path), for ``explain`` and ``last_backend``; may be
        empty. Remembered as ``reasons_against`` is."""
        return ""

    def prefill(self, request: PrefillRequest) -> None:
        """Fill ``request.output`` and write the states; what follows from shapes alone may be kept in ``request.shared``."""
        raise NotImplementedError(f"backend {self.name!r} has no prefill")

    def decode(self, request: DecodeRequest) -> None:
        raise NotImplementedError(f"backend {self.name!r} has no decode")

    def page_slots(self, request: SlotsRequest) -> None:
        """Fill ``request.out`` from the page table, in one launch and without a host synchronization."""
        raise NotImplementedError(f"backend {self.name!r} has no page_slots")

    def express_decode(self, request: DecodeRequest) -> Callable[..., bool] | None:
        """A short way for decode calls like ``request``, which has just been served; None if there is none.

        The result takes the tensors q, k, v, A_log, a, dt_bias, b, state, read_rows, write_rows, intermediate_states,
        page_indices, page_indptr, last_page_len and output of a later call, None for those not given. When they agree
        with the request's in presence, shapes, strides, dtypes and devices it serves the call and returns True; else it
        does nothing and returns False, and the call goes the ordinary way. Scalars and variables are the request's.
        """
        return None

    def express_decode_call(
        self, request: DecodeRequest, terms: tuple
    ) -> Callable[[tuple], torch.Tensor | None] | None:
        """All of the short way in the backend's hands, in the place of ``express_decode``; None if there is no such thing.

        The result takes a call as a tuple and does what that of ``dispatch.short_way`` does, under ``terms``, a ``dispatch.Terms``.
        """
        return None

    def arguments_like(self, request: Request, surroundings: tuple, values: tuple) -> Callable[[tuple], bool] | None:
        """A quick way to tell whether the arguments of a call are like ``values``, those of ``request``; None if there is none.

        The result takes the arguments as a tuple in the same order. It is True only where no decision that ``dispatch``
        remembers can differ (``dispatch._key``), with all as in ``surroundings``, a ``dispatch.Surroundings``.
        """
        return None

    def compilations(self) -> int:
        """How often this backend has compiled or loaded a kernel or library in this process (``gdn_multi.warmup``)."""
        return 0

    # --- helpers for backends ----------------------------------------------------------------

    def with_slots(self, request):
        """``request`` with its page table turned into rows by this backend's ``page_slots``.

        Returns the request itself when it has no page table, so a backend can call it always.
        """
        if request.pages is None:
            return request
        from .slots import slots_request, with_slots

        wanted = slots_request(
            request.function,
            request.pages,
            request.cu_seqlens if isinstance(request, PrefillRequest) else None,
            request.device,
        )
        self.page_slots(wanted)
        return with_slots(request, wanted.out)
