"""The cuDNN backend without cuDNN: what it says when a piece is missing, what it refuses, and what it converts.

Conversions are checked with a stand-in for ``gated_delta_net`` that takes what one of the engines takes, refuses the
rest as that engine does, and computes with the float64 reference.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from cases import bits, same_bits
from gdn_multi.backends import cudnn as adapter

from gdn_multi import dispatch, reference
from gdn_multi.bench.standard import CALLS, Maker

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn


@pytest.fixture
def backend():
    return adapter.CudnnBackend()


@pytest.fixture(params=[adapter.FROST, adapter.CUTILE])
def engine(request, monkeypatch):
    monkeypatch.setattr(adapter, "engine", lambda device: request.param)
    return request.param


@pytest.fixture
def cutile(monkeypatch):
    monkeypatch.setattr(adapter, "engine", lambda device: adapter.CUTILE)


@pytest.fixture
def stand_in(monkeypatch):
    """cuDNN's function: strict about what the engine takes, float64 inside, tensors of its own. Records its calls."""
    calls = []

    def gated_delta_net(
        q, k, v, g, beta, cu_seqlens, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        batch_invariant, use_beta_sigmoid_in_kernel, gate_domain, safe_gate=False, a_log=None, dt_bias=None,
    ):  # fmt: skip
        calls.append(dict(locals()))
        print("tuning 1/8")
        frost = adapter.engine(q.device) == adapter.FROST
        heads = max(q.shape[1], v.shape[1])
        assert g.shape == beta.shape == (q.shape[0], heads)
        assert k.shape[1] in ((q.shape[1], v.shape[1]) if frost else (q.shape[1],))
        assert gate_domain == "log"
        assert beta.dtype in (torch.float32, q.dtype)
        if not frost:
            assert all(x.is_contiguous() for x in (q, k, v, g, beta)) and v.shape[1] % q.shape[1] == 0
            assert cu_seqlens.dtype == torch.int32
            assert not safe_gate and not use_beta_sigmoid_in_kernel
            assert initial_state is None or initial_state.dtype == torch.float32
        if not safe_gate:
            assert torch.isfinite(g[cu_seqlens[0] : cu_seqlens[-1]]).all()
        if initial_state is not None:
            assert initial_state.is_contiguous() and initial_state.shape[0] == len(cu_seqlens) - 1
            assert initial_state.dtype in (torch.float32, torch.bfloat16, torch.float16)
        output, states = reference.prefill(
            q, k, v, g, beta, scale, cu_seqlens=cu_seqlens, initial_state=initial_state, gate_domain="log",
            use_gate_in_kernel=safe_gate, A_log=a_log, dt_bias=dt_bias, beta_is_logit=use_beta_sigmoid_in_kernel,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )  # fmt: skip
        final = torch.stack([s[-1] for s in states])
        lengths = cu_seqlens[1:] - cu_seqlens[:-1]
        final[lengths == 0] = float("nan")  # what an engine leaves there is not relied upon
        output[: cu_seqlens[0]] = output[cu_seqlens[-1] :] = float("nan")
        return output.to(q.dtype), final.to(torch.float32 if initial_state is None else initial_state.dtype)

    monkeypatch.setattr(adapter, "_gated_delta_net", lambda: gated_delta_net)
    return calls


def request_of(name="plain", maker=None, **changes):
    function, arguments = CALLS[name](maker or Maker(CPU, False))
    arguments.update(changes)
    return dispatch.build_request(function, **arguments)[0]


def run(backend, request):
    assert backend.reasons_against(request) == ()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        backend.prefill(request)
    return request


# --- usable or not ---------------------------------------------------------------------------------------------------


def hide(monkeypatch, *hidden, versions=()):
    """As if these modules were not installed, the others were, in these versions."""
    known = dict(versions)
    monkeypatch.setattr(adapter, "_has_module", lambda name: name not in hidden)
    monkeypatch.setattr(adapter, "_version", lambda name: known.get(name, ""))
    for cached in (adapter._frontend_reason, adapter._cutile_reasons, adapter._frost_reasons):
        cached.cache_clear()


