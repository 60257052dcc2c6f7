"""Which backends the conformance suite runs on here; the others are skipped, with their own reasons."""

from __future__ import annotations

import pytest
from doors import conformance_device, reasons_unusable, wanted_backends


def pytest_generate_tests(metafunc):
    metafunc.parametrize("name", wanted_backends(metafunc.config))


def test_backend_is_usable(name, request):
    reasons = reasons_unusable(name, conformance_device(request.config))
    if not reasons:
        return
    message = f"{name} does not run on {conformance_device(request.config)}: " + "; ".join(reasons)
    if request.config.getoption("--gdn-backend"):
        pytest.fail(message)  # it was asked for by name
    pytest.skip(message)
