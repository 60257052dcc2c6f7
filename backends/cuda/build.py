"""Build csrc/ into one library an architecture, and keep it in a cache that can be trusted.

An entry of the cache is a folder ``<architecture>-<hash of sources and flags>-nvcc<version>`` with the library, what
ptxas reported, and ``entry.json``, which holds the library's size and SHA-256. It is made beside its place and renamed
into it, under a lock, so that several processes build once and none sees half of it. An entry whose library does not
match its record is built again. Since an entry is code that will run, the cache must belong to the user and nobody
else may be able to write to it.

nvcc is asked where its toolkit is (``--dryrun``): its own path says nothing when it is a wrapper script.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from gdn_multi import env
from gdn_multi.layout import csrc_dir

#: Architectures there is code for, by compute capability. The "a" ones run on that capability only.
ARCHITECTURES: dict[tuple[int, int], str] = {
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (10, 3): "sm_103a",
    (10, 7): "sm_107a",
    (12, 0): "sm_120a",
}

LIBRARY = "gdn_multi_cuda.so"
RECORD = "entry.json"
REPORT = "ptxas.txt"

_HOST_FLAGS = ("-O2", "-fPIC", "-fvisibility=hidden")
_FLAGS = ("-std=c++17", "-O3", "-DNDEBUG", *(f"-Xcompiler={flag}" for flag in _HOST_FLAGS))
_DEVICE_FLAGS = ("-Xptxas=-v", "-Xptxas=-warn-spills")
#: Host code only (TVM FFI's headers take long in a device pass that would find nothing).
_HOST_ONLY = ("bindings.cu",)
_LINK_FLAGS = ("-shared", "-cudart=static")


class BuildError(RuntimeError):
    """The library could not be built, or the cache cannot be trusted; the message says what would mend it."""


# --- the compiler --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Toolchain:
    nvcc: str  #: what to call
    version: tuple[int, int, int]
    toolkit: str  #: the folder that nvcc takes itself to be in
    origin: str  #: how it was found: "CUDA_HOME", "PATH", "nvidia-cuda-nvcc wheel"
    codes: tuple[str, ...]  #: architectures it knows, as "90"

    @property
    def version_text(self) -> str:
        return ".".join(map(str, self.version))

    def supports(self, arch: str) -> bool:
        return re.fullmatch(r"sm_(\d+)[af]?", arch).group(1) in self.codes


def _run(command: Sequence[str], timeout: float = 60) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed: {(done.stderr or done.stdout).strip()[:300]}")
    return done.stdout + done.stderr


def _candidates() -> Iterator[tuple[str, str]]:
    home = env.cuda_home()
    if home:
        yield os.path.join(home, "bin", "nvcc"), "CUDA_HOME"
    on_path = shutil.which("nvcc")
    if on_path:
        yield on_path, "PATH"
    for folder in sys.path:  # the wheels install into <site-packages>/nvidia/cu<major>/
        for nvcc in sorted(Path(folder or ".").glob("nvidia/cu*/bin/nvcc"), reverse=True):
            yield str(nvcc.resolve()), "nvidia-cuda-nvcc wheel"
    if os.path.exists("/usr/local/cuda/bin/nvcc"):
        yield "/usr/local/cuda/bin/nvcc", "/usr/local/cuda"


def _inspect(nvcc: str, origin: str) -> Toolchain:
    """The toolchain behind ``nvcc``; BuildError when a part of it is missing."""
    if not os.access(nvcc, os.X_OK):
        raise BuildError(f"{nvcc} is not an executable file")
    try:
        release = re.search(r"V(\d+)\.(\d+)\.(\d+)", _run([nvcc, "--version"]))
        dryrun = _run([nvcc, "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull])
        codes = tuple(re.findall(r"sm_(\d+)", _run([nvcc, "--list-gpu-code"])))
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{nvcc} does not run: {error}") from error
    top = re.search(r"^#\$ TOP=(.+)$", dryrun, re.MULTILINE)
    if not release or not top:
        raise BuildError(f"{nvcc} does not answer like nvcc (no version or no TOP in --dryrun)")
    toolkit = os.path.realpath(top.group(1).strip().strip('"'))
    includes = re.findall(r'"-I([^"]+)"', dryrun)
    if not any(os.path.isfile(os.path.join(folder, "cuda_runtime.h")) for folder in includes):
        raise BuildError(f"{nvcc}: no cuda_runtime.h in {', '.join(includes)} (wheel nvidia-cuda-runtime)")
    cicc = re.search(r"^#\$ CICC_PATH=(.+)$", dryrun, re.MULTILINE)
    if cicc and not os.path.isfile(os.path.join(cicc.group(1).strip().strip('"'), "cicc")):
        raise BuildError(f"{nvcc}: no cicc in {cicc.group(1)} (wheel nvidia-nvvm)")
    return Toolchain(nvcc, tuple(int(n) for n in release.groups()), toolkit, origin, codes)


def find_toolchain() -> Toolchain:
    """The first nvcc that works: of CUDA_HOME, PATH, the wheels, /usr/local/cuda. BuildError when there is none."""
    return _find_toolchain(env.cuda_home(), env.search_path(), tuple(sys.path))


@lru_cache(maxsize=8)
def _find_toolchain(*_key) -> Toolchain:
    found = []
    for nvcc, origin in _candidates():
        try:
            return _inspect(nvcc, origin)
        except BuildError as error:
            found.append(f"{origin}: {error}")
    what = "; ".join(found) if found else "none in CUDA_HOME, on PATH, in an nvidia-cuda-nvcc wheel or in /usr/local/cuda"
    raise BuildError(
        f"no usable nvcc ({what}); install a CUDA toolkit of 13.0 or newer, or the wheels: pip install gdn-multi[nvcc]"
    )


def _find_ninja() -> str:
    found = shutil.which("ninja")
    if found:
        return found
    try:
        import ninja
    except ImportError:
        raise BuildError("no ninja on PATH and no ninja package; pip install ninja") from None
    return os.path.join(ninja.BIN_DIR, "ninja")


# --- the cache -----------------------------------------------------------------------------------


def cache_root(root: os.PathLike | None = None, *, create: bool = False) -> Path:
    """The folder of the entries, refused (BuildError) when it is not the user's own or others can write to it."""
    path = Path(root) if root is not None else Path(env.cache_dir()) / "cuda"
    if create:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        found = path.stat()
    except OSError:
        return path
    if found.st_uid != os.geteuid():
        raise BuildError(f"the build cache {path} belongs to another user; set {env.CACHE_DIR} to a folder of your own")
    if stat.S_IMODE(found.st_mode) & 0o022:
        raise BuildError(
            f"the build cache {path} can be written by others (mode {stat.S_IMODE(found.st_mode):o}), and what lies in "
            f"it would be run; chmod 700 it, or set {env.CACHE_DIR} to a folder of your own"
        )
    return path


