"""Which backend serves a call, why, and the record of what ran.

A call names its backend (keyword, else environment variable), and then that backend serves it or the call fails; or
it leaves the choice to the policy: the registered backends with a ``priority``, highest first, the first that is usable
here and has no reason against the request.
"""

from __future__ import annotations

import inspect
import logging
import operator
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch

from . import env, memory, policy
from .backend import Backend
from .registry import registry
from .request import DecodeRequest, PageTable, PrefillRequest, Request, SlotsRequest
from .validate import again, check_no_slots

logger = logging.getLogger("gdn_multi")


class LastCall(NamedTuple):
    """What served the last call of this thread."""

    function: str
    """The public function, e.g. "chunk_gated_delta_rule_paged"."""
    backend: str
    """The backend's name."""
    detail: str
    """What ran inside the backend (an engine, a kernel path); may be empty."""


class _Thread(threading.local):
    last: LastCall | None = None


_thread = _Thread()


def last_backend() -> LastCall | None:
    """What served this thread's last call that ran: ``LastCall(function, backend, detail)``; None before the first.

    The same goes to the logger "gdn_multi" at level DEBUG, call by call.
    """
    return _thread.last


@dataclass(frozen=True)
class Explanation:
    """Which backend would serve a call, and what speaks against each of the others. ``str()`` gives a table."""

    function: str
    backend: str | None
    """The backend that would serve the call; None when the call would fail."""
    source: str
    """What decided: "the backend argument", an environment variable, or "the policy"."""
    reasons: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """For each registered backend the reasons why it cannot serve the call; () if it could."""
    detail: str = ""
    """What would run inside the chosen backend, where it says so."""
    error: str = ""
    """The message that the call would fail with; empty when it would be served."""
    policy: str = ""
    """Why ``backend="auto"`` asks the backends in its order: what was measured (gdn_multi/policy.py), or that nothing was."""

    def __str__(self) -> str:
        head = f"{self.function}: " + (f"served by {self.backend!r}" if self.backend else "not served")
        lines = [head + f" (chosen by {self.source})" + (f": {self.detail}" if self.detail else "")]
        width = max((len(name) for name in self.reasons), default=0)
        for name, reasons in self.reasons.items():
            if name == self.backend:
                texts: tuple[str, ...] = ("serves this call",)
            else:
                texts = reasons or ("could serve it; not chosen",)
            for i, text in enumerate(texts):
                lines.append(f"  {name if i == 0 else '':<{width}}  {text}")
        if self.policy:
            lines.append(f"  policy: {self.policy}")
        if self.error:
            lines.append(f"  the call raises: {self.error}")
        return "\n".join(lines)


# --- choosing --------------------------------------------------------------------------------------


def _kind(request: Request) -> str:
    if isinstance(request, SlotsRequest):
        return "prefill" if request.is_prefill else "decode"
    return request.kind


def _load(name: str) -> Backend | str:
    """The backend, or why it could not be loaded."""
    try:
        return registry.get(name)
    except RuntimeError as error:
        return str(error)


def _unusable(name: str, device: torch.device) -> tuple[str, ...]:
    backend = _load(name)
    return (backend,) if isinstance(backend, str) else tuple(backend.reasons_unusable(device))


def _reasons(name: str, request: Request) -> tuple[str, ...]:
    """Every reason against: not usable here first, else not serving this request."""
    reasons = _unusable(name, request.device)
    return reasons or tuple(registry.get(name).reasons_against(request))


def _policy(request: Request | None = None) -> list[str]:
    """Names in the automatic choice, best first: for a request, or in general."""
    ranked = []
    for name in registry.names():
        backend = _load(name)
        if isinstance(backend, Backend) and backend.priority is not None:
            usable = request is not None and not backend.reasons_unusable(request.device)
            priority = backend.priority_for(request) if usable else backend.priority
            if priority is not None:
                ranked.append((-priority, name))
    names = [name for _, name in sorted(ranked, key=lambda pair: pair[0])]
    choice = None if request is None else policy.choice_for(request, _capability(request.device))
    return names if choice is None else policy.apply(names, choice)


def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def _quoted(request: Request) -> str:
    """The measurement behind the policy's order, for a person."""
    if _capability(request.device) is None or isinstance(request, SlotsRequest):
        return ""
    choice = policy.choice_for(request, _capability(request.device))
    if choice is None:
        return "by priority; nothing has been measured on sm_{}{}".format(*_capability(request.device))
    return f"{', then '.join(choice.order)} for {choice.kind}, {choice.when} ({choice.measured})"


