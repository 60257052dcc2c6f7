"""The wheel: built from this checkout, installed into an empty environment, used from another folder."""

import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import gdn_multi
from gdn_multi import layout

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("setuptools") is None or importlib.util.find_spec("pip") is None,
    reason="building a wheel needs setuptools and pip: pip install -e .[tests]",
)


def run(*command, **options):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, so that no build/ or egg-info is left in the checkout."""
    base = tmp_path_factory.mktemp("wheel")
    source = base / "source"
    source.mkdir()
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:
        names = listed.stdout.splitlines()
    else:  # not a git checkout
        names = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if ".venv" not in path.parts]
    for name in names:
        if (ROOT / name).is_file() and not name.startswith("tests/"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", base, source)
    (built,) = base.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """An environment with the wheel in it, and nothing else of its own: torch and what torch needs are seen through a
    path file, without the project's own editable install."""
    base = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", base)
    python = base / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "--no-deps", "--no-index", wheel)
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *_torch_folders()}
    (site / "seen.pth").write_text("\n".join(sorted(folders)) + "\n")
    return python


def _torch_folders():
    import torch

    return {str(Path(torch.__file__).resolve().parents[1])}


def elsewhere(python, tmp_path, *command):
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "GDN_MULTI"))}
    return run(python, *command, cwd=tmp_path, env=variables)


def test_it_holds_every_package_and_every_data_file(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, inside in (("gdn_multi", "gdn_multi"), ("backends", "gdn_multi/backends")):
        for path in (ROOT / folder).rglob("*.py"):
            assert f"{inside}/{path.relative_to(ROOT / folder).as_posix()}" in names
    for folder, pattern in (("csrc", "**/*.cu"), ("csrc", "**/*.cuh"), ("csrc", "**/*.h"), ("docs", "*.md")):
        for path in (ROOT / folder).glob(pattern):
            assert f"gdn_multi/{path.relative_to(ROOT).as_posix()}" in names
    top = {name.split("/")[0] for name in names}
    assert top == {"gdn_multi", f"gdn_multi-{gdn_multi.__version__}.dist-info"}, "nothing beside the package"
    assert any(name.endswith("LICENSE") for name in names)


PROBE = """
import importlib, json, pathlib, gdn_multi
from gdn_multi import layout
from gdn_multi.registry import BUILTIN
csrc = layout.csrc_dir()
print(json.dumps({
    "file": gdn_multi.__file__,
    "csrc": str(csrc),
    "sources": sorted(p.relative_to(csrc).as_posix() for p in csrc.rglob("*") if p.suffix in (".cu", ".cuh", ".h")),
    "backends": {name: importlib.import_module(target.split(":")[0]).__file__ for name, target in BUILTIN.items()},
    "documents": [document.name for document in layout.documents()],
    "readme": layout.documents()[0].text.decode(),
    "checkout": layout.checkout_dir() is not None,
}))
"""


def test_installed_it_finds_its_backends_sources_and_documents(python, tmp_path):
    found = json.loads(elsewhere(python, tmp_path, "-c", PROBE))
    package = Path(found["file"]).parent
    assert python.parents[1] in package.parents, f"imported from {package}, not from the environment"
    assert not found["checkout"]
    assert Path(found["csrc"]) == package / "csrc"
    ours = [path.relative_to(ROOT / "csrc").as_posix() for path in (ROOT / "csrc").rglob("*")]
    assert found["sources"] == sorted(name for name in ours if name.endswith((".cu", ".cuh", ".h"))) != []
    for name, file in found["backends"].items():
        assert Path(file).is_relative_to(package / "backends"), (name, file)
    assert found["documents"] == [document.name for document in layout.documents()]
    assert found["readme"].strip() == (ROOT / "README.md").read_text().strip()


def test_installed_it_runs_the_demo_and_doctor(python, tmp_path):
    small = ["--device", "cpu", "--heads", "1/2", "--head-size", "64", "--page-size", "64", "--tokens", "120"]
    printed = elsewhere(python, tmp_path, "-m", "gdn_multi", "demo", *small)
    assert "docs/contract.md" in printed and printed.rstrip().endswith("ok")
    found = json.loads(elsewhere(python, tmp_path, "-m", "gdn_multi", "doctor", "--json", "--device", "cpu"))
    assert [backend["name"] for backend in found["backends"] if backend["usable"]] == ["torch"]


def test_the_command_is_installed_too(python, tmp_path):
    assert gdn_multi.__version__ in elsewhere(python, tmp_path, python.parent / "gdn-multi", "--version")


EDITABLE = """
import importlib, gdn_multi, pathlib
from gdn_multi import layout
root = pathlib.Path({root!r})
assert pathlib.Path(gdn_multi.__file__) == root / "gdn_multi" / "__init__.py", gdn_multi.__file__
assert layout.csrc_dir() == root / "csrc", layout.csrc_dir()
for name in ("torch", "cuda", "triton"):
    file = importlib.import_module("gdn_multi.backends." + name).__file__
    assert pathlib.Path(file).is_relative_to(root / "backends"), file
assert [d.name for d in layout.documents()][0] == "README.md"
"""


def test_an_editable_install_finds_the_same(tmp_path, wheel):
    """Of the copy that the wheel was built from, since it writes an egg-info beside the sources."""
    source, base = wheel.parent / "source", tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", base)
    python = base / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "seen.pth").write_text("\n".join({sysconfig.get_path("purelib"), *_torch_folders()}) + "\n")
    run(*pip, "install", "--no-deps", "--no-index", "--no-build-isolation", "--editable", source)
    elsewhere(python, tmp_path, "-c", EDITABLE.format(root=str(source)))
