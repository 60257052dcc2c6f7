"""A call like an earlier one skips the checks: its request must be the one that the checks would have made."""

import dataclasses
import sys

import like_arguments
import pytest
import torch

import gdn_multi
from gdn_multi import dispatch, env, memory, validate
from gdn_multi.request import PageTable

T, N, HQ, HV, K, V = 7, 2, 1, 2, 8, 4


def state(rows):
    return torch.zeros(rows, HV, V, K)


def index(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def tokens(*lead):
    q, k, v = torch.randn(*lead, HQ, K), torch.randn(*lead, HQ, K), torch.randn(*lead, HV, V)
    return dict(q=q, k=k, v=v), (torch.rand(*lead, HV), torch.rand(*lead, HV))


def prefill(**more):
    qkv, (g, beta) = tokens(T)
    return dict(**qkv, g=g, beta=beta, cu_seqlens=index(0, 3, T), **more)


def raw():
    return prefill(
        use_gate_in_kernel=True, A_log=torch.zeros(HV), dt_bias=torch.zeros(HV), beta_is_logit=True,
        use_qk_l2norm_in_kernel=True, scale=0.5, output=torch.zeros(T, HV, V),
    )  # fmt: skip


def pool_in_place():
    return prefill(initial_state=state(5), output_state=state(5), output_final_state=True, state_indices=index(3, 1))


def all_slots():
    return prefill(
        initial_state=state(5), output_state=state(5), output_final_state=True, state_indices=index(3, 1),
        output_state_indices=index(2, 0), checkpoint_every_n_tokens=64, state_checkpoints=state(4),
        checkpoint_cu_starts=index(0, 0), checkpoint_state_indices=index(3), prefix_lens=index(0, 62), use_cp=False,
    )  # fmt: skip


def paged_prefill(with_slots):
    table = dict(page_indices=index(1, 0), page_indptr=index(0, 1, 2), page_size=64, last_page_len=index(3, 4))
    call = prefill(state_pool=state(3), **table)
    if with_slots:
        call["slots"] = gdn_multi.gdn_paged_prefill_slots(call["cu_seqlens"], **table)
    return call


def decode(**more):
    qkv, (a, b) = tokens(N, 1)
    return dict(**qkv, A_log=torch.zeros(HV), a=a, dt_bias=torch.zeros(HV), b=b, **more)


def paged_decode(with_slots):
    table = dict(page_indices=index(1, 0), page_indptr=index(0, 1, 2), last_page_len=index(3, 4))
    call = decode(state_pool=state(3), **table)
    if with_slots:
        call["slots"] = gdn_multi.gdn_paged_decode_slots(**table)
    return call


CASES = {
    "prefill": ("chunk_gated_delta_rule", prefill),
    "raw": ("chunk_gated_delta_rule", raw),
    "new final state": ("chunk_gated_delta_rule", lambda: prefill(output_final_state=True, initial_state=state(N))),
    "pool in place": ("chunk_gated_delta_rule", pool_in_place),
    "all slots": ("chunk_gated_delta_rule", all_slots),
    "paged prefill": ("chunk_gated_delta_rule_paged", lambda: paged_prefill(False)),
    "paged prefill with slots": ("chunk_gated_delta_rule_paged", lambda: paged_prefill(True)),
    "decode": ("gated_delta_rule_decode_pretranspose", lambda: decode(state=state(N))),
    "decode pool": (
        "gated_delta_rule_decode_pretranspose",
        lambda: decode(
            state=None, initial_state=state(5), initial_state_indices=index(3, 1), output_state_indices=index(2, 0),
            intermediate_states_buffer=torch.zeros(N, 1, HV, V, K), disable_state_update=True,
        ),
    ),  # fmt: skip
    "decode pool in place": (
        "gated_delta_rule_decode_pretranspose",
        lambda: decode(state=None, initial_state=state(5), initial_state_indices=index(3, 1)),
    ),
    "paged decode": ("gated_delta_rule_decode_paged", lambda: paged_decode(False)),
    "paged decode with slots": ("gated_delta_rule_decode_paged", lambda: paged_decode(True)),
}


def build(function, call):
    return dispatch.build_request(function, **call)[0]


def bind(function, call):
    import inspect

    bound = inspect.signature(getattr(gdn_multi, function)).bind(**call)
    bound.apply_defaults()
    return dict(bound.arguments)


@pytest.mark.parametrize("case", CASES)
def test_again_makes_the_request_that_the_checks_make(case):
    function, make = CASES[case]
    template = dispatch._without_data(build(function, make()))
    call = make()
    expected = build(function, call)
    actual = validate.again(template, bind(function, call))
    assert type(actual) is type(expected)
    for field in dataclasses.fields(expected):
        a, b = getattr(actual, field.name), getattr(expected, field.name)
        if field.name in ("output", "final_state") and b is not None and call.get("output_state") is None:
            if field.name != "output" or call.get("output") is None:
                if not expected.is_paged or field.name == "output":
                    # allocated by each: alike, not the same
                    assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
                    continue
        if isinstance(b, PageTable):
            assert a.page_size == b.page_size
            assert a.page_indices is b.page_indices and a.page_indptr is b.page_indptr
            assert a.last_page_len is b.last_page_len
        elif isinstance(b, torch.Tensor):
            same = a is b or (field.name == "output" and call.get("output") is None and a.shape == b.shape)
            assert same, field.name
        else:
            assert a == b, field.name


def test_the_template_keeps_no_tensor_alive():
    template = dispatch._without_data(build("chunk_gated_delta_rule", all_slots()))
    for value in template.__dict__.values():
        assert not isinstance(value, torch.Tensor) or value.device.type == "meta"


def test_what_a_backend_leaves_on_a_request_is_not_kept():
    request = build("chunk_gated_delta_rule", all_slots())
    request.__dict__["plan_of_a_backend"] = object()
    assert "plan_of_a_backend" not in dispatch._without_data(request).__dict__


def test_like_calls_share_what_a_backend_worked_out():
    request = build("chunk_gated_delta_rule", prefill())
    template = dispatch._without_data(request)
    request.shared["plan"] = "plan"
    assert validate.again(template, bind("chunk_gated_delta_rule", prefill())).shared is request.shared
    changed = dataclasses.replace(request, num_tokens=T + 1)
    assert changed.shared == {} and request.shared, "a request that is made of another may be of other sizes"


@pytest.fixture
def counted(monkeypatch):
    """Counts how often decode arguments are looked at in full."""
    from gdn_multi import gdn_decode

    seen = []

    def decode_request(**arguments):
        seen.append(arguments)
        return validate.decode_request(**arguments)

    monkeypatch.setattr(gdn_decode, "decode_request", decode_request)
    monkeypatch.setitem(dispatch._PUBLIC, "decode_request", "gated_delta_rule_decode_pretranspose")
    dispatch.forget_accepted()
    yield seen
    dispatch.forget_accepted()


def run(**changes):
    torch.manual_seed(0)
    call = decode(state=None, initial_state=torch.randn(5, HV, V, K), initial_state_indices=index(3, 1))
    call.update(changes)
    return gdn_multi.gated_delta_rule_decode_pretranspose(**call)


def test_only_the_first_of_like_calls_is_checked(counted):
    first, _ = run()
    second, _ = run()
    assert len(counted) == 1 and torch.equal(first, second) and first is not second


@pytest.mark.parametrize(
    "changes",
    [
        dict(scale=0.5),
        dict(use_qk_l2norm=False),
        dict(backend="torch"),
        dict(initial_state_indices=index(3, 1, dtype=torch.int64)),
        dict(initial_state=torch.randn(6, HV, V, K)),
        dict(initial_state=torch.randn(5, HV, V, 2 * K)[..., :K]),
        dict(initial_state=torch.randn(5, HV, V, K).half()),
        dict(A_log=torch.zeros(HV).half()),
        dict(output_state_indices=index(3, 1)),
        dict(output=torch.zeros(N, 1, HV, V)),
    ],
    ids=lambda c: ",".join(c),
)
def test_any_difference_is_checked(counted, changes):
    run()
    run(**changes)
    assert len(counted) == 2


@pytest.mark.parametrize("variable", [env.BACKEND, env.DECODE_BACKEND, env.BATCH_INVARIANT])
def test_a_changed_variable_is_checked(counted, monkeypatch, variable):
    run()
    monkeypatch.setenv(variable, "0" if variable == env.BATCH_INVARIANT else "torch")
    run()
    assert len(counted) == 2


def test_a_bad_call_after_a_good_one_is_refused(counted):
    run()
    with pytest.raises(ValueError, match="initial_state_indices must be int32 or int64"):
        run(initial_state_indices=torch.tensor([3.0, 1.0]))
    q = torch.randn(N, 1, HQ, K, requires_grad=True)
    with pytest.raises(ValueError, match="q requires grad"):
        run(q=q)


def test_check_looks_at_every_call(counted, monkeypatch):
    run()
    monkeypatch.setenv(env.CHECK, "1")
    with pytest.raises(ValueError, match=r"initial_state_indices\[1\] \(sequence 1\) must be below 5"):
        run(initial_state_indices=index(3, 5))


def test_a_new_backend_is_asked(counted):
    class Newcomer(gdn_multi.Backend):
        name, priority = "newcomer", 10_000

        def decode(self, request):
            request.output.fill_(7)

    run()
    gdn_multi.register_backend(Newcomer)
    try:
        assert torch.all(run()[0] == 7)
    finally:
        gdn_multi.unregister_backend("newcomer")
    assert not torch.all(run()[0] == 7)


def test_like_calls_with_swapped_pools_do_not_mix(counted):
    """Two pools alike in everything but contents: each call updates its own."""
    pools = [torch.randn(5, HV, V, K) for _ in range(2)]
    before = [p.clone() for p in pools]
    run(initial_state=pools[0])
    _, returned = run(initial_state=pools[1])
    assert returned is pools[1] and len(counted) == 1
    assert all(not torch.equal(p, q) for p, q in zip(pools, before))


# --- the short way of decode -----------------------------------------------------------------------


class Express(gdn_multi.Backend):
    """Serves decode with the torch backend, and offers a short way that compares the tensors as the interface says."""

    name, priority = "express", 10_000

    def __init__(self):
        from gdn_multi.registry import registry

        self.torch = registry.get("torch")
        self.ordinary = self.short = self.refused = 0

    def page_slots(self, request):
        self.torch.page_slots(request)

    def decode(self, request):
        self.ordinary += 1
        self.torch.decode(request)

    @staticmethod
    def signature(tensors):
        return [None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors]

    def express_decode(self, request):
        pages = request.pages or PageTable(None, None, None)
        wanted = self.signature(
            (
                request.q, request.k, request.v, request.A_log, request.a, request.dt_bias, request.b, request.state,
                request.read_rows, request.write_rows, request.intermediate_states, pages.page_indices,
                pages.page_indptr, pages.last_page_len, request.output,
            )
        )  # fmt: skip

        def again(q, k, v, A_log, a, dt_bias, b, state, read, write, steps, indices, indptr, last, output):
            tensors = (q, k, v, A_log, a, dt_bias, b, state, read, write, steps, indices, indptr, last, output)
            if self.signature(tensors) != wanted:
                self.refused += 1
                return False
            self.short += 1
            table = None if indices is None else PageTable(indices, indptr, last)
            self.torch.decode(
                dataclasses.replace(
                    request, q=q, k=k, v=v, A_log=A_log, a=a, dt_bias=dt_bias, b=b, state=state, read_rows=read,
                    write_rows=write, intermediate_states=steps, pages=table, output=output,
                )
            )  # fmt: skip
            return True

        return again


@pytest.fixture
def express():
    backend = Express()
    gdn_multi.register_backend(backend)
    yield backend
    gdn_multi.unregister_backend("express")


class Comparing(Express):
    """With a quick way to tell that a prefill's arguments are like those of one before."""

    def prefill(self, request):
        self.torch.prefill(request)

    def arguments_like(self, request, surroundings, values):
        assert request.kind == "prefill" and surroundings.values == env.deciding()
        wanted = [self.signature([x])[0] if isinstance(x, torch.Tensor) else x for x in values]
        self.compared = []

        def like(values):
            same = [self.signature([x])[0] if isinstance(x, torch.Tensor) else x for x in values] == wanted
            self.compared.append(same)
            return same

        return like


@pytest.mark.parametrize("function, make", [CASES["all slots"], CASES["paged prefill"], CASES["new final state"]])
def test_a_call_like_the_one_before_needs_no_key(monkeypatch, function, make):
    keys, of = [], dispatch._key

    def key(build, arguments):
        keys.append(of(build, arguments))
        return keys[-1]

    def call(**changes):
        torch.manual_seed(0)
        out = getattr(gdn_multi, function)(**{**make(), **changes})
        return out if isinstance(out, torch.Tensor) else out[0]

    monkeypatch.setattr(dispatch, "_key", key)
    monkeypatch.setattr(dispatch, "_looked_into", lambda name, tensor: False)  # on the CPU cu_seqlens is
    backend = Comparing()
    gdn_multi.register_backend(backend)
    try:
        first, second, third = call(), call(), call()
        assert len(keys) == 1 and backend.compared == [True, True]
        assert torch.equal(first, second) and torch.equal(first, third)
        call(scale=0.5), call(scale=0.5)
        assert len(keys) == 2 and backend.compared == [True]
        assert torch.equal(call(), first) and len(keys) == 3, "found by its key, and compared with from then on"
        assert torch.equal(call(), first) and len(keys) == 3
        with pytest.raises(ValueError, match="scale"):
            call(scale=float("nan"))
    finally:
        gdn_multi.unregister_backend("express")
    assert not dispatch._newest, "a backend that is gone serves nothing"


@pytest.mark.parametrize("function, make", [CASES["prefill"], CASES["decode"]])
@pytest.mark.parametrize("when", ["decided", "run"])
def test_a_call_under_which_a_variable_was_set_is_not_remembered(monkeypatch, function, make, when):
    """By another thread, say: nobody knows which value counted."""
    seen = []

    class Sets(Express):
        def reasons_against(self, request):
            self.set(request, "decided")
            return ()

        def prefill(self, request):
            self.set(request, "run")
            seen.append(request.batch_invariant)
            self.torch.prefill(request)

        def decode(self, request):
            self.set(request, "run")
            seen.append(request.batch_invariant)
            super().decode(request)

        def set(self, request, now):
            if now == when and not seen:
                monkeypatch.setenv(env.BATCH_INVARIANT, "1")

    monkeypatch.setattr(dispatch, "_looked_into", lambda name, tensor: False)
    gdn_multi.register_backend(Sets)
    try:
        for _ in range(3):
            getattr(gdn_multi, function)(**make())
        (template,) = [accepted.template for accepted in dispatch._accepted.values()]
        assert template.batch_invariant
    finally:
        gdn_multi.unregister_backend("express")
    assert seen in ([False, True, True], [False, True]), "the third by the short way, or not"


def test_arguments_are_told_from_others():
    def like(values):
        return dispatch.Arguments(like_arguments.surroundings(), values).alike

    like_arguments.check_tells_apart(like)
    like_arguments.check_follows_variables_and_modes(like)
    like_arguments.check_keeps_nothing_alive(like, sys.getrefcount)


@pytest.mark.parametrize("without", [False, True], ids=["quick", "by torch"])
@pytest.mark.parametrize("shape", [(2, 3, 4), (0, 3, 4), (3, 0, 4), (5,), ()])
def test_new_tensors_are_dense(monkeypatch, shape, without):
    if without:
        monkeypatch.setattr(memory, "_allocators", None)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.uint8):
        make = memory.Empty(shape, dtype, torch.device("cpu"))
        for made in (make(), *[how(*values) for how, values in make.calls()]):
            wanted = torch.empty(shape, dtype=dtype)
            assert (made.shape, made.stride(), made.dtype, made.device) == (wanted.shape, wanted.stride(), dtype, wanted.device)