#: What decided when neither the call nor the environment names a backend.
POLICY = "the policy"


def _wanted(request: Request, keyword: str) -> tuple[tuple[str, ...] | None, str]:
    """(names demanded, or None for the policy; what decided)."""
    if keyword != "auto":
        return (keyword,), "the backend argument"
    names, variable = env.backend_choice(_kind(request))
    return (names, f"the environment variable {variable}") if names else (None, POLICY)


def _check_known(names: tuple[str, ...], source: str) -> None:
    known = registry.names()
    for name in names:
        if name not in known and name != "auto":
            raise ValueError(f"unknown backend {name!r} in {source}; registered: {', '.join(known)} (or 'auto')")


def choose(request: Request, keyword: str) -> tuple[Backend, str]:
    """The backend that serves ``request`` and what decided; raises when there is none.

    ValueError: an unknown name, or slot arguments with a backend that the specification says rejects them.
    RuntimeError: the named backend is not usable here. NotImplementedError: it does not serve this request.
    """
    names, source = _wanted(request, keyword)
    if names is not None:
        _check_known(names, source)
    order = _expand(names, request)
    slots = getattr(request, "slot_arguments", ())
    if len(order) == 1:
        check_no_slots(slots, order[0], source, getattr(request, "is_paged", False))
    tried: dict[str, tuple[str, ...]] = {}
    for name in order:
        reasons = _reasons(name, request)
        if not reasons:
            return registry.get(name), source
        tried[name] = reasons
    raise _refusal(request, tried, source)


def _expand(names: tuple[str, ...] | None, request: Request | None = None) -> list[str]:
    """The order in which to ask: the names, with "auto" standing for the policy's own."""
    order: list[str] = []
    for name in names or ("auto",):
        for one in _policy(request) if name == "auto" else (name,):
            if one not in order:
                order.append(one)
    return order


def _refusal(request: Request, tried: dict[str, tuple[str, ...]], source: str) -> Exception:
    unusable = all(_unusable(name, request.device) for name in tried)
    serving = [n for n in registry.names() if n not in tried and not _reasons(n, request)]
    lines = [f"{request.function}: no backend of {source} serves this call"]
    if len(tried) == 1:
        (name,) = tried
        what = "is not usable here" if unusable else "does not serve this call"
        lines = [f"{request.function}: backend {name!r} ({source}) {what}"]
    for name, reasons in tried.items():
        lines += [f"  {name}: {reason}" for reason in reasons]
    lines.append(f"  backends that would serve it: {', '.join(serving) if serving else 'none'}")
    return (RuntimeError if unusable else NotImplementedError)("\n".join(lines))


_warned: set = set()


def _warn_slow(tried: dict[str, tuple[str, ...]]) -> None:
    """The policy sends a GPU's call to the slow backend: say so, once for each set of reasons."""
    key = tuple(sorted(tried.items()))
    if key in _warned:
        return
    _warned.add(key)
    why = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in tried.items())
    warnings.warn(
        f"gdn_multi runs on a GPU with the torch backend, which is much slower than a kernel, because {why}. "
        f"gdn_multi.explain() and 'python -m gdn_multi doctor' say more; backend='torch' asks for it without this warning.",
        RuntimeWarning,
        stacklevel=5,
    )


#: Whether this process has looked for variables that look like ours and are not.
_unknown_named = False


def _name_unknown() -> None:
    """Say once which variables are set that look like ours and are not: one misspelt has no effect, and nothing else tells."""
    global _unknown_named
    _unknown_named = True
    names = env.unknown()
    if names:
        warnings.warn(
            f"{', '.join(names)}: gdn_multi knows no such variable, so that it has no effect; it knows {', '.join(env.VARIABLES)}",
            RuntimeWarning,
            stacklevel=5,
        )


# --- serving ---------------------------------------------------------------------------------------


