"""Checks of the public functions' arguments, and the requests they become.

Every error names the argument, what was expected and what came; scalars are looked at first, nothing is written here.
``TypeError``: a wrong Python type. ``ValueError``: a wrong value, shape, dtype, device, stride or combination.
The order of the checks is part of the contract: scalars, then which arguments go together, then tensors.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch

from . import env
from .request import CHUNK, DecodeRequest, PageTable, PrefillRequest, SlotsRequest
from .slots import slots_request

INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INDEX_DTYPES = (torch.int32, torch.int64)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PREFILL_STATE_DTYPES = STATE_DTYPES + FP8_DTYPES
#: The three arguments that the specification calls slot arguments.
SLOT_ARGUMENTS = ("output_state_indices", "checkpoint_state_indices", "prefix_lens")
#: Backends that the specification says reject slot arguments.
NO_SLOT_BACKENDS = ("cudnn", "cake_gdn")


# --- messages ------------------------------------------------------------------------------------


def _names(dtypes: Sequence[torch.dtype]) -> str:
    names = [str(d).replace("torch.", "") for d in dtypes]
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " or " + names[-1]


def _type(value: Any) -> str:
    return "None" if value is None else f"{type(value).__name__} {value!r}"[:80]


# --- scalars -------------------------------------------------------------------------------------


def _bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {_type(value)}")


def _scale(value: Any, head_size: int) -> float:
    if value is None:
        return head_size**-0.5
    return float(value)


def _check_scale(value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        hint = "; pass a Python float (reading a tensor would wait for the device)"
        got = f"a tensor{hint}" if isinstance(value, torch.Tensor) else _type(value)
        raise TypeError(f"scale must be a number or None, got {got}")
    try:
        finite = math.isfinite(value)
    except OverflowError:  # an int beyond the floats
        finite = False
    if not finite:
        raise ValueError(f"scale must be finite, got {str(value)[:40]}")


def _check_backend_type(value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError(f"backend must be the name of a backend or 'auto', got {_type(value)}")


def _check_page_size(value: Any) -> None:
    if type(value) is not int:
        raise ValueError(f"page_size must be a Python int, got {_type(value)}")
    if value <= 0 or value % CHUNK:
        raise ValueError(f"page_size must be a positive multiple of {CHUNK}, got {value}")


# --- tensors -------------------------------------------------------------------------------------


def _tensor(name: str, value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {_type(value)}")
    if value.layout is not torch.strided or value.is_nested:
        kind = "a nested tensor" if value.is_nested else f"one of layout {str(value.layout).replace('torch.', '')}"
        raise ValueError(f"{name} must be a dense tensor, got {kind}")
    if value.is_neg():
        raise ValueError(f"{name} is a view whose sign is still to be applied; pass {name}.resolve_neg()")
    if value.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} requires grad, and gdn_multi is for inference: call under torch.no_grad() or pass {name}.detach()"
        )
    return value


def _check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name} must be on q's device {device}, got {tensor.device}")


def _check_dtype(name: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype], why: str = "") -> None:
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} must be {_names(dtypes)}{why}, got {_names((tensor.dtype,))}")


def _check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...], meaning: str) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {meaning} = {list(shape)}, got {list(tensor.shape)}")


def _check_last_contiguous(name: str, tensor: torch.Tensor) -> None:
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(
            f"{name} must be contiguous in its last dimension (other strides are free), got strides "
            f"{tuple(tensor.stride())}"
        )


def _check_writable(name: str, tensor: torch.Tensor) -> None:
    """Elements that share memory (an expanded dimension) can't be written."""
    for size, stride in zip(tensor.shape, tensor.stride()):
        if stride == 0 and size > 1:
            raise ValueError(
                f"{name} is written by the call and must not repeat memory (a dimension of size {size} has stride 0: "
                f"an expanded tensor), got strides {tuple(tensor.stride())}"
            )


def _index(name: str, value: Any, length: None | int | tuple[int, ...], device: torch.device, meaning: str = ""):
    """A 1-D contiguous int32 or int64 tensor on q's device, of the given length (or one of the lengths, or any)."""
    tensor = _tensor(name, value)
    _check_dtype(name, tensor, INDEX_DTYPES)
    lengths = None if length is None else (length,) if isinstance(length, int) else length
    if tensor.ndim != 1 or (lengths is not None and tensor.shape[0] not in lengths):
        wanted = "1-D" if lengths is None else f"1-D with {' or '.join(map(str, lengths))} entries"
        raise ValueError(f"{name} must be {wanted}{meaning}, got shape {list(tensor.shape)}")
    _check_device(name, tensor, device)
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tuple(tensor.stride())}")
    return tensor


