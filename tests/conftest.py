"""Fixtures and options of all tests.

The conformance suite is written once. Every test that asks for the ``door`` fixture runs on each backend that is
usable on the device (a GPU where there is one, else the CPU); a backend that is not usable is skipped once, with its
own reasons, in tests/conformance/test_conf_usable.py.

    --suite=small        only the tests marked ``small``, on small sizes: what Triton's interpreter can run
    --gdn-backend=NAME   only this backend (may be repeated); it must then be usable
    --gdn-device=DEVICE  cpu, cuda, cuda:1, ...
    --build              also the tests that compile csrc/
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# Before torch is imported: tensors are small here, so that threads, the more of them there are, spend their time on waiting for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))  # tests import cases, doors, tolerances by name

from doors import Door, Sizes, conformance_device, reasons_unusable, wanted_backends  # noqa: E402

GDN_VARIABLES = [name for name in os.environ if name.startswith("GDN_MULTI_") and name != "GDN_MULTI_CACHE_DIR"]


def pytest_addoption(parser):
    parser.addoption("--suite", choices=("full", "small"), default="full", help="conformance tests to run")
    parser.addoption("--gdn-backend", action="append", default=None, help="only this backend (may be repeated)")
    parser.addoption("--gdn-device", default=None, help="device of the conformance tests")
    parser.addoption("--build", action="store_true", help="also the tests that compile csrc/, which takes minutes")


def pytest_configure(config):
    config.addinivalue_line("markers", "small: part of the selection that runs under Triton's interpreter")
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line("markers", "build: compiles csrc/; runs with --build")


def pytest_generate_tests(metafunc):
    if "door" not in metafunc.fixturenames:
        return
    config = metafunc.config
    device = conformance_device(config)
    names = [name for name in wanted_backends(config) if not reasons_unusable(name, device)]
    if metafunc.definition.get_closest_marker("small") is None:
        # Triton on a CPU means its interpreter: thousands of times slower, so only the selection runs there.
        names = [name for name in names if not (name == "triton" and device.type == "cpu")]
    metafunc.parametrize("door", names, indirect=True)


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--build"):
        skip = pytest.mark.skip(reason="compiles csrc/, which takes minutes: --build, or make test-build")
        for item in items:
            if item.get_closest_marker("build") is not None:
                item.add_marker(skip)
    if config.getoption("--suite") != "small":
        return
    dropped = [i for i in items if "door" in getattr(i, "fixturenames", ()) and i.get_closest_marker("small") is None]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [i for i in items if i not in set(dropped)]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    """Tests start without any GDN_MULTI_ variable of the user's (the build cache excepted)."""
    for name in GDN_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def door(request) -> Door:
    config = request.config
    return Door(request.param, conformance_device(config), config.getoption("--suite") == "small")


@pytest.fixture
def sizes(door) -> Sizes:
    return door.sizes


@pytest.fixture
def on_gpu(door) -> Door:
    if door.device.type != "cuda":
        pytest.skip("needs a CUDA device")
    return door
