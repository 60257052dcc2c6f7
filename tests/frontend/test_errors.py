"""What bad input gets: the contract's table and more, on every public function that a row applies to.

A refusal has the right type, names the argument, says what was expected and what came, and leaves every tensor of the
call unchanged to the bit. Scalars are looked at before tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import cases
import numpy
import pytest
import torch
from cases import DecodeStep, Dims, PagedBatch, PagedDecode, Tokens, index, random_states

import gdn_multi
from gdn_multi import env

DIMS = Dims(2, 2, 4, 16, 24)
F32, F16, BF16, F8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn
META = torch.device("meta")  # a device other than q's that every machine has

Call = tuple[Callable, dict]


# --- calls that are right --------------------------------------------------------------------------


def prefill() -> Call:
    tokens = Tokens(DIMS, (70, 0, 5))
    more = dict(initial_state=random_states(3, DIMS), output_state=random_states(3, DIMS, 2), output_final_state=True)
    return gdn_multi.chunk_gated_delta_rule, tokens.arguments(**more, output=tokens.new_output())


def slot_prefill() -> Call:
    """All three slot arguments."""
    pool = random_states(8, DIMS)
    tokens = Tokens(DIMS, (70, 0, 5))
    return gdn_multi.chunk_gated_delta_rule, tokens.arguments(
        initial_state=pool, output_state=pool, output_final_state=True, state_checkpoints=pool,
        output=tokens.new_output(),
        state_indices=index([1, 2, -1]), output_state_indices=index([3, 4, 5]), prefix_lens=index([60, 1, 63]),
        checkpoint_state_indices=index([6, 7, 0]), checkpoint_cu_starts=index([0, 2, 2, 3]),
        checkpoint_every_n_tokens=64,
    )  # fmt: skip


def raw_prefill() -> Call:
    tokens = Tokens(DIMS, (7,), gate="raw", beta="logit")
    return gdn_multi.chunk_gated_delta_rule, tokens.arguments(output=tokens.new_output())


def paged_prefill() -> Call:
    batch = PagedBatch(DIMS).add(prefix=70, new=9).add(prefix=0, new=64).add().build()
    return gdn_multi.chunk_gated_delta_rule_paged, batch.arguments(output=batch.tokens.new_output())


def slotted_paged_prefill() -> Call:
    function, arguments = paged_prefill()
    table = {n: arguments[n] for n in ("cu_seqlens", "page_indices", "page_indptr", "page_size", "last_page_len")}
    rows = gdn_multi.reference.prefill_slots(**table)
    slots = gdn_multi.GDNPagedPrefillSlots(*(index(rows[n]) for n in ("read", "write", "starts", "prefix")))
    return function, dict(arguments, slots=slots)


def decode() -> Call:
    step = DecodeStep(DIMS, 3, 2)
    buffer = torch.zeros(3, 2, DIMS.heads, DIMS.V, DIMS.K)
    more = dict(output=step.new_output(), intermediate_states_buffer=buffer)
    return gdn_multi.gated_delta_rule_decode_pretranspose, step.arguments(state=random_states(3, DIMS), **more)


def pool_decode() -> Call:
    step = DecodeStep(DIMS, 3)
    return gdn_multi.gated_delta_rule_decode_pretranspose, step.arguments(
        state=None, initial_state=random_states(8, DIMS), initial_state_indices=index([1, -1, 3]),
        output_state_indices=index([4, 5, 6]), output=step.new_output(),
    )  # fmt: skip


def paged_decode() -> Call:
    batch = PagedDecode(DIMS).add(65).add(70).add(2).build()
    return gdn_multi.gated_delta_rule_decode_paged, batch.arguments(output=batch.step.new_output())


def slotted_paged_decode() -> Call:
    function, arguments = paged_decode()
    table = {n: arguments[n] for n in ("page_indices", "page_indptr", "last_page_len")}
    slots = gdn_multi.GDNPagedDecodeSlots(*(index(x) for x in gdn_multi.reference.decode_slots(**table)))
    return function, dict(arguments, slots=slots)


def prefill_slots() -> Call:
    _, arguments = paged_prefill()
    names = ("cu_seqlens", "page_indices", "page_indptr", "page_size", "last_page_len")
    return gdn_multi.gdn_paged_prefill_slots, {n: arguments[n] for n in names}


def decode_slots() -> Call:
    _, arguments = paged_decode()
    return gdn_multi.gdn_paged_decode_slots, {n: arguments[n] for n in ("page_indices", "page_indptr", "last_page_len")}


PREFILLS = [prefill, slot_prefill, raw_prefill, paged_prefill, slotted_paged_prefill]
PLAIN_PREFILLS = [prefill, slot_prefill, raw_prefill]
PAGED_PREFILLS = [paged_prefill, slotted_paged_prefill]
DECODES = [decode, pool_decode, paged_decode, slotted_paged_decode]
PAGED_DECODES = [paged_decode, slotted_paged_decode]
WITH_PAGE_SIZE = [*PAGED_PREFILLS, prefill_slots]
WITH_TABLE = [*WITH_PAGE_SIZE, *PAGED_DECODES, decode_slots]
COMPUTE = PREFILLS + DECODES
ALL = [*COMPUTE, prefill_slots, decode_slots]


def on(*calls):
    return pytest.mark.parametrize("call", calls, ids=lambda c: c.__name__)


def tensors(arguments: dict) -> list[torch.Tensor]:
    """All tensors of a call with memory behind them; for a view the whole of it."""
    found = []
    for value in arguments.values():
        for x in value if isinstance(value, tuple) else (value,):
            if isinstance(x, torch.Tensor) and x.device.type == "cpu" and x.layout is torch.strided and not x.is_nested:
                found.append(x._base if x._base is not None else x)
    return found


def refused(call: Callable[[], Call], error, *words: str, **changes) -> str:
    """The call with ``changes`` raises ``error`` exactly, with all ``words`` (patterns) in its message."""
    function, arguments = call()
    arguments = {**arguments, **changes}
    before = [cases.bits(x) for x in tensors(arguments)]
    with pytest.raises(error) as caught:
        function(**arguments)
    assert type(caught.value) is error, f"{type(caught.value).__name__}: {caught.value}"
    message = str(caught.value)
    for word in words:
        assert re.search(word, message), f"{word!r} is not in: {message}"
    for x, bits in zip(tensors(arguments), before):
        assert torch.equal(cases.bits(x), bits), "a refused call changed something"
    return message


def got(value) -> str:
    return "None" if value is None else type(value).__name__


@on(*ALL)
def test_the_calls_below_are_right_before_they_are_broken(call):
    function, arguments = call()
    function(**arguments)


# --- the contract's table, row by row --------------------------------------------------------------


@on(*WITH_PAGE_SIZE)
@pytest.mark.parametrize(
    "value",
    [0, -64, 1, 63, 65, 100, 64.0, "64", None, True, numpy.int64(64), torch.tensor(64), (64,)],
    ids=lambda v: f"{type(v).__name__}-{v}",
)
def test_page_size(call, value):
    refused(
        call, ValueError, "page_size", "int" if type(value) is not int else "positive multiple of 64", page_size=value
    )


TABLE = ("page_indices", "page_indptr", "last_page_len")


@on(*WITH_TABLE)
@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.float32, torch.bool], ids=str)
def test_page_table_dtypes(call, name, dtype):
    refused(call, ValueError, name, "int32 or int64", str(dtype).split(".")[1], **{name: call()[1][name].to(dtype)})


@on(*WITH_TABLE)
@pytest.mark.parametrize("name", TABLE)
def test_page_table_shapes_strides_and_devices(call, name):
    value = call()[1][name]
    refused(call, ValueError, name, "1-D", re.escape(str([1, *value.shape])), **{name: value[None]})
    refused(call, ValueError, name, "contiguous", "stride", **{name: value.repeat_interleave(2)[::2]})
    if not (call is decode_slots and name == "page_indptr"):  # whose device is the call's
        refused(call, ValueError, "page_ind|last_page", "device", "meta", **{name: value.to(META)})
    if name != "page_indices":
        longer = torch.cat([value, value[-1:]])
        # The sequences are counted by one of the arguments, so either of two may be the one that does not fit.
        for wrong in (longer, value[:-1].clone()):
            message = refused(call, ValueError, "page_indptr|last_page_len", "entries", **{name: wrong})
            assert name not in message or str(len(wrong)) in message


@on(*WITH_TABLE)
@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("value", [None, [0, 1], 7], ids=str)
def test_page_table_types(call, name, value):
    refused(call, TypeError, name, "[Tt]ensor", got(value), **{name: value})


@pytest.mark.parametrize(
    "changes,missing",
    [
        (dict(state_indices=None), "state_indices"),
        (dict(output_state=None), "output_state"),
        (dict(output_final_state=False), "output_final_state"),
    ],
    ids=["state_indices", "output_state", "output_final_state"],
)
def test_output_state_indices_without_what_it_needs(changes, missing):
    refused(slot_prefill, ValueError, "output_state_indices", rf"\b{missing}\b", **changes)


def test_output_state_indices_of_decode_without_a_pool():
    refused(decode, ValueError, "output_state_indices", "initial_state", output_state_indices=index([0, 1, 2]))


@pytest.mark.parametrize("name,value", [("checkpoint_state_indices", [1]), ("prefix_lens", [0, 0, 0])])
def test_checkpoint_arguments_without_an_interval(name, value):
    refused(prefill, ValueError, name, "checkpoint_every_n_tokens", "0", **{name: index(value)})


NOT_DENSE = {
    "heads of a wider pool": lambda rows: torch.zeros(rows, DIMS.heads + 1, DIMS.V + 1, DIMS.K)[:, :-1, :-1],
    "padded K": lambda rows: torch.zeros(rows, DIMS.heads, DIMS.V, DIMS.K + 8)[..., :-8],
    "V before heads": lambda rows: torch.zeros(rows, DIMS.V, DIMS.heads, DIMS.K).transpose(1, 2),
}


@pytest.mark.parametrize("kind", NOT_DENSE)
def test_state_checkpoints_with_rows_that_are_not_dense(kind):
    refused(slot_prefill, ValueError, "state_checkpoints", "dense", "stride", state_checkpoints=NOT_DENSE[kind](8))


@on(*PAGED_PREFILLS)
@pytest.mark.parametrize("kind", NOT_DENSE)
def test_state_pool_with_rows_that_are_not_dense(call, kind):
    rows = call()[1]["state_pool"].shape[0]
    refused(call, ValueError, "state_pool", "dense", "stride", state_pool=NOT_DENSE[kind](rows))


def test_a_padded_row_stride_is_fine():
    function, arguments = slot_prefill()
    padded = torch.zeros(8, DIMS.heads * DIMS.V * DIMS.K + 5)[:, :-5].unflatten(1, (DIMS.heads, DIMS.V, DIMS.K))
    function(**dict(arguments, state_checkpoints=padded))


STATES = [
    (prefill, "initial_state"), (prefill, "output_state"), (slot_prefill, "initial_state"),
    (slot_prefill, "output_state"),
    (slot_prefill, "state_checkpoints"), (paged_prefill, "state_pool"), (slotted_paged_prefill, "state_pool"),
    (decode, "state"), (pool_decode, "initial_state"), (paged_decode, "state_pool"),
    (slotted_paged_decode, "state_pool"),
]  # fmt: skip
EACH_STATE = pytest.mark.parametrize("call,name", STATES, ids=[f"{c.__name__}-{n}" for c, n in STATES])


@EACH_STATE
def test_five_dimensional_pool(call, name):
    pool = call()[1][name]
    refused(call, ValueError, name, "4-?D", "5-?D", re.escape(str([1, *pool.shape])), **{name: pool[None]})


SLOT_ARGUMENTS = ("output_state_indices", "checkpoint_state_indices", "prefix_lens")


def only(names) -> Callable[[], Call]:
    """slot_prefill with these slot arguments alone."""

    def call() -> Call:
        function, arguments = slot_prefill()
        for name in SLOT_ARGUMENTS:
            if name not in names:
                del arguments[name]
        return function, arguments

    return call


EACH_SLOT_ARGUMENT = pytest.mark.parametrize(
    "names", [*((n,) for n in SLOT_ARGUMENTS), SLOT_ARGUMENTS], ids=lambda n: "+".join(n)
)


@EACH_SLOT_ARGUMENT
@pytest.mark.parametrize(
    "changes,words",
    [(dict(use_cp=True), "use_cp"), (dict(backend="cudnn"), "cudnn"), (dict(backend="cake_gdn"), "cake_gdn")],
    ids=["use_cp", "cudnn", "cake_gdn"],
)  # fmt: skip
def test_slot_arguments_that_are_rejected(names, changes, words):
    message = refused(only(names), ValueError, words, *(rf"\b{n}\b" for n in names), **changes)
    for other in set(SLOT_ARGUMENTS) - set(names):
        assert not re.search(rf"(?<!_)\b{other}\b", message.split(":")[0]), "an argument that was not given is blamed"


@EACH_SLOT_ARGUMENT
@pytest.mark.parametrize("backend", ["cudnn", "cake_gdn"])
@pytest.mark.parametrize("variable", ["GDN_MULTI_BACKEND", "GDN_MULTI_PREFILL_BACKEND"])
def test_slot_arguments_that_a_backend_named_by_a_variable_rejects(names, backend, variable, monkeypatch):
    monkeypatch.setenv(variable, backend)
    refused(only(names), ValueError, backend, variable, *names)


@on(*PAGED_PREFILLS)
@pytest.mark.parametrize("backend", ["cudnn", "cake_gdn"])
def test_paged_prefill_on_backends_without_slots(call, backend):
    refused(call, ValueError, backend, *SLOT_ARGUMENTS, backend=backend)


@on(*COMPUTE)
def test_unknown_backend_in_the_keyword(call):
    names = gdn_multi.registered_backends()
    refused(call, ValueError, "'?cudda'?", "backend argument|backend=|keyword", *names, backend="cudda")


@on(*ALL)
@pytest.mark.parametrize("value", ["cudda", "cudda,torch", "torch,cudda"])
@pytest.mark.parametrize("variable", ["GDN_MULTI_BACKEND", "own"])
def test_unknown_backend_in_a_variable(call, variable, value, monkeypatch):
    if variable == "own":
        variable = "GDN_MULTI_DECODE_BACKEND" if "decode" in call.__name__ else "GDN_MULTI_PREFILL_BACKEND"
    monkeypatch.setenv(variable, value)
    refused(call, ValueError, "cudda", variable, *gdn_multi.registered_backends())


SLOTTED = pytest.mark.parametrize(
    "call,field",
    [(slotted_paged_prefill, n) for n in gdn_multi.GDNPagedPrefillSlots._fields]
    + [(slotted_paged_decode, n) for n in gdn_multi.GDNPagedDecodeSlots._fields],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)


@SLOTTED
def test_slots(call, field):
    slots = call()[1]["slots"]
    rows = getattr(slots, field)
    wrong: dict[str, tuple[torch.Tensor, str]] = {
        "dtype": (rows.long(), "int64"),
        "float": (rows.float(), "float32"),
        "longer": (torch.cat([rows, rows[:1]]), re.escape(str([len(rows) + 1]))),
        "2-D": (rows[None], re.escape(str([1, len(rows)]))),
        "stride": (rows.repeat_interleave(2)[::2], "contiguous"),
        "device": (rows.to(META), "meta"),
    }
    for value, words in wrong.values():
        refused(call, ValueError, field, "int32", words, slots=slots._replace(**{field: value}))
    refused(call, TypeError, field, "[Tt]ensor", slots=slots._replace(**{field: [1, 2, 3]}))


@on(slotted_paged_prefill, slotted_paged_decode)
def test_slots_that_are_no_slots(call):
    slots = call()[1]["slots"]
    refused(call, TypeError, "slots", "Tensor", slots=slots[0])
    refused(call, ValueError, "slots", str(len(slots)), slots=tuple(slots)[:-1])
    refused(call, TypeError, "slots", "dict", slots=slots._asdict())


@on(*PAGED_DECODES)
@pytest.mark.parametrize("steps", [0, 2, 3])
def test_paged_decode_of_several_tokens(call, steps):
    step = DecodeStep(DIMS, 3, steps)
    changes = {n: x for n, x in step.arguments(output=step.new_output()).items()}
    refused(call, ValueError, rf"T = {steps}|\[3, {steps}", **changes)


# --- wrong Python types ----------------------------------------------------------------------------


@on(*COMPUTE)
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize(
    "value", [None, 3, [[1.0]], numpy.zeros((7, 2, 16), dtype=numpy.float32)], ids=lambda v: type(v).__name__
)
def test_inputs_that_are_no_tensors(call, name, value):
    refused(call, TypeError, rf"\b{name}\b", "[Tt]ensor", got(value), **{name: value})


OPTIONAL_TENSORS = [
    (prefill, "g"), (prefill, "beta"), (prefill, "initial_state"), (prefill, "output_state"), (prefill, "output"),
    (raw_prefill, "A_log"), (raw_prefill, "dt_bias"), (slot_prefill, "state_indices"), (slot_prefill, "prefix_lens"),
    (slot_prefill, "output_state_indices"), (slot_prefill, "checkpoint_state_indices"),
    (slot_prefill, "state_checkpoints"),
    (slot_prefill, "checkpoint_cu_starts"), (paged_prefill, "state_pool"), (paged_prefill, "output"),
    (paged_prefill, "g"),
    (decode, "state"), (decode, "A_log"), (decode, "a"), (decode, "dt_bias"), (decode, "b"), (decode, "output"),
    (decode, "intermediate_states_buffer"), (pool_decode, "initial_state"), (pool_decode, "initial_state_indices"),
    (pool_decode, "output_state_indices"), (paged_decode, "state_pool"), (paged_decode, "output"),
]  # fmt: skip


@pytest.mark.parametrize("call,name", OPTIONAL_TENSORS, ids=[f"{c.__name__}-{n}" for c, n in OPTIONAL_TENSORS])
def test_other_arguments_that_are_no_tensors(call, name):
    refused(call, TypeError, rf"\b{name}\b", "[Tt]ensor", "list", **{name: [1, 2, 3]})


@on(*PREFILLS, prefill_slots)
def test_cu_seqlens(call):
    cu = call()[1]["cu_seqlens"]
    last = int(cu[-1])
    refused(call, TypeError, "cu_seqlens", "[Tt]ensor", "list", cu_seqlens=[0, last])
    refused(call, ValueError, "cu_seqlens", "required|None", cu_seqlens=None)
    refused(call, ValueError, "cu_seqlens", "int32 or int64", "float32", cu_seqlens=cu.float())
    refused(call, ValueError, "cu_seqlens", "int32 or int64", "int16", cu_seqlens=cu.short())
    refused(call, ValueError, "cu_seqlens", "1-D", cu_seqlens=cu[None])
    refused(call, ValueError, "cu_seqlens", "contiguous", cu_seqlens=cu.repeat_interleave(2)[::2])
    refused(call, ValueError, "cu_seqlens", "1", cu_seqlens=cu[:1].clone())
    if call is not prefill_slots:
        refused(call, ValueError, "cu_seqlens", "device", "meta", cu_seqlens=cu.to(META))


@on(*PREFILLS)
def test_cu_seqlens_whose_values_the_host_can_see(call):
    """On a CPU the values cost nothing to check."""
    cu = call()[1]["cu_seqlens"]
    beyond, backwards, negative = cu.clone(), cu.clone(), cu.clone()
    beyond[-1] += 1
    backwards[0] = cu[-1] + 1 if len(cu) == 2 else cu[1] + 1
    negative[0] = -1
    for wrong in (beyond, backwards, negative):
        refused(call, ValueError, "cu_seqlens", cu_seqlens=wrong)


SCALARS = [
    # argument, value, error, words
    ("scale", "1", TypeError, "must be a number or None, got str '1'", PREFILLS + DECODES),
    ("scale", torch.tensor(1.0), TypeError, "must be a number or None, got a tensor; pass a Python float", PREFILLS + DECODES),
    ("scale", True, TypeError, "number|float", PREFILLS + DECODES),
    ("scale", cases.NAN, ValueError, "finite", PREFILLS + DECODES),
    ("scale", cases.INF, ValueError, "finite", PREFILLS + DECODES),
    ("backend", None, TypeError, "backend", PREFILLS + DECODES),
    ("backend", 3, TypeError, "backend", PREFILLS + DECODES),
    ("use_qk_l2norm_in_kernel", 1, TypeError, "True or False|bool", PREFILLS),
    ("use_qk_l2norm_in_kernel", None, TypeError, "True or False|bool", PREFILLS),
    ("use_gate_in_kernel", 1, TypeError, "True or False|bool", PREFILLS),
    ("beta_is_logit", "yes", TypeError, "True or False|bool", PREFILLS),
    ("gate_domain", None, TypeError, "linear.*log", PREFILLS),
    ("gate_domain", "ln", ValueError, "linear.*log.*ln", PREFILLS),
    ("output_final_state", 1, TypeError, "True or False|bool", PLAIN_PREFILLS),
    ("checkpoint_every_n_tokens", 64.0, TypeError, "int", PLAIN_PREFILLS),
    ("checkpoint_every_n_tokens", None, TypeError, "int", PLAIN_PREFILLS),
    ("checkpoint_every_n_tokens", -64, ValueError, "64.*-64", PLAIN_PREFILLS),
    ("checkpoint_every_n_tokens", 63, ValueError, "64.*63", PLAIN_PREFILLS),
    ("use_cp", "yes", ValueError, "auto.*yes", PLAIN_PREFILLS),
    ("use_cp", None, TypeError, "auto.*None", PLAIN_PREFILLS),
    ("max_seqlen", 1.5, TypeError, "int", PREFILLS),
    ("max_seqlen", -1, ValueError, "-1", PREFILLS),
    ("use_qk_l2norm", 1, TypeError, "True or False|bool", DECODES),
    ("disable_state_update", 1, TypeError, "True or False|bool", [decode, pool_decode]),
]
EACH_SCALAR = pytest.mark.parametrize(
    "call,name,value,error,words",
    [(call, *rest) for *rest, calls in SCALARS for call in calls],
    ids=[f"{call.__name__}-{s[0]}-{s[1]}" for s in SCALARS for call in s[4]],
)


@EACH_SCALAR
def test_scalars(call, name, value, error, words):
    refused(call, error, rf"\b{name}\b", words, **{name: value})


@EACH_SCALAR
def test_scalars_are_checked_first(call, name, value, error, words):
    """A call with a bad scalar and bad tensors reports the scalar."""
    bad = dict(q="not a tensor", v=torch.zeros(1), output=torch.zeros(3))
    refused(call, error, rf"\b{name}\b", words, **bad, **{name: value})


@on(*WITH_PAGE_SIZE)
def test_the_page_size_is_checked_before_tensors(call):
    refused(
        call, ValueError, "page_size", page_size=63, page_indptr=torch.zeros(1, 1), cu_seqlens="x", last_page_len=None
    )


def test_max_seqlen_below_the_longest_sequence():
    """On a CPU, where the lengths can be seen, or with cu_seqlens_cpu."""
    refused(prefill, ValueError, "max_seqlen", "70", "69", max_seqlen=69)
    refused(paged_prefill, ValueError, "max_seqlen", "64", "63", max_seqlen=63)


def test_cu_seqlens_cpu():
    refused(prefill, TypeError, "cu_seqlens_cpu", cu_seqlens_cpu=75)
    refused(prefill, TypeError, "cu_seqlens_cpu", cu_seqlens_cpu=[0, 70.5, 70, 75])
    refused(prefill, ValueError, "cu_seqlens_cpu", "4", "3", cu_seqlens_cpu=index([0, 70, 75]))
    refused(prefill, ValueError, "cu_seqlens_cpu", cu_seqlens_cpu=index([0, 70, 70, 76]))
    refused(prefill, ValueError, "cu_seqlens_cpu", cu_seqlens_cpu=index([0, 71, 70, 75]))


# --- wrong tensors ---------------------------------------------------------------------------------


@on(*COMPUTE)
def test_input_dtypes(call):
    arguments = call()[1]
    for dtype in (torch.float64, torch.int32, F8):
        name = str(dtype).split(".")[1]
        changes = {n: arguments[n].to(dtype) for n in ("q", "k", "v")}
        refused(call, ValueError, r"\bq\b", "bfloat16", "float16", name, **changes)
    for name in ("k", "v"):
        refused(call, ValueError, rf"\b{name}\b", "float32", "float16", **{name: arguments[name].half()})


@on(*COMPUTE)
def test_input_shapes(call):
    arguments = call()[1]
    for name in ("q", "k", "v"):
        x = arguments[name]
        refused(call, ValueError, rf"\b{name}\b", re.escape(str([1, *x.shape])), **{name: x[None]})
        refused(call, ValueError, rf"\b{name}\b", **{name: x[0]})
    for name in ("k", "v"):
        x = arguments[name]
        refused(call, ValueError, rf"\b{name}\b", "token", **{name: torch.cat([x, x[:1]])})
    refused(call, ValueError, r"\bk\b", "head size|K", "16", k=torch.cat([arguments["k"]] * 2, -1))


@on(*COMPUTE)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_inputs_that_are_not_contiguous_in_the_last_dimension(call, name):
    x = call()[1][name].repeat_interleave(2, -1)[..., ::2]
    refused(call, ValueError, rf"\b{name}\b", "contiguous", "stride", **{name: x})


@on(*COMPUTE)
@pytest.mark.parametrize("name", ["k", "v"])
def test_inputs_on_another_device(call, name):
    refused(call, ValueError, rf"\b{name}\b", "device", "cpu", "meta", **{name: call()[1][name].to(META)})


@on(*COMPUTE)
def test_head_counts(call):
    arguments = call()[1]

    def heads(name, count):
        x = arguments[name]
        return x.new_zeros((*x.shape[:-2], count, x.shape[-1]))

    for q, k, v in ((2, 1, 4), (2, 2, 3), (3, 2, 2), (2, 4, 4), (4, 2, 1), (2, 2, 1)):
        counts = dict(q=heads("q", q), k=heads("k", k), v=heads("v", v))
        refused(call, ValueError, "head", *(str(n) for n in (q, k, v)), **counts)


@on(decode, pool_decode, paged_decode)
def test_decode_has_no_gqa(call):
    """q and k are both [B, T, H, K] there."""
    arguments = call()[1]
    k = arguments["k"]
    refused(call, ValueError, "head", k=k.new_zeros(k.shape[0], k.shape[1], 1, k.shape[3]))


@on(*PREFILLS)
def test_gates(call):
    raw = call is raw_prefill
    for name in ("g", "beta"):
        x = call()[1][name]
        shape = re.escape(str([x.shape[0], DIMS.heads]))
        refused(call, ValueError, rf"\b{name}\b", shape, **{name: x[:, :-1]})
        refused(call, ValueError, rf"\b{name}\b", shape, **{name: x[:-1]})
        refused(call, ValueError, rf"\b{name}\b", **{name: x[..., None]})
        refused(call, ValueError, rf"\b{name}\b", "float32", "float64", **{name: x.double()})
        refused(call, ValueError, rf"\b{name}\b", "float32", "float16", **{name: x.half()})
        refused(call, ValueError, rf"\b{name}\b", "device", "meta", **{name: x.to(META)})
    if raw:
        for name in ("A_log", "dt_bias"):
            x = call()[1][name]
            refused(call, ValueError, name, re.escape(str([DIMS.heads])), **{name: x[:-1]})
            refused(call, ValueError, name, **{name: x[None]})
            refused(call, ValueError, name, "float64", **{name: x.double()})
            refused(call, ValueError, name, "meta", **{name: x.to(META)})


def test_half_gates_only_with_raw_gates():
    """q's dtype is for raw gates and logits; alpha and beta themselves are float32."""
    function, arguments = prefill()
    half = {n: arguments[n].half() for n in ("q", "k", "v", "output")}
    refused(prefill, ValueError, r"\bg\b", "float32", "float16", **half, g=arguments["g"].half())
    refused(prefill, ValueError, r"\bbeta\b", "float32", "float16", **half, beta=arguments["beta"].half())