def _state(
    name: str,
    value: Any,
    sizes: tuple[int, int, int],
    device: torch.device,
    *,
    dtypes: Sequence[torch.dtype],
    rows: int | None = None,
    rows_are: str = "rows",
    written: bool = False,
) -> torch.Tensor:
    """A state tensor or pool [rows, heads, V, K] with K contiguous."""
    tensor = _tensor(name, value)
    heads, v, k = sizes
    layout = f"[{rows_are}, heads, V, K] = [{'*' if rows is None else rows}, {heads}, {v}, {k}]"
    if tensor.ndim != 4:
        extra = " (a 5-D pool is another library's layout and is not served)" if tensor.ndim == 5 else ""
        raise ValueError(f"{name} must have the 4-D layout {layout}{extra}, got shape {list(tensor.shape)}")
    if tuple(tensor.shape[1:]) != (heads, v, k) or (rows is not None and tensor.shape[0] != rows):
        hint = ""
        if v != k and tuple(tensor.shape[1:]) == (heads, k, v):
            hint = "; states are V-major, with K contiguous"
        raise ValueError(f"{name} must have the 4-D layout {layout}, got shape {list(tensor.shape)}{hint}")
    _check_dtype(name, tensor, dtypes)
    _check_device(name, tensor, device)
    if tensor.stride(-1) != 1 and k > 1:
        raise ValueError(f"{name} must be contiguous in K, its last dimension, got strides {tuple(tensor.stride())}")
    if written:
        _check_writable(name, tensor)
    return tensor


def _output(value: Any, shape: tuple[int, ...], meaning: str, q: torch.Tensor) -> tuple[torch.Tensor, bool]:
    if value is None:
        return torch.empty(shape, dtype=q.dtype, device=q.device), True
    output = _tensor("output", value)
    _check_shape("output", output, shape, meaning)
    _check_dtype("output", output, (q.dtype,), " (q's dtype)")
    _check_device("output", output, q.device)
    _check_last_contiguous("output", output)
    _check_writable("output", output)
    return output, False


def _gate_parameter(name: str, value: Any, heads: int, device: torch.device) -> torch.Tensor:
    tensor = _tensor(name, value)
    _check_shape(name, tensor, (heads,), "[heads of the state]")
    _check_dtype(name, tensor, STATE_DTYPES)
    _check_device(name, tensor, device)
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tuple(tensor.stride())}")
    return tensor


def _inputs(q: Any, k: Any, v: Any, ndim: int, layout: tuple[str, str, str]) -> None:
    """What q, k and v have in common: types, ranks, dtype, device, sizes and the last stride."""
    for name, value, dims in zip("qkv", (q, k, v), layout):
        tensor = _tensor(name, value)
        if tensor.ndim != ndim:
            raise ValueError(f"{name} must be {ndim}-D {dims}, got shape {list(tensor.shape)}")
    _check_dtype("q", q, INPUT_DTYPES)
    for name, tensor in (("k", k), ("v", v)):
        _check_dtype(name, tensor, (q.dtype,), " (q's dtype)")
        _check_device(name, tensor, q.device)
        if tensor.shape[:-2] != q.shape[:-2]:
            raise ValueError(
                f"{name} must have as many tokens as q, {list(q.shape[:-2])}, got shape {list(tensor.shape)}"
            )
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k must have q's head size K = {q.shape[-1]}, got shape {list(k.shape)}")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if 0 in tensor.shape[-2:]:
            raise ValueError(f"{name} must have at least one head of at least one element, got {list(tensor.shape)}")
        _check_last_contiguous(name, tensor)


def _heads(hq: int, hk: int, hv: int) -> int:
    """Heads of output and state; ValueError unless GVA, GQA or equal heads."""
    if (hq == hk and hv % hq == 0) or (hk == hv and hq % hk == 0):
        return max(hq, hv)
    raise ValueError(
        f"the head counts of q, k and v must be GVA (q = k, v a multiple of q) or GQA (k = v, q a multiple of k), "
        f"got q {hq}, k {hk}, v {hv}"
    )


# --- sequences -----------------------------------------------------------------------------------


def _bounds(values: Sequence[int], num_tokens: int, name: str) -> None:
    if values[0] < 0 or values[-1] > num_tokens:
        raise ValueError(
            f"{name} must lie in [0, {num_tokens}], the tokens of q, got first {values[0]} and last {values[-1]}"
        )
    for i, (a, b) in enumerate(zip(values, values[1:])):
        if b < a:
            raise ValueError(f"{name} must not decrease, got {a} and then {b} at entry {i + 1}")


def _cu_seqlens(value: Any, device: torch.device) -> torch.Tensor:
    if value is None:
        raise ValueError(
            "cu_seqlens is required, got None: [num_seqs + 1] offsets; for one sequence of T tokens pass "
            "torch.tensor([0, T], dtype=torch.int32, device=q.device)"
        )
    tensor = _index("cu_seqlens", value, None, device)
    if tensor.shape[0] < 2:
        raise ValueError(f"cu_seqlens must have num_seqs + 1 >= 2 entries, got {tensor.shape[0]}")
    return tensor


