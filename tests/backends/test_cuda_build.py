"""Building csrc/: the cache and its faults, the compiler's search, and the library itself, all without a GPU."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi")

from gdn_multi.backends.cuda import CudaBackend, build, load_library  # noqa: E402

from gdn_multi.layout import checkout_dir, csrc_dir  # noqa: E402


def compiler():
    try:
        return build.find_toolchain()
    except build.BuildError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def forget():
    """What build.py remembers of its surroundings is looked up again in each test."""
    build._find_toolchain.cache_clear()
    build._source_hash.cache_clear()
    yield
    build._find_toolchain.cache_clear()
    build._source_hash.cache_clear()


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A csrc/ that compiles at once: one kernel, and bindings that include no header of TVM FFI."""
    csrc = tmp_path / "csrc"
    csrc.mkdir()
    (csrc / "kernel.cu").write_text("__global__ void tiny(float* x) { x[threadIdx.x] += 1.f; }\n")
    (csrc / "bindings.cu").write_text('extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n')
    monkeypatch.setattr(build, "csrc_dir", lambda: csrc)
    return csrc


@pytest.fixture
def root(tmp_path):
    return tmp_path / "cache"


def answer(entry) -> int:
    return ctypes.CDLL(str(entry.library)).answer()


# --- the cache -----------------------------------------------------------------------------------


def test_builds_once_and_says_so(tiny, root):
    compiler()
    said = []
    entry = build.build("sm_80", root, say=said.append)
    assert answer(entry) == 42 and entry.fault() is None
    assert any("building for sm_80" in line for line in said) and any("kernel.cu" in line for line in said)
    assert os.stat(root).st_mode & 0o777 == 0o700
    assert [kernel.name for kernel in build.ptxas_report(entry.report)] == ["tiny"]
    said.clear()
    stamp = entry.library.stat().st_mtime_ns
    assert build.build("sm_80", root, say=said.append) == entry
    assert said == [] and entry.library.stat().st_mtime_ns == stamp
    assert not list(root.glob("building-*")) and not list(root.glob("made-*"))


def test_key(tiny, root):
    """Another source, architecture or compiler is another entry."""
    toolchain = compiler()
    first = build.build("sm_80", root)
    (tiny / "kernel.cu").write_text("__global__ void other(float* x) { x[threadIdx.x] += 2.f; }\n")
    build._source_hash.cache_clear()
    assert build.built("sm_80", root, toolchain) is None
    second = build.build("sm_80", root)
    third = build.build("sm_86", root)
    assert len({first.folder, second.folder, third.folder}) == 3 and len(build.entries(root)) == 3
    assert toolchain.version_text in first.folder.name
    assert build.built("sm_80", root) == second  # of any compiler


def test_host_code_is_compiled_once_for_all_architectures(tiny, root):
    compiler()
    build._host_objects.clear()
    said = []

    def compiled(arch):
        said.clear()
        assert answer(build.build(arch, root, say=said.append)) == number
        return {name for name in ("kernel.cu", "bindings.cu") if any(name in line for line in said)}

    number = 42
    assert compiled("sm_80") == {"kernel.cu", "bindings.cu"}
    assert compiled("sm_86") == {"kernel.cu"}
    number = 43
    (tiny / "bindings.cu").write_text((tiny / "bindings.cu").read_text().replace("42", "43"))
    build._source_hash.cache_clear()
    assert compiled("sm_86") == {"kernel.cu", "bindings.cu"}


