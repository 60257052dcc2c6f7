"""The pool rows of a paged batch from its page table, one launch for a prefill and one for a decode."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from gdn_multi.request import SlotsRequest

from .launch import Launch

#: Sequences of one program.
BLOCK = 128

_POINTERS = ["indices_ptr", "indptr_ptr", "last_ptr", "read_ptr", "write_ptr"]


@triton.jit(
    do_not_specialize=["num_seqs", "page_size"],
    do_not_specialize_on_alignment=_POINTERS + ["cu_ptr", "starts_ptr", "prefix_ptr"],
)
def prefill_slots_kernel(
    indices_ptr, indptr_ptr, last_ptr, cu_ptr, read_ptr, write_ptr, starts_ptr, prefix_ptr,
    num_seqs: tl.int32, page_size: tl.int32, BLOCK: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = seq < num_seqs
    first = tl.load(indptr_ptr + seq, mask=inside, other=0).to(tl.int64)
    end = tl.load(indptr_ptr + seq + 1, mask=inside, other=1).to(tl.int64)
    new = tl.load(cu_ptr + seq + 1, mask=inside, other=0).to(tl.int64)
    new -= tl.load(cu_ptr + seq, mask=inside, other=0).to(tl.int64)
    total = (end - first - 1) * page_size + tl.load(last_ptr + seq, mask=inside, other=0).to(tl.int64)
    prefix = total - new
    reads = inside & (prefix > 0)
    writes = inside & (new > 0) & (total % page_size != 0)  # else the last checkpoint is that state
    read = tl.load(indices_ptr + first + (prefix - 1) // page_size, mask=reads, other=-1)
    write = tl.load(indices_ptr + end - 1, mask=writes, other=-1)
    tl.store(read_ptr + seq, read.to(tl.int32), mask=inside)
    tl.store(write_ptr + seq, write.to(tl.int32), mask=inside)
    tl.store(starts_ptr + seq, (first + prefix // page_size).to(tl.int32), mask=inside)
    tl.store(prefix_ptr + seq, prefix.to(tl.int32), mask=inside)


@triton.jit(do_not_specialize=["num_seqs"], do_not_specialize_on_alignment=_POINTERS)
def decode_slots_kernel(
    indices_ptr, indptr_ptr, last_ptr, read_ptr, write_ptr, num_seqs: tl.int32, BLOCK: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = seq < num_seqs
    first = tl.load(indptr_ptr + seq, mask=inside, other=0).to(tl.int64)
    last = tl.load(indptr_ptr + seq + 1, mask=inside, other=1).to(tl.int64) - 1
    opens_page = tl.load(last_ptr + seq, mask=inside, other=0) == 1
    # A page before the first does not exist; the clamp keeps a wrong table from reading beside the others.
    before = tl.maximum(tl.where(opens_page, last - 1, last), first)
    read = tl.load(indices_ptr + before, mask=inside, other=-1)
    write = tl.load(indices_ptr + last, mask=inside, other=-1)
    tl.store(read_ptr + seq, read.to(tl.int32), mask=inside)
    tl.store(write_ptr + seq, write.to(tl.int32), mask=inside)


#: Number of sequences, page size, dtypes and device -> launch.
_LAUNCHES: dict[tuple[Any, ...], Launch] = {}
_MAX_LAUNCHES = 4096


def page_slots(request: SlotsRequest) -> None:
    """Fill ``request.out``, in one launch."""
    table, cu_seqlens = request.table, request.cu_seqlens
    num_seqs = table.last_page_len.shape[0]
    if num_seqs == 0:
        return
    tensors = (table.page_indices, table.page_indptr, table.last_page_len)
    sizes: tuple[int, ...] = (num_seqs,)
    kernel = decode_slots_kernel
    if cu_seqlens is not None:
        tensors += (cu_seqlens,)
        sizes += (table.page_size,)
        kernel = prefill_slots_kernel
    key = (*sizes, *(tensor.dtype for tensor in tensors), request.device)
    launch = _LAUNCHES.get(key)
    if launch is None:
        if len(_LAUNCHES) >= _MAX_LAUNCHES:
            _LAUNCHES.clear()
        grid = (triton.cdiv(num_seqs, BLOCK),)
        launch = _LAUNCHES[key] = Launch(kernel, grid, request.device, (*sizes, BLOCK), num_warps=4)
    launch(*tensors, *request.out)