def _host_seqlens(value: Any, length: int, num_tokens: int) -> tuple[int, ...]:
    name = "cu_seqlens_cpu"
    if isinstance(value, torch.Tensor):
        _tensor(name, value)
        if value.device.type != "cpu" or value.dtype not in INDEX_DTYPES or value.ndim != 1:
            raise ValueError(
                f"{name} must be a 1-D int32 or int64 tensor on the CPU or a sequence of ints, got "
                f"{_names((value.dtype,))} of shape {list(value.shape)} on {value.device}"
            )
        values = value.tolist()
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        if not all(isinstance(x, numbers.Integral) and not isinstance(x, bool) for x in value):
            raise TypeError(f"{name} must be a sequence of ints or a CPU tensor, got {_type(value)}")
        values = [int(x) for x in value]
    else:
        raise TypeError(f"{name} must be a sequence of ints or a CPU tensor, got {_type(value)}")
    if len(values) != length:
        raise ValueError(f"{name} must have the {length} entries of cu_seqlens, got {len(values)}")
    _bounds(values, num_tokens, name)
    return tuple(values)


def _longest(
    cu_seqlens: torch.Tensor, cu_seqlens_cpu: Any, max_seqlen: int | None, num_tokens: int
) -> tuple[tuple[int, ...] | None, int]:
    """(host copy of cu_seqlens or None, upper bound on the longest sequence). Reads cu_seqlens only on the CPU."""
    host = None
    if cu_seqlens_cpu is not None:
        host = _host_seqlens(cu_seqlens_cpu, cu_seqlens.shape[0], num_tokens)
    if cu_seqlens.device.type == "cpu":
        actual = tuple(cu_seqlens.tolist())
        _bounds(actual, num_tokens, "cu_seqlens")
        if host is not None and host != actual:
            raise ValueError("cu_seqlens_cpu must hold the values of cu_seqlens, got other values")
        host = actual
    longest = num_tokens if host is None else max(b - a for a, b in zip(host, host[1:]))
    if max_seqlen is not None:
        if host is not None and max_seqlen < longest:
            raise ValueError(f"max_seqlen must be at least the longest sequence, {longest} tokens, got {max_seqlen}")
        longest = min(longest, max_seqlen)
    return host, longest


def _max_seqlen(value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"max_seqlen must be an int or None, got {_type(value)}")
    if value < 0:
        raise ValueError(f"max_seqlen must not be negative, got {value}")
    return int(value)


def page_table(
    page_indices: Any, page_indptr: Any, last_page_len: Any, num_seqs: int, device: torch.device, page_size: int = 0
) -> PageTable:
    """A checked page table."""
    indices = _index("page_indices", page_indices, None, device)
    indptr = _index("page_indptr", page_indptr, num_seqs + 1, device, " (sequences + 1)")
    last = _index("last_page_len", last_page_len, num_seqs, device, " (one a sequence)")
    return PageTable(page_indices=indices, page_indptr=indptr, last_page_len=last, page_size=page_size)


def _slots(slots: Any, fields: tuple[str, ...], num_seqs: int, device: torch.device, made_by: str):
    if not isinstance(slots, tuple):
        raise TypeError(f"slots must be the named tuple that {made_by} returns, got {_type(slots)}")
    if len(slots) != len(fields):
        raise ValueError(f"slots must have the {len(fields)} entries {', '.join(fields)}, got {len(slots)}")
    for field, value in zip(fields, slots):
        name = f"slots.{field}"
        tensor = _tensor(name, value)
        if (
            tensor.dtype != torch.int32
            or tuple(tensor.shape) != (num_seqs,)
            or tensor.device != device
            or not tensor.is_contiguous()
        ):
            raise ValueError(
                f"{name} must be a contiguous int32 tensor of shape [{num_seqs}] on {device}, got "
                f"{_names((tensor.dtype,))} of shape {list(tensor.shape)} on {tensor.device}"
                + ("" if tensor.is_contiguous() else f" with strides {tuple(tensor.stride())}")
            )
    return slots


# --- prefill -------------------------------------------------------------------------------------


def _check_prefill_scalars(scale, use_qk_l2norm, gate_domain, use_gate_in_kernel, beta_is_logit, backend) -> None:
    _check_scale(scale)
    _bool("use_qk_l2norm_in_kernel", use_qk_l2norm)
    if not isinstance(gate_domain, str):
        raise TypeError(f"gate_domain must be 'linear' or 'log', got {_type(gate_domain)}")
    if gate_domain not in ("linear", "log"):
        raise ValueError(f"gate_domain must be 'linear' or 'log', got {gate_domain!r}")
    _bool("use_gate_in_kernel", use_gate_in_kernel)
    _bool("beta_is_logit", beta_is_logit)
    _check_backend_type(backend)


def check_no_slots(given: tuple[str, ...], backend: str, source: str, paged: bool = False) -> None:
    """The specification's refusal: these backends reject slot arguments, wherever their name came from."""
    if given and backend in NO_SLOT_BACKENDS:
        made = " (a paged call is made of them)" if paged else ""
        raise ValueError(
            f"{', '.join(given)}{made}: backend {backend!r} ({source}) does not take slot arguments; "
            f"use backend 'auto', 'cuda', 'triton' or 'torch'"
        )


