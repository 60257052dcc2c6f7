"""gdn_multi.warmup: makes a model's calls on every backend the policy may choose, and counts what they compiled."""

import pytest
import torch

import gdn_multi

MODEL = dict(num_q_heads=1, num_v_heads=2, head_size_k=16, max_batch=3, max_tokens=70, max_decode_tokens=2, page_size=64)


class Compiling(gdn_multi.Backend):
    """Compiles once for each kind of call and data type, as a kernel library would."""

    name, priority = "compiling", 10_000

    def __init__(self):
        self.compiled = set()
        self.seen = []

    def compilations(self):
        return len(self.compiled)

    def _serve(self, request):
        state = request.state if request.kind == "decode" else request.initial_state
        paged = request.pages is not None
        key = (request.kind, request.q.dtype, state is not None, paged)
        if request.kind == "decode":
            key += (state.dtype, request.num_tokens > 1, request.intermediate_states is not None)
        else:
            key += (request.gate, request.beta_is_logit, request.use_qk_l2norm)
        self.compiled.add(key)
        self.seen.append(request)
        request.output.zero_()

    prefill = decode = _serve

    def page_slots(self, request):
        self.compiled.add(("slots", request.is_prefill))
        for rows in request.out:
            rows.zero_()


@pytest.fixture
def compiling():
    backend = Compiling()
    gdn_multi.register_backend(backend)
    yield backend
    gdn_multi.unregister_backend("compiling")


def test_after_it_a_models_calls_compile_nothing(compiling):
    lines = []
    report = gdn_multi.warmup(**MODEL, device="cpu", progress=lines.append)
    assert "compiling" in report.backends and "torch" in report.backends
    assert report.compilations == len(compiling.compiled) > 5 and report.seconds > 0
    assert any("compiling: decode" in line for line in lines) and f"{report.calls} calls" in lines[-1]
    before = gdn_multi.compilations()
    q, v = torch.rand(2, 1, 1, 16).bfloat16(), torch.rand(2, 1, 2, 16).bfloat16()
    gate, head, rows = torch.rand(2, 1, 2).bfloat16(), torch.zeros(2), torch.tensor([0, 1], dtype=torch.int32)
    table = dict(page_indices=rows, page_indptr=torch.tensor([0, 1, 2]), last_page_len=rows + 2)
    gdn_multi.gated_delta_rule_decode_paged(
        q, q, v, head, gate, head, gate, state_pool=torch.zeros(2, 2, 16, 16), **table
    )
    assert gdn_multi.last_backend().backend == "compiling"
    assert gdn_multi.compilations() == before
    assert gdn_multi.warmup(**MODEL, device="cpu", progress=lines.append).compilations == 0


def test_it_covers_the_largest_batch_and_length(compiling):
    gdn_multi.warmup(**MODEL, device="cpu", progress=lambda text: None)
    assert max(r.batch for r in compiling.seen if r.kind == "decode") == 3
    assert max(r.num_tokens for r in compiling.seen if r.kind == "prefill") == 70
    assert {r.num_tokens for r in compiling.seen if r.kind == "decode"} == {1, 2}
    gates = {r.gate for r in compiling.seen if r.kind == "prefill"}
    assert gates == {"linear", "raw"}


def test_only_the_backends_asked_for(compiling):
    report = gdn_multi.warmup(**MODEL, device="cpu", backends=("torch",), progress=lambda text: None)
    assert report.backends == ("torch",) and compiling.seen == []


def test_progress_goes_to_stderr(compiling, capsys):
    gdn_multi.warmup(**MODEL, device="cpu")
    captured = capsys.readouterr()
    assert captured.out == "" and "gdn_multi warmup:" in captured.err


