"""The table of measured choices: what it says, and that the automatic choice and `explain` follow it."""

import types

import pytest
import torch

import gdn_multi
from gdn_multi import dispatch, env, policy
from gdn_multi.registry import registry
from gdn_multi.request import DecodeRequest, PrefillRequest

H200 = (9, 0)


def request(kind, **fields):
    """As much of a request as the rows look at."""
    cls = {"prefill": PrefillRequest, "decode": DecodeRequest}[kind]
    made = object.__new__(cls)
    values = dict(
        q=torch.empty(1, dtype=torch.bfloat16), state=torch.empty(1), head_size_k=128, head_size_v=128, batch=1, num_heads=8,
        num_tokens=1, batch_invariant=False,
    )  # fmt: skip
    for name, value in {**values, **fields}.items():
        object.__setattr__(made, name, value)
    return made


@pytest.mark.parametrize(
    "kind, fields, order",
    [
        ("prefill", {}, ("cuda", "triton")),
        ("prefill", dict(head_size_k=64, head_size_v=64), ("triton", "cuda")),
        ("prefill", dict(q=torch.empty(1)), ("triton", "cuda")),
        ("decode", {}, ("cuda", "triton")),
        # another batch may not mean another backend, and other bits
        ("decode", dict(batch=256, num_heads=64, num_tokens=2), ("cuda", "triton")),
        ("decode", dict(batch=256, num_heads=64, state=torch.empty(1, dtype=torch.bfloat16)), ("cuda", "triton")),
    ],
)
def test_choices_on_an_h200(kind, fields, order):
    assert policy.choice_for(request(kind, **fields), H200).order == order


def test_nothing_is_measured_on_other_cards():
    for capability in ((8, 0), (8, 9), (10, 0), (12, 0), None):
        assert policy.choice_for(request("prefill"), capability) is None
        assert policy.choice_for(request("decode"), capability) is None


def test_each_row_can_be_reached_and_says_what_was_measured():
    assert len({(c.kind, c.capability, c.when) for c in policy.CHOICES}) == len(policy.CHOICES)
    for choice in policy.CHOICES:
        assert "H200" in choice.measured
        assert set(choice.order) <= set(gdn_multi.registered_backends())


def test_other_backends_keep_their_places():
    choice = policy.Choice("decode", H200, "", lambda r: True, ("triton", "cuda"), "")
    assert policy.apply(["mine", "cuda", "other", "triton", "torch"], choice) == ["mine", "triton", "other", "cuda", "torch"]
    assert policy.apply(["cuda", "torch"], choice) == ["cuda", "torch"]
    assert policy.apply(["torch"], choice) == ["torch"]


def test_the_automatic_choice_and_explain_follow(monkeypatch):
    device = types.SimpleNamespace(type="cuda", index=0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: H200)
    for name in ("triton", "cuda", "torch"):
        backend = registry.get(name)
        monkeypatch.setattr(backend, "reasons_unusable", lambda device: (), raising=False)
        monkeypatch.setattr(backend, "priority_for", lambda request, priority=backend.priority: priority, raising=False)
    made = request("prefill", head_size_k=64, head_size_v=64, device=device)
    names = dispatch._policy(made)
    assert names.index("triton") < names.index("cuda") < names.index("torch")
    assert "2.35 ms" in dispatch._quoted(made)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert "nothing has been measured on sm_80" in dispatch._quoted(made)


def test_explain_on_a_cpu_quotes_nothing():
    q = torch.nn.functional.normalize(torch.randn(4, 1, 64), dim=-1)
    explanation = gdn_multi.explain(gdn_multi.chunk_gated_delta_rule, q, q, q, cu_seqlens=torch.tensor([0, 4]))
    assert explanation.policy == "" and "policy:" not in str(explanation)


def test_precise_is_asked_for_by_the_variable(monkeypatch):
    q = torch.nn.functional.normalize(torch.randn(4, 1, 64), dim=-1)
    arguments = dict(q=q, k=q, v=q, cu_seqlens=torch.tensor([0, 4]))
    assert not dispatch.build_request("chunk_gated_delta_rule", **arguments)[0].precise
    before = env.deciding()
    monkeypatch.setenv(env.PRECISE, "1")
    assert dispatch.build_request("chunk_gated_delta_rule", **arguments)[0].precise
    assert env.deciding() != before  # a call that was accepted without it is looked at again