@pytest.mark.parametrize("damage", ("truncated", "changed", "no record", "record cut short", "no library"))
def test_damaged_entry_is_built_again(tiny, root, damage):
    compiler()
    entry = build.build("sm_80", root)
    data, record = entry.library.read_bytes(), entry.folder / build.RECORD
    if damage == "truncated":
        entry.library.write_bytes(data[: len(data) // 2])
    elif damage == "changed":
        entry.library.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "no record":
        record.unlink()
    elif damage == "record cut short":
        record.write_text(record.read_text()[:20])
    else:
        entry.library.unlink()
    assert entry.fault() is not None
    said = []
    again = build.build("sm_80", root, say=said.append)
    assert again == entry and again.fault() is None and answer(again) == 42
    assert any("damaged" in line for line in said)


def test_cache_that_others_can_write_is_refused(tiny, root):
    compiler()
    entry = build.build("sm_80", root)
    for mode in (0o770, 0o707, 0o777):
        root.chmod(mode)
        with pytest.raises(build.BuildError, match="can be written by others"):
            build.build("sm_80", root)
        with pytest.raises(build.BuildError, match="can be written by others"):
            build.built("sm_80", root)
    root.chmod(0o755)
    assert build.build("sm_80", root) == entry


def test_cache_of_another_user_is_refused(tiny, root, monkeypatch):
    root.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(build.BuildError, match="belongs to another user"):
        build.cache_root(root)


def test_two_processes_build_one_sound_entry(tiny, root):
    compiler()
    program = textwrap.dedent(
        f"""
        import sys
        from pathlib import Path
        from gdn_multi.backends.cuda import build
        build.csrc_dir = lambda: Path({str(tiny)!r})
        said = []
        entry = build.build("sm_80", {str(root)!r}, say=said.append)
        print(entry.folder, entry.fault(), sum("built for" in line for line in said))
        """
    )
    where = checkout_dir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*([str(where)] if where else []), os.environ.get("PYTHONPATH", "")])}
    both = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    said = []
    for process in both:
        out, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
        said.append(out.split())
    assert said[0][0] == said[1][0] and said[0][1] == said[1][1] == "None"
    assert int(said[0][2]) + int(said[1][2]) == 1, "both built, or neither"
    assert len(build.entries(root)) == 1 and answer(build.entries(root)[0]) == 42


def test_failed_build_leaves_nothing_and_shows_the_error(tiny, root):
    compiler()
    (tiny / "kernel.cu").write_text("__global__ void tiny(float* x) { x[0] = no_such_name; }\n")
    with pytest.raises(build.BuildError, match="no_such_name"):
        build.build("sm_80", root)
    assert build.entries(root) == [] and not list(root.glob("building-*"))


# --- the compiler --------------------------------------------------------------------------------


def script(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return str(path)


def test_wrapper_script_on_path(tmp_path, monkeypatch, tiny, root):
    """A wrapper's place says nothing about the toolkit: nvcc is asked."""
    real = compiler()
    script(tmp_path / "bin" / "nvcc", f'exec "{real.nvcc}" "$@"\n')
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    found = build.find_toolchain()
    assert found.nvcc == str(tmp_path / "bin" / "nvcc") and found.origin == "PATH"
    assert found.toolkit == real.toolkit and found.version == real.version
    assert answer(build.build("sm_80", root)) == 42


def test_cuda_home_comes_first_and_a_broken_one_is_passed_over(tmp_path, monkeypatch):
    real = compiler()
    script(tmp_path / "home" / "bin" / "nvcc", f'exec "{real.nvcc}" "$@"\n')
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert build.find_toolchain().origin == "CUDA_HOME"
    script(tmp_path / "home" / "bin" / "nvcc", "exit 1\n")
    build._find_toolchain.cache_clear()
    assert build.find_toolchain().origin != "CUDA_HOME"


def test_no_compiler_is_a_reason(tmp_path, monkeypatch, root):
    monkeypatch.setattr(build, "_candidates", lambda: iter(()))
    with pytest.raises(build.BuildError, match="no usable nvcc.*pip install"):
        build.find_toolchain()
    # The backend says the same before any call, and a build made elsewhere makes up for it.
    monkeypatch.setenv("GDN_MULTI_CACHE_DIR", str(root))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    device = torch.device("cuda", 0)
    (reason,) = CudaBackend().reasons_unusable(device)
    assert "no usable nvcc" in reason
    folder = root / "cuda" / (build._prefix("sm_90a") + "13.0.0")
    folder.mkdir(parents=True)
    (root / "cuda").chmod(0o700)
    (folder / build.RECORD).write_text(json.dumps({"size": 0, "sha256": ""}))
    assert CudaBackend().reasons_unusable(device) == ()


def test_other_devices_are_a_reason(monkeypatch):
    (reason,) = CudaBackend().reasons_unusable(torch.device("cpu"))
    assert "CUDA devices" in reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "old card")
    (reason,) = CudaBackend().reasons_unusable(torch.device("cuda", 0))
    assert "7.5" in reason and "old card" in reason and "sm_80" in reason