def test_a_torch_whose_quick_way_is_another_does_without(monkeypatch):
    """Once it was short of memory it may be asked again."""
    asked = []

    class Allocators:
        @staticmethod
        def _empty_strided_cpu(size, strides, dtype):
            asked.append(size)
            if len(asked) == 1:
                raise torch.OutOfMemoryError("none now")
            return torch.empty_strided(size, strides, dtype=dtype).double()

    monkeypatch.setattr(memory, "_allocators", Allocators)
    for tries in (1, 2, 2):
        made = memory.Empty((4, 5), torch.float16, torch.device("cpu"))()
        assert made.dtype == torch.float16 and made.shape == (4, 5)
        assert asked == [(2, 3)] * tries


def test_new_tensors_on_another_device_than_the_current(monkeypatch):
    """The quick way allocates on the current device of a kind: it is not taken where that is another."""
    made = []
    monkeypatch.setattr(memory, "_quick", lambda device, dtype: lambda *of: made.append(of) or "quick")
    monkeypatch.setattr(memory.Empty, "anywhere", lambda self: "anywhere")
    monkeypatch.setattr(memory, "current_device", lambda: 1)
    assert memory.Empty((2, 3), torch.float16, torch.device("cuda:1"))() == "quick" and made == [((2, 3), (3, 1), torch.float16)]
    assert memory.Empty((2, 3), torch.float16, torch.device("cuda:0"))() == "anywhere"


