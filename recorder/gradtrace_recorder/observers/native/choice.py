"""Whether the native observer is used, and which journal a recording has with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gradtrace_recorder.guard import Problems
from gradtrace_recorder.journal.writer import JournalWriter
from gradtrace_recorder.observers.native.build import library
from gradtrace_recorder.observers.native.journal import NativeJournal
from gradtrace_recorder.recording.native_library import Native
from gradtrace_recorder.settings.variables import Settings


def chosen_native(settings: Settings, problems: Problems) -> Native | None:
    """The native observer where it is built and wanted. Never compiles."""
    if settings.observer == "python":
        return None
    reason = why_python(settings)
    found = None
    if reason is None:
        try:
            found = library()
        except Exception as error:  # whatever its start raises, Python can do it
            reason = f"the native observer that was built does not load: {error}"
            problems.add(f"{reason}; recorded with the Python observer")
            return None
        if found is None:
            reason = (
                "none is built for this torch and this Python (python -m gradtrace_recorder build)"
            )
    if found is not None:
        return Native(found)
    if settings.observer == "native":
        problems.add(
            f"GRADTRACE_OBSERVER is native, and {reason}; recorded with the Python observer"
        )
    return None


def why_python(settings: Settings) -> str | None:
    """What of these settings the native observer does not do, None where it does all."""
    if settings.replay is not None:
        return "Nodes are run again by Python"
    return None


def journal_of(native: Native | None, path: Path, **about: Any) -> JournalWriter:
    """A new journal: the library's own where hooks write into it without the GIL."""
    if native is None:
        return JournalWriter(path, **about)
    return NativeJournal(native.library, path, **about)