@pytest.fixture(autouse=True)
def forget_what_was_seen():
    yield
    for cached in (adapter._frontend_reason, adapter._cutile_reasons, adapter._frost_reasons):
        cached.cache_clear()


def test_no_gpu(backend):
    assert any("NVIDIA GPU" in reason and "cpu" in reason for reason in backend.reasons_unusable(CPU))


def test_no_frontend(backend, monkeypatch):
    hide(monkeypatch, "cudnn")
    assert any(adapter.INSTALL_FRONTEND in reason for reason in backend.reasons_unusable(CPU))


def test_old_frontend(monkeypatch):
    hide(monkeypatch, versions={"nvidia-cudnn-frontend": "1.30.2"}.items())
    reason = adapter._frontend_reason()
    assert "1.30.2 is too old" in reason and adapter.INSTALL_FRONTEND in reason


def test_frontend_that_fails_to_import(monkeypatch):
    hide(monkeypatch, versions={"nvidia-cudnn-frontend": "1.32.0"}.items())

    def broken():
        raise ImportError("libcudnn.so.9: cannot open")

    monkeypatch.setattr(adapter, "_gated_delta_net", broken)
    assert "libcudnn.so.9" in adapter._frontend_reason()


def test_no_cuda_tile(backend, monkeypatch, cutile):
    hide(monkeypatch, "cuda.tile")
    monkeypatch.setattr(adapter, "_runtime_version", lambda: 13050)
    reasons = [r for r in backend.reasons_unusable(CPU) if "cuda-tile, which" in r]
    assert len(reasons) == 1 and adapter.INSTALL_TILE in reasons[0]


@pytest.mark.parametrize("version, said", [(None, "cuda-bindings, which"), (13000, "brings 13.0"), (13050, "")])
def test_cuda_runtime(monkeypatch, version, said):
    hide(monkeypatch)
    monkeypatch.setattr(adapter, "_runtime_version", lambda: version)
    monkeypatch.setattr(adapter, "_has_tileiras", lambda: True)
    reasons = adapter._cutile_reasons()
    assert (reasons == ()) if not said else (said in reasons[0] and adapter.INSTALL_TILE in reasons[0])


def test_no_tileiras(monkeypatch):
    hide(monkeypatch)
    monkeypatch.setattr(adapter, "_runtime_version", lambda: 13050)
    monkeypatch.setattr(adapter.shutil, "which", lambda *args, **kwargs: None)
    (reason,) = adapter._cutile_reasons()
    assert "tileiras" in reason and adapter.INSTALL_TILEIRAS in reason


def test_tileiras_of_three_packages_of_one_version(monkeypatch):
    packages = ("nvidia-cuda-tileiras", "nvidia-cuda-nvcc", "nvidia-nvvm")
    monkeypatch.setattr(adapter.shutil, "which", lambda *args, **kwargs: None)
    monkeypatch.setattr(adapter, "_version", lambda name: "13.5.37")
    assert adapter._has_tileiras()
    monkeypatch.setattr(adapter, "_version", lambda name: "13.5.37" if name != packages[2] else "13.4.1")
    assert not adapter._has_tileiras()


def test_frost_needs_cutlass_and_no_cuda_tile(backend, monkeypatch):
    hide(monkeypatch, "cuda.tile", "cutlass")
    monkeypatch.setattr(adapter, "engine", lambda device: adapter.FROST)
    text = " | ".join(backend.reasons_unusable(CPU))
    assert adapter.INSTALL_DSL in text and "cuda-tile" not in text


# --- refusals --------------------------------------------------------------------------------------------------------


def test_refuses_what_the_specification_says(backend, engine):
    assert "paged call" in " | ".join(backend.reasons_against(request_of("paged")))
    assert "checkpoints" in " | ".join(backend.reasons_against(request_of("checkpoints")))
    assert backend.reasons_against(request_of("decode")) == ("serves prefill only",)
    request = replace(request_of(), slot_arguments=("output_state_indices", "prefix_lens"))
    assert "output_state_indices, prefix_lens" in " | ".join(backend.reasons_against(request))
    assert "float32" in " | ".join(backend.reasons_against(request_of("plain", Maker(CPU, False, dtype=torch.float32))))
    assert "use_cp=True" in " | ".join(backend.reasons_against(request_of(use_cp=True)))


