"""Any test on the emulated CUDA backend, which is slow: for a look at a few tests, not for a whole suite.

PYTHONPATH=tests/backends python -m pytest -p cuda_emulator.plugin --gdn-backend=cuda --gdn-device=cpu tests/conformance -k TEST
"""

import gdn_multi

from . import FOLDER, EmulatedCudaBackend, build_library


def pytest_configure(config):
    gdn_multi.register_backend(EmulatedCudaBackend(build_library(FOLDER)), replace=True)
