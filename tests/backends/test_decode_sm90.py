"""csrc/decode/sm90_decode.cu on the CPU (cuda_emulator/): every plan has decode.cu's bits, and those are right. And the functions
that csrc/bindings.cu gives to Python for calls like an earlier one."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import like_arguments
import pytest
import torch

pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi")
pytestmark = pytest.mark.build
sys.path.insert(0, str(Path(__file__).resolve().parent))

from gdn_multi.backends.cuda import build, load_library  # noqa: E402

from gdn_multi import dispatch, env, reference  # noqa: E402
from gdn_multi.layout import csrc_dir  # noqa: E402

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
LIMIT = {F32: 1e-6, BF16: 4e-3, F16: 5e-4}
PORTABLE = -1


@pytest.fixture(scope="module")
def library():
    """(decode(...), the functions of force_decode.cu, the library)"""
    from cuda_emulator import FLAGS, FOLDER, HERE, toolchain_or_skip
    from tvm_ffi.libinfo import find_dlpack_include_path, find_include_path, find_libtvm_ffi

    csrc, toolkit = csrc_dir(), toolchain_or_skip().toolkit
    renamed = ("-Dlaunch_decode=launch_decode_portable", "-Dlaunch_decode_sm90=launch_decode_never")
    files = {
        csrc / "bindings.cu": (), csrc / "common/page_slots.cu": (), csrc / "decode/decode.cu": renamed,
        csrc / "decode/sm90_decode.cu": (), HERE / "force_decode.cu": (), HERE / "emulate.cpp": (),
    }  # fmt: skip
    digest = hashlib.sha256()
    for path in sorted({*build.sources(), *HERE.glob("*.h"), *files}):
        digest.update(path.read_bytes())
    made = FOLDER / f"decode-{digest.hexdigest()[:16]}.so"
    if not made.exists():
        FOLDER.mkdir(exist_ok=True)
        includes = [
            f"-I{p}" for p in (f"{toolkit}/include", csrc, HERE, find_include_path(), find_dlpack_include_path())
        ]
        with tempfile.TemporaryDirectory(dir=FOLDER) as work:

            def compiled(item):
                source, flags = item
                object_file = os.path.join(work, source.stem + ".o")
                command = ["g++", *FLAGS, *flags, *includes, "-x", "c++", "-c", str(source), "-o", object_file]
                done = subprocess.run(command, capture_output=True, text=True)
                assert done.returncode == 0, done.stderr[-3000:]
                return object_file

            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = list(pool.map(compiled, files.items()))
            linked = os.path.join(work, "made.so")
            where = os.path.dirname(find_libtvm_ffi())
            subprocess.run(["g++", "-shared", "-o", linked, *objects, f"-L{where}", "-ltvm_ffi"], check=True)
            os.replace(linked, made)
    loaded = load_library(str(made), "emulated")
    return loaded.decode, ctypes.CDLL(str(made)), loaded


def bits(x):
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


def relative(x, y):
    return ((x.double() - y.double()).norm() / y.double().norm().clamp_min(1e-30)).item()


def poisoned(*shape, dtype):
    return torch.full(shape, float("nan")).to(dtype)


class Case:
    """One token for B sequences on a poisoned pool, sequence 1 of them padding where rows are given."""

    def __init__(
        self, B, H, HV, K, V, dtype, state_dtype, rows="int32", steps=False, update=True, norm=True, raw=F32, seed=0
    ):
        torch.manual_seed(seed)
        self.B, self.update, self.norm, self.scale = B, update, norm, K**-0.5
        fused = torch.randn(B, 1, 2 * H * K + HV * V).to(dtype)
        self.q, self.k = (x.unflatten(-1, (H, K)) for x in fused[..., : 2 * H * K].chunk(2, -1))
        self.v = fused[..., 2 * H * K :].unflatten(-1, (HV, V))
        self.A_log, self.dt_bias = (torch.rand(HV) * 4).log().to(raw), (torch.randn(HV) - 3).to(raw)
        self.a, self.b = torch.randn(B, 1, HV).to(dtype if raw == F32 else raw), torch.randn(B, 1, HV).to(raw)
        self.padded = torch.full((2 * B + 1, HV * V * K + 64), float("nan")).to(state_dtype)  # a pool with gaps
        self.pool = self.padded[:, : HV * V * K].view(2 * B + 1, HV, V, K)
        self.read = torch.randperm(2 * B + 1)[:B] if rows != "none" else torch.arange(B)
        self.write = self.read.clone()
        self.table, self.given, self.live = (None,) * 3, (None, None), torch.ones(B, dtype=torch.bool)
        if rows == "pages":
            free = [r for r in range(2 * B + 1) if r not in self.read.tolist()]
            pages, indptr, last = [], [0], []
            for i in range(B):
                if i % 2 == 0:  # the token opens a page
                    self.write[i] = free.pop()
                pages += [int(self.read[i])] + ([int(self.write[i])] if i % 2 == 0 else [])
                indptr.append(len(pages))
                last.append(1 if i % 2 == 0 else 5)
            if B > 2:  # a sequence of one token: nothing to decode from
                last[1], self.live[1] = 1, False
            self.table = (
                torch.tensor(pages, dtype=torch.int32),
                torch.tensor(indptr),
                torch.tensor(last, dtype=torch.int32),
            )
        elif rows != "none":
            if B > 2:
                self.live[1] = False
            write = self.write.clone()
            write[~self.live] = -1
            self.given = self.read.to(getattr(torch, rows)), write
        self.initial = torch.randn(B, HV, V, K).to(state_dtype)
        self.pool[self.read[self.live]] = self.initial[self.live]
        self.steps = poisoned(B, 2, HV, V, K, dtype=state_dtype) if steps else None
        self.output = poisoned(B, 1, HV, V, dtype=dtype)

    def run(self, library, variant):
        """(pool with its gaps, steps, output, served by sm90_decode.cu)"""
        decode, functions, _ = library
        padded, steps, output = self.padded.clone(), self.steps, self.output.clone()
        pool = padded[:, : self.pool[0].numel()].view(self.pool.shape)
        steps = steps.clone() if steps is not None else None
        functions.gdn_force_decode(variant)
        decode(
            self.q, self.k, self.v, self.A_log, self.a, self.dt_bias, self.b, pool, *self.given, steps,
            *(self.table or (None, None, None)), output, self.scale, self.norm, self.update,
        )  # fmt: skip
        return padded, steps, output, bool(functions.gdn_forced_decode_served())

    def check(self, results):
        padded, steps, output, _ = results
        pool = padded[:, : self.pool[0].numel()].view(self.pool.shape)
        o, states = reference.decode(
            self.q, self.k, self.v, self.A_log, self.a, self.dt_bias, self.b, self.scale, state=self.initial,
            use_qk_l2norm=self.norm,
        )  # fmt: skip
        live = self.live
        assert relative(output[live], o[live]) < LIMIT[output.dtype]
        assert (output[~live] == 0).all()
        written = self.write[live] if self.update else self.write[:0]
        if self.update:
            assert relative(pool[written], states[live, 0]) < LIMIT[pool.dtype]
        keep = torch.ones(len(pool), dtype=torch.bool)
        keep[written] = False
        assert torch.equal(bits(padded[keep]), bits(self.padded[keep]))
        assert torch.equal(bits(padded[:, self.pool[0].numel() :]), bits(self.padded[:, self.pool[0].numel() :]))
        if steps is not None:
            assert relative(steps[live, 0], states[live, 0]) < LIMIT[pool.dtype]
            assert steps[:, 1].isnan().all() and steps[~live].isnan().all()


CASES = {
    "float32": dict(B=3, H=1, HV=3, K=128, V=128, dtype=BF16, state_dtype=F32),
    "bfloat16": dict(B=3, H=1, HV=2, K=128, V=128, dtype=BF16, state_dtype=BF16, rows="pages"),
    "float16, V 64": dict(B=4, H=2, HV=4, K=128, V=64, dtype=F16, state_dtype=F16, rows="int64", raw=F16),
    "one head, no rows": dict(
        B=5, H=1, HV=1, K=128, V=128, dtype=F16, state_dtype=BF16, rows="none", norm=False, raw=BF16
    ),
    "steps, no update": dict(B=3, H=1, HV=2, K=128, V=128, dtype=BF16, state_dtype=F32, steps=True, update=False),
    "steps, 16 bits": dict(B=2, H=1, HV=2, K=128, V=128, dtype=BF16, state_dtype=BF16, steps=True, rows="pages"),
    "K 64": dict(B=3, H=1, HV=2, K=64, V=128, dtype=BF16, state_dtype=F32, rows="pages"),
    "K 64, 16 bits": dict(B=3, H=2, HV=2, K=64, V=64, dtype=F16, state_dtype=F16, rows="int64"),
}


@pytest.mark.parametrize("name", CASES)
def test_every_plan_gives_the_bits_of_the_portable_kernel(library, name, monkeypatch):
    case = Case(**CASES[name])
    monkeypatch.setenv("EMULATED_MULTIPROCESSORS", "1")  # small calls are large then, and not left to decode.cu
    want = case.run(library, PORTABLE)
    case.check(want)
    assert not want[3]
    for variant in (*range(library[1].gdn_decode_plans() + 1), 101, 201):
        got = case.run(library, variant)
        assert got[3], f"variant {variant} was not served"
        for x, y in zip(got[:3], want[:3]):
            assert x is None or torch.equal(bits(x), bits(y)), f"variant {variant}"


def test_what_is_left_to_the_portable_kernel(library):
    """Heads of q that are not aligned, and a pool whose rows are not dense."""
    case = Case(2, 1, 2, 128, 128, BF16, F32)
    shifted = torch.empty(2, 1, 1, 129, dtype=BF16)[..., 1:]
    shifted.copy_(case.q)
    case.q = shifted
    results = case.run(library, 0)
    assert not results[3]
    case.check(results)
    decode, functions, _ = library
    case = Case(2, 1, 2, 128, 128, BF16, F32, rows="none")
    wide = poisoned(2, 2, 128, 256, dtype=F32)
    wide[..., :128] = case.initial
    functions.gdn_force_decode(0)
    decode(
        case.q, case.k, case.v, case.A_log, case.a, case.dt_bias, case.b, wide[..., :128], *[None] * 6,
        case.output, case.scale, True, True,
    )  # fmt: skip
    assert not functions.gdn_forced_decode_served()
    assert wide[..., 128:].isnan().all() and not wide[..., :128].isnan().any()


# --- calls like an accepted one, as a function of Python's own ------------------------------------------------------------

OPTIONS = (0.25, True, None, "cuda")  # compared with a call's, and of no other account here


def accepted(library, case, levels=None, log=print):
    """(function of a call as a tuple, the tensors of a call like the accepted one, where it says that it served)"""
    _, functions, loaded = library
    functions.gdn_force_decode(PORTABLE)
    if loaded.decode_short is None:
        pytest.skip("this torch has no exchange interface")
    tensors = (
        case.q, case.k, case.v, case.A_log, case.a, case.dt_bias, case.b, case.pool, *case.given, case.steps,
        *(case.table or (None, None, None)), case.output,
    )  # fmt: skip
    thread, made = dispatch._Thread(), []
    terms = dispatch.Terms(
        dispatch.Surroundings(env.raw, env.deciding_keys, env.deciding()), OPTIONS,
        ((torch.empty_like, (torch.zeros(1),)), (torch.empty_like, (case.output,))), thread, "last",
        dispatch.LastCall("decode", "cuda", ""), {10: False} if levels is None else levels, 10, log,
    )  # fmt: skip
    loaded.decode_short(*tensors, case.scale, case.norm, case.update, id(terms), id(made))
    (function,) = made
    return function, tensors, thread


def call_of(tensors, options=OPTIONS):
    return (*options, *tensors[14:], *tensors[:14])


def fresh(case, tensors):
    """Other tensors of the same kind, as the next step of a model brings them, and the call's padded pool."""
    padded = case.padded.clone()
    pool = padded[:, : case.pool[0].numel()].view(case.pool.shape)

    def copy(x):
        return None if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)

    return tuple(pool if x is case.pool else copy(x) for x in tensors), padded


