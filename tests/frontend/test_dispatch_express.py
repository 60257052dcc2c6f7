"""The short way of decode calls: what it takes without a further look, and what it notices all the same."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from test_again import HV, K, N, V, express, index, paged_decode, run  # noqa: E402, F401

import gdn_multi  # noqa: E402
from gdn_multi import dispatch, env, memory  # noqa: E402


def paged(with_slots, **changes):
    call = paged_decode(with_slots)
    call.update(changes)
    return gdn_multi.gated_delta_rule_decode_paged(**call)


def test_a_scale_computed_anew_is_the_same_scale(express):  # noqa: F811
    for part in (1.0, 2.0, 1.0, 2.0):
        run(scale=part / 4)
    assert (express.ordinary, express.short) == (2, 2)


def test_an_equal_option_of_another_type_is_not_the_same(express):  # noqa: F811
    run(scale=1.0)
    run(scale=1)
    assert (express.ordinary, express.short) == (2, 0)
    with pytest.raises(TypeError):
        run(scale=True)


@pytest.mark.parametrize("of_two", [torch.tensor([1.0, 2.0]), [1.0, 2.0]])
def test_an_option_that_does_not_compare_is_refused_as_ever(express, of_two):  # noqa: F811
    run(scale=1.0)
    with pytest.raises(TypeError, match="scale must be a number"):
        run(scale=of_two)


def test_calls_in_turn_stay_on_the_short_way(express):  # noqa: F811
    for _ in range(3):
        paged(True)
        paged(False)
        paged(True, state_pool=torch.zeros(3, HV, V, K).half())
    assert (express.ordinary, express.short) == (3, 6)


def test_the_short_way_keeps_a_few_of_a_shape_only(express):  # noqa: F811
    for rows in range(5, 15):
        run(initial_state=torch.randn(rows, HV, V, K))
    (known,) = dispatch.short_ways["gated_delta_rule_decode_pretranspose"].known.values()
    assert len(known) == dispatch._MOST_EXPRESS
    run(initial_state=torch.randn(14, HV, V, K))
    assert express.short == 1
    run(initial_state=torch.randn(5, HV, V, K))
    assert express.short == 1, "served as an earlier call like it, with its tensors compared by the front end"


def test_a_variable_set_and_unset(express, monkeypatch):  # noqa: F811
    run()
    for value in ("torch", "express"):
        monkeypatch.setenv(env.DECODE_BACKEND, value)
        run()
        assert gdn_multi.last_backend().backend == value
    monkeypatch.delenv(env.DECODE_BACKEND)
    run()
    assert (express.ordinary, express.short) == (2, 1)


@pytest.mark.parametrize("name", ["q", "v", "A_log", "a", "dt_bias", "b"])
def test_a_pending_sign_is_noticed(express, name):  # noqa: F811
    shapes = dict(q=(N, 1, 1, K), v=(N, 1, HV, V), A_log=(HV,), dt_bias=(HV,), a=(N, 1, HV), b=(N, 1, HV))
    run()
    run()
    with pytest.raises(ValueError, match=f"{name} is a view whose sign is still to be applied"):
        run(**{name: torch._neg_view(torch.randn(shapes[name]))})


def test_no_public_operation_gives_a_bfloat16_with_a_pending_sign():
    """So that the short way need not ask those whether they have one."""
    x = torch.randn(4, 4, dtype=torch.complex64).conj().imag
    assert x.is_neg() and not x.to(torch.bfloat16).is_neg()
    with pytest.raises(RuntimeError, match="negative bit"):
        x.view(torch.bfloat16)


def test_the_mode_of_autograd_is_noticed(express):  # noqa: F811
    A_log = torch.zeros(HV, requires_grad=True)
    with torch.no_grad():
        run(A_log=A_log)
        out, _ = run(A_log=A_log)
    assert express.short == 1 and not out.requires_grad
    with pytest.raises(ValueError, match="A_log requires grad"):
        run(A_log=A_log)
    with torch.inference_mode():
        out, _ = run(A_log=A_log)
    assert express.short == 2 and out.is_inference()


@pytest.mark.parametrize("without", [False, True])
def test_new_outputs_are_dense(express, monkeypatch, without):  # noqa: F811
    if without:  # a torch without the quick allocators
        monkeypatch.setattr(memory, "_allocators", None)
    for _ in range(2):
        v = torch.randn(N, 1, V, HV).transpose(2, 3).contiguous().as_strided((N, 1, HV, V), (HV * V, 5, V, 1))
        out, _ = run(v=v)
        assert out.shape == v.shape and out.stride() == (HV * V, HV * V, V, 1) and out.dtype == v.dtype
    assert express.short == 1


def test_an_allocator_that_takes_other_arguments_is_not_used(express, monkeypatch):  # noqa: F811
    class Other:
        @staticmethod
        def _empty_strided_cpu(size):
            raise AssertionError("not asked with one argument")

    monkeypatch.setattr(memory, "_allocators", Other)
    run()
    run()
    assert express.short == 1


def test_tensors_of_one_storage_are_told_apart_by_their_strides(express):  # noqa: F811
    run()
    wide = torch.zeros(5, HV, V, 2 * K)
    run(initial_state=wide[..., :K])
    assert express.short == 0 and express.refused == 1
    run(initial_state=wide[..., :K], initial_state_indices=index(0, 4))
    assert express.short == 1
