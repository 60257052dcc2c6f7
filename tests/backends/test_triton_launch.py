"""The short way to a compiled Triton kernel, with a stand-in for what Triton compiles."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from gdn_multi.backends.triton import launch as module  # noqa: E402

if module._runtime is None:
    pytest.skip("Triton before 3.4 keeps its hooks elsewhere: launches always go the long way", allow_module_level=True)


class Compiled:
    """What a kernel's launch returns: ``run`` as Triton's own launcher is called, and an item for each grid."""

    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.short, self.long = [], []

    def run(self, *args):
        self.short.append(args)

    def __getitem__(self, grid):
        return lambda *args, stream: self.long.append((grid, stream, args))


class Kernel:
    def __init__(self):
        self.compiled, self.first = Compiled(), []

    def __getitem__(self, grid):
        def run(*args, **options):
            self.first.append((grid, args, options))
            return self.compiled

        return run


@pytest.fixture
def hooks(monkeypatch):
    """Both hooks of Triton, none set; a test may put others there."""
    for name in ("launch_enter_hook", "launch_exit_hook"):
        monkeypatch.setattr(module._runtime, name, None)
    return monkeypatch


@pytest.fixture
def launched(monkeypatch):
    """A launch that was made once, and its kernel."""
    monkeypatch.setattr(module, "_raw_stream", lambda device: 77)
    kernel = Kernel()
    launch = module.Launch(kernel, (3,), torch.device("cpu"), (5, 0.5), num_warps=4)
    launch(torch.empty(1))
    return launch, kernel


def test_triton_compiles_with_the_options(launched, hooks):
    (grid, args, options), = launched[1].first
    assert grid == (3, 1, 1) and args[1:] == (5, 0.5) and options["num_warps"] == 4


def test_then_its_launcher_is_called(launched, hooks):
    launch, kernel = launched
    x = torch.empty(1)
    launch(x)
    assert len(kernel.first) == 1 and not kernel.compiled.long
    assert kernel.compiled.short == [(3, 1, 1, 77, "function", "metadata", None, None, None, x.data_ptr(), 5, 0.5)]


class Chain:
    def __init__(self, *calls):
        self.calls = list(calls)


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("hook,told", [(Chain(), False), (Chain(print), True), (print, True)])
def test_hooks_are_told(launched, hooks, name, hook, told):
    launch, kernel = launched
    hooks.setattr(module._runtime, name, hook)
    x = torch.empty(1)
    launch(x)
    assert bool(kernel.compiled.short) != told
    assert kernel.compiled.long == ([((3, 1, 1), 77, (x.data_ptr(), 5, 0.5))] if told else [])
