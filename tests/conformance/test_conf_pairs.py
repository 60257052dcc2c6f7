"""Every pair of usable backends on the same calls: one answer beside the other, outputs and states.

On a machine without a GPU that is ``torch`` and, with TRITON_INTERPRET=1, Triton's interpreter.
"""

from __future__ import annotations

from itertools import combinations

import pytest
import tolerances
import torch
from cases import Dims, PagedBatch, PagedDecode, Tokens, random_states
from doors import Door, conformance_device, reasons_unusable

import gdn_multi
from gdn_multi.validate import NO_SLOT_BACKENDS


def pytest_generate_tests(metafunc):
    if "pair" not in metafunc.fixturenames:
        return
    device = conformance_device(metafunc.config)
    names = [name for name in gdn_multi.registered_backends() if not reasons_unusable(name, device)]
    pairs = list(combinations(names, 2))
    none = pytest.param(None, marks=pytest.mark.skip(reason=f"one usable backend here: {', '.join(names)}"))
    metafunc.parametrize("pair", pairs or [none], ids=["-".join(pair) for pair in pairs] or ["none"])


@pytest.fixture
def doors(pair, request):
    device = conformance_device(request.config)
    return tuple(Door(name, device, small=device.type == "cpu") for name in pair)


def sizes(doors) -> tuple[Dims, torch.dtype]:
    """What all of them serve; float16, since the interpreter's products of bfloat16 are wrong."""
    if doors[0].device.type == "cpu":
        return Dims(1, 1, 2, 64, 64), torch.float16
    return Dims(2, 2, 4, 128, 128), torch.bfloat16


def pages_served(doors) -> None:
    for door in doors:
        if door.name in NO_SLOT_BACKENDS:
            pytest.skip(f"{door.name} takes no slot arguments, which a paged call stands for")


def compare(what: str, x: torch.Tensor, y: torch.Tensor, tolerance: float) -> None:
    tolerances.assert_close(x, y.double(), tolerances.between(tolerance), what)


@pytest.mark.parametrize("gate, beta, l2norm", [("linear", "plain", False), ("raw_half", "logit_half", True)])
def test_plain_prefill(doors, gate, beta, l2norm):
    dims, dtype = sizes(doors)
    results = []
    for door in doors:
        tokens = Tokens(dims, (70, 0, 6), device=door.device, dtype=dtype, gate=gate, beta=beta, l2norm=l2norm, seed=3)
        initial = random_states(3, dims).to(door.device)
        more = dict(initial_state=initial, output_final_state=True)
        results.append(door(gdn_multi.chunk_gated_delta_rule, **tokens.arguments(**more), may_refuse=True))
    (a, a_state), (b, b_state) = results
    compare("output", a, b, tolerances.prefill_output(dtype))
    for i in (0, 2):
        limit = tolerances.prefill_state(dtype, torch.float32)
        compare(f"state of sequence {i}", a_state[i], b_state[i], limit)


def test_paged_prefill(doors):
    pages_served(doors)
    dims, dtype = sizes(doors)
    results = []
    for door in doors:
        batch = PagedBatch(dims).add(prefix=65, new=70).add(new=0).add(prefix=128, new=9, shares=0)
        batch.build(door.device, dtype=dtype, seed=5)
        pages = sorted(batch.expected()[1])
        output = door(gdn_multi.chunk_gated_delta_rule_paged, **batch.arguments(), may_refuse=True)
        results.append((output, batch.pool.tensor, pages))
    (a, a_pool, pages), (b, b_pool, others) = results
    assert pages == others and len(pages) == 3
    compare("output", a, b, tolerances.prefill_output(dtype))
    for page in pages:
        compare(f"page {page}", a_pool[page], b_pool[page], tolerances.prefill_state(dtype, torch.float32))


def test_paged_decode(doors):
    pages_served(doors)
    dims, dtype = sizes(doors)
    results = []
    for door in doors:
        batch = PagedDecode(dims).add(2).add(65).add(100)
        batch.build(door.device, dtype=dtype, seed=7)
        output = door(gdn_multi.gated_delta_rule_decode_paged, **batch.arguments(), may_refuse=True)
        results.append((output, batch.pool.tensor, batch.write))
    (a, a_pool, rows), (b, b_pool, _) = results
    compare("output", a, b, tolerances.decode_output(dtype))
    for row in rows:
        compare(f"page {row}", a_pool[row], b_pool[row], tolerances.decode_state(torch.float32))