@pytest.mark.parametrize("backends,error,words", [
    ("torch", TypeError, "backends must be a tuple of names of backends, got 'torch'"),
    (("torch", 3), TypeError, "backends must be a tuple of names"),
    ((), ValueError, "backends must name at least one backend"),
    (("torch", "nix"), ValueError, "unknown backend 'nix' in backends; registered: cuda, triton"),
    (("torch", "cudnn"), RuntimeError, r"not usable on cpu \(backends\): cudnn: "),
])  # fmt: skip
def test_backends_that_cannot_be_warmed_up_are_errors(backends, error, words):
    with pytest.raises(error, match=words):
        gdn_multi.warmup(**MODEL, device="cpu", backends=backends, progress=lambda text: None)


@pytest.mark.parametrize("changed,error,words", [
    (dict(max_batch=0), ValueError, "max_batch must be at least 1, got 0"),
    (dict(max_tokens=-1), ValueError, "max_tokens must be at least 0, got -1"),
    (dict(max_tokens=2.5), TypeError, "max_tokens must be an int, got 2.5"),
    (dict(num_k_heads=0), ValueError, "num_k_heads must be at least 1"),
    (dict(num_q_heads=2, num_v_heads=3, max_tokens=0), ValueError, "head counts"),
    (dict(page_size=0), ValueError, "multiple of 64, got 0"),
    (dict(max_tokens=0, max_decode_tokens=0), ValueError, "nothing to warm up"),
])  # fmt: skip
def test_sizes_that_no_model_has_are_errors(changed, error, words):
    with pytest.raises(error, match=words):
        gdn_multi.warmup(**{**MODEL, **changed}, device="cpu", progress=lambda text: None)


def test_the_backends_are_those_that_the_variables_name(compiling, monkeypatch):
    monkeypatch.setenv("GDN_MULTI_BACKEND", "torch")
    assert gdn_multi.warmup(**MODEL, device="cpu", progress=lambda text: None).backends == ("torch",)
    assert compiling.seen == []
    monkeypatch.setenv("GDN_MULTI_DECODE_BACKEND", "cudnn, compiling")
    assert set(gdn_multi.warmup(**MODEL, device="cpu", progress=lambda text: None).backends) == {"torch", "compiling"}
    assert {request.kind for request in compiling.seen} == {"decode"}
    monkeypatch.setenv("GDN_MULTI_DECODE_BACKEND", "cudnn")
    with pytest.raises(RuntimeError, match=r"not usable on cpu \(GDN_MULTI_DECODE_BACKEND\): cudnn: "):
        gdn_multi.warmup(**MODEL, device="cpu", progress=lambda text: None)
    monkeypatch.setenv("GDN_MULTI_DECODE_BACKEND", "nix")
    with pytest.raises(ValueError, match="unknown backend 'nix' in GDN_MULTI_DECODE_BACKEND"):
        gdn_multi.warmup(**MODEL, device="cpu", progress=lambda text: None)


@pytest.mark.parametrize("changed,kinds", [
    (dict(num_q_heads=4, num_k_heads=1, num_v_heads=1), {"prefill"}),
    (dict(state_dtype=torch.float8_e4m3fn), {"prefill"}),
    (dict(max_tokens=0), {"decode"}),
    (dict(max_decode_tokens=0), {"prefill"}),
    (dict(), {"prefill", "decode"}),
])  # fmt: skip
def test_what_is_served_is_warmed_up(compiling, changed, kinds):
    report = gdn_multi.warmup(**{**MODEL, **changed}, device="cpu", progress=lambda text: None)
    assert report.backends == ("compiling", "torch")
    assert {request.kind for request in compiling.seen} == kinds
    assert report.calls == 2 * len(compiling.seen)


def test_a_backend_that_refuses_a_form_gets_the_others(compiling, monkeypatch):
    monkeypatch.setattr(
        Compiling, "reasons_against", lambda self, r: ("no pool",) if getattr(r, "read_rows", None) is not None else ()
    )
    gdn_multi.warmup(**MODEL, device="cpu", backends=("compiling",), progress=lambda text: None)
    assert {r.is_paged for r in compiling.seen} == {True, False} and {r.kind for r in compiling.seen} == {"prefill", "decode"}
