"""The native CUDA backend: csrc/, compiled by nvcc on first use or ahead of time (build.py), called through TVM FFI.

A call here is one call into the library with the request's tensors; shapes, strides and dtypes are read on the C++
side. Which architecture's library serves a device is looked up once.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch

from gdn_multi.backend import Backend, Reasons
from gdn_multi.request import GATES, DecodeRequest, PrefillRequest, SlotsRequest

from . import prefill_heuristics

HEAD_SIZES = (64, 128)
#: csrc/common/params.h, enum Gate
_GATE_CODES = {name: code for code, name in enumerate(GATES)}
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class Library(NamedTuple):
    """The functions of one loaded library; csrc/bindings.cu says what they take."""

    arch: str
    arguments_like: Any
    """This and decode_short are None where this torch or Python lacks what they need."""
    decode: Any
    decode_again: Any
    decode_short: Any
    decode_slots: Any
    prefill: Any
    prefill_slots: Any


def load_library(path: str, arch: str) -> Library:
    """Load a built library. Needs no GPU."""
    import tvm_ffi

    module = tvm_ffi.load_module(path)
    library = Library(arch, *(getattr(module, name) for name in Library._fields[1:]))
    torch_api = _torch_api()
    if torch_api is None or not module.read_objects_with(torch_api):
        return library._replace(arguments_like=None, decode_short=None)
    library.arguments_like.release_gil = library.decode_short.release_gil = False  # they make and keep Python objects
    return library


@cache
def _torch_api() -> int | None:
    """The address of torch's functions for reading tensors from C (DLPack's exchange interface); None without them."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return None
    pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    try:
        return pointer_of(("PyCapsule_GetPointer", ctypes.pythonapi))(capsule, b"dlpack_exchange_api")
    except (TypeError, ValueError):  # a torch that hands over something else
        return None


def _say(text: str) -> None:
    print(f"gdn_multi, cuda backend: {text}", file=sys.stderr, flush=True)


