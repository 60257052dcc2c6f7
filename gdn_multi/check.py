"""GDN_MULTI_CHECK=1: every index in range, every written row owned by one sequence; the first fault is named.

All index tensors of the call travel to the host in one copy, which is the one synchronization; pools and tokens are
not read. While a CUDA graph is being captured nothing can be copied: the check is then skipped, with a warning.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from .request import DecodeRequest, PageTable, PrefillRequest, Request, SlotsRequest

WHERE = " (found by GDN_MULTI_CHECK)"


def check(request: Request) -> None:
    """ValueError with the sequence and the entry that broke a rule; nothing has been written then."""
    if request.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        warnings.warn("GDN_MULTI_CHECK is skipped while a CUDA graph is captured", RuntimeWarning, stacklevel=4)
        return
    if isinstance(request, SlotsRequest):
        values = _to_host({**_table_tensors(request.table), "cu_seqlens": request.cu_seqlens})
        _check_table(values, request.table, None)
    elif isinstance(request, PrefillRequest):
        _check_prefill(request)
    else:
        _check_decode(request)


def _to_host(tensors: dict[str, Tensor | None]) -> dict[str, list[int]]:
    """The values of all given tensors, in one copy."""
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    joined = torch.cat([tensor.reshape(-1).long() for tensor in given.values()]).tolist() if given else []
    values, start = {}, 0
    for name, tensor in given.items():
        values[name] = joined[start : start + tensor.numel()]
        start += tensor.numel()
    return values


def _table_tensors(table: PageTable | None) -> dict[str, Tensor | None]:
    if table is None:
        return {}
    return dict(
        page_indices=table.page_indices, page_indptr=table.page_indptr, last_page_len=table.last_page_len
    )  # fmt: skip


def _check_table(values: dict[str, list[int]], table: PageTable, num_pages: int | None) -> None:
    pages, indptr, last = values["page_indices"], values["page_indptr"], values["last_page_len"]
    cu = values.get("cu_seqlens")
    for i, (first, end) in enumerate(zip(indptr, indptr[1:])):
        if first < 0 or end > len(pages):
            raise ValueError(
                f"page_indptr of sequence {i}, [{first}, {end}), must lie in the {len(pages)} entries of page_indices"
                + WHERE
            )
        if end <= first:
            raise ValueError(f"sequence {i} must own at least one page, got page_indptr {first} and {end}" + WHERE)
        if last[i] < 1 or (table.page_size and last[i] > table.page_size):
            upper = f"[1, {table.page_size}]" if table.page_size else "[1, page_size]"
            raise ValueError(f"last_page_len[{i}] (sequence {i}) must be in {upper}, got {last[i]}" + WHERE)
        if len(set(pages[first:end])) < end - first:
            seen: dict[int, int] = {}
            for entry in range(first, end):
                if pages[entry] in seen:
                    raise ValueError(
                        f"page_indices[{entry}] (sequence {i}, its page {entry - first}) is page {pages[entry]}, as is "
                        f"page_indices[{seen[pages[entry]]}]: a sequence lists a page once" + WHERE
                    )
                seen[pages[entry]] = entry
        # Slots are int32: without a pool, what does not fit there is no row of any.
        limit, of = (2**31, "what fits a slot") if num_pages is None else (num_pages, "the rows of the pool")
        for entry in range(first, end):
            if not 0 <= pages[entry] < limit:
                raise ValueError(
                    f"page_indices[{entry}] (sequence {i}, its page {entry - first}) must be in [0, {limit}), {of}, "
                    f"got {pages[entry]}" + WHERE
                )
        if cu is None:
            if last[i] == 1 and end - first < 2:
                raise ValueError(
                    f"sequence {i} opens a page (last_page_len[{i}] = 1) and must own the page before it too, got one "
                    f"page; to pad, use last_page_len >= 2" + WHERE
                )
        else:
            total, new = (end - first - 1) * table.page_size + last[i], cu[i + 1] - cu[i]
            if new < 0 or cu[i] < 0:
                raise ValueError(
                    f"cu_seqlens[{i}] and [{i + 1}] (sequence {i}) must satisfy 0 <= start <= end, got {cu[i]} and "
                    f"{cu[i + 1]}" + WHERE
                )
            if new > total:
                raise ValueError(
                    f"sequence {i} has {new} new tokens in cu_seqlens and only {total} tokens in its pages" + WHERE
                )


def _check_slots(slots: dict[str, tuple[list[int] | None, list[int]]], used: list[bool]) -> None:
    """Given ``slots``, by name what was given (None: nothing) and what the page table says, for the sequences that use them."""
    for name, (given, right) in slots.items():
        for i, (one, other) in enumerate(zip(given or (), right)):
            if used[i] and one != other:
                raise ValueError(
                    f"{name}[{i}] (sequence {i}) must be {other}, as the page table says, got {one}: slots belong to the "
                    f"page table and lengths that they were derived from" + WHERE
                )


class _Owners:
    """Which sequence reads and writes which row; rows of different pools are told apart by their address."""

    def __init__(self) -> None:
        self.reads: dict[int, list[tuple[int, str]]] = {}
        self.writes: dict[int, list[tuple[int, str]]] = {}

    def add(self, kind: str, pool: Tensor, row: int, sequence: int, what: str) -> None:
        address = pool.data_ptr() + row * pool.stride(0) * pool.element_size()
        getattr(self, kind).setdefault(address, []).append((sequence, f"{what} (row {row})"))

    def check(self) -> None:
        for address, writers in self.writes.items():
            first, what = writers[0]
            for other, other_what in writers[1:] + self.reads.get(address, []):
                if other != first:
                    verb = "writes" if (other, other_what) in writers[1:] else "reads"
                    raise ValueError(
                        f"sequence {other} {verb} a row that sequence {first} writes: {other_what} and {what}; a "
                        f"written row must belong to one sequence of a call" + WHERE
                    )


def _in_range(name: str, entry: int, row: int, rows: int, sequence: int, of: str) -> None:
    if row >= rows:
        raise ValueError(
            f"{name}[{entry}] (sequence {sequence}) must be below {rows}, the rows of {of}, got {row}" + WHERE
        )


def _check_prefill(r: PrefillRequest) -> None:
    from . import reference

    values = _to_host(
        {
            "cu_seqlens": r.cu_seqlens,
            "read": r.read_rows,
            "write": r.write_rows,
            "starts": r.checkpoint_starts,
            "rows": r.checkpoint_rows,
            "prefix": r.prefix_lens,
            **_table_tensors(r.pages or r.slots_of),
        }
    )
    cu = values["cu_seqlens"]
    for i, (start, end) in enumerate(zip(cu, cu[1:])):
        if start < 0 or end < start or end > r.num_tokens:
            raise ValueError(
                f"cu_seqlens[{i}] and [{i + 1}] (sequence {i}) must satisfy 0 <= start <= end <= {r.num_tokens}, the "
                f"tokens of q, got {start} and {end}" + WHERE
            )
        if end - start > r.max_seqlen:
            raise ValueError(f"sequence {i} has {end - start} tokens, more than max_seqlen = {r.max_seqlen}" + WHERE)
    if r.cu_seqlens_cpu is not None and list(r.cu_seqlens_cpu) != cu:
        raise ValueError("cu_seqlens_cpu must hold the values of cu_seqlens, got other values" + WHERE)

    read, write, starts, rows, prefix = (values.get(n) for n in ("read", "write", "starts", "rows", "prefix"))
    # How a message calls the entries: argument[entry], the entry being the sequence's number unless a page table says.
    names = dict(
        read="state_indices", write="output_state_indices", rows="checkpoint_state_indices",
        starts="checkpoint_cu_starts", prefix="prefix_lens",
    )  # fmt: skip
    if "output_state_indices" not in r.slot_arguments:
        names["write"] = "state_indices"
    read_entry = write_entry = range(r.num_seqs)
    if r.is_paged:
        names = dict(
            read="slots.state_indices", write="slots.output_state_indices", rows="page_indices",
            starts="slots.checkpoint_cu_starts", prefix="slots.prefix_lens",
        )  # fmt: skip
    table = r.pages or r.slots_of
    if table is not None:
        _check_table(values, table, r.initial_state.shape[0])
        cpu, size = torch.device("cpu"), table.page_size
        pages = [
            torch.tensor(values[n], device=cpu) for n in ("cu_seqlens", "page_indices", "page_indptr", "last_page_len")
        ]
        slots = reference.prefill_slots(pages[0], pages[1], pages[2], size, pages[3])
        used = [end > start for start, end in zip(cu, cu[1:])]  # a sequence without new tokens reads and writes nothing
        _check_slots({names[n]: (values.get(n), slots[n]) for n in ("read", "write", "starts", "prefix")}, used)
        read, write, starts, prefix = (slots[n] for n in ("read", "write", "starts", "prefix"))
        rows, indptr = values["page_indices"], values["page_indptr"]
        names.update(read="page_indices", write="page_indices")
        read_entry = [first + max(before - 1, 0) // size for first, before in zip(indptr, prefix)]
        write_entry = [end - 1 for end in indptr[1:]]

    owners = _Owners()
    for i, (start, end) in enumerate(zip(cu, cu[1:])):
        if end == start and not r.final_state_is_new:  # reads and writes nothing
            continue
        before = 0 if prefix is None else prefix[i]
        if before < 0:
            raise ValueError(f"{names['prefix']}[{i}] (sequence {i}) must not be negative, got {before}" + WHERE)
        if r.initial_state is not None:
            row = i if read is None else read[i]
            _in_range(names["read"], read_entry[i], row, r.initial_state.shape[0], i, "initial_state")
            if row >= 0:
                owners.add("reads", r.initial_state, row, i, f"{names['read']}[{read_entry[i]}]")
        if r.final_state is not None:
            row = i if write is None else write[i]
            _in_range(names["write"], write_entry[i], row, r.final_state.shape[0], i, "output_state")
            if row >= 0:
                owners.add("writes", r.final_state, row, i, f"{names['write']}[{write_entry[i]}]")
        if r.checkpoint_every:
            count = (before + end - start) // r.checkpoint_every - before // r.checkpoint_every
            for entry in range(starts[i], starts[i] + count):
                if entry < 0 or (rows is not None and entry >= len(rows)):
                    limit = f"the {len(rows)} entries of {names['rows']}" if rows is not None else "the rows"
                    raise ValueError(
                        f"checkpoint {entry - starts[i]} of sequence {i} is entry {entry}, outside {limit}" + WHERE
                    )
                row = entry if rows is None else rows[entry]
                name, place = (names["starts"], i) if rows is None else (names["rows"], entry)
                _in_range(name, place, row, r.state_checkpoints.shape[0], i, "state_checkpoints")
                if row >= 0:
                    owners.add("writes", r.state_checkpoints, row, i, f"{name}[{place}]")
    owners.check()


def _check_decode(r: DecodeRequest) -> None:
    values = _to_host({"read": r.read_rows, "write": r.write_rows, **_table_tensors(r.pages or r.slots_of)})
    read, write = values.get("read"), values.get("write")
    names = ("initial_state_indices", "output_state_indices" if r.slot_arguments else "initial_state_indices")
    entries = (range(r.batch), range(r.batch))
    if r.is_paged:
        names = ("slots.initial_state_indices", "slots.output_state_indices")
    table = r.pages or r.slots_of
    if table is not None:
        from . import reference

        _check_table(values, table, r.state.shape[0])
        indptr, last = values["page_indptr"], values["last_page_len"]
        tables = (torch.tensor(values[n], device="cpu") for n in ("page_indices", "page_indptr", "last_page_len"))
        right = reference.decode_slots(*tables)
        _check_slots({name: pair for name, *pair in zip(names, (read, write), right)}, [True] * r.batch)
        read, write = right
        names = ("page_indices", "page_indices")
        ends = [end - 1 for end in indptr[1:]]
        entries = ([end - (n == 1) for end, n in zip(ends, last)], ends)
    if read is None or write is None:
        return
    owners = _Owners()
    for i, (source, target) in enumerate(zip(read, write)):
        if source < 0 or target < 0:
            continue
        _in_range(names[0], entries[0][i], source, r.state.shape[0], i, "the pool")
        owners.add("reads", r.state, source, i, f"{names[0]}[{entries[0][i]}]")
        if r.update_state:
            _in_range(names[1], entries[1][i], target, r.state.shape[0], i, "the pool")
            owners.add("writes", r.state, target, i, f"{names[1]}[{entries[1][i]}]")
    owners.check()
