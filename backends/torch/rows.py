"""Rows of state pools: derived from a page table, read into float32, written back rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

from gdn_multi.request import SlotsRequest

#: Integer types of the same width: rows are moved as integers, so that every bit survives and every dtype works.
_AS_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def host_reads(device: torch.device) -> bool:
    """Whether the host can read values of this device without waiting: then sizes are exact, else upper bounds."""
    return device.type == "cpu"


def page_slots(request: SlotsRequest) -> None:
    """Contract, "Slots of a page table"."""
    table = request.table
    indptr, last = table.page_indptr.long(), table.last_page_len.long()
    first, end = indptr[:-1], indptr[1:]
    pages = table.page_indices
    if not request.is_prefill:
        read, write = request.out
        every = torch.ones_like(last, dtype=torch.bool)
        write.copy_(_pages(pages, end - 1, every))
        read.copy_(_pages(pages, torch.where(last == 1, end - 2, end - 1), every))
        return
    read, write, starts, prefix_lens = request.out
    cu = request.cu_seqlens.long()
    new = cu[1:] - cu[:-1]
    total = (end - first - 1) * table.page_size + last
    prefix = total - new
    prefix_lens.copy_(prefix)
    starts.copy_(first + prefix // table.page_size)
    none = torch.full_like(read, -1)
    # select, not index arithmetic: an empty prefix may point before the table
    reads, writes = prefix > 0, (new > 0) & (total % table.page_size != 0)
    last_prefix_page = first + (prefix - 1).clamp(min=0) // table.page_size
    read.copy_(torch.where(reads, _pages(pages, last_prefix_page, reads), none))
    write.copy_(torch.where(writes, _pages(pages, end - 1, writes), none))


def _pages(table: Tensor, entry: Tensor, used: Tensor) -> Tensor:
    """``entries`` of page ids: one that is negative or no int32 is an IndexError where the host can see it, and no other row."""
    ids = entries(table, entry, used)
    if host_reads(ids.device):
        wrong = used & ((ids < 0) | (ids >= 2**31))
        if bool(wrong.any()):
            raise IndexError(f"page id {int(ids[wrong][0])}")
    return ids


def entries(table: Tensor, entry: Tensor, used: Tensor) -> Tensor:
    """``table[entry]`` as int64 where ``used``; -1 or anything elsewhere. A used entry outside the table is an
    IndexError where the host can see it, and the nearest entry where it can't."""
    size = table.shape[0]
    if host_reads(entry.device):
        wrong = used & ((entry < 0) | (entry >= size))
        if bool(wrong.any()):
            raise IndexError(f"entry {int(entry[wrong][0])} of a table of {size} rows")
    if size == 0:
        return torch.full_like(entry, -1)
    return table[entry.clamp(0, size - 1)].long()


def load_rows(pool: Tensor | None, rows: Tensor | None, num_rows: int, like: Tensor, shape) -> Tensor:
    """float32 [num_rows, *shape] from ``pool[rows]``: a negative row, or no pool, is zero; no rows: row i is i."""
    if pool is None or pool.shape[0] == 0:
        return like.new_zeros((num_rows, *shape), dtype=torch.float32)
    if rows is None:
        return pool[:num_rows].to(torch.float32, copy=True)
    bits = pool.view(_AS_INTEGER[pool.element_size()])
    picked = bits.index_select(0, rows.long().clamp(min=0)).view(pool.dtype).float()
    return picked.masked_fill_((rows < 0).view(-1, 1, 1, 1), 0.0)


def round_to(values: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 -> a state dtype, to nearest even; float8 saturates."""
    limit = _FP8_MAX.get(dtype)
    return (values if limit is None else values.clamp(-limit, limit)).to(dtype)


def store_rows(pool: Tensor, rows: Tensor, values: Tensor) -> None:
    """``pool[rows] = values``, rounded; negative rows are skipped and no other row changes.

    On a GPU the number of rows to write is unknown to the host, so a skipped entry repeats the write of the first one
    that is not skipped (the same bits to the same row); when all are skipped, row 0 is written with its own bits.
    """
    if rows.shape[0] == 0 or pool.shape[0] == 0:
        return
    integer = _AS_INTEGER[pool.element_size()]
    bits = pool.view(integer)
    rows = rows.long()
    if host_reads(rows.device):
        kept = (rows >= 0).nonzero()[:, 0]
        if kept.numel() < rows.numel():
            rows, values = rows[kept], values[kept]
        bits.index_copy_(0, rows, round_to(values, pool.dtype).view(integer))
        return
    new = round_to(values, pool.dtype).contiguous().view(integer)
    kept = rows >= 0
    source = torch.where(kept, torch.arange(rows.shape[0], device=rows.device), kept.int().argmax())
    any_kept = kept.any()
    target = torch.where(any_kept, rows[source], torch.zeros_like(rows))
    bits.index_copy_(0, target, torch.where(any_kept, new[source], bits[:1]))