def run(request: Request, keyword: str = "auto") -> tuple[Backend, LastCall]:
    """Choose a backend and have it serve the request."""
    env.check_switches()
    if not _unknown_named:
        _name_unknown()
    backend, source = choose(request, keyword)
    if backend.name == "torch" and request.device.type == "cuda" and source == POLICY:
        _warn_slow({name: _reasons(name, request) for name in _policy(request) if name != "torch"})
    if env.flag(env.CHECK):
        from .check import check

        check(request)
    last = LastCall(request.function, backend.name, backend.detail(request))
    _execute(backend, request, last, source)
    return backend, last


def _execute(backend: Backend, request: Request, last: LastCall, source: str) -> None:
    device = request.device
    try:
        if device.type == "cuda" and device.index != memory.current_device():
            with torch.cuda.device(device):
                getattr(backend, request.kind)(request)
        else:
            getattr(backend, request.kind)(request)
    except IndexError as error:  # values of index tensors are looked at only by the check
        raise IndexError(
            f"{request.function}: an index tensor holds a value out of range, and rows may have been written before it "
            f"was met; run the call again with {env.CHECK}=1, which names the entry before anything is written ({error})"
        ) from error
    _thread.last = last
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("%s served by %s (%s)%s", last.function, last.backend, source, last.detail and f": {last.detail}")


def serve(build: Callable[..., Request], arguments: dict[str, Any]) -> Request:
    """Validate a public call's arguments into a request, run it, and return the request with its results.

    With GDN_MULTI_SAVE the call is saved, always or when it fails.
    """
    newest = _newest
    known = newest.get(build)
    if known is None or not known.like(tuple(arguments.values())):
        key = _key(build, arguments)
        known = None if key is None else _accepted.get(key)
        if known is not None and known.like is not None:
            newest[build] = known
    if known is not None:
        request = again(known.template, arguments)
        _execute(known.backend, request, known.last, "as an earlier call like it")
        return request
    folder, which = env.save_folder()
    if folder is None:
        request = build(**arguments)
        backend, last = run(request, arguments.get("backend", "auto"))
        if key is not None:
            _remember(key, request, backend, last, arguments)
        return request
    from .saved import save_call

    if which == "all":  # before it runs: inputs are as the call saw them
        save_call(folder, _PUBLIC[build.__name__], arguments)
    try:
        request = build(**arguments)
        run(request, arguments.get("backend", "auto"))
    except Exception:
        if which == "failed":
            save_call(folder, _PUBLIC[build.__name__], arguments)
        raise
    return request


# --- calls like an earlier one ---------------------------------------------------------------------
#
# An engine makes the same call thousands of times a second. What was decided from shapes, dtypes, strides, devices,
# scalars and environment variables is remembered under exactly those; only tensors' contents may differ. A backend's
# answers must therefore depend on nothing else (backend.py says so).


class _Accepted(NamedTuple):
    template: PrefillRequest | DecodeRequest
    backend: Backend
    last: LastCall
    like: Callable[[tuple], bool] | None
    """Whether the arguments of a call are like this one's: Backend.arguments_like, or Arguments."""


class Surroundings(NamedTuple):
    """What a call like an earlier one must find as that did, besides its arguments, and what is needed to look. All that does so
    in C needs of Python is here, in this order (csrc/bindings.cu, Surroundings::Item)."""

    environment: dict[Any, Any]
    names: tuple
    values: tuple
    is_grad_enabled: Callable[[], bool] = torch.is_grad_enabled
    requires_grad: str = "requires_grad"
    is_neg: Callable[[torch.Tensor], bool] = torch.Tensor.is_neg


_accepted: dict[tuple, _Accepted] = {}
#: By builder the one that served last: a model makes like calls one after another, and to compare takes less than a key.
_newest: dict[Callable, _Accepted] = {}
#: The scalars of the decode functions, in the order in which short ways take them.
DECODE_OPTIONS = ("scale", "use_qk_l2norm", "disable_state_update", "backend")
#: The place of q in such a call: after them and the output.
_OF_Q = len(DECODE_OPTIONS) + 1
_MOST_ACCEPTED = 4096
_MOST_EXPRESS = 4  # of one function and shape of q: with slots and without, layers of two dtypes


def forget_accepted() -> None:
    """Decide anew for every call from now on; called when backends come or go."""
    global _newest
    _accepted.clear()
    _newest = {}  # a call that is under way may still write to the old one
    for short in short_ways.values():
        short.forget()


registry.on_change = forget_accepted


_SCALARS = (bool, int, float, str)


