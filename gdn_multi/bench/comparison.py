"""One call on every usable backend, against the float64 reference: what ``python -m gdn_multi compare`` computes.

expected(request)    what the reference says the call must write: output, final states, every page or checkpoint
compare(call, ...)   runs a saved call on each backend and holds the results to it, bit by bit where bits must stay
"""

from __future__ import annotations

import ctypes
import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .. import reference
from ..request import DecodeRequest, PrefillRequest, Request, SlotsRequest
from ..saved import SavedCall
from .timing import Timer

#: Tokens that the reference keeps all states of at a time.
SEGMENT = 256

#: Relative errors above these are called wrong: dtype of the inputs, plus what storing a state may add.
INPUT_LIMIT = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 2e-2}
STORE_LIMIT = {torch.float32: 0.0, torch.float16: 1e-3, torch.bfloat16: 5e-3}


@dataclass
class Item:
    """Something that the call must write: the tensor of that name in the request, at ``index``."""

    label: str
    tensor: str
    index: object  #: a row, a slice of tokens, or a (sequence, token) pair
    expected: torch.Tensor


@dataclass
class Outcome:
    """What one backend did with the call."""

    detail: str = ""
    reasons: list[str] = field(default_factory=list)  #: why it did not run; empty when it did
    output_error: float | None = None
    states: list[tuple[str, float]] = field(default_factory=list)  #: (label, error) of every state or page
    wrong: list[str] = field(default_factory=list)  #: what is outside its limit, or changed and must not
    bits: str = ""  #: digest of everything written: equal digests are equal bits
    ms: float | None = None
    p20: float | None = None
    p80: float | None = None
    graph: bool = False
    host_us: float | None = None
    launches: int | None = None
    peak_bytes: int | None = None


@dataclass
class Pair:
    """How far two backends are apart, bit by bit."""

    first: str
    second: str
    output_differs: float  #: fraction of elements with other bits
    output_largest: float  #: largest difference
    states_differ: float
    states_largest: float


@dataclass
class Comparison:
    name: str
    function: str
    shape: str
    info: dict = field(default_factory=dict)
    refused: str = ""  #: the front end's message, when the call is refused before any backend is asked
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    pairs: list[Pair] = field(default_factory=list)

    @property
    def is_wrong(self) -> bool:
        return any(outcome.wrong for outcome in self.outcomes.values())


def from_json(calls: Sequence[dict]) -> list[Comparison]:
    """What ``dataclasses.asdict`` made of comparisons, after a way through JSON."""
    made = []
    for call in calls:
        fields = {name: call[name] for name in Comparison.__dataclass_fields__ if name in call}
        fields["outcomes"] = {
            name: Outcome(**dict(each, states=[tuple(pair) for pair in each["states"]]))
            for name, each in call["outcomes"].items()
        }
        fields["pairs"] = [Pair(**pair) for pair in call["pairs"]]
        made.append(Comparison(**fields))
    return made


# --- what the reference says -------------------------------------------------------------------------


def expected(request: Request) -> tuple[list[Item], dict[str, set]]:
    """Every item that the call must write, and for each state tensor of the request the rows it may write."""
    if isinstance(request, SlotsRequest):
        return _expected_slots(request), {}
    if isinstance(request, DecodeRequest):
        return _expected_decode(request)
    return _expected_prefill(request)


def _list(rows: torch.Tensor | None, count: int) -> list[int]:
    return list(range(count)) if rows is None else [int(row) for row in rows.tolist()]


