"""Every environment variable that gdn_multi reads, each read at the call; docs/environment.md describes them."""

from __future__ import annotations

import os

#: Backend of every call, of prefill calls, of decode calls: a name, or names in order of preference, by commas.
BACKEND = "GDN_MULTI_BACKEND"
PREFILL_BACKEND = "GDN_MULTI_PREFILL_BACKEND"
DECODE_BACKEND = "GDN_MULTI_DECODE_BACKEND"
#: 1: check every index and the ownership of every row on the device, with one synchronization a call.
CHECK = "GDN_MULTI_CHECK"
#: 1: a sequence's bits do not depend on the rest of its batch.
BATCH_INVARIANT = "GDN_MULTI_BATCH_INVARIANT"
#: 1: products inside a backend in the finest format that it has for them, at some cost in time.
PRECISE = "GDN_MULTI_PRECISE"
#: A folder: calls are saved there, to be replayed by ``python -m gdn_multi compare``.
SAVE = "GDN_MULTI_SAVE"
#: What is saved there: "failed" (calls that raise, the default) or "all".
SAVE_WHICH = "GDN_MULTI_SAVE_WHICH"
#: Where compiled kernels are kept; default: gdn_multi in the user's cache directory.
CACHE_DIR = "GDN_MULTI_CACHE_DIR"

VARIABLES = (
    BACKEND, PREFILL_BACKEND, DECODE_BACKEND, CHECK, BATCH_INVARIANT, PRECISE, SAVE, SAVE_WHICH, CACHE_DIR,
)  # fmt: skip

_FALSE = ("", "0", "false", "no", "off")
_TRUE = ("1", "true", "yes", "on")


#: What decides how a call is served; compared as it stands, so that a call costs no parsing.
_DECIDING = (BACKEND, PREFILL_BACKEND, DECODE_BACKEND, CHECK, BATCH_INVARIANT, SAVE, PRECISE)  # each_call_checked counts
# os.environ decodes at every look-up; the dictionary beneath it does not (CPython, POSIX).
_raw = getattr(os.environ, "_data", None) if os.name == "posix" else None
#: Where ``deciding`` looks, and for what.
raw = os.environ if _raw is None else _raw
deciding_keys = tuple(os.environ.encodekey(name) for name in _DECIDING) if _raw is not None else _DECIDING


_1, _2, _3, _4, _5, _6, _7 = deciding_keys
_NONE_SET = (None,) * len(deciding_keys)


def deciding() -> tuple:
    """The values, unparsed, of all variables that decide how a call is served."""
    known = raw
    # As a rule none is set, and looking for seven names is quicker than collecting seven values.
    if _1 in known or _2 in known or _3 in known or _4 in known or _5 in known or _6 in known or _7 in known:
        return tuple(map(known.get, deciding_keys))
    return _NONE_SET


def given(names: tuple[str, ...] = VARIABLES) -> dict[str, str]:
    """Those of ``names`` that are set, with their values."""
    return {name: os.environ[name] for name in names if name in os.environ}


def unknown() -> list[str]:
    """Variables that look like ours and are not."""
    return [name for name in sorted(os.environ) if name.startswith("GDN_MULTI_") and name not in VARIABLES]


def search_path() -> str:
    """Where programs are looked for."""
    return os.environ.get("PATH", "")


def each_call_checked(values: tuple) -> bool:
    """Whether ``deciding()`` values ask for work at every call (checks, saving)."""
    return values[3] is not None or values[5] is not None


def flag(name: str) -> bool:
    """A switch: 1/true/yes/on or 0/false/no/off; anything else is a ValueError that says so."""
    value = os.environ.get(name)
    if value is None:
        return False
    lowered = value.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ValueError(f"{name} must be one of {', '.join(_TRUE + _FALSE[1:])}, got {value!r}")


def check_switches() -> None:
    """ValueError when a switch has a value that is neither on nor off, whether the call at hand looks at it or not."""
    if deciding() is not _NONE_SET:
        for name in (CHECK, BATCH_INVARIANT, PRECISE):
            flag(name)


def backend_choice(kind: str) -> tuple[tuple[str, ...] | None, str]:
    """The names that the environment asks for in calls of ``kind`` ("prefill", "decode"), and the variable they
    come from; (None, "") when it asks for none. "auto" stands for the policy."""
    own = PREFILL_BACKEND if kind == "prefill" else DECODE_BACKEND
    for variable in (own, BACKEND):
        value = os.environ.get(variable)
        if value is None:
            continue
        names = tuple(name.strip() for name in value.split(",") if name.strip())
        if not names:
            continue
        return (None if names == ("auto",) else names), variable
    return None, ""


def cache_dir() -> str:
    """Where compiled kernels are kept (not created here)."""
    given = os.environ.get(CACHE_DIR)
    if given:
        return os.path.abspath(os.path.expanduser(given))
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "gdn_multi")


def save_folder() -> tuple[str | None, str]:
    """(folder or None, which calls: "failed" or "all")."""
    folder = os.environ.get(SAVE)
    if not folder:
        return None, "failed"
    which = os.environ.get(SAVE_WHICH, "failed").strip().lower()
    if which not in ("failed", "all"):
        raise ValueError(f"{SAVE_WHICH} must be 'failed' or 'all', got {which!r}")
    return folder, which


def cuda_home() -> str | None:
    """The CUDA toolkit that the user points at, if any."""
    return os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or None


def triton_interpret() -> bool:
    """Whether Triton's interpreter is on (read by Triton at import, so set it before the process starts)."""
    return os.environ.get("TRITON_INTERPRET", "").strip().lower() in _TRUE


def triton_ptxas() -> str | None:
    """The ptxas that the user gives Triton for Blackwell and later, if any."""
    return os.environ.get("TRITON_PTXAS_BLACKWELL_PATH") or os.environ.get("TRITON_PTXAS_PATH") or None