def test_unknown_architecture():
    with pytest.raises(build.BuildError, match="no code for 'sm_75'.*sm_80"):
        build.build("sm_75")


# --- ptxas' report -------------------------------------------------------------------------------

LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4goodPf' for 'sm_80'
ptxas info    : Function properties for _Z4goodPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 2048 bytes smem
ptxas info    : Compiling entry function '_Z3badPf' for 'sm_80'
ptxas info    : Function properties for _Z3badPf
    16 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers, 16 bytes cumulative stack size
"""


def test_report_and_spills():
    good, bad = build.ptxas_report(LOG)
    assert (good.registers, good.shared, good.spill_stores) == (40, 2048, 0)
    assert (bad.registers, bad.stack, bad.spill_stores, bad.spill_loads) == (255, 16, 12, 20)
    assert build.spilling([good, bad]) == [bad]


def test_command_fails_on_a_spill(tiny, root, monkeypatch, capsys):
    compiler()
    from gdn_multi.cli import main

    arguments = ["build", "--arch", "80", "--cache", str(root)]
    assert main(arguments) == 0
    monkeypatch.setattr(build, "ptxas_report", lambda log: [build.KernelReport("bad", 255, 16, 12, 20, 0)])
    assert main(arguments) == 1
    assert "spill" in capsys.readouterr().err
    assert main(["build", "--list", "--cache", str(root)]) == 0
    assert "sm_90a" in capsys.readouterr().out


# --- the library itself --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library():
    """The real csrc/, for one architecture, in the user's own cache: compiled once for each change of the sources."""
    compiler()
    entry = build.build("sm_80", say=lambda text: print(text, file=sys.stderr))
    return entry, load_library(str(entry.library), "sm_80")


@pytest.mark.build
def test_library_needs_no_driver(library):
    """It loads here, without a GPU, and asks for no library of the driver or the toolkit."""
    entry, _ = library
    listed = subprocess.run(["ldd", str(entry.library)], capture_output=True, text=True).stdout
    assert "libtvm_ffi" in listed and "libcuda" not in listed, listed


@pytest.mark.build
def test_no_kernel_spills(library):
    entry, _ = library
    kernels = build.ptxas_report(entry.report)
    assert len(kernels) > 30
    assert build.spilling(kernels) == []


def decode_arguments(**changes):
    given = dict(
        q=torch.zeros(2, 1, 2, 128, dtype=torch.bfloat16), k=torch.zeros(2, 1, 2, 128, dtype=torch.bfloat16),
        v=torch.zeros(2, 1, 4, 128, dtype=torch.bfloat16), A_log=torch.zeros(4), a=torch.zeros(2, 1, 4),
        dt_bias=torch.zeros(4), b=torch.zeros(2, 1, 4), state=torch.zeros(2, 4, 128, 128), read=None, write=None,
        steps=None, indices=None, indptr=None, last=None, output=torch.zeros(2, 1, 4, 128, dtype=torch.bfloat16),
        scale=1.0, l2norm=True, update=True,
    )  # fmt: skip
    given.update(changes)
    return tuple(given.values())


@pytest.mark.build
def test_wrong_device_is_a_value_error(library):
    with pytest.raises(ValueError, match="q must be on a CUDA device"):
        library[1].decode(*decode_arguments())


def test_sources_lie_where_they_should():
    names = {path.relative_to(csrc_dir()).as_posix() for path in build.sources()}
    assert {"bindings.cu", "common/params.h", "decode/decode.cu", "prefill/launch.cu"} <= names
    for path in build.sources():
        knows = "tvm" in path.read_text().lower().replace("knows python, torch or tvm ffi", "")
        assert knows == (path.name == "bindings.cu") or path.name in ("params.h", "primitives.cuh"), path


def every_architecture():
    try:
        toolchain = build.find_toolchain()
    except build.BuildError:
        return []
    return [arch for arch in build.ARCHITECTURES.values() if toolchain.supports(arch)]


@pytest.mark.build
@pytest.mark.parametrize("arch", every_architecture())
def test_every_architecture_compiles_without_spills(arch):
    entry = build.build(arch)
    assert entry.fault() is None
    assert build.spilling(build.ptxas_report(entry.report)) == []