def _gates(g, beta, gate_domain, use_gate_in_kernel, A_log, dt_bias, beta_is_logit, q, heads) -> str:
    """Check gates and weights; return how g is to be read."""
    given = [name for name, value in (("A_log", A_log), ("dt_bias", dt_bias)) if value is not None]
    if use_gate_in_kernel:
        missing = [n for n, x in (("g", g), ("A_log", A_log), ("dt_bias", dt_bias)) if x is None]
        if missing:
            raise ValueError(f"use_gate_in_kernel=True needs g, A_log and dt_bias, got None for {', '.join(missing)}")
    elif given:
        raise ValueError(f"{' and '.join(given)} {'is' if len(given) == 1 else 'are'} read only with use_gate_in_kernel=True, got False")
    if beta_is_logit and beta is None:
        raise ValueError("beta_is_logit=True needs beta, got None")
    for name, value, raw, raw_name in (
        ("g", g, use_gate_in_kernel, "use_gate_in_kernel"),
        ("beta", beta, beta_is_logit, "beta_is_logit"),
    ):
        if value is None:
            continue
        tensor = _tensor(name, value)
        _check_shape(name, tensor, (q.shape[0], heads), "[tokens, heads of the state]")
        if raw:
            _check_dtype(name, tensor, (torch.float32, q.dtype), f" (float32 or q's dtype with {raw_name}=True)")
        else:
            _check_dtype(name, tensor, (torch.float32,), f" (q's dtype too only with {raw_name}=True)")
        _check_device(name, tensor, q.device)
    if use_gate_in_kernel:
        _gate_parameter("A_log", A_log, heads, q.device)
        _gate_parameter("dt_bias", dt_bias, heads, q.device)
        return "raw"
    return "none" if g is None else gate_domain


def _tokens(q, k, v, g, beta, gate_domain, use_gate_in_kernel, A_log, dt_bias, beta_is_logit, cu_seqlens):
    """Check the tokens of a prefill; return (how g is to be read, sequences, (state heads, V, K))."""
    _inputs(q, k, v, 3, ("[tokens, q heads, K]", "[tokens, k heads, K]", "[tokens, v heads, V]"))
    heads = _heads(q.shape[1], k.shape[1], v.shape[1])
    gate = _gates(g, beta, gate_domain, use_gate_in_kernel, A_log, dt_bias, beta_is_logit, q, heads)
    num_seqs = _cu_seqlens(cu_seqlens, q.device).shape[0] - 1
    return gate, num_seqs, (heads, v.shape[2], q.shape[2])


