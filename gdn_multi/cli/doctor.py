"""``python -m gdn_multi doctor``: what this machine has, which backends are usable, and what the others need."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from gdn_multi import __version__, env
from gdn_multi.registry import registry

from .table import format_table

#: Packages whose versions matter, as pip names them.
PACKAGES = (
    "torch",
    "triton",
    "apache-tvm-ffi",
    "ninja",
    "nvidia-cudnn-frontend",
    "cuda-tile",
    "cuda-bindings",
    "nvidia-cuda-tileiras",
    "nvidia-cuda-nvcc",
    "flashinfer-python",
    "flash-linear-attention",
)

#: Variables of other programs that change what happens here, besides env.VARIABLES.
FOREIGN_VARIABLES = (
    "CUDA_HOME",
    "CUDA_PATH",
    "CUDA_VISIBLE_DEVICES",
    "TRITON_INTERPRET",
    "TRITON_CACHE_DIR",
    "TRITON_PTXAS_PATH",
    "TRITON_PTXAS_BLACKWELL_PATH",
    "XDG_CACHE_HOME",
)

SM107 = (
    "compute capability 10.7: the Triton kernels need a ptxas of CUDA 13.4 or newer on PATH or in "
    "TRITON_PTXAS_BLACKWELL_PATH; an older one does not know sm_107a"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="the device that backends are asked about; default: cuda, else cpu")
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def run(args: argparse.Namespace) -> int:
    try:
        found = gather(args.device)
    except RuntimeError as error:  # torch does not know the device
        print(f"doctor: --device {args.device}: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    print(json.dumps(found, indent=2) if args.json else report(found))
    return 0 if any(backend["usable"] for backend in found["backends"]) else 1


def gather(device: str | None = None) -> dict:
    """Everything that ``report`` prints, as plain values."""
    import torch

    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    gpus = _gpus()
    found = {
        "machine": {
            "gdn_multi": f"{__version__} ({Path(__file__).resolve().parents[1]})",  # a checkout hides the installed one
            "system": _system(),
            "processor": f"{_processor()}, {os.cpu_count()} cores",
            "python": f"{platform.python_version()} ({sys.executable})",
            "cuda of torch": torch.version.cuda or "none: a build for the CPU",
            "driver": _driver() or "none found",
            "gpus": gpus,
        },
        "packages": {name: _package(name) for name in PACKAGES},
        "compilers": _compilers(),
        "device": str(chosen),
        "device present": chosen.type != "cuda" or torch.cuda.is_available(),
        "backends": _backends(chosen),
        "variables": env.given((*env.VARIABLES, *FOREIGN_VARIABLES)),
        "bad_values": _bad_values(),
        "unknown_variables": env.unknown(),
    }
    found["advice"] = advice(found)
    return found


def advice(found: dict) -> list[str]:
    """Sentences on what to do or to know, from what was gathered."""
    sentences = []
    if not found["device present"]:
        sentences.append(f"{found['device']} is not here: the answers leave out what only a GPU could say")
    if any(gpu["compute capability"] == "10.7" for gpu in found["machine"]["gpus"]):
        sentences.append(SM107)
    for name in found["unknown_variables"]:
        sentences.append(f"{name} is set, but gdn_multi knows no such variable; it knows {', '.join(env.VARIABLES)}")
    sentences += found["bad_values"]
    return sentences


def report(found: dict) -> str:
    machine = dict(found["machine"])
    gpus = machine.pop("gpus")
    lines = [f"{name:<14} {value}" for name, value in machine.items()]
    for index, gpu in enumerate(gpus):
        what = f"{gpu['name']}, compute capability {gpu['compute capability']}, {gpu['memory']}"
        lines.append(f"{f'gpu {index}':<14} {what}")
    if not gpus:
        lines.append(f"{'gpu':<14} none")
    packages = [(name, version or "not installed") for name, version in found["packages"].items()]
    compilers = []
    for name, compiler in found["compilers"].items():
        where = compiler.get("path") or compiler["missing"]
        if compiler.get("toolkit") not in (None, os.path.dirname(os.path.dirname(where))):
            where += f" (toolkit: {compiler['toolkit']})"
        compilers.append((name, compiler.get("version", "-"), where))
    backends = []
    for backend in found["backends"]:
        texts = backend["reasons"] or [backend["summary"]]
        lines_of = [line for text in texts for line in _wrapped(text)] or [""]
        backends.append((backend["name"], "yes" if backend["usable"] else "no", lines_of[0]))
        backends += [("", "", line) for line in lines_of[1:]]
    parts = [
        "\n".join(lines),
        format_table(("package", "version"), packages),
        format_table(("compiler", "version", "path"), compilers),
        format_table(("backend", f"usable on {found['device']}", "what it serves, or why not"), backends),
    ]
    if found["variables"]:
        parts.append(format_table(("variable", "value"), found["variables"].items()))
    else:
        parts.append("no variable that gdn_multi reads is set")
    parts += [f"note: {sentence}" for sentence in found["advice"]]
    return "\n\n".join(parts)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 90, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)


# --- backends --------------------------------------------------------------------------------


def _backends(device) -> list[dict]:
    found = []
    for name in registry.names():
        summary, reasons = "", ()
        try:
            backend = registry.get(name)
            summary = backend.summary
            reasons = tuple(backend.reasons_unusable(device))
        except Exception as error:  # a broken backend must not hide the others
            reasons = (f"{type(error).__name__}: {error}",)
        found.append({"name": name, "usable": not reasons, "summary": summary, "reasons": list(reasons)})
    return found


# --- the machine -----------------------------------------------------------------------------


def _system() -> str:
    try:
        name = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        name = ""
    kernel = f"{platform.system()} {platform.release()} {platform.machine()}"
    return f"{name}, {kernel}" if name else kernel


def _processor() -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match.group(1) if match else platform.processor() or platform.machine()


def _driver() -> str | None:
    answer = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return answer.splitlines()[0].strip() if answer else None


def _gpus() -> list[dict[str, str]]:
    import torch

    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(
            {
                "name": properties.name,
                "compute capability": f"{properties.major}.{properties.minor}",
                "memory": f"{properties.total_memory / 2**30:.0f} GiB",
            }
        )
    return gpus


def _bad_values() -> list[str]:
    """What every call would say of the variables' values."""
    known, sentences = registry.names(), []
    for kind in ("prefill", "decode"):
        names, variable = env.backend_choice(kind)
        unknown = [name for name in names or () if name not in known and name != "auto"]
        if unknown:
            sentences.append(
                f"{variable} names {', '.join(map(repr, unknown))}, which is not registered; registered: {', '.join(known)}"
            )
    for name in (env.CHECK, env.BATCH_INVARIANT, env.PRECISE):
        try:
            env.flag(name)
        except ValueError as error:
            sentences.append(str(error))
    return list(dict.fromkeys(sentences))


