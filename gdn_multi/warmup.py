"""No surprise at the first request: build, load and compile before serving what a model's calls will need."""

from __future__ import annotations

import numbers
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from . import dispatch, env, validate
from .registry import registry


@dataclass(frozen=True)
class WarmupReport:
    """What :func:`warmup` did."""

    seconds: float
    """Time it took, wall clock."""
    calls: int
    """Calls made, over all backends."""
    compilations: int
    """Kernels or libraries compiled or loaded during them."""
    backends: tuple[str, ...]
    """The backends that were warmed up."""


def compilations() -> int:
    """How often a backend has compiled or loaded a kernel or a library in this process.

    After :func:`warmup` it does not move any more for the calls that the warm-up was told of.
    """
    return sum(backend.compilations() for backend in registry.made())


def warmup(
    *,
    num_q_heads: int,
    num_v_heads: int,
    num_k_heads: int | None = None,
    head_size_k: int = 128,
    head_size_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    state_dtype: torch.dtype = torch.float32,
    gate_dtype: torch.dtype | None = None,
    parameter_dtype: torch.dtype = torch.float32,
    index_dtype: torch.dtype = torch.int32,
    max_batch: int = 64,
    max_tokens: int = 8192,
    max_decode_tokens: int = 1,
    page_size: int = 1024,
    raw_gates: bool = True,
    fused_qkv: bool = True,
    backends: tuple[str, ...] | None = None,
    device: torch.device | None = None,
    progress: Callable[[str], None] | None = None,
) -> WarmupReport:
    """Build, load and compile everything that a model's calls will need, on every backend that may serve them.

    Makes small prefill and decode calls like the model's, on scratch memory, with each backend that calls may be served
    by here (those of ``GDN_MULTI_BACKEND`` and its kin where set, else of the policy), so that no later call compiles
    anything; :func:`compilations` counts. What a function does not take is left out: decode with GQA heads or a float8 pool.

    Parameters
    ----------
    num_q_heads, num_k_heads, num_v_heads : int
        Heads of this rank; ``num_k_heads`` defaults to ``num_q_heads``.
    head_size_k, head_size_v : int
        K and V; V defaults to K.
    dtype, state_dtype, gate_dtype, parameter_dtype, index_dtype : torch.dtype
        Of q, k and v; of the pool; of raw gates, a and b (default: ``dtype``); of A_log and dt_bias; of index tensors.
    max_batch : int
        The most sequences of one call, at least 1.
    max_tokens : int
        The most tokens of one prefill call; 0 for a process that makes none.
    max_decode_tokens : int
        The most tokens a sequence of one decode call (speculative decoding); 0 for a process that makes none.
    page_size : int
        Tokens a page.
    raw_gates : bool
        Whether prefill gets raw gates, beta logits and unnormalised q and k (as a model makes the call); the plain
        call, linear gates and normalised q and k, is warmed up too.
    fused_qkv : bool
        Whether prefill gets q, k and v as views of one projection's output, [tokens, all their columns], as well as
        contiguous: their strides are known to some kernels when these are compiled.
    backends : tuple of str, optional
        These backends instead; each must be usable here.
    device : torch.device, optional
        Default: the current CUDA device, else the CPU.
    progress : callable, optional
        Gets a line of text now and then; default: print to stderr.

    Returns
    -------
    WarmupReport(seconds, calls, compilations, backends)

    Raises
    ------
    TypeError
        A size that is no int; ``backends`` that is no tuple or list of names.
    ValueError
        A size out of range, head counts that are neither GVA nor GQA, an unknown backend (in a variable too).
    RuntimeError
        A backend that is asked for and not usable here, or none that is.
    """
    start, before = time.perf_counter(), compilations()
    say = progress or (lambda text: print(f"gdn_multi warmup: {text}", file=sys.stderr, flush=True))
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device(device)
    num_k_heads = num_q_heads if num_k_heads is None else num_k_heads
    head_size_v = head_size_k if head_size_v is None else head_size_v
    for name, value, least in (
        ("num_q_heads", num_q_heads, 1), ("num_k_heads", num_k_heads, 1), ("num_v_heads", num_v_heads, 1),
        ("head_size_k", head_size_k, 1), ("head_size_v", head_size_v, 1), ("max_batch", max_batch, 1),
        ("max_tokens", max_tokens, 0), ("max_decode_tokens", max_decode_tokens, 0),
    ):  # fmt: skip
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise TypeError(f"{name} must be an int, got {value!r}")
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    validate._check_page_size(page_size)
    validate._heads(num_q_heads, num_k_heads, num_v_heads)
    kinds = {"prefill": max_tokens > 0, "decode": max_decode_tokens > 0}
    if num_k_heads != num_q_heads or num_v_heads % num_q_heads or state_dtype not in validate.STATE_DTYPES:
        kinds["decode"] = False  # not served by any backend
    if not any(kinds.values()):
        raise ValueError(
            f"there is nothing to warm up: with these heads and state_dtype no decode is served, or none is wanted, and no prefill is, "
            f"got max_tokens {max_tokens} and max_decode_tokens {max_decode_tokens}"
        )
    chosen = _backends(backends, device, [kind for kind, wanted in kinds.items() if wanted])
    usable = tuple(chosen)
    model = _Model(
        num_q_heads, num_k_heads, num_v_heads, head_size_k, head_size_v, dtype, state_dtype, gate_dtype or dtype,
        parameter_dtype, index_dtype, page_size, device,
    )  # fmt: skip
    calls = 0
    with torch.no_grad():
        for name, of_kinds in chosen.items():
            tokens, steps = max_tokens * ("prefill" in of_kinds), max_decode_tokens * ("decode" in of_kinds)
            for what, call in model.calls(max_batch, tokens, steps, raw_gates, fused_qkv):
                began, compiled = time.perf_counter(), compilations()
                calls += call(name)
                if compilations() != compiled:
                    say(f"{name}: {what}, {time.perf_counter() - began:.1f} s")
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    report = WarmupReport(time.perf_counter() - start, calls, compilations() - before, usable)
    say(f"{report.calls} calls, {report.compilations} compiled or loaded, {report.seconds:.1f} s: {', '.join(usable)}")
    return report


