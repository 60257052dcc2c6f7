"""The torch backend's own insides; what it must compute is the conformance suite's business."""

import pytest
import torch
from gdn_multi.backends.torch import prefill as torch_prefill
from gdn_multi.backends.torch import rows

import gdn_multi


def batch(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    lengths = [0, 130, 1, 64, 0, 300, 63, 0]
    cu = torch.tensor([2, *lengths]).cumsum(0)
    tokens = int(cu[-1]) + 3
    q, k, v = (torch.randn(tokens, h, d, dtype=dtype) for h, d in ((1, 32), (1, 32), (2, 16)))
    prefix = torch.tensor([0, 70, 63, 0, 5, 128, 1, 64])
    every, n = 64, len(lengths)
    counts = [(int(p) + x) // every - int(p) // every for p, x in zip(prefix, lengths)]
    pool = torch.randn(40, 2, 16, 32)
    return dict(
        q=q, k=torch.nn.functional.normalize(k, dim=-1), v=v, g=torch.rand(tokens, 2), beta=torch.rand(tokens, 2),
        cu_seqlens=cu, initial_state=pool, output_state=pool, output_final_state=True,
        state_indices=torch.tensor([0, 1, -1, 3, 4, 5, -1, 7]), output_state_indices=torch.tensor([8, 9, 10, -1, 12, 13, 14, 15]),
        state_checkpoints=pool, checkpoint_cu_starts=torch.tensor([0, *counts]).cumsum(0),
        checkpoint_state_indices=torch.arange(16, 16 + sum(counts)).index_fill(0, torch.tensor([1]), -1),
        checkpoint_every_n_tokens=every, prefix_lens=prefix, backend="torch",
    ), n  # fmt: skip


@pytest.mark.parametrize("waste, one_lane", [(0, True), (1000, False)], ids=["one lane", "a lane a sequence"])
def test_the_plans_for_devices_that_the_host_cannot_read(monkeypatch, waste, one_lane):
    """On a GPU sizes are upper bounds: run those plans here, against the plan with exact sizes."""
    call, n = batch()
    expected, expected_pool = gdn_multi.chunk_gated_delta_rule(**call)
    monkeypatch.setattr(rows, "host_reads", lambda device: False)
    lanes = []
    make_plan = torch_prefill._make_plan
    monkeypatch.setattr(torch_prefill, "_make_plan", lambda *a: lanes.append(make_plan(*a)) or lanes[-1])
    call, _ = batch()
    monkeypatch.setattr(torch_prefill, "_WASTE", waste)
    call["output"] = torch.full((call["q"].shape[0], 2, 16), float("nan"))
    output, pool = gdn_multi.chunk_gated_delta_rule(**call)
    assert (lanes[0].lanes is None) == one_lane
    inside = slice(int(call["cu_seqlens"][0]), int(call["cu_seqlens"][-1]))
    torch.testing.assert_close(output[inside], expected[inside], rtol=1e-5, atol=1e-6)
    assert output[: inside.start].isnan().all() and output[inside.stop :].isnan().all()
    torch.testing.assert_close(pool, expected_pool, rtol=1e-5, atol=1e-6)
    before = batch()[0]["initial_state"]
    unwritten = [r for r in range(40) if torch.equal(before[r], expected_pool[r])]
    assert len(unwritten) > 10
    for r in unwritten:
        assert torch.equal(pool[r], before[r])


def test_store_rows_without_reading_values(monkeypatch):
    monkeypatch.setattr(rows, "host_reads", lambda device: False)
    pool = torch.randn(6, 1, 2, 2)
    pool[0, 0, 0, 0] = float("nan")
    before = pool.clone()
    values = torch.randn(3, 1, 2, 2)
    rows.store_rows(pool, torch.tensor([-1, -1, -1]), values)
    assert torch.equal(pool.view(torch.int32), before.view(torch.int32)), "nothing to write changes no bit"
    rows.store_rows(pool, torch.tensor([-1, 4, 2]), values)
    assert torch.equal(pool[4], values[1]) and torch.equal(pool[2], values[2])
    for r in (0, 1, 3, 5):
        assert torch.equal(pool[r].view(torch.int32), before[r].view(torch.int32))


def test_inverse_of_repeated_keys_stays_exact():
    """Equal keys with beta 1 and no decay: I + strict is all ones below the diagonal, its inverse is bidiagonal. A
    product of matrix powers would meet binomial coefficients near 1e18 on the way."""
    strict = torch.ones(1, 64, 64).tril(-1)
    expected = torch.eye(64) - torch.diag(torch.ones(63), -1)
    assert torch.equal(torch_prefill._unit_lower_inverse(strict)[0], expected)


def test_inverse_of_random_matrices():
    torch.manual_seed(0)
    strict = torch.randn(3, 2, 64, 64).tril(-1) * 0.2
    inverse = torch_prefill._unit_lower_inverse(strict).double()
    eye = torch.eye(64, dtype=torch.float64)
    assert torch.allclose((strict.double() + eye) @ inverse, eye.expand_as(inverse), atol=1e-4)


def test_float32_stays_float32_whatever_the_caller_allows():
    call, _ = batch()
    expected = gdn_multi.chunk_gated_delta_rule(**call)[0]
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            call, _ = batch()
            output = gdn_multi.chunk_gated_delta_rule(**call)[0]
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(precision)
    assert torch.equal(output, expected)


def test_float8_saturates_and_rounds_to_even():
    values = torch.tensor([1e9, -1e9, 448.0, 17.0, 19.0, float("inf")])
    e4m3 = rows.round_to(values, torch.float8_e4m3fn).float()
    assert e4m3.tolist() == [448.0, -448.0, 448.0, 16.0, 20.0, 448.0]
    assert rows.round_to(values, torch.float8_e5m2).float()[:2].tolist() == [57344.0, -57344.0]


def test_use_cp_is_refused_with_a_reason():
    call, _ = batch()
    for name in ("output_state_indices", "checkpoint_state_indices", "prefix_lens"):
        del call[name]
    call.update(checkpoint_every_n_tokens=0, state_checkpoints=None, checkpoint_cu_starts=None, use_cp=True)
    call["state_indices"] = torch.arange(8)
    with pytest.raises(NotImplementedError, match="use_cp=True: the torch backend has no split-sequence path"):
        gdn_multi.chunk_gated_delta_rule(**call)


@pytest.mark.parametrize("same", ["k is v", "q is v", "q is k"])
def test_one_tensor_in_two_places_is_normalised_only_where_it_should_be(same):
    torch.manual_seed(0)
    x, y = torch.randn(70, 2, 16) * 3, torch.randn(70, 2, 16)
    q, k, v = {"k is v": (y, x, x), "q is v": (x, y, x), "q is k": (x, x, y)}[same]
    common = dict(beta=torch.full((70, 2), 0.5), cu_seqlens=torch.tensor([0, 70]), use_qk_l2norm_in_kernel=True)
    output = gdn_multi.chunk_gated_delta_rule(q, k, v, **common, backend="torch")
    expected, _ = gdn_multi.reference.prefill(q, k, v, **common)
    torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-5)


def test_precision_settings_come_back_whatever_interface_set_them():
    places = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    if not hasattr(places[0], "fp32_precision"):
        pytest.skip("this torch has only the older settings")
    before = [place.fp32_precision for place in places]
    try:
        for value in ("tf32", "ieee"):
            for place in places:
                place.fp32_precision = value
            call, _ = batch()
            gdn_multi.chunk_gated_delta_rule(**call)
            assert [place.fp32_precision for place in places] == [value, value]
    finally:
        for place, value in zip(places, before):
            place.fp32_precision = value


def test_precision_is_full_until_the_last_of_several_threads_is_done(monkeypatch):
    from gdn_multi.backends import torch as backend

    state = ["medium"]
    monkeypatch.setattr(backend, "_settings", lambda: iter([(lambda: state[0], lambda v: state.__setitem__(0, v))]))
    precision = backend._Precision()
    with precision:
        with precision:  # a second call begins before the first ends
            assert state == ["ieee"]
        assert state == ["ieee"]
    assert state == ["medium"]


def test_an_entry_outside_its_table_is_an_error_where_the_host_can_see_it():
    call, _ = batch()
    call["checkpoint_cu_starts"] = call["checkpoint_cu_starts"] + 1000
    with pytest.raises(IndexError, match="GDN_MULTI_CHECK=1"):
        gdn_multi.chunk_gated_delta_rule(**call)


def test_another_default_device_changes_nothing():
    expected = gdn_multi.chunk_gated_delta_rule(**batch()[0])[0]
    call = batch()[0]
    torch.set_default_device("meta")
    try:
        output = gdn_multi.chunk_gated_delta_rule(**call)[0]
    finally:
        torch.set_default_device(None)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("page", [-1, 2**31, 2**32 + 1])
def test_a_page_id_that_no_slot_can_hold_is_seen_before_anything_is_written(page):
    """In an int32, 2**32 + 1 would be page 1."""
    q, v, gate, head = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 2, 8), torch.randn(1, 1, 2), torch.zeros(2)
    pool, table = torch.randn(3, 2, 8, 8), dict(page_indices=torch.tensor([page]), page_indptr=torch.tensor([0, 1]))
    before = pool.clone()
    with pytest.raises(IndexError, match=f"page id {page}"):
        gdn_multi.gated_delta_rule_decode_paged(
            q, q, v, head, gate, head, gate, state_pool=pool, **table, last_page_len=torch.tensor([2]), backend="torch"
        )
    with pytest.raises(IndexError, match=f"page id {page}"):
        gdn_multi.chunk_gated_delta_rule_paged(
            q[0], q[0], v[0], cu_seqlens=torch.tensor([0, 1]), state_pool=pool, **table, page_size=64,
            last_page_len=torch.tensor([2]), backend="torch",
        )  # fmt: skip
    assert torch.equal(pool, before)