def test_limits_of_the_engines(backend, engine, monkeypatch):
    request = replace(request_of(), head_size_k=192)
    assert bool(backend.reasons_against(request)) is (engine == adapter.FROST)
    request = request_of()
    strided = torch.cat([request.q, request.q], dim=-1)[..., : request.head_size_k]
    text = " | ".join(backend.reasons_against(request_of(q=strided)))
    assert ("contiguous q" in text) is (engine == adapter.CUTILE)
    monkeypatch.setenv("GDN_MULTI_BATCH_INVARIANT", "1")
    text = " | ".join(backend.reasons_against(request_of()))
    assert ("GDN_MULTI_BATCH_INVARIANT" in text) is (engine == adapter.CUTILE)


def test_detail_names_the_engine_and_the_conversions(backend, engine):
    detail = backend.detail(request_of("model"))
    assert detail.startswith(f"{engine} engine")
    assert ("raw gates converted" in detail and "logits converted" in detail) is (engine == adapter.CUTILE)
    assert "alpha converted to log alpha" in backend.detail(request_of("plain"))


# --- conversions -----------------------------------------------------------------------------------------------------


def close(actual, right, tolerance):
    error = (actual.double() - right.double()).norm() / right.double().norm().clamp_min(1e-30)
    assert error < tolerance, f"relative error {error:.2e}"


def check(backend, tolerance=4e-3, **changes):
    """The backend's answer against the torch backend's, both on the same call."""
    mine, right = request_of(**changes), request_of(**changes)
    run(backend, mine)
    dispatch.run(right, "torch")
    close(mine.output, right.output, tolerance)
    if mine.final_state is not None:
        close(mine.final_state.float(), right.final_state.float(), tolerance)
    return mine


@pytest.mark.parametrize("name", ["plain", "model"])
def test_standard_calls(backend, engine, stand_in, name):
    check(backend, name=name)
    assert stand_in[0]["safe_gate"] is (name == "model" and engine == adapter.FROST)


def test_no_gates(backend, engine, stand_in):
    check(backend, g=None, beta=None)


def test_log_gates_and_zero_alpha(backend, engine, stand_in):
    g = request_of().g.clone()
    g[5], g[40, 0] = 0.0, 1e-42
    check(backend, g=g)
    with_infinity = g.log()
    assert torch.isinf(with_infinity).any()
    check(backend, g=with_infinity, gate_domain="log")


def test_log_gates_are_exact():
    """Zero, denormals, one and a little more: exp of what the engine gets is the alpha of the call."""
    g = torch.rand(211, 2)
    g[0], g[1], g[2], g[3], g[4] = 0.0, 1e-42, 1e-38, 1.0, 1.0001
    request = request_of(g=g)
    given = adapter._gate(request, adapter._plan(request).log_gates)
    assert torch.isfinite(given).all()
    torch.testing.assert_close(given.double().exp().float(), g, rtol=1e-5, atol=0)


def test_raw_gates_and_logits_in_float32():
    request = request_of("model")
    x = request.g.double() + request.dt_bias.double()
    right = -request.A_log.double().exp() * torch.log1p(x.exp())
    torch.testing.assert_close(adapter._gate(request, True).double(), right, rtol=1e-5, atol=0)
    assert same_bits(adapter._beta(request, True), torch.sigmoid(request.beta.float()).to(request.beta.dtype))


def test_int64_offsets_and_tokens_of_no_sequence(backend, engine, stand_in):
    cu = torch.tensor([3, 130, 130, 200], dtype=torch.int64)
    mine = replace(request_of(cu_seqlens=cu), cu_seqlens_cpu=None)
    run(backend, mine)
    assert bool((mine.output[:3] == 0).all()) and bool((mine.output[200:] == 0).all())
    assert torch.equal(mine.final_state[1], mine.initial_state[1])
    given = torch.full_like(mine.output, 5.0)
    mine = replace(request_of(cu_seqlens=cu, output=given), cu_seqlens_cpu=None)
    run(backend, mine)
    assert bool((given[:3] == 5).all()) and bool((given[200:] == 5).all()) and not bool((given[3:200] == 5).all())