def sources(csrc: Path | None = None) -> list[Path]:
    """All sources of csrc/, headers included, in a fixed order."""
    csrc = csrc or csrc_dir()
    return sorted(path for path in csrc.rglob("*") if path.suffix in (".cu", ".cuh", ".h"))


@lru_cache(maxsize=4)
def _source_hash(csrc: Path) -> str:
    import tvm_ffi

    digest = hashlib.sha256()
    for path in sources(csrc):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(csrc).as_posix()}\0{len(data)}\0".encode())
        digest.update(data)
    digest.update(repr((_FLAGS, _DEVICE_FLAGS, _LINK_FLAGS, _HOST_ONLY, tvm_ffi.__version__)).encode())
    return digest.hexdigest()[:16]


def _prefix(arch: str) -> str:
    return f"{arch}-{_source_hash(csrc_dir())}-nvcc"


class Entry(NamedTuple):
    arch: str
    folder: Path

    @property
    def library(self) -> Path:
        return self.folder / LIBRARY

    @property
    def report(self) -> str:
        return (self.folder / REPORT).read_text()

    def fault(self) -> str | None:
        """Why the entry is not to be loaded, or None."""
        try:
            record = json.loads((self.folder / RECORD).read_text())
            data = self.library.read_bytes()
        except (OSError, ValueError) as error:
            return f"unreadable: {error}"
        if not isinstance(record, dict) or len(data) != record.get("size"):
            return f"{LIBRARY} has {len(data)} bytes, not the recorded size"
        if hashlib.sha256(data).hexdigest() != record.get("sha256"):
            return f"{LIBRARY} does not have the recorded checksum"
        return None