def prefill_request(
    q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel, output,
    output_state, state_checkpoints, checkpoint_cu_starts, checkpoint_every_n_tokens, use_cp, state_indices, backend,
    max_seqlen, gate_domain, use_gate_in_kernel, A_log, dt_bias, beta_is_logit, cu_seqlens_cpu, output_state_indices,
    checkpoint_state_indices, prefix_lens,
) -> PrefillRequest:  # fmt: skip
    """The request of a ``chunk_gated_delta_rule`` call."""
    # scalars
    _check_prefill_scalars(
        scale, use_qk_l2norm_in_kernel, gate_domain, use_gate_in_kernel, beta_is_logit, backend
    )
    _bool("output_final_state", output_final_state)
    every = checkpoint_every_n_tokens
    if isinstance(every, bool) or not isinstance(every, numbers.Integral):
        raise TypeError(f"checkpoint_every_n_tokens must be an int, got {_type(every)}")
    every = int(every)
    if every < 0 or every % CHUNK:
        raise ValueError(f"checkpoint_every_n_tokens must be 0 or a positive multiple of {CHUNK}, got {every}")
    if not isinstance(use_cp, bool) and use_cp != "auto":
        error = ValueError if isinstance(use_cp, str) else TypeError
        raise error(f"use_cp must be 'auto', True or False, got {_type(use_cp)}")
    max_seqlen = _max_seqlen(max_seqlen)

    # which arguments go together
    slot_values = (output_state_indices, checkpoint_state_indices, prefix_lens)
    slot_arguments = tuple(name for name, value in zip(SLOT_ARGUMENTS, slot_values) if value is not None)
    if slot_arguments and use_cp is True:
        raise ValueError(
            f"{', '.join(slot_arguments)}: use_cp=True does not take slot arguments; pass use_cp='auto' or False"
        )
    check_no_slots(slot_arguments, backend, "the backend argument")
    if output_state_indices is not None:
        missing = [
            text
            for text, given in (
                ("state_indices", state_indices is not None),
                ("output_state", output_state is not None),
                ("output_final_state=True", output_final_state),
            )
            if not given
        ]
        if missing:
            raise ValueError(
                f"output_state_indices needs state_indices, output_state and output_final_state=True, "
                f"got a call without {', '.join(missing)}"
            )
    if every == 0:
        for name, value in (
            ("checkpoint_state_indices", checkpoint_state_indices),
            ("prefix_lens", prefix_lens),
            ("state_checkpoints", state_checkpoints),
            ("checkpoint_cu_starts", checkpoint_cu_starts),
        ):
            if value is not None:
                raise ValueError(f"{name} needs checkpoint_every_n_tokens > 0, got 0")
    elif state_checkpoints is None or checkpoint_cu_starts is None:
        missing = "state_checkpoints" if state_checkpoints is None else "checkpoint_cu_starts"
        raise ValueError(
            f"checkpoint_every_n_tokens = {every} needs state_checkpoints and checkpoint_cu_starts, "
            f"got None for {missing}"
        )
    if output_state is not None and not output_final_state:
        raise ValueError("output_state is written only with output_final_state=True, got output_final_state=False")
    if state_indices is not None and output_final_state and output_state is None:
        raise ValueError(
            "state_indices with output_final_state=True needs output_state, the pool that the final states go to "
            "(it may be initial_state), got None"
        )
    if state_indices is not None and initial_state is None and output_state is None:
        raise ValueError("state_indices needs initial_state or output_state, got None for both")

    # tensors
    gate, num_seqs, sizes = _tokens(
        q, k, v, g, beta, gate_domain, use_gate_in_kernel, A_log, dt_bias, beta_is_logit, cu_seqlens
    )
    heads = sizes[0]
    rows = num_seqs if state_indices is None else None
    rows_are = "sequences" if state_indices is None else "pool rows"
    common = dict(dtypes=PREFILL_STATE_DTYPES, rows=rows, rows_are=rows_are)
    if initial_state is not None:
        _state("initial_state", initial_state, sizes, q.device, **common)
    if output_state is not None:
        _state("output_state", output_state, sizes, q.device, written=True, **common)
    if state_indices is not None:
        _index("state_indices", state_indices, num_seqs, q.device, " (one a sequence)")
    if output_state_indices is not None:
        _index("output_state_indices", output_state_indices, num_seqs, q.device, " (one a sequence)")
    if every:
        _state(
            "state_checkpoints", state_checkpoints, sizes, q.device, dtypes=PREFILL_STATE_DTYPES, rows_are="rows",
            written=True,
        )  # fmt: skip
        starts = num_seqs + 1 if checkpoint_state_indices is None else (num_seqs, num_seqs + 1)
        _index("checkpoint_cu_starts", checkpoint_cu_starts, starts, q.device)
        if checkpoint_state_indices is not None:
            _index("checkpoint_state_indices", checkpoint_state_indices, None, q.device)
            _check_dense_rows("state_checkpoints", state_checkpoints, "with checkpoint_state_indices ")
        if prefix_lens is not None:
            _index("prefix_lens", prefix_lens, num_seqs, q.device, " (one a sequence)")
    host, longest = _longest(cu_seqlens, cu_seqlens_cpu, max_seqlen, q.shape[0])
    invariant = env.flag(env.BATCH_INVARIANT)
    output, output_is_new = _output(output, (q.shape[0], heads, v.shape[2]), "[tokens, heads, V]", q)
    final_state_is_new = output_final_state and output_state is None
    if final_state_is_new:
        output_state = torch.empty((num_seqs, *sizes), dtype=torch.float32, device=q.device)
    write_rows = None
    if output_final_state:
        write_rows = state_indices if output_state_indices is None else output_state_indices
    return PrefillRequest(
        function="chunk_gated_delta_rule",
        gate=gate,
        cu_seqlens_cpu=host,
        max_seqlen=longest,
        initial_state=initial_state,
        read_rows=None if initial_state is None else state_indices,
        final_state=output_state,
        write_rows=write_rows,
        final_state_is_new=final_state_is_new,
        checkpoint_every=every,
        state_checkpoints=state_checkpoints,
        checkpoint_starts=checkpoint_cu_starts,
        checkpoint_rows=checkpoint_state_indices,
        prefix_lens=prefix_lens,
        pages=None,
        output=output,
        output_is_new=output_is_new,
        use_cp=use_cp,
        batch_invariant=invariant,
        precise=env.flag(env.PRECISE),
        slot_arguments=slot_arguments,
        **_token_fields(q, k, v, g, beta, A_log, dt_bias, beta_is_logit, use_qk_l2norm_in_kernel, scale, cu_seqlens),
        is_paged=False,
    )


def _token_fields(q, k, v, g, beta, A_log, dt_bias, beta_is_logit, use_qk_l2norm, scale, cu_seqlens) -> dict:
    """The fields of a PrefillRequest that describe the tokens, the same for every prefill function."""
    return dict(
        num_tokens=q.shape[0],
        num_seqs=cu_seqlens.shape[0] - 1,
        num_q_heads=q.shape[1],
        num_k_heads=k.shape[1],
        num_v_heads=v.shape[1],
        num_heads=max(q.shape[1], v.shape[1]),
        head_size_k=q.shape[2],
        head_size_v=v.shape[2],
        device=q.device,
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        A_log=A_log,
        dt_bias=dt_bias,
        beta_is_logit=beta_is_logit,
        use_qk_l2norm=use_qk_l2norm,
        scale=_scale(scale, q.shape[2]),
        cu_seqlens=cu_seqlens,
    )


