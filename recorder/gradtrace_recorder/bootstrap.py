"""From the environment variable to an armed process. torch calls `start_from_env` at the end of its import.

It runs wherever torch is imported, launchers and data workers included: idempotent, silent, standard library
only while GRADTRACE_DIR is unset, and it never raises, since an exception here would break `import torch`.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradtrace_recorder.session import Session
    from gradtrace_recorder.settings import Settings
    from gradtrace_recorder.tripwire import Tripwire

OLDEST_TORCH = (2, 6)
OLDEST_PYTHON = (3, 10)

_armed: Tripwire | None = None


def start_from_env() -> None:
    """Arm this process if GRADTRACE_DIR names a directory."""
    if not os.environ.get("GRADTRACE_DIR") or _armed is not None:
        return
    from gradtrace_recorder.guard import say
    from gradtrace_recorder.settings import settings_from

    try:
        settings = settings_from()
        if settings is not None:
            start_session(settings)
    except Exception as error:
        say(f"recording is off for this process: {error}")
        if os.environ.get("GRADTRACE_STRICT") == "1":
            raise


def start_session(settings: Settings) -> None:
    """Arm this process with these settings. Raises RuntimeError where it is armed, or versions are too old."""
    global _armed
    if _armed is not None:
        raise RuntimeError("gradtrace is recording in this process already; stop() it first")
    import torch

    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if found < OLDEST_TORCH or sys.version_info < OLDEST_PYTHON:
        raise RuntimeError(
            f"gradtrace needs torch {_dotted(OLDEST_TORCH)} and Python {_dotted(OLDEST_PYTHON)} or newer, "
            f"this is torch {torch.__version__} and Python {sys.version.split()[0]}"
        )
    from gradtrace_recorder.tripwire import Tripwire

    tripwire = Tripwire(settings)
    tripwire.set()
    _armed = tripwire


def stop_session() -> None:
    """Close the recording and remove every hook. Does nothing where none is armed."""
    global _armed
    tripwire, _armed = _armed, None
    if tripwire is not None:
        tripwire.stop(timeout=60.0)


def is_armed() -> bool:
    """Whether this process records, or waits for its first event."""
    return _armed is not None


def current_session() -> Session | None:
    """The session of this process, begun now if it is armed; None where it is not."""
    return _armed.spring() if _armed is not None else None


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