DECODES = {name: case for name, case in CASES.items() if "decode" in name}


@pytest.mark.parametrize("case", DECODES)
def test_the_short_way_gives_what_the_ordinary_way_gives(express, case):
    function, make = DECODES[case]
    results = []
    for way in ("ordinary", "short", "torch"):
        torch.manual_seed(1)
        call = make()
        for name in ("state", "initial_state", "state_pool"):
            if call.get(name) is not None:
                call[name].normal_()
        if way == "torch":
            call["backend"] = "torch"
        out = getattr(gdn_multi, function)(**call)
        out, pool = out if isinstance(out, tuple) else (out, call["state_pool"])
        assert pool is (call.get("state_pool") if "paged" in case else call["state"] if call.get("state") is not None
                        else call["initial_state"])  # fmt: skip
        results.append((out, pool.clone()))
        assert gdn_multi.last_backend().backend == ("torch" if way == "torch" else "express")
    assert (express.ordinary, express.short) == (1, 1)
    for out, pool in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(pool, results[0][1])


@pytest.mark.parametrize(
    "changes, error",
    [
        (dict(scale=float("nan")), ValueError),
        (dict(scale="1"), TypeError),
        (dict(use_qk_l2norm=1), TypeError),
        (dict(backend="nope"), ValueError),
        (dict(q=None), TypeError),
        (dict(k=torch.zeros(N, 1, HQ, K, dtype=torch.float16)), ValueError),
        (dict(state=torch.zeros(N, HV, V, K)), ValueError),
        (dict(initial_state=torch.zeros(5, HV, V + 1, K)), ValueError),
        (dict(initial_state_indices=torch.tensor([0.0, 1.0])), ValueError),
        (dict(output=torch.zeros(N, 1, HV, V + 1)), ValueError),
        (dict(A_log=[0.0]), TypeError),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else x.__name__,
)
def test_the_short_way_refuses_nothing_less(express, changes, error):
    run()
    run()
    assert express.short == 1
    with pytest.raises(error):
        run(**changes)
    assert (express.ordinary, express.short) == (1, 1)
    with pytest.raises(ValueError, match="requires grad"):
        run(q=torch.zeros(N, 1, HQ, K, requires_grad=True))


def test_the_short_way_follows_the_variables(express, monkeypatch):
    run()
    monkeypatch.setenv(env.DECODE_BACKEND, "torch")
    run()
    assert gdn_multi.last_backend().backend == "torch" and express.short == 0
    monkeypatch.setenv(env.DECODE_BACKEND, "express")
    monkeypatch.setenv(env.CHECK, "1")
    run()
    run()
    assert express.short == 0, "GDN_MULTI_CHECK looks at every call"


@pytest.mark.parametrize("name", ["q", "k", "initial_state_indices", "output"])
def test_a_tuple_is_not_the_tensors_in_it(counted, name):
    out = torch.zeros(N, 1, HV, V)
    run(output=out)
    good = dict(q=torch.randn(N, 1, HQ, K), k=torch.randn(N, 1, HQ, K), initial_state_indices=index(3, 1), output=out)
    with pytest.raises(TypeError, match=f"{name} must be a torch.Tensor, got tuple"):
        run(**{**dict(output=out), name: (good[name],)})


def test_a_view_whose_sign_is_pending_is_refused(counted, express):
    run()
    run()
    with pytest.raises(ValueError, match="v is a view whose sign is still to be applied"):
        run(v=torch._neg_view(torch.randn(N, 1, HV, V)))
