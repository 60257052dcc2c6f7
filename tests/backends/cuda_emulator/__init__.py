"""The native CUDA backend without a GPU: csrc/ compiled by g++ and run thread by thread (emulate.h).

It tests what a GPU would do with indices, fragment layouts, barriers and rounding, on small tensors; not how fast.
Needs g++ and CUDA's headers (nvcc's toolkit or the wheels). ``pytest -p cuda_emulator.plugin`` puts it in the
place of the backend "cuda" on CPU tensors, for any test: see plugin.py.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gdn_multi.backends.cuda import CudaBackend, Library, build, load_library, prefill_heuristics

from gdn_multi.layout import csrc_dir

HERE = Path(__file__).resolve().parent
#: A load or store at an address that is no multiple of its size, which a GPU refuses, ends the process here too.
ALIGNED = ("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error")
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-DGDN_EMULATE", "-Wno-attributes", *ALIGNED)
#: Where libraries are kept from run to run; their names say what they were made from.
FOLDER = Path(tempfile.gettempdir()) / "gdn_multi_emulated"


def toolchain_or_skip() -> build.Toolchain:
    """CUDA's headers, with g++ to compile against them; skips the test where either is missing."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    try:
        return build.find_toolchain()
    except build.BuildError as error:
        pytest.skip(f"needs CUDA's headers: {error}")


def build_library(folder: Path) -> Path:
    """The emulated library in ``folder``, made if these sources have not been compiled there yet."""
    from tvm_ffi.libinfo import find_dlpack_include_path, find_include_path, find_libtvm_ffi

    sources = build.sources()
    mine = sorted({*HERE.glob("emulate.*"), *HERE.glob("*.h")})
    digest = hashlib.sha256(repr(FLAGS).encode())
    for path in [*sources, *mine]:
        digest.update(path.read_bytes())
    library = folder / f"emulated-{digest.hexdigest()[:16]}.so"
    if library.exists():
        return library
    toolkit = build.find_toolchain().toolkit
    includes = [f"-I{path}" for path in (f"{toolkit}/include", csrc_dir(), HERE, find_include_path(), find_dlpack_include_path())]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:

        def compiled(source: Path) -> str:
            made = os.path.join(work, hashlib.sha256(str(source).encode()).hexdigest()[:16] + ".o")
            command = ["g++", *FLAGS, *includes, "-x", "c++", "-c", str(source), "-o", made]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{source.name} does not compile for the emulator:\n{done.stderr[-3000:]}")
            return made

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compiled, [path for path in [*sources, *mine] if path.suffix in (".cu", ".cpp")]))
        made = os.path.join(work, "made.so")
        where = os.path.dirname(find_libtvm_ffi())
        subprocess.run(["g++", "-shared", "-o", made, *objects, f"-L{where}", "-ltvm_ffi"], check=True, capture_output=True)
        os.replace(made, library)
    return library


class EmulatedCudaBackend(CudaBackend):
    """The backend "cuda", on CPU tensors: the portable path of prefill, or the path given (prefill_heuristics.py)."""

    def __init__(self, library: Path, path: prefill_heuristics.Path = prefill_heuristics.PORTABLE) -> None:
        super().__init__()
        self._emulated: Library = load_library(str(library), "emulated")
        self.forced_path = path

    def reasons_unusable(self, device):
        return () if device.type == "cpu" else ("the emulator runs on the CPU",)

    def _library(self, device):
        return self._emulated

    def facts(self, device):
        return (9, 0), 132
