"""``doctor``: what it says, and what it says when packages and compilers are missing."""

import json
import os
import subprocess
import sys
from importlib import metadata

import pytest
import torch

import gdn_multi
from gdn_multi import cli, env
from gdn_multi.cli import doctor


@pytest.fixture
def found():
    return doctor.gather("cpu")


def test_it_names_every_backend_with_its_reasons(found):
    named = {backend["name"]: backend for backend in found["backends"]}
    assert tuple(named) == gdn_multi.registered_backends()
    assert named["torch"]["usable"] and not named["torch"]["reasons"]
    assert not named["cuda"]["usable"] and named["cuda"]["reasons"], "the cuda backend does not run on a CPU"
    printed = doctor.report(found)
    for backend in found["backends"]:
        assert backend["usable"] == (not backend["reasons"])
        assert backend["name"] in printed
    assert torch.__version__ in printed


def test_json_is_what_the_table_shows(capsys):
    assert cli.main(["doctor", "--json", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["device"] == "cpu"
    assert found["packages"]["torch"] == metadata.version("torch")
    assert {backend["name"] for backend in found["backends"]} == set(gdn_multi.registered_backends())


def test_exit_code_is_non_zero_when_nothing_is_usable(monkeypatch, capsys):
    unusable = [{"name": "torch", "usable": False, "summary": "", "reasons": ["planted"]}]
    monkeypatch.setattr(doctor, "_backends", lambda device: unusable)
    assert cli.main(["doctor", "--device", "cpu"]) == 1
    assert "planted" in capsys.readouterr().out


def test_an_unknown_device_is_one_line(capsys):
    assert cli.main(["doctor", "--device", "gpu7"]) == 2
    error = capsys.readouterr().err
    assert "gpu7" in error and error.count("\n") == 1


def test_a_backend_that_breaks_does_not_hide_the_others():
    def broken():
        raise OSError("planted: no such library")

    gdn_multi.register_backend(broken, name="broken")
    try:
        backends = {backend["name"]: backend for backend in doctor.gather("cpu")["backends"]}
    finally:
        gdn_multi.unregister_backend("broken")
    assert not backends["broken"]["usable"] and "planted: no such library" in backends["broken"]["reasons"][0]
    assert backends["torch"]["usable"]


def test_variables_and_a_misspelt_one(monkeypatch):
    monkeypatch.setenv(env.BACKEND, "torch")
    monkeypatch.setenv("GDN_MULTI_BACKENDS", "torch")
    found = doctor.gather("cpu")
    assert found["variables"][env.BACKEND] == "torch"
    assert any("GDN_MULTI_BACKENDS" in sentence and env.BACKEND in sentence for sentence in found["advice"])


def test_compute_capability_10_7_is_told_about_ptxas(found):
    assert not any("10.7" in sentence for sentence in doctor.advice(found))
    gpu = {"name": "a GPU", "compute capability": "10.7", "memory": "1 GiB"}
    found["machine"]["gpus"] = [gpu]
    found["advice"] = doctor.advice(found)
    for words in ("13.4", "PATH", "TRITON_PTXAS_BLACKWELL_PATH", "sm_107a"):
        assert words in doctor.report(found).split("note:", 1)[1]
    found["machine"]["gpus"] = [{**gpu, "compute capability": "10.0"}]
    assert not any("ptxas" in sentence for sentence in doctor.advice(found))


HIDDEN = """
import sys
from importlib.machinery import PathFinder
find = PathFinder.find_spec
hidden = ("triton", "cudnn", "cuda", "flashinfer", "fla", "ninja", "tvm_ffi", "nvidia")
PathFinder.find_spec = lambda name, *rest: None if name.split(".")[0] in hidden else find(name, *rest)
from importlib import metadata
real = metadata.version
def version(name):
    if name not in ("torch", "gdn-multi"):
        raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.version = version
from gdn_multi.cli import main
sys.exit(main(["doctor", "--json", "--device", "cpu"]))
"""


def test_with_every_optional_package_and_compiler_hidden(tmp_path):
    """A process of its own, in which no optional package can be imported and PATH is empty."""
    variables = {k: v for k, v in os.environ.items() if k not in ("CUDA_HOME", "CUDA_PATH", "TRITON_INTERPRET")}
    variables["PATH"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN], capture_output=True, text=True, env=variables, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["packages"]["triton"] is None and found["packages"]["torch"] is not None
    assert "missing" in found["compilers"]["g++"] and "missing" in found["compilers"]["ninja"]
    backends = {backend["name"]: backend for backend in found["backends"]}
    assert [name for name, backend in backends.items() if backend["usable"]] == ["torch"]


@pytest.mark.parametrize(
    "answer, version",
    [
        ("Cuda compilation tools, release 13.0, V13.0.88\nBuild cuda_13.0.r13.0/compiler.1_0", "13.0.88"),
        ("g++ (Debian 12.2.0-14+deb12u1) 12.2.0\nCopyright", "12.2.0"),
        ("1.13.0.git.kitware.jobserver-pipe-1", "1.13.0"),
        ("", "unknown"),
    ],
)
def test_versions_are_read_from_what_compilers_print(answer, version):
    assert doctor._version(answer) == version


def test_ptxas_in_the_wheels_is_found(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia" / "cu13" / "bin" / "ptxas"
    tool.parent.mkdir(parents=True)
    tool.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.5, V13.5.37'\n")
    tool.chmod(0o755)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    paths = doctor._in_wheels("ptxas")
    assert str(tool) in paths
    assert doctor._compiler(None, "/nonexistent/ptxas", str(tool)) == {"version": "13.5.37", "path": str(tool)}


def test_values_that_every_call_would_refuse_are_noted(monkeypatch, capsys):
    monkeypatch.setenv(env.BACKEND, "torch,trition")
    monkeypatch.setenv(env.CHECK, "maybe")
    assert cli.main(["doctor", "--device", "cpu"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"{env.BACKEND} names 'trition', which is not registered; registered: cuda" in printed
    assert f"{env.CHECK} must be one of 1, true" in printed
    monkeypatch.setenv(env.BACKEND, "torch,auto")
    monkeypatch.setenv(env.CHECK, "0")
    assert cli.main(["doctor", "--device", "cpu"]) == 0
    assert "must be one of" not in capsys.readouterr().out
