"""Which backend serves a call: by keyword, by variable, by preference, by policy; and what users can ask about it."""

import logging
import sys
import types
import warnings

import pytest
import torch

import gdn_multi
from gdn_multi import dispatch, env
from gdn_multi.registry import registry

VARIABLES = (env.BACKEND, env.PREFILL_BACKEND, env.DECODE_BACKEND)


class Fake(gdn_multi.Backend):
    """A third party's backend: counts its calls, writes a constant."""

    name = "fake"
    priority = None
    unusable = ()
    against = ()

    def __init__(self):
        self.calls = []

    def reasons_unusable(self, device):
        return self.unusable

    def reasons_against(self, request):
        return self.against

    def detail(self, request):
        return f"fake {request.kind}"

    def prefill(self, request):
        self.calls.append(request)
        request.output.fill_(7)

    decode = prefill

    def page_slots(self, request):
        self.calls.append(request)
        for rows in request.out:
            rows.fill_(0)


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def fake():
    backend = Fake()
    gdn_multi.register_backend(backend)
    yield backend
    if "fake" in gdn_multi.registered_backends():
        gdn_multi.unregister_backend("fake")


def prefill_arguments(**more):
    q = torch.randn(5, 1, 8)
    return dict(q=q, k=q, v=q, cu_seqlens=torch.tensor([0, 5]), **more)


def decode_arguments(**more):
    q, gate, head = torch.randn(2, 1, 1, 8), torch.randn(2, 1, 1), torch.randn(1)
    return dict(q=q, k=q, v=q, state=torch.zeros(2, 1, 8, 8), A_log=head, a=gate, dt_bias=head, b=gate, **more)


def slot_arguments():
    one = torch.zeros(1, dtype=torch.int64)
    return dict(
        initial_state=torch.zeros(2, 1, 8, 8), output_state=torch.zeros(2, 1, 8, 8), output_final_state=True,
        state_indices=one, output_state_indices=one,
    )  # fmt: skip


def prefill(**more):
    return gdn_multi.chunk_gated_delta_rule(**prefill_arguments(**more))


def decode(**more):
    return gdn_multi.gated_delta_rule_decode_pretranspose(**decode_arguments(**more))


# --- choosing --------------------------------------------------------------------------------------


def test_keyword(fake):
    assert torch.all(prefill(backend="fake") == 7)
    assert gdn_multi.last_backend() == ("chunk_gated_delta_rule", "fake", "fake prefill")
    prefill(backend="torch")
    assert gdn_multi.last_backend().backend == "torch"
    assert len(fake.calls) == 1


def test_variable_for_all_calls(fake, monkeypatch):
    monkeypatch.setenv(env.BACKEND, "fake")
    prefill()
    decode()
    assert [r.kind for r in fake.calls] == ["prefill", "decode"]


@pytest.mark.parametrize("variable, expected", [(env.PREFILL_BACKEND, "prefill"), (env.DECODE_BACKEND, "decode")])
def test_variable_for_one_kind_wins_over_the_general_one(fake, monkeypatch, variable, expected):
    monkeypatch.setenv(env.BACKEND, "torch")
    monkeypatch.setenv(variable, "fake")
    prefill()
    decode()
    assert [r.kind for r in fake.calls] == [expected]


def test_slots_follow_the_variable_of_their_kind(fake, monkeypatch):
    monkeypatch.setenv(env.DECODE_BACKEND, "fake")
    one = torch.tensor([1], dtype=torch.int32)
    table = (torch.tensor([3], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32))
    gdn_multi.gdn_paged_decode_slots(*table, one)
    gdn_multi.gdn_paged_prefill_slots(torch.tensor([0, 1]), *table, 64, one)
    assert [r.is_prefill for r in fake.calls] == [False]


def test_keyword_wins_over_variable(fake, monkeypatch):
    monkeypatch.setenv(env.BACKEND, "fake")
    prefill(backend="torch")
    assert fake.calls == []


@pytest.mark.parametrize("value", ["fake,torch", " fake , torch ", "fake,auto"])
def test_list_is_an_order_of_preference(fake, monkeypatch, value):
    monkeypatch.setenv(env.BACKEND, value)
    prefill()
    assert gdn_multi.last_backend().backend == "fake"
    fake.against = ("not today",)
    prefill()
    assert gdn_multi.last_backend().backend == "torch"
    fake.against, fake.unusable = (), ("not here",)
    prefill()
    assert gdn_multi.last_backend().backend == "torch"