def _check_dense_rows(name: str, pool: torch.Tensor, when: str = "") -> None:
    _, heads, v, k = pool.shape
    if pool.shape[0] and tuple(pool.stride())[1:] != (v * k, k, 1):
        raise ValueError(
            f"{name} {when}must have rows that are dense [heads, V, K] blocks, strides (any, {v * k}, {k}, 1), "
            f"got strides {tuple(pool.stride())}; the row stride may be padded"
        )


def paged_prefill_request(
    q, k, v, g, beta, scale, cu_seqlens, state_pool, page_indices, page_indptr, page_size, last_page_len,
    use_qk_l2norm_in_kernel, output, gate_domain, use_gate_in_kernel, A_log, dt_bias, beta_is_logit, slots, backend,
    max_seqlen,
) -> PrefillRequest:  # fmt: skip
    """The request of a ``chunk_gated_delta_rule_paged`` call."""
    _check_page_size(page_size)
    _check_prefill_scalars(
        scale, use_qk_l2norm_in_kernel, gate_domain, use_gate_in_kernel, beta_is_logit, backend
    )
    max_seqlen = _max_seqlen(max_seqlen)
    check_no_slots(SLOT_ARGUMENTS, backend, "the backend argument", paged=True)
    gate, num_seqs, sizes = _tokens(
        q, k, v, g, beta, gate_domain, use_gate_in_kernel, A_log, dt_bias, beta_is_logit, cu_seqlens
    )
    heads = sizes[0]
    _state("state_pool", state_pool, sizes, q.device, dtypes=PREFILL_STATE_DTYPES, rows_are="pages", written=True)
    _check_dense_rows("state_pool", state_pool)
    table = page_table(page_indices, page_indptr, last_page_len, num_seqs, q.device, page_size)
    read = write = starts = prefix = rows = None
    pages = table
    if slots is not None:
        fields = ("state_indices", "output_state_indices", "checkpoint_cu_starts", "prefix_lens")
        read, write, starts, prefix = _slots(slots, fields, num_seqs, q.device, "gdn_paged_prefill_slots")
        rows, pages = table.page_indices, None
    slots_of = table if slots is not None and env.flag(env.CHECK) else None
    host, longest = _longest(cu_seqlens, None, max_seqlen, q.shape[0])
    invariant = env.flag(env.BATCH_INVARIANT)
    output, output_is_new = _output(output, (q.shape[0], heads, v.shape[2]), "[tokens, heads, V]", q)
    return PrefillRequest(
        function="chunk_gated_delta_rule_paged",
        gate=gate,
        cu_seqlens_cpu=host,
        max_seqlen=longest,
        initial_state=state_pool,
        read_rows=read,
        final_state=state_pool,
        write_rows=write,
        final_state_is_new=False,
        checkpoint_every=page_size,
        state_checkpoints=state_pool,
        checkpoint_starts=starts,
        checkpoint_rows=rows,
        prefix_lens=prefix,
        pages=pages,
        output=output,
        output_is_new=output_is_new,
        use_cp="auto",
        batch_invariant=invariant,
        precise=env.flag(env.PRECISE),
        slot_arguments=SLOT_ARGUMENTS,
        slots_of=slots_of,
        **_token_fields(q, k, v, g, beta, A_log, dt_bias, beta_is_logit, use_qk_l2norm_in_kernel, scale, cu_seqlens),
        is_paged=True,
    )


# --- decode --------------------------------------------------------------------------------------


def _decode_tensors(q, k, v, A_log, a, dt_bias, b):
    """Checks shared by both decode functions; returns (B, T, H, HV, K, V)."""
    _inputs(q, k, v, 4, ("[B, T, heads, K]", "[B, T, heads, K]", "[B, T, v heads, V]"))
    batch, tokens, hq, size_k = q.shape
    heads, size_v = v.shape[2:]
    if k.shape[2] != hq or heads % hq:
        raise ValueError(
            f"decode needs k with q's heads and v heads a multiple of them, got q {hq}, k {k.shape[2]}, v {heads}"
        )
    if tokens < 1:
        raise ValueError(f"q must hold at least one token a sequence, [B, T, heads, K], got shape {list(q.shape)}")
    for name, value in (("a", a), ("b", b)):
        tensor = _tensor(name, value)
        _check_shape(name, tensor, (batch, tokens, heads), "[B, T, v heads]")
        _check_dtype(name, tensor, STATE_DTYPES)
        _check_device(name, tensor, q.device)
    _gate_parameter("A_log", A_log, heads, q.device)
    _gate_parameter("dt_bias", dt_bias, heads, q.device)
    return batch, tokens, hq, heads, size_k, size_v