@on(*PREFILLS)
def test_gate_arguments_that_do_not_go_together(call):
    if call is raw_prefill:
        for name in ("g", "A_log", "dt_bias"):
            refused(call, ValueError, "use_gate_in_kernel", rf"\b{name}\b", **{name: None})
        refused(call, ValueError, "beta", "beta_is_logit", beta=None)
        return
    parameter = torch.zeros(DIMS.heads)
    refused(call, ValueError, "use_gate_in_kernel", "A_log", use_gate_in_kernel=True)
    refused(call, ValueError, "A_log is read only with use_gate_in_kernel", A_log=parameter)
    refused(call, ValueError, "A_log and dt_bias are read only with use_gate_in_kernel", A_log=parameter, dt_bias=parameter)
    refused(call, ValueError, "use_gate_in_kernel", "dt_bias", dt_bias=parameter)
    refused(call, ValueError, "beta", "beta_is_logit", beta_is_logit=True, beta=None)


@EACH_STATE
def test_states(call, name):
    pool = call()[1][name]
    rows, heads, V, K = pool.shape
    shape = rf"{heads}, {V}, {K}"
    refused(call, ValueError, name, shape, "V-major|K contiguous|V, K", **{name: pool.transpose(2, 3).contiguous()})
    refused(call, ValueError, name, shape, **{name: pool[:, :-1]})
    refused(call, ValueError, name, **{name: pool[0]})
    refused(call, ValueError, name, "contiguous", "stride", **{name: pool.repeat_interleave(2, -1)[..., ::2]})
    refused(call, ValueError, name, "float32", "float64", **{name: pool.double()})
    refused(call, ValueError, name, "device", "meta", **{name: pool.to(META)})
    if "decode" in call.__name__:
        refused(call, ValueError, name, "float32", "float8_e4m3fn", **{name: pool.to(F8)})
    if (call, name) in ((prefill, "initial_state"), (prefill, "output_state"), (decode, "state")):
        refused(call, ValueError, name, "3", "4", **{name: torch.cat([pool, pool[:1]])})