def _looked_into(name: str, tensor: torch.Tensor) -> bool:
    """Whether the checks read the tensor's values."""
    return name == "cu_seqlens" and not tensor.is_cuda


def _key(build: Callable, arguments: dict[str, Any]) -> tuple | None:
    """What a decision may depend on; None for a call that must be looked at each time: its checks read values (on the
    CPU, or a host copy of cu_seqlens), a tensor requires grad, or GDN_MULTI_CHECK or GDN_MULTI_SAVE is set."""
    settings = env.deciding()
    if env.each_call_checked(settings) or arguments.get("cu_seqlens_cpu") is not None:
        return None
    grad = torch.is_grad_enabled()
    parts = [build, settings]
    for name, value in arguments.items():
        if value is None:  # the most common by far
            parts.append(None)
        elif isinstance(value, torch.Tensor):
            if (grad and value.requires_grad) or _looked_into(name, value):
                return None
            if value.layout is not torch.strided or value.is_nested:  # which the checks refuse
                return None
            parts += (value.shape, value.stride(), value.dtype, value.device, _may_have_sign(value) and value.is_neg())
        elif isinstance(value, _SCALARS):
            parts += (type(value), value)
        elif isinstance(value, tuple):
            parts += (tuple, len(value))
            for one in value:
                if not isinstance(one, torch.Tensor) or (grad and one.requires_grad):
                    return None
                if one.layout is not torch.strided or one.is_nested:
                    return None
                parts += (one.shape, one.stride(), one.dtype, one.device)
        else:
            return None
    return tuple(parts)


def _remember(key: tuple, request: Request, backend: Backend, last: LastCall, arguments: dict[str, Any]) -> None:
    if isinstance(request, SlotsRequest):
        return
    settings = key[1]
    if env.deciding() != settings:  # a variable was set while the call was decided or ran: who knows what it was served under
        return
    if len(_accepted) >= _MOST_ACCEPTED:
        forget_accepted()
    in_c = isinstance(env.raw, dict)
    around = Surroundings(env.raw, env.deciding_keys, settings)
    values = tuple(arguments.values())
    like = None
    if isinstance(request, PrefillRequest):
        like = (backend.arguments_like(request, around, values) if in_c else None) or Arguments(around, values).alike
    _accepted[key] = accepted = _Accepted(_without_data(request), backend, last, like)
    if like is not None:
        _newest[key[0]] = accepted
    if isinstance(request, DecodeRequest):
        options, new = tuple([arguments.get(name) for name in DECODE_OPTIONS]), accepted.template.output.calls()
        terms = Terms(around, options, new, _thread, "last", last, _levels, logging.DEBUG, _log_short)
        attempt = backend.express_decode_call(request, terms) if in_c else None
        if attempt is None:
            again_from_tensors = backend.express_decode(request)
            if again_from_tensors is None:
                return
            inputs = (request.q, request.k, request.v, request.A_log, request.a, request.dt_bias, request.b)
            signed = tuple([i for i, tensor in enumerate(inputs) if _may_have_sign(tensor)])
            attempt = short_way(terms, signed, again_from_tensors)
        short_ways[request.function].add(request.q.shape, attempt)


def _may_have_sign(tensor: torch.Tensor) -> bool:
    """Whether it may be a view whose sign is pending: these come from complex tensors, and there are none of bfloat16 or whole numbers."""
    return tensor.dtype is not torch.bfloat16 and tensor.is_floating_point()


_signature = attrgetter("shape", "dtype", "device", "layout")
_requires_grad = attrgetter("requires_grad")


def _places(chosen: list[bool]) -> Callable[[tuple], tuple]:
    """A function that takes out of a tuple the items at those places, as a tuple."""
    places = [i for i, yes in enumerate(chosen) if yes]
    if len(places) > 1:  # of one place an itemgetter gives the item, of none there is no itemgetter
        return itemgetter(*places)
    return lambda values: tuple([values[i] for i in places])