@pytest.mark.parametrize("value", ["", " ", ",", "auto"])
def test_empty_variable_and_auto_leave_it_to_the_policy(fake, monkeypatch, value):
    monkeypatch.setenv(env.BACKEND, value)
    prefill()
    assert gdn_multi.last_backend().backend != "fake"


def test_policy_takes_the_highest_priority_that_serves(fake):
    fake.priority = 10_000
    prefill()
    assert gdn_multi.last_backend().backend == "fake"
    fake.against = ("not today",)
    prefill()
    assert gdn_multi.last_backend().backend != "fake"


def test_a_backend_may_rank_itself_by_the_request(fake, monkeypatch):
    fake.priority = 10_000
    monkeypatch.setattr(fake, "priority_for", lambda request: 1 if request.kind == "prefill" else 10_000, raising=False)
    prefill()
    assert gdn_multi.last_backend().backend != "fake"
    decode()
    assert gdn_multi.last_backend().backend == "fake"


def test_policy_leaves_out_backends_without_priority(fake):
    prefill()
    assert fake.calls == []


def test_on_a_cpu_the_default_is_torch(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    prefill()
    assert gdn_multi.last_backend().backend == "torch"


# --- failing ---------------------------------------------------------------------------------------


def test_unknown_name_lists_the_registered_ones():
    with pytest.raises(ValueError, match="unknown backend 'nope' in the backend argument; registered: .*torch"):
        prefill(backend="nope")


@pytest.mark.parametrize("value", ["nope", "torch,nope"])
@pytest.mark.parametrize("variable", [env.BACKEND, env.PREFILL_BACKEND])
def test_unknown_name_in_a_variable_says_which(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=f"unknown backend 'nope' in the environment variable {variable}; registered"):
        prefill()


@pytest.mark.parametrize("through", ["keyword", "variable"])
def test_a_name_is_a_demand(fake, monkeypatch, through):
    fake.against = ("does not do odd days", "nor Sundays")
    call = dict(backend="fake") if through == "keyword" else {}
    if through == "variable":
        monkeypatch.setenv(env.BACKEND, "fake")
    output = torch.full((5, 1, 8), 3.0)
    with pytest.raises(NotImplementedError) as caught:
        prefill(output=output, **call)
    for part in ("chunk_gated_delta_rule", "'fake'", "odd days", "Sundays", "would serve it: ", "torch"):
        assert part in str(caught.value)
    assert torch.all(output == 3)


def test_unusable_backend_is_a_runtime_error(fake):
    fake.unusable = ("no such card; pip install card",)
    with pytest.raises(RuntimeError, match="pip install card") as caught:
        prefill(backend="fake")
    assert not isinstance(caught.value, NotImplementedError)


def test_a_list_that_serves_nothing_names_each_reason(fake, monkeypatch):
    gdn_multi.register_backend(type("Other", (Fake,), dict(name="other", against=("rain",)))())
    try:
        fake.against = ("sun",)
        monkeypatch.setenv(env.BACKEND, "fake,other")
        with pytest.raises(NotImplementedError, match="(?s)fake: sun.*other: rain.*would serve it: .*torch"):
            prefill()
    finally:
        gdn_multi.unregister_backend("other")


@pytest.mark.parametrize("name", ["cudnn", "cake_gdn"])
@pytest.mark.parametrize("through", ["keyword", "variable"])
def test_slot_arguments_are_rejected_by_name(monkeypatch, name, through):
    call = dict(backend=name) if through == "keyword" else {}
    if through == "variable":
        monkeypatch.setenv(env.BACKEND, name)
    with pytest.raises(ValueError, match=f"output_state_indices: backend '{name}' .*does not take slot arguments"):
        prefill(**slot_arguments(), **call)


def test_slot_arguments_in_a_list_go_to_the_next(monkeypatch):
    monkeypatch.setenv(env.BACKEND, "cudnn,torch")
    prefill(**slot_arguments())
    assert gdn_multi.last_backend().backend == "torch"


def test_a_gpu_call_on_the_slow_backend_warns_once(monkeypatch):
    monkeypatch.setattr(dispatch, "_warned", set())
    with pytest.warns(RuntimeWarning, match="much slower.*because cuda: no nvcc"):
        dispatch._warn_slow({"cuda": ("no nvcc",)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dispatch._warn_slow({"cuda": ("no nvcc",)})


# --- registering -----------------------------------------------------------------------------------


def test_register_twice_needs_replace(fake):
    with pytest.raises(ValueError, match="registered already"):
        gdn_multi.register_backend(Fake())
    other = Fake()
    gdn_multi.register_backend(other, replace=True)
    prefill(backend="fake")
    assert other.calls and not fake.calls


def test_register_a_class_or_a_factory():
    gdn_multi.register_backend(Fake)
    gdn_multi.unregister_backend("fake")
    made = []
    gdn_multi.register_backend(lambda: made.append(Fake()) or made[-1], name="fake")
    assert made == [], "a factory is called when its backend is first asked for"
    prefill(backend="fake")
    assert len(made) == 1 and len(made[0].calls) == 1
    gdn_multi.unregister_backend("fake")
    with pytest.raises(ValueError, match="unknown backend 'fake'"):
        prefill(backend="fake")


@pytest.mark.parametrize("name", ["auto", "", "a,b", None])
def test_bad_names_are_refused(name):
    with pytest.raises(ValueError, match="a backend needs a name"):
        gdn_multi.register_backend(type("Bad", (Fake,), dict(name=name))())


def test_bad_types_are_refused():
    with pytest.raises(TypeError, match="must be a gdn_multi.Backend"):
        gdn_multi.register_backend(object(), name="thing")
    with pytest.raises(ValueError, match="calls itself 'fake'"):
        gdn_multi.register_backend(Fake(), name="other")


def test_unregister_unknown_lists_names():
    with pytest.raises(ValueError, match="no backend named 'nope'.*torch"):
        gdn_multi.unregister_backend("nope")


def test_a_replaced_builtin_comes_back():
    gdn_multi.register_backend(type("Mine", (Fake,), dict(name="torch"))(), replace=True)
    try:
        assert torch.all(prefill(backend="torch") == 7)
    finally:
        gdn_multi.unregister_backend("torch")
    assert not torch.all(prefill(backend="torch") == 7)


def test_entry_points(monkeypatch):
    module = types.ModuleType("third_party_gdn")
    module.Backend = type("Backend", (Fake,), dict(name="third_party"))
    monkeypatch.setitem(sys.modules, "third_party_gdn", module)
    entries = [
        types.SimpleNamespace(name="third_party", value="third_party_gdn:Backend"),
        types.SimpleNamespace(name="torch", value="third_party_gdn:Backend"),
        types.SimpleNamespace(name="broken", value="no_such_module:Backend"),
    ]
    monkeypatch.setattr("gdn_multi.registry.metadata.entry_points", lambda group: entries)
    monkeypatch.setattr(registry, "_entry_points_read", False)
    try:
        with pytest.warns(RuntimeWarning, match="entry point 'torch'.*ignored"):
            assert torch.all(prefill(backend="third_party") == 7)
        with pytest.raises(RuntimeError, match="'broken' could not be loaded.*no_such_module"):
            prefill(backend="broken")
        prefill()  # a broken one does not get in the way of the others
    finally:
        for name in ("third_party", "broken"):
            gdn_multi.unregister_backend(name)


# --- asking ----------------------------------------------------------------------------------------


def test_explain_runs_nothing_and_names_every_backend(fake):
    fake.against = ("not today",)
    output = torch.full((5, 1, 8), 3.0)
    before = gdn_multi.last_backend()
    answer = gdn_multi.explain(gdn_multi.chunk_gated_delta_rule, **prefill_arguments(output=output, backend="torch"))
    assert (answer.backend, answer.source) == ("torch", "the backend argument")
    assert set(answer.reasons) == set(gdn_multi.registered_backends())
    assert answer.reasons["fake"] == ("not today",) and answer.reasons["torch"] == ()
    assert torch.all(output == 3) and fake.calls == [] and gdn_multi.last_backend() == before
    text = str(answer)
    for part in ("served by 'torch'", "not today", "serves this call"):
        assert part in text


def test_explain_takes_a_name_and_positional_arguments():
    a = decode_arguments()
    answer = gdn_multi.explain("gated_delta_rule_decode_pretranspose", *a.values(), backend="torch")
    assert answer.backend == "torch" and answer.function == "gated_delta_rule_decode_pretranspose"


def test_explain_says_what_decided(fake, monkeypatch):
    fake.priority = 10_000
    answer = gdn_multi.explain("chunk_gated_delta_rule", **prefill_arguments())
    assert (answer.backend, answer.source, answer.detail) == ("fake", "the policy", "fake prefill")
    monkeypatch.setenv(env.PREFILL_BACKEND, "torch")
    answer = gdn_multi.explain("chunk_gated_delta_rule", **prefill_arguments())
    assert answer.backend == "torch" and env.PREFILL_BACKEND in answer.source


def test_explain_a_call_that_would_fail(fake):
    fake.unusable = ("no such card",)
    answer = gdn_multi.explain("chunk_gated_delta_rule", **prefill_arguments(backend="fake"))
    assert answer.backend is None and "no such card" in answer.error and "not served" in str(answer)
    answer = gdn_multi.explain("chunk_gated_delta_rule", **prefill_arguments(), use_cp=True, backend="torch")
    assert answer.backend is None and "use_cp" in answer.error


def test_explain_refuses_what_the_call_refuses():
    with pytest.raises(ValueError, match="function must be one of .*chunk_gated_delta_rule"):
        gdn_multi.explain("softmax")
    with pytest.raises(ValueError, match="scale must be finite"):
        gdn_multi.explain("chunk_gated_delta_rule", **prefill_arguments(scale=float("nan")))
    with pytest.raises(ValueError, match="unknown backend"):
        gdn_multi.explain("chunk_gated_delta_rule", **prefill_arguments(backend="nope"))


def test_every_call_is_logged(fake, caplog):
    with caplog.at_level(logging.DEBUG, logger="gdn_multi"):
        prefill(backend="fake")
    assert "chunk_gated_delta_rule served by fake (the backend argument): fake prefill" in caplog.text


def test_last_backend_is_per_thread(fake):
    import threading

    prefill(backend="torch")
    seen = []
    thread = threading.Thread(target=lambda: (seen.append(gdn_multi.last_backend()), prefill(backend="fake")))
    thread.start()
    thread.join()
    assert seen == [None] and gdn_multi.last_backend().backend == "torch"


def test_failed_load_of_one_backend_is_a_reason_not_a_crash():
    def broken():
        raise OSError("libmissing.so")

    gdn_multi.register_backend(broken, name="broken")
    try:
        prefill()
        answer = gdn_multi.explain("chunk_gated_delta_rule", **prefill_arguments())
        assert "libmissing.so" in answer.reasons["broken"][0]
        with pytest.raises(RuntimeError, match="libmissing.so"):
            prefill(backend="broken")
    finally:
        gdn_multi.unregister_backend("broken")


def test_switches_say_what_they_take(monkeypatch):
    monkeypatch.setenv(env.CHECK, "maybe")
    with pytest.raises(ValueError, match=f"{env.CHECK} must be one of 1, true.*'maybe'"):
        prefill()


@pytest.mark.parametrize("call", [
    lambda: prefill(), lambda: decode(), lambda: gdn_multi.gdn_paged_decode_slots(*[torch.tensor(x) for x in ([0], [0, 1], [2])]),
])  # fmt: skip
def test_a_misspelt_variable_is_named_once(monkeypatch, call):
    forget = dispatch.forget_accepted
    monkeypatch.setattr(dispatch, "_unknown_named", False)
    monkeypatch.setenv("GDN_MULTI_BATCHINVARIANT", "1")
    forget()
    words = "^GDN_MULTI_BATCHINVARIANT: gdn_multi knows no such variable.*GDN_MULTI_BATCH_INVARIANT"
    with pytest.warns(RuntimeWarning, match=words) as said:
        call()
    assert [w.filename for w in said] == [__file__], "the warning is of the line that called"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call()
        forget()
        call()