@pytest.mark.parametrize("name", CASES)
def test_a_tuple_is_served_as_the_call_is(library, name):
    case = Case(**CASES[name])
    want = case.run(library, PORTABLE)
    again, tensors, thread = accepted(library, case)
    (*others, output), padded = fresh(case, tensors)
    assert again(call_of((*others, output))) is output
    assert torch.equal(bits(output), bits(want[2])) and torch.equal(bits(padded), bits(want[0]))
    if case.steps is not None:
        assert torch.equal(bits(others[10]), bits(want[1]))
    assert thread.last.backend == "cuda"


def test_a_tuple_without_an_output_gets_one(library):
    """The first way of making one is of another kind here, as it is where another device is current."""
    case = Case(**CASES["float32"])
    want = case.run(library, PORTABLE)
    again, tensors, _ = accepted(library, case)
    (*others, _), _ = fresh(case, tensors)
    output = again(call_of((*others, None)))
    assert torch.equal(bits(output), bits(want[2]))
    assert sys.getrefcount(output) == 2, "nobody else holds it"


def test_a_tuple_that_differs_is_refused(library):
    case = Case(**CASES["float32"])
    again, tensors, thread = accepted(library, case)
    wide = torch.zeros(3, 1, 1, 256, dtype=BF16)
    changes = {
        "fewer sequences": (0, tensors[0][:2]), "dtype": (1, tensors[1].to(F16)), "stride": (2, tensors[2].clone()),
        "last stride": (0, wide[..., ::2]), "alignment": (0, wide.flatten()[1 : 1 + 3 * 128].view(3, 1, 1, 128)),
        "a dimension more": (3, tensors[3][None]), "device": (4, torch.empty_like(tensors[4], device="meta")),
        "rows of int64": (8, tensors[8].long()), "no rows": (8, None), "steps": (10, torch.zeros(3, 1, 3, 128, 128)),
        "None": (0, None), "a list": (5, [0.0] * 3), "a number": (6, 1.0), "a tuple of it": (0, (tensors[0],)),
        "numpy": (5, tensors[5].numpy()), "sparse": (5, tensors[5].to_sparse()), "output": (14, tensors[14][:2]),
        "grad": (3, tensors[3].clone().requires_grad_()), "sign": (5, torch._neg_view(tensors[5])),
        "grad of the output": (14, tensors[14].clone().requires_grad_()),
    }  # fmt: skip
    for change, (i, value) in changes.items():
        others, padded = fresh(case, tensors)
        before = padded.clone()
        assert again(call_of((*others[:i], value, *others[i + 1 :]))) is None, change
        assert torch.equal(bits(padded), bits(before)) and others[14].isnan().all(), change
    assert again(call_of(tensors[:14])) is None and again(()) is None and again(list(call_of(tensors))) is None
    assert thread.last is None
    assert again(call_of(fresh(case, tensors)[0])) is not None, "none of this is remembered"