def _decode_fields(q, k, v, A_log, a, dt_bias, b, scale, use_qk_l2norm) -> dict:
    """The fields of a DecodeRequest that describe the tokens."""
    return dict(
        batch=q.shape[0],
        num_tokens=q.shape[1],
        num_q_heads=q.shape[2],
        num_heads=v.shape[2],
        head_size_k=q.shape[3],
        head_size_v=v.shape[3],
        device=q.device,
        q=q,
        k=k,
        v=v,
        A_log=A_log,
        a=a,
        dt_bias=dt_bias,
        b=b,
        scale=_scale(scale, q.shape[3]),
        use_qk_l2norm=use_qk_l2norm,
    )


def decode_request(
    q, k, v, state, A_log, a, dt_bias, b, scale, output, use_qk_l2norm, initial_state, initial_state_indices,
    output_state_indices, intermediate_states_buffer, disable_state_update, backend,
) -> DecodeRequest:  # fmt: skip
    """The request of a ``gated_delta_rule_decode_pretranspose`` call."""
    _check_scale(scale)
    _bool("use_qk_l2norm", use_qk_l2norm)
    _bool("disable_state_update", disable_state_update)
    _check_backend_type(backend)
    if (state is None) == (initial_state is None):
        both = "both" if state is not None else "neither"
        raise ValueError(
            f"one of state ([B, heads, V, K], one row a sequence) and initial_state (a pool, with "
            f"initial_state_indices) must be given, got {both}"
        )
    if (initial_state is None) != (initial_state_indices is None):
        missing = "initial_state" if initial_state is None else "initial_state_indices"
        raise ValueError(f"initial_state and initial_state_indices go together, got None for {missing}")
    if output_state_indices is not None and initial_state is None:
        raise ValueError("output_state_indices needs initial_state and initial_state_indices, got a call without them")
    slot_arguments = () if output_state_indices is None else ("output_state_indices",)

    batch, tokens, hq, heads, size_k, size_v = _decode_tensors(q, k, v, A_log, a, dt_bias, b)
    sizes = (heads, size_v, size_k)
    read = write = None
    if state is not None:
        _state(
            "state", state, sizes, q.device, dtypes=STATE_DTYPES, rows=batch, rows_are="B",
            written=not disable_state_update,
        )  # fmt: skip
        pool = state
    else:
        _state(
            "initial_state", initial_state, sizes, q.device, dtypes=STATE_DTYPES, rows_are="pool rows",
            written=not disable_state_update,
        )  # fmt: skip
        pool = initial_state
        read = _index("initial_state_indices", initial_state_indices, batch, q.device, " (one a sequence)")
        write = read
        if output_state_indices is not None:
            write = _index("output_state_indices", output_state_indices, batch, q.device, " (one a sequence)")
    buffer = intermediate_states_buffer
    if buffer is not None:
        name = "intermediate_states_buffer"
        _tensor(name, buffer)
        if buffer.ndim != 5 or buffer.shape[0] != batch or buffer.shape[1] < tokens or tuple(buffer.shape[2:]) != sizes:
            raise ValueError(
                f"{name} must have shape [B, >= T, v heads, V, K] = [{batch}, >= {tokens}, {heads}, {size_v}, "
                f"{size_k}], got {list(buffer.shape)}"
            )
        _check_dtype(name, buffer, (pool.dtype,), " (the state's dtype)")
        _check_device(name, buffer, q.device)
        _check_last_contiguous(name, buffer)
        _check_writable(name, buffer)
    invariant = env.flag(env.BATCH_INVARIANT)
    output, _ = _output(output, (batch, tokens, heads, size_v), "[B, T, v heads, V]", q)
    return DecodeRequest(
        function="gated_delta_rule_decode_pretranspose",
        state=pool,
        read_rows=read,
        write_rows=write,
        intermediate_states=buffer,
        update_state=not disable_state_update,
        pages=None,
        output=output,
        batch_invariant=invariant,
        slot_arguments=slot_arguments,
        **_decode_fields(q, k, v, A_log, a, dt_bias, b, scale, use_qk_l2norm),
        is_paged=False,
    )


def paged_decode_request(
    q, k, v, A_log, a, dt_bias, b, scale, output, use_qk_l2norm, state_pool, page_indices, page_indptr, last_page_len,
    backend, slots,
) -> DecodeRequest:  # fmt: skip
    """The request of a ``gated_delta_rule_decode_paged`` call."""
    _check_scale(scale)
    _bool("use_qk_l2norm", use_qk_l2norm)
    _check_backend_type(backend)
    check_no_slots(("output_state_indices",), backend, "the backend argument", paged=True)
    if _tensor("q", q).ndim == 4 and q.shape[1] != 1:
        raise ValueError(
            f"gated_delta_rule_decode_paged decodes one token a sequence, q [B, 1, heads, K], got T = {q.shape[1]}"
        )
    batch, tokens, hq, heads, size_k, size_v = _decode_tensors(q, k, v, A_log, a, dt_bias, b)
    sizes = (heads, size_v, size_k)
    _state("state_pool", state_pool, sizes, q.device, dtypes=STATE_DTYPES, rows_are="pages", written=True)
    table = page_table(page_indices, page_indptr, last_page_len, batch, q.device)
    read = write = None
    pages = table
    if slots is not None:
        fields = ("initial_state_indices", "output_state_indices")
        read, write = _slots(slots, fields, batch, q.device, "gdn_paged_decode_slots")
        pages = None
    slots_of = table if slots is not None and env.flag(env.CHECK) else None
    invariant = env.flag(env.BATCH_INVARIANT)
    output, _ = _output(output, (batch, tokens, heads, size_v), "[B, 1, v heads, V]", q)
    return DecodeRequest(
        function="gated_delta_rule_decode_paged",
        state=state_pool,
        read_rows=read,
        write_rows=write,
        intermediate_states=None,
        update_state=True,
        pages=pages,
        output=output,
        batch_invariant=invariant,
        slot_arguments=("output_state_indices",),
        slots_of=slots_of,
        **_decode_fields(q, k, v, A_log, a, dt_bias, b, scale, use_qk_l2norm),
        is_paged=True,
    )