class CudaBackend(Backend):
    name = "cuda"
    priority = 300
    summary = "native kernels for sm_80 to sm_120, built by nvcc on first use; K and V of 64 and 128"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._libraries: dict[str, Library] = {}  # by architecture
        self._by_device: dict[int, Library] = {}
        self._failed: dict[str, str] = {}  # architecture -> why its build failed
        self._unusable: dict[int, Reasons] = {}
        self._facts: dict[int, tuple[tuple[int, int], int]] = {}  # by device: compute capability, multiprocessors
        #: For tests and benchmarks: take this path whatever the heuristics say; scratch memory to look into afterwards.
        self.forced_path: prefill_heuristics.Path | None = None
        self.scratch: torch.Tensor | None = None

    # --- whether it can run ------------------------------------------------------------------

    def reasons_unusable(self, device: torch.device) -> Reasons:
        if device.type != "cuda":
            return (f"runs on CUDA devices, not on {device}",)
        index = _index(device)
        if index in self._by_device:
            return ()
        found = self._unusable.get(index)
        if found is None:
            found = self._unusable[index] = self._find_reasons(index)
        return found

    def _find_reasons(self, index: int) -> Reasons:
        from . import build

        capability = torch.cuda.get_device_capability(index)
        arch = build.ARCHITECTURES.get(capability)
        if arch is None:
            return (
                f"has no code for compute capability {capability[0]}.{capability[1]} "
                f"({torch.cuda.get_device_name(index)}); there is code for {', '.join(build.ARCHITECTURES.values())}",
            )
        if arch in self._failed:
            return (self._failed[arch],)
        try:
            import tvm_ffi  # noqa: F401
        except ImportError:
            return ("needs apache-tvm-ffi; pip install apache-tvm-ffi",)
        try:
            try:
                toolchain = build.find_toolchain()
            except build.BuildError:
                if build.built(arch) is None:  # made where there was a compiler
                    raise
            else:
                if not toolchain.supports(arch):
                    return (f"nvcc {toolchain.version_text} ({toolchain.origin}) does not know {arch}; a newer one is needed",)
                build.cache_root()
        except build.BuildError as error:
            return (str(error),)
        return ()

    def _library(self, device: torch.device) -> Library:
        index = _index(device)
        library = self._by_device.get(index)
        if library is None:
            with self._lock:
                library = self._by_device.get(index) or self._load(index)
                self._by_device[index] = library
        return library

    def _load(self, index: int) -> Library:
        from . import build

        arch = build.ARCHITECTURES[torch.cuda.get_device_capability(index)]
        if arch not in self._libraries:
            try:
                self._libraries[arch] = load_library(str(self.prepare(arch).library), arch)
            except build.BuildError as error:
                self._failed[arch] = str(error)
                self._unusable.pop(index, None)
                raise RuntimeError(f"backend 'cuda': {error}") from error
        return self._libraries[arch]

    @staticmethod
    def prepare(arch: str):
        """A sound build for ``arch``, made now if there is none."""
        from . import build

        try:
            toolchain = build.find_toolchain()
        except build.BuildError:
            entry = build.built(arch)
            if entry is None:
                raise
            fault = entry.fault()
            if fault is not None:
                raise build.BuildError(f"the build in {entry.folder} is damaged ({fault}), and there is no nvcc here") from None
            return entry
        return build.build(arch, toolchain=toolchain, say=_say)

    def compilations(self) -> int:
        return len(self._libraries)  # each built or found, and loaded, once

    # --- what it serves ----------------------------------------------------------------------

    def reasons_against(self, request) -> Reasons:
        reasons = []
        if isinstance(request, SlotsRequest):
            return ()
        if request.head_size_k not in HEAD_SIZES or request.head_size_v not in HEAD_SIZES:
            reasons.append(f"serves head sizes 64 and 128, not K = {request.head_size_k} and V = {request.head_size_v}")
        if request.q.dtype == torch.float32:
            reasons.append("serves bfloat16 and float16 inputs, not float32")
        if isinstance(request, PrefillRequest):
            if request.use_cp is True and not prefill_heuristics.can_split(request, self.facts(request.device)[0]):
                reasons.append("splits sequences, which use_cp=True demands, only on sm_90 and at K = V = 128")
            for name in ("initial_state", "final_state", "state_checkpoints"):
                states = getattr(request, name)
                if states is not None and states.dtype in _FP8 and self.facts(request.device)[0] < (8, 9):
                    reasons.append(f"{name} is {str(states.dtype).replace('torch.', '')}, which needs sm_89 or newer")
        return tuple(reasons)

    def priority_for(self, request) -> int | None:
        """Behind Triton where a prefill takes the portable path: on an H200 it is much slower (gdn_multi/policy.py), and
        there is no reason to think otherwise of cards on which neither has been measured."""
        if isinstance(request, PrefillRequest) and self.prefill_path(request) == prefill_heuristics.PORTABLE:
            return 150
        return self.priority

    def detail(self, request) -> str:
        from . import build

        arch = build.ARCHITECTURES.get(self.facts(request.device)[0], "") if request.device.type == "cuda" else ""
        if not isinstance(request, PrefillRequest):
            return arch
        path = self.prefill_path(request) if arch else prefill_heuristics.PORTABLE
        if path == prefill_heuristics.PORTABLE:
            return f"{arch} portable path".strip()
        if path.fused:
            return f"{arch} one launch, {path.rows} V rows a CTA".strip()
        if path.pairs:
            return f"{arch} wgmma path, one launch, a pair of CTAs a head where the copy engine can take the tensors"
        split = f", sequences split every {path.segment} chunks" if path.segment else ""
        operands = ", fp16 operands" if path.half else ""
        return f"{arch} wgmma path, {path.rows} V rows a CTA{split}{operands}"

    def prefill_path(self, request: PrefillRequest) -> prefill_heuristics.Path:
        """Which of the prefill's paths serves the call."""
        if self.forced_path is not None:
            return self.forced_path
        path = request.shared.get("cuda")
        if path is None:
            path = request.shared["cuda"] = prefill_heuristics.choose(request, *self.facts(request.device))
        return path

    def facts(self, device: torch.device) -> tuple[tuple[int, int], int]:
        """Compute capability and number of multiprocessors."""
        index = _index(device)
        facts = self._facts.get(index)
        if facts is None:
            properties = torch.cuda.get_device_properties(index)
            facts = self._facts[index] = ((properties.major, properties.minor), properties.multi_processor_count)
        return facts

    # --- the calls ---------------------------------------------------------------------------

    def decode(self, request: DecodeRequest) -> None:
        self._library(request.device).decode(*_decode_arguments(request))

    def express_decode(self, request: DecodeRequest) -> Callable[..., bool] | None:
        if request.batch == 0 or request.num_tokens == 0:
            return None
        return self._library(request.device).decode_again(*_decode_arguments(request))

    def express_decode_call(self, request: DecodeRequest, terms: tuple) -> Callable[[tuple], torch.Tensor | None] | None:
        library = self._library(request.device)
        if library.decode_short is None or request.batch == 0 or request.num_tokens == 0:
            return None
        made: list[Callable[[tuple], torch.Tensor | None]] = []
        library.decode_short(*_decode_arguments(request), id(terms), id(made))
        return made[0]

    def arguments_like(self, request, surroundings: tuple, values: tuple) -> Callable[[tuple], bool] | None:
        library = self._library(request.device)
        if library.arguments_like is None:
            return None
        made: list[Callable[[tuple], bool]] = []
        library.arguments_like(id(surroundings), id(values), id(made))
        return made[0]

    def page_slots(self, request: SlotsRequest) -> None:
        library, table = self._library(request.device), request.table
        if request.is_prefill:
            library.prefill_slots(
                request.cu_seqlens, table.page_indices, table.page_indptr, table.last_page_len, table.page_size,
                *request.out,
            )  # fmt: skip
        else:
            library.decode_slots(table.page_indices, table.page_indptr, table.last_page_len, *request.out)

    def prefill(self, request: PrefillRequest) -> None:
        pages = request.pages
        indices, indptr, last, page_size = (None, None, None, 0) if pages is None else (
            pages.page_indices, pages.page_indptr, pages.last_page_len, pages.page_size)  # fmt: skip
        self._library(request.device).prefill(
            request.q, request.k, request.v, request.g, request.beta, request.A_log, request.dt_bias,
            request.cu_seqlens, request.initial_state, request.read_rows, request.final_state, request.write_rows,
            request.state_checkpoints, request.checkpoint_starts, request.checkpoint_rows, request.prefix_lens,
            indices, indptr, last, request.output, request.scale, _GATE_CODES[request.gate], request.beta_is_logit,
            request.use_qk_l2norm, request.final_state_is_new, request.output_is_new, request.checkpoint_every, page_size,
            *self.prefill_path(request), self.scratch,
        )  # fmt: skip


def _decode_arguments(request: DecodeRequest) -> tuple:
    pages = request.pages
    indices, indptr, last = (None, None, None) if pages is None else (
        pages.page_indices, pages.page_indptr, pages.last_page_len)  # fmt: skip
    return (
        request.q, request.k, request.v, request.A_log, request.a, request.dt_bias, request.b,
        request.state, request.read_rows, request.write_rows, request.intermediate_states,
        indices, indptr, last, request.output, request.scale, request.use_qk_l2norm, request.update_state,
    )  # fmt: skip


def _index(device: torch.device) -> int:
    index: int | None = device.index
    return torch.cuda.current_device() if index is None else index
