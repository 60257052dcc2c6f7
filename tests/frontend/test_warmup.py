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