# --- page-table rows -----------------------------------------------------------------------------


def prefill_slots_request(cu_seqlens, page_indices, page_indptr, page_size, last_page_len) -> SlotsRequest:
    """The request of a ``gdn_paged_prefill_slots`` call."""
    _check_page_size(page_size)
    device = _tensor("cu_seqlens", cu_seqlens).device if cu_seqlens is not None else torch.device("cpu")
    cu_seqlens = _cu_seqlens(cu_seqlens, device)
    table = page_table(page_indices, page_indptr, last_page_len, cu_seqlens.shape[0] - 1, device, page_size)
    return slots_request("gdn_paged_prefill_slots", table, cu_seqlens, device)


def decode_slots_request(page_indices, page_indptr, last_page_len) -> SlotsRequest:
    """The request of a ``gdn_paged_decode_slots`` call."""
    device = _tensor("page_indptr", page_indptr).device
    if page_indptr.ndim != 1 or page_indptr.shape[0] < 1:
        raise ValueError(f"page_indptr must be 1-D with sequences + 1 entries, got shape {list(page_indptr.shape)}")
    table = page_table(page_indices, page_indptr, last_page_len, page_indptr.shape[0] - 1, device)
    return slots_request("gdn_paged_decode_slots", table, None, device)


# --- calls like an earlier one -------------------------------------------------------------------
#
# A call whose tensors have the shapes, dtypes, strides and devices of an accepted one, and whose other arguments are
# equal, needs no checks: ``again`` puts its tensors into the accepted request. ``dispatch`` decides when that holds.


def _prefill_again(old: dict, new: dict) -> None:
    for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens"):
        old[name] = new[name]
    if old["is_paged"]:
        pool = new["state_pool"]
        old["initial_state"] = old["final_state"] = old["state_checkpoints"] = pool
        if old["pages"] is None:
            slots = new["slots"]
            old["read_rows"], old["write_rows"], old["checkpoint_starts"], old["prefix_lens"] = slots
            old["checkpoint_rows"] = new["page_indices"]
        else:
            old["pages"] = _table_again(old["pages"], new)
    else:
        old["initial_state"] = new["initial_state"]
        rows = new["state_indices"]
        old["read_rows"] = None if new["initial_state"] is None else rows
        if old["final_state_is_new"]:
            old["final_state"] = old["final_state"]()  # a memory.Empty
        else:
            old["final_state"] = new["output_state"]
        if new["output_final_state"]:
            write = new["output_state_indices"]
            old["write_rows"] = rows if write is None else write
        old["state_checkpoints"] = new["state_checkpoints"]
        old["checkpoint_starts"] = new["checkpoint_cu_starts"]
        old["checkpoint_rows"] = new["checkpoint_state_indices"]
        old["prefix_lens"] = new["prefix_lens"]


def _decode_again(old: dict, new: dict) -> None:
    for name in ("q", "k", "v", "A_log", "a", "dt_bias", "b"):
        old[name] = new[name]
    if old["is_paged"]:
        old["state"] = new["state_pool"]
        if old["pages"] is None:
            old["read_rows"], old["write_rows"] = new["slots"]
        else:
            old["pages"] = _table_again(old["pages"], new)
    else:
        pool = new["initial_state"]
        old["state"] = new["state"] if pool is None else pool
        old["read_rows"] = rows = new["initial_state_indices"]
        write = new["output_state_indices"]
        old["write_rows"] = rows if write is None else write
        old["intermediate_states"] = new["intermediate_states_buffer"]


def _table_again(old: PageTable, new: dict) -> PageTable:
    return PageTable(new["page_indices"], new["page_indptr"], new["last_page_len"], old.page_size)


def again(accepted: PrefillRequest | DecodeRequest, arguments: dict) -> PrefillRequest | DecodeRequest:
    """The request of a call that is like the accepted one but for its tensors' contents."""
    cls = type(accepted)
    request = object.__new__(cls)
    fields = request.__dict__
    fields.update(accepted.__dict__)
    if cls is DecodeRequest:
        _decode_again(fields, arguments)
    else:
        _prefill_again(fields, arguments)
    output = arguments["output"]
    fields["output"] = accepted.output() if output is None else output  # a memory.Empty
    return request
