"""Any test on the emulated CUDA backend, which is slow: for a look at a few tests, not for a whole suite.

PYTHONPATH=tests/backends python -m pytest -p cuda_emulator.plugin --gdn-backend=cuda --gdn-device=cpu tests/conformance -k TEST
"""

import tempfile
from pathlib import Path

import gdn_multi

from . import EmulatedCudaBackend, build_library


def pytest_configure(config):
    library = build_library(Path(tempfile.gettempdir()) / "gdn_multi_emulated")
    gdn_multi.register_backend(EmulatedCudaBackend(library), replace=True)
