"""Gated Delta-Rule (GDN) prefill and decode on a paged recurrent-state cache, served by several backends."""

import os as _os
from types import FunctionType as _FunctionType

__version__ = "0.1.0"

# In a checkout that is not installed, ``backends`` and ``csrc`` lie beside this package instead of in it.
_here = _os.path.dirname(_os.path.abspath(__file__))
if not _os.path.isdir(_os.path.join(_here, "backends")):
    _beside = _os.path.dirname(_here)
    if _os.path.isfile(_os.path.join(_beside, "backends", "__init__.py")):
        __path__.append(_beside)

from . import gdn_decode, gdn_paged, gdn_prefill, reference  # noqa: E402
from . import graph_breaks as _graph_breaks  # noqa: E402
from .backend import Backend  # noqa: E402
from .dispatch import Explanation, LastCall, explain, last_backend  # noqa: E402
from .flashinfer_names import missing as _missing  # noqa: E402
from .gdn_decode import gated_delta_rule_decode_pretranspose  # noqa: E402
from .gdn_paged import (  # noqa: E402
    GDNPagedDecodeSlots,
    GDNPagedPrefillSlots,
    chunk_gated_delta_rule_paged,
    gated_delta_rule_decode_paged,
    gdn_paged_decode_slots,
    gdn_paged_prefill_slots,
)
from .gdn_prefill import chunk_gated_delta_rule  # noqa: E402
from .registry import register_backend, registered_backends, unregister_backend  # noqa: E402
from .request import DecodeRequest, PageTable, PrefillRequest, SlotsRequest  # noqa: E402
from .warmup import WarmupReport, compilations, warmup  # noqa: E402

__all__ = [
    "Backend",
    "DecodeRequest",
    "Explanation",
    "GDNPagedDecodeSlots",
    "GDNPagedPrefillSlots",
    "LastCall",
    "PageTable",
    "PrefillRequest",
    "SlotsRequest",
    "WarmupReport",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_paged",
    "compilations",
    "explain",
    "gated_delta_rule_decode_paged",
    "gated_delta_rule_decode_pretranspose",
    "gdn_decode",
    "gdn_paged",
    "gdn_paged_decode_slots",
    "gdn_paged_prefill_slots",
    "gdn_prefill",
    "last_backend",
    "reference",
    "register_backend",
    "registered_backends",
    "unregister_backend",
    "warmup",
]


def __getattr__(name: str):
    _missing(__name__, name)


for _name in __all__:
    if isinstance(_value := globals()[_name], _FunctionType):
        _graph_breaks.leave_out(_value)
del _name, _value