def test_the_options_of_a_tuple_are_compared(library):
    case = Case(**CASES["float32"])
    again, tensors, _ = accepted(library, case)
    tensors, _ = fresh(case, tensors)
    computed, name = sum([0.125, 0.125]), "".join(["cu", "da"])
    assert computed is not OPTIONS[0] and name is not OPTIONS[3]
    assert again(call_of(tensors, (computed, True, None, name))) is tensors[14]
    for options in (
        (0.5, True, None, "cuda"), (None, True, None, "cuda"), (0.25, 1, None, "cuda"), (0.25, False, None, "cuda"),
        (0.25, True, False, "cuda"), (0.25, True, None, "auto"), (torch.tensor(0.25), True, None, "cuda"),
    ):  # fmt: skip
        assert again(call_of(tensors, options)) is None, options


def test_variables_and_modes_speak_against_a_tuple(library, monkeypatch):
    case = Case(**CASES["float32"])
    again, tensors, _ = accepted(library, case)
    tensors = list(fresh(case, tensors)[0])
    for variable in env._DECIDING:
        with monkeypatch.context() as changed:
            changed.setenv(variable, "1")
            assert again(call_of(tensors)) is None, variable
        assert again(call_of(tensors)) is tensors[14]
    tensors[3] = torch.nn.Parameter(tensors[3])
    assert again(call_of(tensors)) is None
    with torch.no_grad():
        assert again(call_of(tensors)) is tensors[14]
    monkeypatch.setenv(env.BACKEND, "cuda")  # and where one was set, it must still be
    again = accepted(library, case)[0]
    with torch.no_grad():
        assert again(call_of(tensors)) is tensors[14]
        monkeypatch.setenv(env.BACKEND, "auto")
        assert again(call_of(tensors)) is None
        monkeypatch.delenv(env.BACKEND)
        assert again(call_of(tensors)) is None