def _backends(asked: Sequence[str] | None, device: torch.device, kinds: Sequence[str]) -> dict[str, list[str]]:
    """The backends to warm up, each with the kinds of calls, of ``kinds``, that it may be chosen for."""
    if asked is not None:
        if not isinstance(asked, (tuple, list)) or not all(isinstance(name, str) for name in asked):
            raise TypeError(f"backends must be a tuple of names of backends, got {asked!r}")
        if not asked:
            raise ValueError("backends must name at least one backend, got none")
    chosen: dict[str, list[str]] = {}
    for kind in kinds:
        names, source = (tuple(asked), "backends") if asked is not None else env.backend_choice(kind)
        names = names or ("auto",)
        dispatch._check_known(names, source)
        reasons = {name: dispatch._unusable(name, device) for name in dispatch._expand(names)}
        usable = [name for name, against in reasons.items() if not against]
        missing = [name for name in names if reasons.get(name)] if asked is not None or not usable else []
        if missing or not usable:
            texts = [f"{name}: {'; '.join(reasons[name])}" for name in missing or reasons]
            raise RuntimeError(f"not usable on {device} ({source or dispatch.POLICY}): " + ". ".join(texts))
        if names == ("auto",) and device.type == "cuda" and len(usable) > 1:
            usable = [name for name in usable if name != "torch"]  # it compiles nothing, and is the last resort
        for name in usable:
            chosen.setdefault(name, []).append(kind)
    return chosen


def _made(function: Callable, **arguments) -> int:
    """Make the call: 1, or 0 where its backend does not serve it, which is never chosen for it then."""
    try:
        function(**arguments)
    except NotImplementedError:
        return 0
    return 1


def _steps(most: int, factor: int = 4) -> list[int]:
    """1, 4, 16, ... and ``most``."""
    values, value = [], 1
    while value < most:
        values.append(value)
        value *= factor
    return [*values, most]


