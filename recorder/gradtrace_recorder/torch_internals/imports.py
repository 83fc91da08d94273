"""Tells when a module has been imported, so that nothing of ours imports what a job does not use."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

from gradtrace_recorder.guard import say


class AfterImport:
    """Calls back once, after a module has run: at once where it has already.

    A finder in front of the others asks them for the module, and changes nothing but the one call that runs it.
    """

    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self._name = name
        self._call = call

    def arm(self) -> None:
        """Wait from now on."""
        if self._name in sys.modules:
            self._call()
        elif self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def disarm(self) -> None:
        """Wait no more."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """What the other finders find; None for any other module. Called by Python's import."""
        if name != self._name:
            return None
        finders = [getattr(f, "find_spec", None) for f in sys.meta_path if f is not self]
        specs = (find(name, path, target) for find in finders if find is not None)
        spec = next((spec for spec in specs if spec is not None), None)
        loader = None if spec is None else spec.loader
        if loader is not None and hasattr(loader, "exec_module"):
            self._wait(loader)
        return spec

    def _wait(self, loader: Any) -> None:
        run = loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            if module.__name__ == self._name:
                # Python's own loader is this module's alone.
                loader.__dict__.pop("exec_module", None)
                was_armed = self in sys.meta_path
                self.disarm()
                if was_armed:
                    self._told()

        with contextlib.suppress(AttributeError):  # of a loader that takes none, nothing is seen
            loader.exec_module = exec_module

    def _told(self) -> None:
        try:
            self._call()
        except Exception as error:
            say(f"{self._name} is not recorded: {type(error).__name__}: {error}")
