"""Which backends there are: the built-in ones, those of other packages, and those registered by hand.

A built-in backend is one folder in ``backends/`` and one line in ``BUILTIN``.
"""

from __future__ import annotations

import importlib
import threading
import warnings
from collections.abc import Callable
from importlib import metadata

from .backend import Backend

#: name -> "module:class"; the module is imported when the backend is first asked for.
BUILTIN: dict[str, str] = {
    "cuda": "gdn_multi.backends.cuda:CudaBackend",
    "triton": "gdn_multi.backends.triton:TritonBackend",
    "cudnn": "gdn_multi.backends.cudnn:CudnnBackend",
    "flashinfer": "gdn_multi.backends.flashinfer:FlashInferBackend",
    "cake_gdn": "gdn_multi.backends.flashinfer:CakeGDNBackend",
    "torch": "gdn_multi.backends.torch:TorchBackend",
}

#: Other packages announce backends under this entry-point group: ``name = "module:class"``.
ENTRY_POINT_GROUP = "gdn_multi.backends"

Factory = Callable[[], Backend]


class _Registry:
    """Names to backends. Made once; every lookup goes through ``names`` and ``get``."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._made: dict[str, Backend] = {}
        self._factories: dict[str, str | Factory] = dict(BUILTIN)
        self._entry_points_read = False
        self._broken: dict[str, str] = {}
        self.on_change: Callable[[], None] = lambda: None  #: called after every registration

    def _read_entry_points(self) -> None:
        if self._entry_points_read:
            return
        with self._lock:
            if self._entry_points_read:
                return
            for entry in metadata.entry_points(group=ENTRY_POINT_GROUP):
                if entry.name in self._factories:
                    warnings.warn(
                        f"entry point {entry.name!r} of group {ENTRY_POINT_GROUP!r} ({entry.value}) is ignored: "
                        f"a backend of that name exists already",
                        RuntimeWarning,
                        stacklevel=3,
                    )
                    continue
                self._factories[entry.name] = entry.value
            self._entry_points_read = True

    def names(self) -> list[str]:
        self._read_entry_points()
        return list(self._factories)

    def made(self) -> list[Backend]:
        """The backends that have been asked for so far."""
        return list(self._made.values())

    def get(self, name: str) -> Backend:
        """The backend of that name. KeyError when there is none, RuntimeError when it cannot be imported."""
        backend = self._made.get(name)
        if backend is not None:
            return backend
        self._read_entry_points()
        with self._lock:
            backend = self._made.get(name)
            if backend is not None:
                return backend
            factory = self._factories[name]
            if name in self._broken:  # an import that failed is not tried again at every call
                raise RuntimeError(self._broken[name])
            try:
                if isinstance(factory, str):
                    module, _, attribute = factory.partition(":")
                    factory = getattr(importlib.import_module(module), attribute)
                backend = factory()
            except Exception as error:
                self._broken[name] = f"backend {name!r} could not be loaded: {type(error).__name__}: {error}"
                raise RuntimeError(self._broken[name]) from error
            _check_backend(backend, name)
            self._made[name] = backend
            return backend

    def register(self, backend: Backend | Factory, *, name: str | None = None, replace: bool = False) -> None:
        if isinstance(backend, type):
            backend = backend()
        made = backend if isinstance(backend, Backend) else None
        name = name or getattr(backend, "name", None)
        if not isinstance(name, str) or not name or name == "auto" or not name.replace("_", "").isalnum():
            raise ValueError(
                f"a backend needs a name of letters, digits and underscores other than 'auto', got {name!r}"
            )
        if made is None and not callable(backend):
            raise TypeError(
                f"backend must be a gdn_multi.Backend, a subclass of it, or a callable that makes one, "
                f"got {type(backend).__name__}"
            )
        if made is not None:
            _check_backend(made, name)
        with self._lock:
            self._read_entry_points()
            if name in self._factories and not replace:
                raise ValueError(f"a backend named {name!r} is registered already; pass replace=True to replace it")
            self._factories[name] = backend
            self._made.pop(name, None)
            self._broken.pop(name, None)
            if made is not None:
                self._made[name] = made
        self.on_change()

    def unregister(self, name: str) -> None:
        with self._lock:
            self._read_entry_points()
            if name not in self._factories:
                raise ValueError(f"no backend named {name!r} is registered; registered: {', '.join(self._factories)}")
            self._made.pop(name, None)
            self._broken.pop(name, None)
            if name in BUILTIN and self._factories[name] is not BUILTIN[name]:
                self._factories[name] = BUILTIN[name]  # a replaced built-in backend comes back
            else:
                del self._factories[name]
        self.on_change()


def _check_backend(backend: Backend, name: str) -> None:
    if not isinstance(backend, Backend):
        raise TypeError(f"backend {name!r} must be a gdn_multi.Backend, got {type(backend).__name__}")
    if backend.name != name:
        raise ValueError(f"backend registered as {name!r} calls itself {backend.name!r}")


registry = _Registry()


def register_backend(
    backend: Backend | Factory, *, name: str | None = None, replace: bool = False
) -> None:
    """Make a backend known under its name, for the ``backend=`` keyword and the environment variables.

    Parameters
    ----------
    backend : gdn_multi.Backend, a subclass of it, or a callable that makes one
        A callable is called when the backend is first asked for; ``name`` is then required.
    name : str, optional
        Defaults to ``backend.name``.
    replace : bool
        Replace a registered backend of the same name instead of raising ``ValueError``.

    Whether the automatic choice considers it is up to its ``priority``. Other packages can do the same without
    an import, through the entry-point group ``gdn_multi.backends``.
    """
    registry.register(backend, name=name, replace=replace)


def unregister_backend(name: str) -> None:
    """Forget a backend. A built-in one that was replaced comes back; a built-in one itself is forgotten too."""
    registry.unregister(name)


def registered_backends() -> tuple[str, ...]:
    """Names of all registered backends, usable here or not."""
    return tuple(registry.names())