def _prefill_rows(request: PrefillRequest):
    """read and write rows, and for each sequence {new tokens: row of state_checkpoints}."""
    n, every = request.num_seqs, request.checkpoint_every
    cu = request.cu_seqlens.tolist()
    if request.pages is not None:
        pages = request.pages
        rows = reference.prefill_slots(
            request.cu_seqlens, pages.page_indices, pages.page_indptr, pages.page_size, pages.last_page_len
        )
        kept = []
        for prefix, where in zip(rows["prefix"], rows["checkpoints"]):
            first = (prefix // pages.page_size + 1) * pages.page_size - prefix
            kept.append({first + j * pages.page_size: row for j, row in enumerate(where)})
        return rows["read"], rows["write"], kept
    read = _list(request.read_rows, n)
    write = _list(request.write_rows, n) if request.final_state is not None else [-1] * n
    kept = [{} for _ in range(n)]
    if every:
        prefixes = [0] * n if request.prefix_lens is None else request.prefix_lens.tolist()
        starts = request.checkpoint_starts.tolist()
        where = None if request.checkpoint_rows is None else request.checkpoint_rows.tolist()
        for i in range(n):
            new, at = cu[i + 1] - cu[i], every - prefixes[i] % every
            for j, position in enumerate(range(at, new + 1, every)):
                entry = starts[i] + j
                kept[i][position] = entry if where is None else where[entry]
    return read, write, kept


def _expected_prefill(request: PrefillRequest) -> tuple[list[Item], dict[str, set]]:
    read, write, kept = _prefill_rows(request)
    cu = request.cu_seqlens.tolist()
    is_pool = request.is_paged or request.write_rows is not None
    items: list[Item] = []
    rows: dict[str, set] = {"final_state": set(), "state_checkpoints": set(), "initial_state": set()}
    for i in range(request.num_seqs):
        start, end = cu[i], cu[i + 1]
        if request.initial_state is None or read[i] < 0:
            shape = (request.num_heads, request.head_size_v, request.head_size_k)
            state = torch.zeros(shape, dtype=torch.float64, device=request.device)
        else:
            state = request.initial_state[read[i]].double()
        outputs, at = [], 0
        for position in sorted(set(kept[i]) | {end - start}):
            while at < position:
                step = min(SEGMENT, position - at)
                output, state = _segment(request, start + at, start + at + step, state)
                outputs.append(output)
                at += step
            row = kept[i].get(position, -1)
            if row >= 0 and position > 0:
                label = f"page {row}" if request.is_paged else f"checkpoint row {row}"
                items.append(Item(f"{label} (sequence {i}, token {position})", "state_checkpoints", row, state))
                rows["state_checkpoints"].add(row)
        if outputs:
            items.append(Item(f"output of sequence {i}", "output", slice(start, end), torch.cat(outputs)))
        if request.final_state is not None and write[i] >= 0 and (end > start or request.final_state_is_new):
            label = f"{'page' if request.is_paged else 'row'} {write[i]}" if is_pool else "final state"
            items.append(Item(f"{label} (sequence {i}, token {end - start})", "final_state", write[i], state))
            rows["final_state"].add(write[i])
    if request.output_is_new:
        for span in (slice(0, cu[0]), slice(cu[-1], request.num_tokens)):
            if span.stop > span.start:
                items.append(
                    Item("output of no sequence", "output", span, torch.zeros_like(request.output[span]).double())
                )
    return items, rows


def _segment(request: PrefillRequest, start: int, end: int, state: torch.Tensor):
    cut = lambda x: None if x is None else x[start:end]  # noqa: E731
    output, states = reference.prefill(
        request.q[start:end], request.k[start:end], request.v[start:end], cut(request.g), cut(request.beta),
        request.scale, cu_seqlens=torch.tensor([0, end - start]), initial_state=state[None],
        gate_domain="log" if request.gate == "log" else "linear", use_gate_in_kernel=request.gate == "raw",
        A_log=request.A_log, dt_bias=request.dt_bias, beta_is_logit=request.beta_is_logit,
        use_qk_l2norm_in_kernel=request.use_qk_l2norm,
    )  # fmt: skip
    return output, states[0][-1]


def _expected_decode(request: DecodeRequest) -> tuple[list[Item], dict[str, set]]:
    n = request.batch
    if request.pages is not None:
        pages = request.pages
        read, write = reference.decode_slots(pages.page_indices, pages.page_indptr, pages.last_page_len)
    else:
        read, write = _list(request.read_rows, n), _list(request.write_rows, n)
    padding = [a < 0 or b < 0 for a, b in zip(read, write)]
    rows = torch.tensor([max(row, 0) for row in read], device=request.device)
    output, states = reference.decode(
        request.q, request.k, request.v, request.A_log, request.a, request.dt_bias, request.b, request.scale,
        state=request.state[rows], use_qk_l2norm=request.use_qk_l2norm,
    )  # fmt: skip
    items, written = [], set()
    for b in range(n):
        items.append(Item(f"output of sequence {b}", "output", b, output[b] * 0 if padding[b] else output[b]))
        if padding[b]:
            items[-1].expected = torch.zeros_like(output[b])
            continue
        if request.update_state:
            label = f"{'page' if request.is_paged else 'row'} {write[b]} (sequence {b})"
            items.append(Item(label, "state", write[b], states[b, -1]))
            written.add(write[b])
        if request.intermediate_states is not None:
            for t in range(request.num_tokens):
                items.append(Item(f"intermediate ({b}, {t})", "intermediate_states", (b, t), states[b, t]))
    return items, {"state": written}


def _expected_slots(request: SlotsRequest) -> list[Item]:
    table = request.table
    if request.is_prefill:
        rows = reference.prefill_slots(
            request.cu_seqlens, table.page_indices, table.page_indptr, table.page_size, table.last_page_len
        )
        lists = [rows[name] for name in ("read", "write", "starts", "prefix")]
    else:
        lists = list(reference.decode_slots(table.page_indices, table.page_indptr, table.last_page_len))
    return [Item(f"tensor {i}", f"out{i}", slice(None), torch.tensor(values)) for i, values in enumerate(lists)]


# --- what a backend did --------------------------------------------------------------------------------


def _tensor(request: Request, name: str) -> torch.Tensor:
    if name.startswith("out") and name[3:].isdigit():
        return request.out[int(name[3:])]
    return getattr(request, name)


def _bits(x: torch.Tensor) -> torch.Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.detach().contiguous().view(kinds[x.element_size()])


def _raw(x: torch.Tensor) -> bytes:
    x = x.detach().contiguous().cpu()
    size = x.numel() * x.element_size()
    return bytes((ctypes.c_char * size).from_address(x.data_ptr())) if size else b""


def _error(actual: torch.Tensor, right: torch.Tensor) -> float:
    actual, right = actual.double(), right.to(actual.device).double()
    norm = right.norm().item()
    error = (actual - right).norm().item()
    value = error / norm if norm > 0 else error
    return value if value == value else float("inf")


def _limit(request: Request, item: Item) -> float:
    if isinstance(request, SlotsRequest):
        return 0.0
    # Decode computes in float32 whatever the inputs are: only roundings of what is stored are left.
    base = INPUT_LIMIT[torch.float32] if isinstance(request, DecodeRequest) else INPUT_LIMIT[request.q.dtype]
    dtype = _tensor(request, item.tensor).dtype
    return base + STORE_LIMIT.get(dtype, 0.1)  # float8 keeps two or three bits


def _state_tensors(request: Request) -> dict[str, torch.Tensor]:
    if isinstance(request, SlotsRequest):
        return {}
    names = ("state",) if isinstance(request, DecodeRequest) else ("initial_state", "final_state", "state_checkpoints")
    found = {name: getattr(request, name) for name in names if getattr(request, name) is not None}
    if isinstance(request, PrefillRequest) and request.final_state_is_new:
        found.pop("final_state", None)
    return found


def _poison(request: Request) -> None:
    """Fill what the call allocated with NaN: all of it must be written."""
    if isinstance(request, PrefillRequest):
        if request.output_is_new:
            request.output.fill_(float("nan"))
        if request.final_state_is_new and request.final_state is not None:
            fill = float("nan") if request.final_state.dtype.itemsize > 1 else 1.0
            request.final_state.copy_(torch.full_like(request.final_state, fill, dtype=torch.float32))


def _prepare(call: SavedCall, device: torch.device) -> Request:
    from ..dispatch import build_request

    arguments = call.arguments(device)
    arguments.pop("backend", None)
    request, _ = build_request(call.function, **arguments)
    return request


def _run(call: SavedCall, name: str, device: torch.device, items, rows, outcome: Outcome) -> dict | None:
    """Run once and judge; returns copies of what was written, for the comparison between backends."""
    from ..dispatch import run

    request = _prepare(call, device)
    _poison(request)
    states = _state_tensors(request)
    before = {}
    for key, tensor in states.items():  # each piece of memory once, under the first name that it has
        if all(tensor.data_ptr() != states[other].data_ptr() for other in before):
            before[key] = _bits(tensor).clone()
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(request, name)
        if cuda:
            torch.cuda.synchronize(device)
    except Exception as error:
        text = str(error).strip().splitlines()
        outcome.reasons = [f"failed: {type(error).__name__}: {text[0] if text else ''}"]
        outcome.wrong.append(outcome.reasons[0])
        return None
    if cuda:
        outcome.peak_bytes = torch.cuda.max_memory_allocated(device) - held
    outcome.detail = _detail(request, name)

    digest = hashlib.sha256()
    parts: dict[str, list[torch.Tensor]] = {"output": [], "state": []}
    squares, norms = 0.0, 0.0
    for item in items:
        actual = _tensor(request, item.tensor)[item.index]
        error = _error(actual, item.expected)
        is_output = item.tensor == "output" or item.tensor.startswith("out")
        parts["output" if is_output else "state"].append(actual.detach().clone())
        digest.update(_raw(actual))
        if is_output:
            right = item.expected.double()
            squares += (actual.double() - right.to(actual.device)).square().sum().item()
            norms += right.square().sum().item()
        else:
            outcome.states.append((item.label, error))
        if not error <= _limit(request, item):
            outcome.wrong.append(f"{item.label}: error {error:.2e}")
    value = (squares / norms) ** 0.5 if norms > 0 else squares**0.5
    outcome.output_error = value if value == value else float("inf")
    outcome.bits = digest.hexdigest()[:12]

    for key, old in before.items():
        tensor = states[key]
        allowed = set()
        for other, written in rows.items():
            target = getattr(request, other, None)
            if target is not None and target.data_ptr() == tensor.data_ptr():
                allowed |= written
        changed = (_bits(tensor) != old).flatten(1).any(1).nonzero().flatten().tolist()
        for row in sorted(set(changed) - allowed):
            outcome.wrong.append(f"row {row} of {key} changed and must not")
    return parts


def _detail(request: Request, name: str) -> str:
    from ..registry import registry

    return registry.get(name).detail(request)


def _time(call: SavedCall, name: str, device: torch.device, timer: Timer, outcome: Outcome) -> None:
    import gdn_multi

    arguments = call.arguments(device)
    function = getattr(gdn_multi, call.function)
    if call.function in ("gdn_paged_prefill_slots", "gdn_paged_decode_slots"):
        return
    arguments["backend"] = name
    repeat = lambda: function(**arguments)  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        repeat()
        timing = timer.time(repeat)
        outcome.ms, outcome.p20, outcome.p80, outcome.graph = timing.ms, timing.p20, timing.p80, timing.graph
        outcome.host_us = timer.host_us(repeat, timing.ms)
        if device.type == "cuda":
            outcome.launches = _launches(repeat)


def _launches(call) -> int | None:
    """Kernels that one call launches; None where the profiler cannot say."""
    try:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            call()
            torch.cuda.synchronize()
        on_gpu = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        kernels = [e for e in on_gpu if not e.name.startswith(("Memcpy", "Memset"))]
        return len(kernels) or None
    except Exception:
        return None


def compare(
    name: str,
    call: SavedCall,
    backends: Sequence[str],
    device: torch.device,
    timer: Timer | None = None,
    say=lambda text: None,
) -> Comparison:
    """Run ``call`` on each of ``backends`` that serves it; times it too where a timer is given."""
    from ..dispatch import _reasons

    result = Comparison(name, call.function, "", call.info)
    try:
        request = _prepare(call, device)
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        result.refused = f"{type(error).__name__}: {error}"
        return result
    result.shape = describe(request)
    reasons = {each: list(_reasons(each, request)) for each in backends}
    items: list[Item] | None = None
    seen: dict[str, dict] = {}
    for each in backends:
        outcome = result.outcomes[each] = Outcome(reasons=reasons[each])
        if outcome.reasons:
            continue
        if items is None:
            say("reference")
            items, rows = expected(request)
        say(each)
        parts = _run(call, each, device, items, rows, outcome)
        if parts is None:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # raises when the GPU is lost
            continue
        seen[each] = parts
        if timer is not None:
            try:
                _time(call, each, device, timer, outcome)
            except Exception as error:
                outcome.wrong.append(f"when timed: {type(error).__name__}: {str(error).splitlines()[0]}")
    names = list(seen)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            result.pairs.append(_pair(first, second, seen[first], seen[second]))
    return result


def _pair(first: str, second: str, a: dict, b: dict) -> Pair:
    figures = []
    for kind in ("output", "state"):
        differing = total = 0
        largest = 0.0
        for x, y in zip(a[kind], b[kind]):
            differing += (_bits(x) != _bits(y)).sum().item()
            total += x.numel()
            if x.numel():
                largest = max(largest, (x.double() - y.double()).abs().max().item())
        figures += [differing / total if total else 0.0, largest]
    return Pair(first, second, *figures)


def describe(request: Request) -> str:
    """The call's sizes in a few words."""
    if isinstance(request, SlotsRequest):
        return f"{len(request.out[0])} sequences"
    dtypes = str(request.q.dtype).removeprefix("torch.")
    size = f"K = {request.head_size_k}, V = {request.head_size_v}, {dtypes}"
    if isinstance(request, DecodeRequest):
        state = str(request.state.dtype).removeprefix("torch.")
        heads = f"heads {request.num_q_heads}/{request.num_heads}"
        return f"B = {request.batch}, T = {request.num_tokens}, {heads}, {size}, {state} states"
    heads = f"heads {request.num_q_heads}/{request.num_k_heads}/{request.num_v_heads}"
    return f"{request.num_tokens} tokens, {request.num_seqs} sequences, {heads}, {size}"
