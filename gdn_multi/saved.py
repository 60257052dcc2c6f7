"""Saved calls: a call of a public function as one file that another machine can repeat.

The file is a safetensors file: raw tensor bytes behind a JSON header, which also holds the function's name and its
other arguments (key ``gdn_multi`` of the metadata, itself JSON). Reading one runs no code; everything in it is checked
before it is used. Tensors keep their bits, strides and aliases: arguments that shared memory in the call share it
again. Of a large state pool only those rows are kept that the call's index tensors name; the others come back as zeros.

    save_call(folder, function, arguments)     used by dispatch when GDN_MULTI_SAVE is set; never raises
    load_call(path) -> SavedCall               ``.arguments(device)`` makes fresh tensors each time it is asked
    SavedCall.of(function, arguments)          the same without a file
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

FORMAT = 1
FUNCTIONS = (
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_paged",
    "gated_delta_rule_decode_pretranspose",
    "gated_delta_rule_decode_paged",
    "gdn_paged_prefill_slots",
    "gdn_paged_decode_slots",
)
#: Arguments that are pools of states, and those that hold rows of them.
POOLS = ("initial_state", "output_state", "state_checkpoints", "state_pool")
INDICES = (
    "state_indices", "output_state_indices", "checkpoint_state_indices", "page_indices", "initial_state_indices",
)  # fmt: skip
#: Pools of more bytes than this are saved by rows.
WHOLE_BYTES = 64 << 20
#: Longest JSON header that is read.
HEADER_BYTES = 16 << 20

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_counter = itertools.count()


class SavedCallError(ValueError):
    """The file is no saved call, or is damaged."""


@dataclass
class _Memory:
    """A piece of memory that one or several arguments look at: all of it, or some rows of a pool."""

    data: torch.Tensor  #: on the CPU, 1-D; with rows: [len(rows), ...]
    numel: int  #: elements in all
    rows: list[int] | None = None
    row_stride: int = 0  #: elements between rows

    def fresh(self, device: torch.device) -> torch.Tensor:
        if self.rows is None:
            return self.data.to(device, copy=True)
        memory = torch.zeros(self.numel, dtype=self.data.dtype, device=device)
        size = self.data[0].numel() if self.rows else 0
        for row, data in zip(self.rows, self.data):
            memory[row * self.row_stride : row * self.row_stride + size] = data.reshape(-1).to(device)
        return memory


@dataclass
class SavedCall:
    function: str
    #: Argument name -> JSON value; tensors are {"memory": n, "shape": [...], "stride": [...], "offset": n, "cpu": bool}
    values: dict[str, Any]
    memories: list[_Memory]
    info: dict[str, Any] = field(default_factory=dict)  #: where and with which versions it was saved

    @classmethod
    def of(cls, function: str, arguments: dict[str, Any]) -> SavedCall:
        if function not in FUNCTIONS:
            raise ValueError(f"function must be one of {', '.join(FUNCTIONS)}, got {function!r}")
        memories, where = _memories(arguments)
        mixed = any(tensor.device.type != "cpu" for _, tensor in _tensors(arguments))
        values = {name: _encode(value, where, mixed) for name, value in arguments.items()}
        return cls(function, values, memories, _info(arguments))

    def arguments(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        """The call's arguments with new tensors on ``device`` (host tensors stay on the CPU)."""
        device = torch.device(device)
        on_cpu = {view["memory"] for view in _views(self.values) if view.get("cpu")}
        made = [m.fresh(torch.device("cpu") if i in on_cpu else device) for i, m in enumerate(self.memories)]
        return {name: _decode(value, made) for name, value in self.values.items()}


# --- from arguments ----------------------------------------------------------------------------------