def built(arch: str, root: os.PathLike | None = None, toolchain: Toolchain | None = None) -> Entry | None:
    """The entry for ``arch`` of these sources and flags: of ``toolchain``, or of any compiler where that is None."""
    base = cache_root(root)
    if toolchain is not None:
        folders = [base / (_prefix(arch) + toolchain.version_text)]
    else:
        folders = sorted(base.glob(_prefix(arch) + "*"), key=lambda path: path.stat().st_mtime, reverse=True)
    for folder in folders:
        if (folder / RECORD).is_file():
            return Entry(arch, folder)
    return None


def entries(root: os.PathLike | None = None) -> list[Entry]:
    """All entries, of older sources too."""
    base = cache_root(root)
    return [Entry(path.name.split("-")[0], path) for path in sorted(base.glob("sm_*-nvcc*")) if path.is_dir()]


@contextlib.contextmanager
def _locked(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    import fcntl

    with open(path, "a") as file:
        os.chmod(path, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say("another process is building; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file unlocks it


# --- building ------------------------------------------------------------------------------------


#: Objects of host code, by what they were made of and with: the same for every architecture that this process builds.
_host_objects: dict[tuple[str, Toolchain], dict[str, bytes]] = {}


def _object(name: str) -> str:
    return name.replace("/", "_")[: -len(".cu")] + ".o"


def _ninja_file(toolchain: Toolchain, arch: str, csrc: Path, made: Collection[str] = ()) -> str:
    """``made``: objects that are there already."""
    import tvm_ffi
    from tvm_ffi.libinfo import find_dlpack_include_path, find_include_path, find_libtvm_ffi

    def quoted(text: object) -> str:
        return '"' + str(text).replace("$", "$$") + '"'

    number = arch[len("sm_") :]
    include = " ".join(f"-I{quoted(path)}" for path in (csrc, find_include_path(), find_dlpack_include_path()))
    library_dir = os.path.dirname(find_libtvm_ffi())
    lines = [
        "ninja_required_version = 1.3",
        f"# {arch}, nvcc {toolchain.version_text}, apache-tvm-ffi {tvm_ffi.__version__}",
        f"nvcc = {quoted(toolchain.nvcc)}",
        f"flags = {' '.join(_FLAGS)} {include}",
        f"device = {' '.join(_DEVICE_FLAGS)} -gencode=arch=compute_{number},code={arch}",
        "rule device",
        "  command = $nvcc $flags $device -c $in -o $out",
        "  description = $name",
        "rule host",
        "  command = $nvcc $flags -x c++ -c $in -o $out",
        "  description = $name",
        "rule link",
        f"  command = $nvcc {' '.join(_LINK_FLAGS)} -L{quoted(library_dir)} $in -ltvm_ffi -o $out",
        "  description = linking",
    ]
    objects = []
    for source in sources(csrc):
        if source.suffix != ".cu":
            continue
        name = source.relative_to(csrc).as_posix()
        objects.append(_object(name))
        if objects[-1] in made:
            continue
        rule = "host" if name in _HOST_ONLY else "device"
        path = str(source).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")
        lines += [f"build {objects[-1]}: {rule} {path}", f"  name = {name}"]
    lines += [f"build {LIBRARY}: link {' '.join(objects)}", f"default {LIBRARY}", ""]
    return "\n".join(lines)


def _compile(toolchain: Toolchain, arch: str, folder: Path, say: Callable[[str], None]) -> str:
    """Run ninja in ``folder``; what the compilers said."""
    key = _source_hash(csrc_dir()), toolchain
    made = _host_objects.get(key, {})
    for name, data in made.items():
        (folder / name).write_bytes(data)
    (folder / "build.ninja").write_text(_ninja_file(toolchain, arch, csrc_dir(), made))
    environment = {**os.environ, "NINJA_STATUS": "[%f/%t] "}
    process = subprocess.Popen(
        [_find_ninja(), "-C", str(folder)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True, env=environment,
    )  # fmt: skip
    output = []
    try:
        for line in process.stdout:
            output.append(line)
            if re.match(r"\[\d+/\d+\] ", line):
                say(line.strip())
        code = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    text = "".join(output)
    if code:
        lines = [line for line in text.splitlines() if "ptxas info" not in line]
        raise BuildError(f"building csrc for {arch} with nvcc {toolchain.version_text} failed:\n" + "\n".join(lines[-40:]))
    _host_objects[key] = {name: (folder / name).read_bytes() for name in map(_object, _HOST_ONLY) if (folder / name).is_file()}
    return text


def build(
    arch: str,
    root: os.PathLike | None = None,
    *,
    toolchain: Toolchain | None = None,
    say: Callable[[str], None] | None = None,
) -> Entry:
    """A sound entry for ``arch``: the one that is there, or a new one. Several processes may ask at once."""
    say = say or (lambda text: None)
    if arch not in ARCHITECTURES.values():
        raise BuildError(f"no code for {arch!r}; there is code for {', '.join(ARCHITECTURES.values())}")
    toolchain = toolchain or find_toolchain()
    if not toolchain.supports(arch):
        raise BuildError(f"nvcc {toolchain.version_text} ({toolchain.nvcc}) does not know {arch}; a newer one is needed")
    base = cache_root(root, create=True)
    place = Entry(arch, base / (_prefix(arch) + toolchain.version_text))
    if place.folder.is_dir() and place.fault() is None:
        return place
    with _locked(base / f"{arch}.lock", say):
        if place.folder.is_dir():
            fault = place.fault()
            if fault is None:
                return place
            say(f"the cached build of {arch} is damaged ({fault}); building it again")
            shutil.rmtree(place.folder)
        say(f"building for {arch} with nvcc {toolchain.version_text} ({toolchain.origin}); kept in {base}")
        start = time.monotonic()
        work = Path(tempfile.mkdtemp(prefix=f"building-{arch}-", dir=base))
        try:
            log = _compile(toolchain, arch, work, say)
            made = Path(tempfile.mkdtemp(prefix=f"made-{arch}-", dir=base))
            try:
                data = (work / LIBRARY).read_bytes()
                (made / LIBRARY).write_bytes(data)
                (made / REPORT).write_text(log)
                record = {
                    "size": len(data),
                    "sha256": hashlib.sha256(data).hexdigest(),
                    "arch": arch,
                    "nvcc": toolchain.version_text,
                    "seconds": round(time.monotonic() - start, 1),
                }
                (made / RECORD).write_text(json.dumps(record, indent=1) + "\n")
                os.rename(made, place.folder)
            finally:
                shutil.rmtree(made, ignore_errors=True)  # not there any more when all went well
        finally:
            shutil.rmtree(work, ignore_errors=True)
        say(f"built for {arch} in {time.monotonic() - start:.0f} s")
    return place


# --- what ptxas reported -------------------------------------------------------------------------


class KernelReport(NamedTuple):
    name: str  #: demangled where c++filt is there
    registers: int
    stack: int  #: bytes
    spill_stores: int  #: bytes
    spill_loads: int  #: bytes
    shared: int  #: bytes, static


def ptxas_report(log: str) -> list[KernelReport]:
    """The kernels in the output of ``nvcc -Xptxas=-v``."""
    found = []
    name, stack, stores, loads = None, 0, 0, 0
    for line in log.splitlines():
        entry = re.search(r"Compiling entry function '([^']+)'", line)
        spills = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line)
        used = re.search(r"Used (\d+) registers", line)
        if entry:
            name, stack, stores, loads = entry.group(1), 0, 0, 0
        elif spills and name:
            stack, stores, loads = map(int, spills.groups())
        elif used and name:
            shared = re.search(r"(\d+) bytes smem", line)
            found.append(KernelReport(name, int(used.group(1)), stack, stores, loads, int(shared.group(1)) if shared else 0))
            name = None
    names = _demangled([kernel.name for kernel in found])
    return [kernel._replace(name=text) for kernel, text in zip(found, names)]


def _demangled(names: Sequence[str]) -> list[str]:
    tool = shutil.which("c++filt")
    if not tool or not names:
        return list(names)
    done = subprocess.run([tool, "--no-params"], input="\n".join(names), capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    return [re.sub(r"^void ", "", line) for line in lines] if len(lines) == len(names) else list(names)


def spilling(kernels: Sequence[KernelReport]) -> list[KernelReport]:
    """Kernels that keep registers in local memory. All of ours are hot, so there should be none."""
    return [kernel for kernel in kernels if kernel.spill_stores or kernel.spill_loads or kernel.stack]