# --- packages and compilers ------------------------------------------------------------------


def _package(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _compilers() -> dict[str, dict[str, str]]:
    """name -> {"version", "path", ...}, or {"missing": why}."""
    nvcc = _nvcc()
    beside_nvcc = os.path.join(nvcc["toolkit"], "bin", "ptxas") if "toolkit" in nvcc else None
    return {
        "nvcc": nvcc,
        "ptxas": _compiler(env.triton_ptxas(), shutil.which("ptxas"), beside_nvcc, *_in_wheels("ptxas")),
        "g++": _compiler(shutil.which("g++")),
        "ninja": _compiler(shutil.which("ninja"), _ninja_of_package()),
    }


def _nvcc() -> dict[str, str]:
    """The nvcc that the `cuda` backend would build with: it decides, and it sees through wrapper scripts."""
    try:
        from gdn_multi.backends.cuda.build import BuildError, find_toolchain
    except ImportError as error:
        return {"missing": f"the cuda backend cannot say: {error}"}
    try:
        found = find_toolchain()
    except BuildError as error:
        return {"missing": str(error)}
    return {"version": found.version_text, "path": found.nvcc, "toolkit": found.toolkit, "found": found.origin}


def _compiler(*paths: str | None) -> dict[str, str]:
    """The first of ``paths`` that runs."""
    for path in filter(None, paths):
        answer = _output([path, "--version"])
        if answer is not None:
            return {"version": _version(answer), "path": path}
    return {"missing": "not found"}


def _in_wheels(name: str) -> list[str]:
    """A CUDA tool in the nvidia-* wheels: nvidia/cu13/bin, or nvidia/cuda_nvcc/bin in older ones."""
    found = (path for folder in sys.path for path in sorted(Path(folder or ".").glob(f"nvidia/*/bin/{name}")))
    return [str(path) for path in found]


def _ninja_of_package() -> str | None:
    try:
        import ninja
    except ImportError:
        return None
    return os.path.join(ninja.BIN_DIR, "ninja")


def _output(command: Sequence[str]) -> str | None:
    """What a command prints, or None when it cannot be run or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _version(answer: str) -> str:
    """The version in the output of ``--version``: nvcc's and ptxas's release, else the first line."""
    release = re.search(r"release [\d.]+, V([\d.]+)", answer)
    if release:
        return release.group(1)
    first = answer.strip().splitlines()[0] if answer.strip() else "unknown"
    number = re.search(r"(\d+(?:\.\d+)+)\S*$", first)
    return number.group(1) if number else first