@dataclass(frozen=True)
class _Model:
    """Random calls of a model's sizes."""

    hq: int
    hk: int
    hv: int
    size_k: int
    size_v: int
    dtype: torch.dtype
    state_dtype: torch.dtype
    gate_dtype: torch.dtype
    parameter_dtype: torch.dtype
    index_dtype: torch.dtype
    page_size: int
    device: torch.device

    @property
    def heads(self) -> int:
        return max(self.hq, self.hv)

    def calls(
        self, batch: int, tokens: int, decode_tokens: int, raw: bool, fused: bool
    ) -> Iterator[tuple[str, Callable]]:
        for count in _steps(batch):
            for steps in range(1, decode_tokens + 1):
                yield f"decode, {count} sequences, {steps} tokens", lambda b, n=count, t=steps: self.decode(b, n, t)
        for count in _steps(batch):
            for total in _steps(tokens):
                if total < count:
                    continue
                for as_model in (False, True) if raw else (False,):
                    for views in (False, True) if fused else (False,):
                        what = f"prefill, {count} sequences, {total} tokens"
                        what += ", raw gates" * as_model + ", views of one projection" * views
                        yield what, lambda b, n=count, t=total, m=as_model, w=views: self.prefill(b, n, t, m, w)

    def _random(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.rand(shape, device=self.device).to(dtype or self.dtype)

    def _ints(self, values) -> torch.Tensor:
        return torch.tensor(list(values), dtype=self.index_dtype, device=self.device)

    def _pool(self, rows: int) -> torch.Tensor:
        shape = (rows, self.heads, self.size_v, self.size_k)
        return torch.zeros(shape, dtype=self.state_dtype, device=self.device)

    def _parameters(self) -> tuple[torch.Tensor, torch.Tensor]:
        zeros = torch.zeros(self.heads, dtype=self.parameter_dtype, device=self.device)
        return zeros, zeros.clone()

    def decode(self, backend: str, n: int, steps: int) -> int:
        import gdn_multi

        q, k = self._random(n, steps, self.hq, self.size_k), self._random(n, steps, self.hq, self.size_k)
        v = self._random(n, steps, self.hv, self.size_v)
        a, b = (self._random(n, steps, self.hv, dtype=self.gate_dtype) for _ in range(2))
        (A_log, dt_bias), pool = self._parameters(), self._pool(n)
        rows = self._ints(range(n))
        common = dict(q=q, k=k, v=v, A_log=A_log, a=a, dt_bias=dt_bias, b=b, backend=backend)
        plain, takes_slots = gdn_multi.gated_delta_rule_decode_pretranspose, backend not in validate.NO_SLOT_BACKENDS
        pooled = dict(**common, state=None, initial_state=pool, initial_state_indices=rows)
        made = _made(plain, **pooled)
        if takes_slots:
            made += _made(plain, **pooled, output_state_indices=rows)
        if steps > 1:
            buffer = torch.zeros(n, steps, *pool.shape[1:], dtype=self.state_dtype, device=self.device)
            return made + _made(plain, **pooled, intermediate_states_buffer=buffer, disable_state_update=True)
        made += _made(plain, **common, state=pool)
        if takes_slots:
            table = dict(
                page_indices=rows, page_indptr=self._ints(range(n + 1)), last_page_len=self._ints([2] * n)
            )  # fmt: skip
            paged = dict(**common, state_pool=pool, **table)
            made += _made(gdn_multi.gated_delta_rule_decode_paged, **paged)
            made += self._with_slots(gdn_multi.gated_delta_rule_decode_paged, gdn_multi.gdn_paged_decode_slots, table, paged)
        return made

    def prefill(self, backend: str, n: int, total: int, as_model: bool, views: bool) -> int:
        import gdn_multi

        shapes = ((self.hq, self.size_k), (self.hk, self.size_k), (self.hv, self.size_v))
        if views:
            columns = [heads * size for heads, size in shapes]
            parts = self._random(total, sum(columns)).split(columns, dim=1)
            q, k, v = (part.unflatten(1, shape) for part, shape in zip(parts, shapes))
        else:
            q, k, v = (self._random(total, *shape) for shape in shapes)
        length = total // n
        bounds = [i * length for i in range(n)] + [total]
        common = dict(q=q, k=k, v=v, cu_seqlens=self._ints(bounds), backend=backend)
        if as_model:
            A_log, dt_bias = self._parameters()
            g, beta = (self._random(total, self.heads, dtype=self.gate_dtype) for _ in range(2))
            common.update(
                g=g, beta=beta, use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias, beta_is_logit=True,
                use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
        else:
            g, beta = (self._random(total, self.heads, dtype=torch.float32) for _ in range(2))
            common.update(g=g, beta=beta)
        plain = gdn_multi.chunk_gated_delta_rule
        made = _made(plain, **common, output_final_state=True)
        made += _made(plain, **common, initial_state=self._pool(n), output_final_state=True)
        if backend in validate.NO_SLOT_BACKENDS:  # a paged call is made of slots
            return made
        lengths = [b - a for a, b in zip(bounds, bounds[1:])]
        pages = [max(1, -(-x // self.page_size)) for x in lengths]
        table = dict(
            page_indices=self._ints(range(sum(pages))),
            page_indptr=self._ints([sum(pages[:i]) for i in range(n + 1)]),
            page_size=self.page_size,
            last_page_len=self._ints([x - (p - 1) * self.page_size for x, p in zip(lengths, pages)]),
        )
        paged = dict(**common, state_pool=self._pool(sum(pages)), **table)
        made += _made(gdn_multi.chunk_gated_delta_rule_paged, **paged)
        slots_of = dict(cu_seqlens=common["cu_seqlens"], **table)
        return made + self._with_slots(
            gdn_multi.chunk_gated_delta_rule_paged, gdn_multi.gdn_paged_prefill_slots, slots_of, paged
        )

    @staticmethod
    def _with_slots(function: Callable, slots_function: Callable, table: dict, arguments: dict) -> int:
        """The call with rows from the same backend, whatever the variables say."""
        import gdn_multi

        request, _ = dispatch.build_request(slots_function, **table)
        if dispatch._reasons(arguments["backend"], request):
            return 0
        registry.get(arguments["backend"]).page_slots(request)
        kind = gdn_multi.GDNPagedPrefillSlots if request.is_prefill else gdn_multi.GDNPagedDecodeSlots
        return _made(function, **arguments, slots=kind(*request.out))
