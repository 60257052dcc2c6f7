"""gdn_paged_prefill_slots and gdn_paged_decode_slots on every backend, against the reference's lists."""

from __future__ import annotations

import pytest
import torch
from cases import index
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gdn_multi
from gdn_multi import reference

DRAWN = settings(
    max_examples=60, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip


@st.composite
def tables(draw, decode: bool = False):
    """(page size, [(prefix, new)], page ids of all sequences, first entry used of page_indices)."""
    size = draw(st.sampled_from([64, 128, 192, 1024, 4096]))
    edges = st.sampled_from([1, size - 1, size, size + 1, 2 * size, 5 * size])
    if decode:
        sequences = [(n, 1) for n in draw(st.lists(edges | st.integers(1, 4 * size), min_size=1, max_size=40))]
    else:
        part = st.just(0) | edges | st.integers(0, 4 * size)
        sequences = draw(st.lists(st.tuples(part, part), min_size=1, max_size=40))
    count = sum(pages_of(p + n, size) for p, n in sequences)
    ids = draw(st.permutations(range(count))) if count < 60 else list(range(count))[::-1]
    return size, sequences, ids, draw(st.integers(0, 3))


def pages_of(total: int, size: int) -> int:
    return max(1, -(-total // size))


def page_table(table, device, dtypes) -> dict:
    """The tensors of a drawn table; ``dtypes`` in the order cu_seqlens, page_indices, page_indptr, last_page_len."""
    size, sequences, ids, skipped = table
    cu, indptr, last = [skipped], [skipped], []
    for prefix, new in sequences:
        pages = pages_of(prefix + new, size)
        cu.append(cu[-1] + new)
        indptr.append(indptr[-1] + pages)
        last.append(prefix + new - (pages - 1) * size if prefix + new else 1)
    return dict(
        cu_seqlens=index(cu, dtypes[0], device),
        page_indices=index([10**6] * skipped + ids, dtypes[1], device),
        page_indptr=index(indptr, dtypes[2], device),
        last_page_len=index(last, dtypes[3], device),
        page_size=size,
    )


def check_prefill(door, arguments: dict) -> None:
    slots = door.page_slots(gdn_multi.gdn_paged_prefill_slots, **arguments)
    assert isinstance(slots, gdn_multi.GDNPagedPrefillSlots)
    assert slots._fields == ("state_indices", "output_state_indices", "checkpoint_cu_starts", "prefix_lens")
    wanted = reference.prefill_slots(**arguments)
    check(slots, door, [wanted[name] for name in ("read", "write", "starts", "prefix")])


def check_decode(door, arguments: dict) -> None:
    slots = door.page_slots(gdn_multi.gdn_paged_decode_slots, **arguments)
    assert isinstance(slots, gdn_multi.GDNPagedDecodeSlots)
    assert slots._fields == ("initial_state_indices", "output_state_indices")
    check(slots, door, list(reference.decode_slots(**arguments)))


def check(slots, door, wanted) -> None:
    for name, rows, values in zip(slots._fields, slots, wanted):
        assert rows.dtype == torch.int32 and rows.is_contiguous() and rows.device == door.device, name
        assert rows.tolist() == values, name


@DRAWN
@given(table=tables(), wide=st.lists(st.booleans(), min_size=4, max_size=4))
def test_drawn_prefill_tables(door, table, wide):
    dtypes = [torch.int64 if w else torch.int32 for w in wide]
    check_prefill(door, page_table(table, door.device, dtypes))


@DRAWN
@given(table=tables(decode=True), wide=st.lists(st.booleans(), min_size=4, max_size=4))
def test_drawn_decode_tables(door, table, wide):
    arguments = page_table(table, door.device, [torch.int64 if w else torch.int32 for w in wide])
    del arguments["cu_seqlens"], arguments["page_size"]
    check_decode(door, arguments)


@pytest.mark.small
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_small_prefill_table(door, dtype):
    table = (64, [(128, 37), (0, 129), (0, 0), (63, 2), (94, 3), (69, 0), (128, 64), (1, 63)], list(range(20))[::-1], 2)
    check_prefill(door, page_table((*table[:2], table[2][:18], 2), door.device, [dtype] * 4))


@pytest.mark.small
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_small_decode_table(door, dtype):
    totals = [2, 64, 65, 66, 128, 129]
    arguments = page_table(
        (64, [(n - 1, 1) for n in totals], [9, 4, 7, 1, 3, 0, 8, 2, 6, 5, 11], 0), door.device, [dtype] * 4
    )
    del arguments["cu_seqlens"], arguments["page_size"]
    check_decode(door, arguments)


@pytest.mark.small
def test_the_example_of_the_specification(door):
    arguments = dict(
        cu_seqlens=index([0, 452], torch.int32, door.device), page_indices=index([7, 3, 12], torch.int32, door.device),
        page_indptr=index([0, 3], torch.int32, door.device), page_size=1024,
        last_page_len=index([452], torch.int32, door.device),
    )  # fmt: skip
    slots = door.page_slots(gdn_multi.gdn_paged_prefill_slots, **arguments)
    read, write, starts, prefix = (x.tolist() for x in slots)
    assert (read, write, starts, prefix) == ([3], [12], [2], [2048])


def test_many_sequences(door):
    """More sequences than one block of threads."""
    table = (64, [((37 * i) % 300, (11 * i) % 150) for i in range(3000)], [], 0)
    count = sum(pages_of(p + n, 64) for p, n in table[1])
    check_prefill(door, page_table((*table[:2], list(range(count)), 0), door.device, [torch.int32] * 4))
