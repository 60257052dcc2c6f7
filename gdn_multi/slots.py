"""The pool rows of a paged batch: the public tuples, and how a request takes them on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from .request import DecodeRequest, PageTable, PrefillRequest, SlotsRequest


class GDNPagedPrefillSlots(NamedTuple):
    """Per-sequence pool rows of a paged prefill batch, all ``[num_seqs]`` int32, contiguous."""

    state_indices: torch.Tensor
    """Page that holds the last prefix token, read as the initial state; -1 (zero state) for an empty prefix."""
    output_state_indices: torch.Tensor
    """Last page, written with the final state; -1 where there is no new token, or where the final state is the
    checkpoint of a page that ends there."""
    checkpoint_cu_starts: torch.Tensor
    """Entry of ``page_indices`` of the first page boundary that the new tokens cross."""
    prefix_lens: torch.Tensor
    """Tokens before the new ones."""


class GDNPagedDecodeSlots(NamedTuple):
    """Per-sequence pool rows of a paged decode batch, both ``[B]`` int32, contiguous."""

    initial_state_indices: torch.Tensor
    """Page that holds the state before the decoded token."""
    output_state_indices: torch.Tensor
    """Last page, written with the state after the decoded token."""


def slots_request(
    function: str, table: PageTable, cu_seqlens: torch.Tensor | None, device: torch.device
) -> SlotsRequest:
    """A SlotsRequest with freshly allocated rows, for a prefill (``cu_seqlens`` given) or a decode."""
    rows = 4 if cu_seqlens is not None else 2
    num_seqs = table.last_page_len.shape[0]
    out = tuple(torch.empty(num_seqs, dtype=torch.int32, device=device) for _ in range(rows))
    return SlotsRequest(function=function, table=table, cu_seqlens=cu_seqlens, out=out, device=device)


def with_slots(
    request: PrefillRequest | DecodeRequest, slots: Sequence[torch.Tensor]
) -> PrefillRequest | DecodeRequest:
    """``request`` with the rows of ``slots`` in place of its page table (request.py, "pages")."""
    pages = request.pages
    assert pages is not None
    if isinstance(request, PrefillRequest):
        read, write, starts, prefix = slots
        return replace(
            request,
            read_rows=read,
            write_rows=write,
            checkpoint_starts=starts,
            checkpoint_rows=pages.page_indices,
            prefix_lens=prefix,
            pages=None,
        )
    read, write = slots
    return replace(request, read_rows=read, write_rows=write, pages=None)