class Arguments:
    """Arguments that have a key (``_key``), to be compared with others: quicker than making the key of those."""

    __slots__ = ("around", "types", "tensors", "tuples", "others", "scalars", "signatures", "strides", "signed")

    def __init__(self, around: Surroundings, values: tuple):
        self.around = around
        self.types = list(map(type, values))
        is_tensor, is_tuple = ([isinstance(value, kind) for value in values] for kind in (torch.Tensor, tuple))
        self.tensors, self.tuples = _places(is_tensor), _places(is_tuple)
        self.others = _places([not (a or b) for a, b in zip(is_tensor, is_tuple)])
        self.scalars = self.others(values)
        tensors = self._tensors(values)
        self.signatures = list(map(_signature, tensors))
        self.strides = list(map(torch.Tensor.stride, tensors))
        self.signed = _places([a and _may_have_sign(x) for a, x in zip(is_tensor, values)])

    def _tensors(self, values: tuple) -> tuple[torch.Tensor, ...]:
        tensors = self.tensors(values)
        for more in self.tuples(values):
            tensors += more
        return tensors

    def alike(self, values: tuple) -> bool:
        """Whether no decision that is remembered can differ for these, with all else as it was."""
        around = self.around
        if env.deciding() != around.values or list(map(type, values)) != self.types:
            return False
        if self.others(values) != self.scalars:  # of the same types: they compare
            return False
        tensors = self._tensors(values)
        try:
            if list(map(_signature, tensors)) != self.signatures or list(map(torch.Tensor.stride, tensors)) != self.strides:
                return False
            if around.is_grad_enabled() and any(map(_requires_grad, tensors)):
                return False
        except (AttributeError, TypeError, RuntimeError):  # something in a tuple that is no tensor; a tensor without strides
            return False
        return not any(map(torch.Tensor.is_neg, self.signed(values)))


def _alike(options: tuple, wanted: tuple) -> bool:
    # Types first: values of others may not even compare.
    return all(map(operator.is_, map(type, options), map(type, wanted))) and options == wanted


class Terms(NamedTuple):
    """What a decode call must find as the accepted one found it to be served the short way, and what serving it takes. All that
    does so in C needs of Python is here, in this order (csrc/bindings.cu, ShortDecode::Term)."""

    surroundings: Surroundings
    options: tuple
    allocations: tuple
    thread: _Thread
    last_name: str
    last: LastCall
    levels: dict[int, bool]
    debug: int
    log: Callable[[LastCall], None]


#: The logger's own memory of ``isEnabledFor``, emptied when a level is set anywhere: False there saves the question.
_levels: dict[int, bool] = getattr(logger, "_cache", {})


def _log_short(last: LastCall) -> None:
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("%s served by %s (as an earlier call like it)", last.function, last.backend)


def short_way(terms: Terms, signed: tuple[int, ...], again: Callable[..., bool]) -> Callable[[tuple], torch.Tensor | None]:
    """A function of a decode call that returns its output where ``again`` (Backend.express_decode) can serve it from its
    tensors alone, or None, with nothing done.

    A call is (*DECODE_OPTIONS, output or None, *tensors), the tensors as ``again`` takes them but for the output; those at
    ``signed`` may be views whose sign is pending. What costs time here are looks at tensors, 0.1 to 0.2 us each, so that there
    are as few as the checks allow.
    """
    values, options, thread, last, levels = terms.surroundings.values, terms.options, terms.thread, terms.last, terms.levels
    (scale1, norm1, freeze1, backend1), ((quick, arguments), (anywhere, _)) = options, terms.allocations

    def serve(call: tuple) -> torch.Tensor | None:
        try:
            scale, norm, freeze, backend, output, *tensors = call
            if env.deciding() != values:
                return None
            if not (scale is scale1 and norm is norm1 and freeze is freeze1 and backend is backend1):
                if not _alike((scale, norm, freeze, backend), options):
                    return None
            for i in signed:
                if tensors[i].is_neg():
                    return None
            if torch.is_grad_enabled():
                for tensor in (output, *tensors):
                    if tensor is not None and tensor.requires_grad:
                        return None
            out = quick(*arguments) if output is None else output
            if not again(*tensors, out):
                if output is not None or out.device == tensors[2].device:
                    return None
                out = anywhere()  # the call's device is not current
                if not again(*tensors, out):
                    return None
        except (AttributeError, TypeError):  # an argument of a wrong type: the checks will name it
            return None
        thread.last = last
        if levels.get(logging.DEBUG) is not False:
            terms.log(last)
        return out

    return serve


def _not_yet(call: tuple) -> None:
    return None