def _tensors(arguments: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    found = []
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            found.append((name, value))
        elif isinstance(value, tuple) and hasattr(value, "_fields"):
            found += [(name, item) for item in value if isinstance(item, torch.Tensor)]
    return found


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First and one past the last element of the storage that the tensor reaches."""
    if tensor.numel() == 0:
        return tensor.storage_offset(), tensor.storage_offset()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.storage_offset(), tensor.storage_offset() + last + 1


def _memories(arguments: dict[str, Any]):
    """The pieces of memory behind the tensors, and id(tensor) -> (piece, its first element in the storage)."""
    groups: dict[tuple, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in _tensors(arguments):
        if tensor.dtype not in _NAMES:
            continue
        key = (tensor.untyped_storage().data_ptr(), tensor.device, tensor.dtype)
        if tensor.numel() == 0:
            key += (id(tensor),)
        groups.setdefault(key, []).append((name, tensor))
    memories: list[_Memory] = []
    where: dict[int, tuple[int, int]] = {}
    for members in groups.values():
        extents = [_extent(tensor) for _, tensor in members]
        low, high = min(e[0] for e in extents), max(e[1] for e in extents)
        for _, tensor in members:
            where[id(tensor)] = (len(memories), low)
        memories.append(_rows_of(members, arguments, low, high) or _whole(members[0][1], low, high))
    return memories, where


def _whole(tensor: torch.Tensor, low: int, high: int) -> _Memory:
    flat = tensor.detach().as_strided((high - low,), (1,), low)
    return _Memory(flat.cpu().clone(), high - low)


def _rows_of(members, arguments, low: int, high: int) -> _Memory | None:
    """A large pool by the rows that the call names; None where that is not possible or not worth it."""
    name, pool = members[0]
    same = all(n in POOLS and (t.shape, t.stride()) == (pool.shape, pool.stride()) for n, t in members)
    if not same or pool.dim() != 4 or (high - low) * pool.element_size() <= WHOLE_BYTES:
        return None
    if pool.stride()[1:] != (pool.shape[2] * pool.shape[3], pool.shape[3], 1) or pool.stride(0) < pool[0].numel():
        return None
    named = set()
    for index in [arguments.get(n) for n in INDICES] + list(arguments.get("slots") or ())[:2]:
        if isinstance(index, torch.Tensor) and index.dtype in (torch.int32, torch.int64):
            named.update(index.tolist())
    if not named:
        return None
    rows = sorted(row for row in named if 0 <= row < pool.shape[0])
    data = torch.stack([pool[row].detach().cpu() for row in rows]) if rows else pool[:0].detach().cpu()
    return _Memory(data.clone(), high - low, rows, pool.stride(0))


def _encode(value: Any, where, mixed: bool) -> Any:
    if isinstance(value, torch.Tensor):
        if id(value) not in where:
            return {"unsaved": f"tensor of {value.dtype}"}
        memory, low = where[id(value)]
        return {
            "memory": memory,
            "shape": list(value.shape),
            "stride": list(value.stride()),
            "offset": value.storage_offset() - low,
            "cpu": mixed and value.device.type == "cpu",  # a host tensor beside others on a GPU stays one
        }
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {
            "tuple": type(value).__name__,
            "items": {name: _encode(item, where, mixed) for name, item in value._asdict().items()},
        }
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)) and type(value) in (int, float):
        return value
    if isinstance(value, (list, tuple)) and all(type(item) is int for item in value):
        return {"ints": list(value)}
    return {"unsaved": f"{type(value).__name__}: {str(value)[:100]}"}


def _info(arguments: dict[str, Any]) -> dict[str, Any]:
    import gdn_multi

    from . import env

    devices = {tensor.device for _, tensor in _tensors(arguments) if tensor.device.type == "cuda"}
    hidden = (env.SAVE, env.SAVE_WHICH, env.CACHE_DIR)
    return {
        "gdn_multi": gdn_multi.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": ", ".join(sorted({torch.cuda.get_device_name(d) for d in devices})) or "cpu",
        "environment": {name: value for name, value in env.given().items() if name not in hidden},
    }


# --- to arguments ------------------------------------------------------------------------------------


def _views(values: Any):
    if isinstance(values, dict):
        if "memory" in values:
            yield values
        else:
            for value in values.values():
                yield from _views(value)


def _decode(value: Any, memories: Sequence[torch.Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    if "memory" in value:
        return memories[value["memory"]].as_strided(value["shape"], value["stride"], value["offset"])
    if "ints" in value:
        return list(value["ints"])
    if "tuple" in value:
        from .slots import GDNPagedDecodeSlots, GDNPagedPrefillSlots

        kinds = {kind.__name__: kind for kind in (GDNPagedDecodeSlots, GDNPagedPrefillSlots)}
        return kinds[value["tuple"]](**{name: _decode(item, memories) for name, item in value["items"].items()})
    raise SavedCallError(f"an argument could not be saved ({value.get('unsaved')}), so the call cannot be repeated")


# --- files -------------------------------------------------------------------------------------------


def save_call(folder: str, function: str, arguments: dict[str, Any]) -> str | None:
    """Write a call to a new file in ``folder`` and return its path. A failure is a warning: the call goes on."""
    try:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a CUDA graph is being captured")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        stamp = time.strftime("%Y%m%d-%H%M%S")
        path = os.path.join(folder, f"{function}-{stamp}-{os.getpid()}-{next(_counter)}.safetensors")
        write(SavedCall.of(function, arguments), path)
    except Exception as error:
        warnings.warn(f"GDN_MULTI_SAVE: the call was not saved: {error}", RuntimeWarning, stacklevel=2)
        return None
    return path


def write(call: SavedCall, path: str) -> None:
    """Write ``call`` to ``path``, which appears whole or not at all."""
    if sys.byteorder != "little":
        raise RuntimeError("the file's bytes are those of a little-endian machine")
    header: dict[str, Any] = {}
    layout, position = [], 0
    for number, memory in enumerate(call.memories):
        data = memory.data.contiguous()
        size = data.numel() * data.element_size()
        name = f"memory{number}"
        header[name] = {
            "dtype": _NAMES[data.dtype], "shape": list(data.shape), "data_offsets": [position, position + size],
        }  # fmt: skip
        position += size
        layout.append({"numel": memory.numel, "rows": memory.rows, "row_stride": memory.row_stride})
    content = {
        "format": FORMAT, "function": call.function, "arguments": call.values, "memories": layout, "info": call.info,
    }  # fmt: skip
    header["__metadata__"] = {"gdn_multi": json.dumps(content)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    partial = f"{path}.{os.getpid()}.part"
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for memory in call.memories:
                data = memory.data.contiguous()
                size = data.numel() * data.element_size()
                if size:
                    file.write((ctypes.c_char * size).from_address(data.data_ptr()))
        os.replace(partial, path)
    finally:
        if os.path.exists(partial):
            os.unlink(partial)


def load_call(path: str | os.PathLike) -> SavedCall:
    """Read a saved call. Raises SavedCallError for a file that is none; runs no code from it."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= HEADER_BYTES:
                raise SavedCallError("no safetensors header")
            header = json.loads(file.read(length))
            data = bytearray(file.read())
        content = json.loads(header.pop("__metadata__")["gdn_multi"])
        if content["format"] != FORMAT:
            raise SavedCallError(f"format {content['format']}, this version reads {FORMAT}")
        if content["function"] not in FUNCTIONS:
            raise SavedCallError(f"unknown function {content['function']!r}")
        memories = [
            _memory(header[f"memory{number}"], layout, data) for number, layout in enumerate(content["memories"])
        ]
        values = content["arguments"]
        if not isinstance(values, dict):
            raise SavedCallError("the arguments are no table")
        for view in _views(values):
            _check_view(view, memories)
        return SavedCall(content["function"], values, memories, content.get("info", {}))
    except SavedCallError as error:
        raise SavedCallError(f"{os.fspath(path)}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise SavedCallError(f"{os.fspath(path)} is no saved call: {type(error).__name__}: {error}") from None


def _counts(values: Any, what: str) -> list[int]:
    if not isinstance(values, list) or any(type(n) is not int or n < 0 for n in values):
        raise SavedCallError(f"{what} must be a list of counts")
    return values


def _product(sizes: Sequence[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


def _memory(entry: dict[str, Any], layout: dict[str, Any], data: bytearray) -> _Memory:
    dtype = _DTYPES[entry["dtype"]]
    shape = _counts(entry["shape"], "shape")
    start, end = _counts(entry["data_offsets"], "data_offsets")
    size = torch.empty((), dtype=dtype).element_size()
    if not start <= end <= len(data) or end - start != _product(shape) * size:
        raise SavedCallError("a tensor reaches beyond the file")
    if end > start:
        tensor = torch.frombuffer(data, dtype=torch.uint8, count=end - start, offset=start).clone()
    else:
        tensor = torch.empty(0, dtype=torch.uint8)
    tensor = tensor.view(dtype).reshape(shape)
    (numel,) = _counts([layout["numel"]], "numel")
    rows = layout["rows"]
    if rows is None:
        if shape != [numel]:
            raise SavedCallError("a piece of memory has the wrong size")
        return _Memory(tensor, numel)
    rows, (stride,) = _counts(rows, "rows"), _counts([layout["row_stride"]], "row_stride")
    width = _product(shape[1:])
    if len(shape) != 4 or shape[0] != len(rows) or any(row * stride + width > numel for row in rows):
        raise SavedCallError("rows of a pool reach beyond it")
    return _Memory(tensor, numel, rows, stride)


def _check_view(view: dict[str, Any], memories: Sequence[_Memory]) -> None:
    (number, offset) = _counts([view["memory"], view["offset"]], "memory and offset")
    shape, stride = _counts(view["shape"], "shape"), _counts(view["stride"], "stride")
    if number >= len(memories) or len(shape) != len(stride):
        raise SavedCallError("an argument names memory that is not there")
    last = offset + sum((n - 1) * s for n, s in zip(shape, stride)) if 0 not in shape else offset - 1
    if last >= memories[number].numel:
        raise SavedCallError("an argument reaches beyond its memory")