def test_the_log_is_asked_where_a_level_may_have_been_set(library):
    said, levels = [], {10: False}
    case = Case(**CASES["float32"])
    again, tensors, _ = accepted(library, case, levels, said.append)
    assert again(call_of(tensors)) is tensors[14] and not said
    levels.clear()
    assert again(call_of(tensors)) is tensors[14] and said == [dispatch.LastCall("decode", "cuda", "")]

    def fail(last):
        raise OSError("a handler's error")

    again, tensors, _ = accepted(library, case, levels, fail)
    with pytest.raises(OSError, match="a handler's error"):
        again(call_of(tensors))


def test_what_a_tuple_needs_is_let_go_of(library):
    case = Case(**CASES["float32"])
    levels = {10: False}
    before = sys.getrefcount(levels)
    again, tensors, _ = accepted(library, case, levels)
    assert sys.getrefcount(levels) > before
    call = call_of(fresh(case, tensors)[0])
    counts = [sys.getrefcount(x) for x in call]
    for _ in range(3):
        assert again(call) is call[4]
    assert [sys.getrefcount(x) for x in call if isinstance(x, torch.Tensor)] == [
        count for x, count in zip(call, counts) if isinstance(x, torch.Tensor)
    ]
    del again
    assert sys.getrefcount(levels) == before