class ShortWays:
    """The short ways of one decode function: each takes a call and returns its output or None, as ``short_way`` says."""

    __slots__ = ("known", "newest")

    #: The one that served last: a model makes like calls one after another.
    newest: Callable[[tuple], torch.Tensor | None]
    #: By shape of q, newest first. Entries are replaced, never changed: other threads may be reading one.
    known: dict[torch.Size, tuple[Callable[[tuple], torch.Tensor | None], ...]]

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.known, self.newest = {}, _not_yet

    def add(self, shape: torch.Size, attempt: Callable[[tuple], torch.Tensor | None]) -> None:
        self.known[shape] = (attempt, *self.known.get(shape, ())[: _MOST_EXPRESS - 1])
        self.newest = attempt

    def other(self, call: tuple) -> torch.Tensor | None:
        """The output of a call that ``newest`` left, or None: the ordinary way."""
        known, newest = self.known, self.newest
        try:
            shape = call[_OF_Q].shape
        except (AttributeError, RuntimeError):  # no tensor; a nested one
            return None
        for attempt in known.get(shape, ()) if isinstance(shape, torch.Size) else ():
            output = None if attempt is newest else attempt(call)
            if output is not None:
                if known is self.known:  # else forgotten meanwhile
                    self.newest = attempt
                return output
        return None


short_ways = {name: ShortWays() for name in ("gated_delta_rule_decode_paged", "gated_delta_rule_decode_pretranspose")}


def _without_data(request: Request) -> Request:
    """A copy that keeps no tensor alive: how to make what the call allocates, and ``shared``, stay."""
    kept = {}
    for name, field_of in request.__dataclass_fields__.items():
        value = getattr(request, name)
        if isinstance(value, torch.Tensor):
            value = memory.Empty(value.shape, value.dtype, value.device) if name in ("output", "final_state") else None
        elif isinstance(value, PageTable):
            value = PageTable(None, None, None, value.page_size)
        if field_of.init:
            kept[name] = value
    template = replace(request, **kept)
    if isinstance(request, PrefillRequest):
        template.__dict__["shared"] = request.shared
    return template


# --- explaining ------------------------------------------------------------------------------------

#: request builder -> public function
_PUBLIC = {
    "prefill_request": "chunk_gated_delta_rule",
    "paged_prefill_request": "chunk_gated_delta_rule_paged",
    "decode_request": "gated_delta_rule_decode_pretranspose",
    "paged_decode_request": "gated_delta_rule_decode_paged",
    "prefill_slots_request": "gdn_paged_prefill_slots",
    "decode_slots_request": "gdn_paged_decode_slots",
}


def build_request(function: str | Callable, *args: Any, **kwargs: Any) -> tuple[Request, str]:
    """The request of a public call, not run, and its ``backend`` keyword."""
    import gdn_multi

    from . import validate

    name = function if isinstance(function, str) else getattr(function, "__name__", repr(function))
    builders = {public: builder for builder, public in _PUBLIC.items()}
    if name not in builders:
        raise ValueError(f"function must be one of {', '.join(builders)}, got {name!r}")
    bound = inspect.signature(getattr(gdn_multi, name)).bind(*args, **kwargs)
    bound.apply_defaults()
    return getattr(validate, builders[name])(**bound.arguments), bound.arguments.get("backend", "auto")


def explain(function: str | Callable, *args: Any, **kwargs: Any) -> Explanation:
    """Which backend would serve ``function(*args, **kwargs)``, and each other backend's reasons against.

    Takes a public function (or its name) and the call's own arguments; runs nothing and writes nothing. Arguments that
    the call would refuse raise here as they would there; a choice that would fail is returned with ``backend=None``.

    >>> print(gdn_multi.explain(gdn_multi.chunk_gated_delta_rule, q, k, v, g, beta, cu_seqlens=cu))  # doctest: +SKIP
    """
    request, keyword = build_request(function, *args, **kwargs)
    env.check_switches()
    reasons = {name: _reasons(name, request) for name in registry.names()}
    slots = getattr(request, "slot_arguments", ())
    source = _wanted(request, keyword)[1]
    try:
        backend, source = choose(request, keyword)
    except (ValueError, RuntimeError) as error:  # NotImplementedError is a RuntimeError
        if isinstance(error, ValueError) and not slots:
            raise
        return Explanation(request.function, None, source, reasons, error=str(error), policy=_quoted(request))
    return Explanation(request.function, backend.name, source, reasons, backend.detail(request), policy=_quoted(request))