@pytest.mark.parametrize("heads", [(4, 2, 2), (4, 1, 1), (2, 2, 4)])
def test_head_groups(backend, engine, stand_in, heads):
    hq, hk, hv = heads
    ho, d, t = max(hq, hv), 64, 211
    generator = torch.Generator().manual_seed(3)
    randn = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    unit = torch.nn.functional.normalize
    changes = dict(
        q=unit(randn(t, hq, d), dim=-1).bfloat16(), k=unit(randn(t, hk, d), dim=-1).bfloat16(),
        v=randn(t, hv, d).bfloat16(), g=torch.rand(t, ho, generator=generator),
        beta=torch.rand(t, ho, generator=generator), initial_state=randn(3, ho, d, d),
    )  # fmt: skip
    check(backend, **changes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, FP8])
def test_state_dtypes(backend, engine, stand_in, dtype):
    states = request_of().initial_state.to(dtype)
    mine = check(backend, tolerance=5e-2 if dtype == FP8 else 4e-3, initial_state=states)
    assert mine.final_state.dtype == torch.float32  # what the call allocates; test_pools has final states of each dtype


@pytest.mark.parametrize("dtype", [FP8, torch.float8_e5m2])
def test_float8_saturates(backend, engine, stand_in, dtype):
    states = torch.full_like(request_of().initial_state, 300.0).bfloat16()
    target = torch.empty_like(states, dtype=dtype)
    request = run(backend, request_of(v=request_of().v * 1e6, initial_state=states, output_state=target))
    values = request.final_state.float()
    assert bool(torch.isfinite(values).all()) and values.abs().max() == torch.finfo(dtype).max


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_pools(backend, engine, stand_in, dtype):
    """Rows -1, an empty sequence, unused rows of NaN: only the named rows change, to the bit."""
    heads, d = 2, 64
    pool = torch.full((7, heads, d, d), float("nan")).to(dtype)
    states = request_of().initial_state.to(dtype)
    pool[torch.tensor([4, 1])] = states[:2]
    rows = torch.tensor([4, 1, -1], dtype=torch.int64)
    cu = torch.tensor([0, 130, 130, 211], dtype=torch.int32)
    changes = dict(initial_state=pool.clone(), output_state=pool.clone(), state_indices=rows, cu_seqlens=cu)
    mine = run(backend, request_of(**changes))
    right = request_of(**{**changes, "output_state": pool.clone()})
    dispatch.run(right, "torch")
    close(mine.output, right.output, 4e-3)
    close(mine.final_state[4].float(), right.final_state[4].float(), 5e-2 if dtype == FP8 else 4e-3)
    for row in (0, 1, 2, 3, 5, 6):  # 1 belongs to the empty sequence
        assert same_bits(mine.final_state[row], pool[row]), f"row {row} changed"
    assert torch.equal(bits(mine.initial_state), bits(pool))


def test_pool_in_which_nothing_is_written(backend, engine, stand_in):
    pool = torch.randn(4, 2, 64, 64)
    before = pool.clone()
    rows = torch.tensor([-1, -1, -1], dtype=torch.int32)
    run(backend, request_of(initial_state=pool, output_state=pool, state_indices=rows))
    assert torch.equal(pool, before)


def test_chatter_and_announcement(backend, cutile, stand_in, capsys):
    with pytest.warns(RuntimeWarning, match="tunes itself on the first call"):
        backend.prefill(request_of())
    assert capsys.readouterr().out == ""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backend.prefill(request_of("plain", Maker(CPU, False, seed=1)))  # said once, and the shape is known
        backend.prefill(request_of(use_qk_l2norm_in_kernel=True))  # another shape of call
    assert len(stand_in) == 3


def test_frost_announces_nothing(backend, stand_in, monkeypatch):
    monkeypatch.setattr(adapter, "engine", lambda device: adapter.FROST)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backend.prefill(request_of())