def test_the_stride_of_a_single_element_means_nothing(library):
    case = Case(**CASES["float32"])
    again, tensors, _ = accepted(library, case)
    (q, *others), _ = fresh(case, tensors)
    assert again(call_of((q.as_strided(q.shape, (q.stride(0), 7, 9, 1)), *others))) is others[13]


# --- calls of any function like an accepted one --------------------------------------------------------------------------


def like(library, values):
    _, _, loaded = library
    if loaded.arguments_like is None:
        pytest.skip("this torch has no exchange interface")
    made, around = [], like_arguments.surroundings()
    loaded.arguments_like(id(around), id(values), id(made))
    return made[0]


def test_like_arguments_are_told_from_others(library):
    like_arguments.check_tells_apart(partial(like, library))
    values = tuple(like_arguments.arguments())
    assert like(library, values)(list(values)) is False


def test_the_same_tensor_is_looked_at_again(library, monkeypatch):
    x = torch.zeros(4)
    same = like(library, (x,))
    x.resize_(5)
    assert same((x,)) is False
    for unread in (torch.eye(3).to_sparse(), torch.zeros(3, device="meta"), torch.zeros(1, 1, 1, 1, 1, 1)):
        # A class that changed: Python must look attributes up anew, which fails where an error was left behind.
        monkeypatch.setattr(torch.Tensor, "changed", unread, raising=False)
        assert like(library, (unread,))((unread,)) is False


def test_variables_and_modes_speak_against_like_arguments(library):
    like_arguments.check_follows_variables_and_modes(partial(like, library))


def test_remembered_arguments_keep_no_tensor_alive(library):
    like_arguments.check_keeps_nothing_alive(partial(like, library), sys.getrefcount)