@pytest.mark.parametrize(
    "call,name",
    [(c, n) for c, n in STATES if n != "initial_state"] + [(pool_decode, "initial_state")],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_a_state_that_is_written_must_not_repeat_memory(call, name):
    pool = call()[1][name]
    refused(call, ValueError, name, "stride|memory|expand", **{name: pool[:1].expand(pool.shape)})


@on(*[c for c in COMPUTE if c is not slotted_paged_prefill])
def test_outputs(call):
    output = call()[1]["output"]
    refused(call, ValueError, r"\boutput\b", re.escape(str(list(output.shape))), output=output[:, :-1])
    refused(call, ValueError, r"\boutput\b", re.escape(str(list(output.shape))), output=output[..., :-1])
    refused(call, ValueError, r"\boutput\b", output=output.flatten())
    refused(call, ValueError, r"\boutput\b", "float32", "float16", output=output.half())
    refused(call, ValueError, r"\boutput\b", "device", "meta", output=output.to(META))
    refused(call, ValueError, r"\boutput\b", "contiguous", "stride", output=output.repeat_interleave(2, -1)[..., ::2])
    refused(call, ValueError, r"\boutput\b", "stride|memory|expand", output=output[:1].expand(output.shape))


INDICES = [
    (slot_prefill, "state_indices"), (slot_prefill, "output_state_indices"), (slot_prefill, "prefix_lens"),
    (slot_prefill, "checkpoint_state_indices"), (slot_prefill, "checkpoint_cu_starts"),
    (pool_decode, "initial_state_indices"), (pool_decode, "output_state_indices"),
]  # fmt: skip


@pytest.mark.parametrize("call,name", INDICES, ids=[f"{c.__name__}-{n}" for c, n in INDICES])
def test_index_tensors(call, name):
    value = call()[1][name]
    for dtype in (torch.int16, torch.float32, torch.bool, torch.uint8):
        refused(call, ValueError, name, "int32 or int64", str(dtype).split(".")[1], **{name: value.to(dtype)})
    refused(call, ValueError, name, "1-D", **{name: value[None]})
    refused(call, ValueError, name, "contiguous", "stride", **{name: value.repeat_interleave(2)[::2]})
    refused(call, ValueError, name, "device", "meta", **{name: value.to(META)})
    if name != "checkpoint_state_indices":
        longer = torch.cat([value, value[:2]])
        refused(call, ValueError, name, str(len(longer)), **{name: longer})


def test_checkpoint_arguments_that_do_not_go_together():
    refused(slot_prefill, ValueError, "checkpoint_every_n_tokens", "state_checkpoints", state_checkpoints=None)
    refused(slot_prefill, ValueError, "checkpoint_every_n_tokens", "checkpoint_cu_starts", checkpoint_cu_starts=None)
    refused(
        prefill, ValueError, "checkpoint_every_n_tokens", "state_checkpoints", state_checkpoints=random_states(3, DIMS)
    )
    starts = index([0, 1, 1, 1])
    refused(prefill, ValueError, "checkpoint_every_n_tokens", "checkpoint_cu_starts", checkpoint_cu_starts=starts)


def test_state_indices_with_a_final_state_need_an_output_state():
    """A compact buffer made by the call would be written out of bounds by pool rows."""
    refused(prefill, ValueError, "state_indices", "output_state", state_indices=index([0, 1, 2]), output_state=None)


def test_decode_states_that_do_not_go_together():
    refused(decode, ValueError, "state", "initial_state", state=None)
    refused(pool_decode, ValueError, "initial_state", "initial_state_indices", initial_state_indices=None)
    refused(decode, ValueError, "initial_state", initial_state_indices=index([0, 1, 2]))
    refused(pool_decode, ValueError, "state", "initial_state", state=random_states(3, DIMS))


def test_intermediate_states_buffer():
    buffer = decode()[1]["intermediate_states_buffer"]
    name = "intermediate_states_buffer"
    for wrong in (buffer[:2], buffer[:, :1], buffer[0], buffer[..., :-1], buffer.transpose(3, 4).contiguous()):
        refused(decode, ValueError, name, re.escape(str(list(wrong.shape))), **{name: wrong})
    refused(decode, ValueError, name, "float32", "bfloat16", **{name: buffer.bfloat16()})
    refused(decode, ValueError, name, "meta", **{name: buffer.to(META)})
    refused(decode, ValueError, name, "contiguous", **{name: buffer.repeat_interleave(2, -1)[..., ::2]})


@on(decode, pool_decode, paged_decode)
@pytest.mark.parametrize("name", ["a", "b", "A_log", "dt_bias"])
def test_decode_gates(call, name):
    x = call()[1][name]
    shape = re.escape(str(list(x.shape)))
    refused(call, ValueError, rf"\b{name}\b", shape, **{name: x[..., :-1]})
    refused(call, ValueError, rf"\b{name}\b", shape, **{name: x[None]})
    refused(call, ValueError, rf"\b{name}\b", "float32", "float64", **{name: x.double()})
    refused(call, ValueError, rf"\b{name}\b", "device", "meta", **{name: x.to(META)})
    refused(call, TypeError, rf"\b{name}\b", "[Tt]ensor", "None", **{name: None})


# --- gradients -------------------------------------------------------------------------------------

FLOATING = {
    prefill: ("q", "k", "v", "g", "beta", "initial_state"), raw_prefill: ("A_log", "dt_bias"),
    paged_prefill: ("q", "k", "v", "g", "beta", "state_pool"),
    decode: ("q", "k", "v", "a", "b", "A_log", "dt_bias", "state"),
    pool_decode: ("q", "initial_state"), paged_decode: ("q", "k", "v", "a", "b", "A_log", "dt_bias", "state_pool"),
}  # fmt: skip
EACH_FLOATING = [(call, name) for call, names in FLOATING.items() for name in names]


@pytest.mark.parametrize("call,name", EACH_FLOATING, ids=[f"{c.__name__}-{n}" for c, n in EACH_FLOATING])
def test_inputs_that_require_grad(call, name):
    """Rule 9; without grad mode they are as good as any."""
    with torch.enable_grad():
        refused(call, ValueError, rf"\b{name}\b", "grad", **{name: call()[1][name].clone().requires_grad_()})
    function, arguments = call()
    arguments[name] = arguments[name].clone().requires_grad_()
    with torch.no_grad():
        function(**arguments)


# --- tensors without a place for every element ---------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@on(*ALL)
def test_sparse_and_nested_tensors(call):
    """Also of the right shape, and where strides are free."""
    for name, value in call()[1].items():
        if isinstance(value, torch.Tensor):
            nested = torch.nested.as_nested_tensor([value[0], value[:0].sum(0)])
            refused(call, ValueError, rf"\b{name}\b", "dense", "sparse_coo", **{name: value.to_sparse()})
            refused(call, ValueError, rf"\b{name}\b", "dense", "nested", **{name: nested})
        elif isinstance(value, tuple):
            nested = torch.nested.as_nested_tensor([value[1], value[1][:0]])
            for kind, other in ("sparse_coo", value[1].to_sparse()), ("nested", nested):
                refused(call, ValueError, r"\bslots\b", "dense", kind, slots=type(value)(value[0], other, *value[2:]))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_sparse_and_nested_lengths_on_the_host():
    lengths = prefill()[1]["cu_seqlens"]
    for kind, other in ("sparse_coo", lengths.to_sparse()), ("nested", torch.nested.as_nested_tensor([lengths, lengths[:0]])):
        refused(prefill, ValueError, r"\bcu_seqlens_cpu\b", "dense", kind, cu_seqlens_cpu=other)


# --- backends --------------------------------------------------------------------------------------


@on(*COMPUTE)
def test_a_backend_that_is_not_usable_here(call):
    """RuntimeError, with the name and why."""

    class Elsewhere(gdn_multi.Backend):
        name = "elsewhere"

        def reasons_unusable(self, device):
            return ("it runs on the moon only",)

    gdn_multi.register_backend(Elsewhere())
    try:
        refused(call, RuntimeError, "elsewhere", "moon", backend="elsewhere")
    finally:
        gdn_multi.unregister_backend("elsewhere")


@on(*COMPUTE)
def test_a_backend_that_does_not_serve_the_call(call):
    """NotImplementedError, with every reason, and with the backends that would."""

    class Picky(gdn_multi.Backend):
        name = "picky"

        def reasons_against(self, request):
            return ("it serves Tuesdays only", "and not this head size")

    gdn_multi.register_backend(Picky())
    try:
        refused(call, NotImplementedError, "picky", "Tuesdays", "head size", "torch", backend="picky")
    finally:
        gdn_multi.unregister_backend("picky")


def test_a_backend_that_is_usable_is_not_run_for_a_refused_call():
    """Checks come before the backend is called at all."""
    ran = []

    class Counting(gdn_multi.Backend):
        name = "counting"

        def prefill(self, request):
            ran.append(request)

        def decode(self, request):
            ran.append(request)

    gdn_multi.register_backend(Counting())
    try:
        refused(prefill, ValueError, "output", backend="counting", output=torch.zeros(3))
        refused(paged_prefill, ValueError, "last_page_len", backend="counting", last_page_len=torch.zeros(3))
        refused(
            pool_decode, ValueError, "output_state_indices", backend="counting", output_state_indices=torch.zeros(3)
        )
        assert not ran
        function, arguments = prefill()
        function(**arguments, backend="counting")
        assert len(ran) == 1
    finally:
        gdn_multi.unregister_backend("counting")


@on(*ALL)
@pytest.mark.parametrize("name", [env.CHECK, env.BATCH_INVARIANT, env.PRECISE])
def test_a_switch_that_is_neither_on_nor_off(call, name, monkeypatch):
    """In every call, whether it looks at that switch or not; after a call like it too."""
    function, arguments = call()
    function(**arguments)
    monkeypatch.setenv(name, "x")
    refused(call, ValueError, f"{name} must be one of 1, true.*got 'x'")
    with pytest.raises(ValueError, match=f"{name} must be one of"):
        gdn_multi.explain(function, **arguments)


# --- states of every dtype, as a counter-check ------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, BF16, F16, F8, torch.float8_e5m2], ids=str)
def test_state_dtypes_that_prefill_accepts(dtype):
    function, arguments = prefill()
    function(**dict(arguments, initial_state=arguments["initial_state"].to(dtype)))
