"""csrc/decode/sm90_decode.cu on the CPU (cuda_emulator/): every plan has decode.cu's bits, and those are right."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi")
pytestmark = pytest.mark.build
sys.path.insert(0, str(Path(__file__).resolve().parent))

from gdn_multi.backends.cuda import _python, build  # noqa: E402

from gdn_multi import reference  # noqa: E402
from gdn_multi.layout import csrc_dir  # noqa: E402

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
LIMIT = {F32: 1e-6, BF16: 4e-3, F16: 5e-4}
PORTABLE = -1


@pytest.fixture(scope="module")
def library():
    """(decode(...), the functions of force_decode.cu, the module)"""
    import tvm_ffi
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
    module = tvm_ffi.load_module(str(made))
    return module.decode, ctypes.CDLL(str(made)), module


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


# --- calls like an accepted one, by the address of a tuple ---------------------------------------------------------------


def accepted(library, case):
    """(function of a tuple, the tensors of a call like the accepted one)"""
    _, functions, module = library
    functions.gdn_force_decode(PORTABLE)
    if _python() is None or not module.read_objects_with(*_python()):
        pytest.skip("this torch has no exchange interface")
    tensors = (
        case.q, case.k, case.v, case.A_log, case.a, case.dt_bias, case.b, case.pool, *case.given, case.steps,
        *(case.table or (None, None, None)), case.output,
    )  # fmt: skip
    function = module.decode_again(*tensors, case.scale, case.norm, case.update)
    function.release_gil = False
    return (lambda tensors: function(id(tensors))), tensors


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
    again, tensors = accepted(library, case)
    (*others, output), padded = fresh(case, tensors)
    assert again((*others, output)) is True
    assert torch.equal(bits(output), bits(want[2])) and torch.equal(bits(padded), bits(want[0]))
    if case.steps is not None:
        assert torch.equal(bits(others[10]), bits(want[1]))


def test_a_tuple_that_differs_is_refused(library):
    case = Case(**CASES["float32"])
    again, tensors = accepted(library, case)
    wide = torch.zeros(3, 1, 1, 256, dtype=BF16)
    changes = {
        "fewer sequences": (0, tensors[0][:2]), "dtype": (1, tensors[1].to(F16)), "stride": (2, tensors[2].clone()),
        "last stride": (0, wide[..., ::2]), "alignment": (0, wide.flatten()[1 : 1 + 3 * 128].view(3, 1, 1, 128)),
        "a dimension more": (3, tensors[3][None]), "device": (4, torch.empty_like(tensors[4], device="meta")),
        "rows of int64": (8, tensors[8].long()), "no rows": (8, None), "steps": (10, torch.zeros(3, 1, 3, 128, 128)),
        "None": (14, None), "a list": (5, [0.0] * 3), "a number": (6, 1.0), "a tuple of it": (0, (tensors[0],)),
        "numpy": (5, tensors[5].numpy()), "sparse": (5, tensors[5].to_sparse()),
    }  # fmt: skip
    for change, (i, value) in changes.items():
        others, padded = fresh(case, tensors)
        before = padded.clone()
        assert again((*others[:i], value, *others[i + 1 :])) is False, change
        assert torch.equal(bits(padded), bits(before)) and others[14].isnan().all(), change
    assert again(tensors[:14]) is False and again(()) is False
    assert again(fresh(case, tensors)[0]) is True, "none of this is remembered"


def test_the_stride_of_a_single_element_means_nothing(library):
    case = Case(**CASES["float32"])
    again, tensors = accepted(library, case)
    (q, *others), _ = fresh(case, tensors)
    assert again((q.as_strided(q.shape, (q.stride(0), 7, 9, 1)), *others)) is True
