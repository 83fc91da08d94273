"""From the environment variable to an armed process. torch calls `start_from_env` at the end of its import.

It runs wherever torch is imported, launchers and data workers included: idempotent, silent, standard library
only while GRADTRACE_DIR and GRADTRACE_CONFIG are unset, and it never raises, since an exception here would break
`import torch`. While they are unset it leaves one thing behind: a look, at the process's end, whether they were set too
late, or misspelt.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradtrace_recorder.session.session import Session
    from gradtrace_recorder.session.tripwire import Tripwire
    from gradtrace_recorder.settings.variables import Settings

OLDEST_TORCH = (2, 6)
OLDEST_PYTHON = (3, 10)

_armed: Tripwire | None = None
_looks_at_end = False


def start_from_env() -> None:
    """Arm this process if GRADTRACE_DIR names a directory, or the file that GRADTRACE_CONFIG names does."""
    if _armed is not None:
        return
    if not _switched_on_by():
        _look_at_the_end()
        return
    try:
        from gradtrace_recorder.settings.variables import settings_from

        settings = settings_from()
        if settings is not None:
            start_session(settings)
    except Exception as error:
        _say(f"recording is off for this process: {error}")
        if os.environ.get("GRADTRACE_STRICT") == "1":
            raise


def _switched_on_by() -> str | None:
    """The variable that is set, of the two that switch recording on."""
    return next((n for n in ("GRADTRACE_DIR", "GRADTRACE_CONFIG") if os.environ.get(n)), None)


def _look_at_the_end() -> None:
    """A job whose GRADTRACE_DIR is set after it has imported torch, or misspelt, is told when it ends: not recorded."""
    global _looks_at_end
    if not _looks_at_end:
        _looks_at_end = True
        atexit.register(_tell_if_in_vain, os.getpid())


def _tell_if_in_vain(pid: int) -> None:
    """A process that only starts others is not told: none of its own operations was to be differentiated."""
    if os.getpid() != pid or not _looks_at_end:
        return
    try:
        name = _switched_on_by()
        if name is None and not _may_be_misspelt():
            return
        import torch

        if not torch._C._autograd._get_sequence_nr():
            return
        if name is not None:
            _say(
                f"nothing of this process was recorded: {name} was set after torch had been imported; set it before "
                "Python starts, or before the import, or call gradtrace_recorder.start()"
            )
            return
        from gradtrace_recorder.settings.variables import unknown_variables

        for sentence in unknown_variables(os.environ):
            _say(f"nothing of this process was recorded: {sentence}")
            return  # one line is enough
    except Exception:  # torch may be half gone by now
        return


def _may_be_misspelt() -> bool:
    """Whether any variable begins as ours do. One of the two that is there and empty says: off."""
    return not {"GRADTRACE_DIR", "GRADTRACE_CONFIG"} & set(os.environ) and any(
        name.upper().startswith("GRADTRACE") for name in os.environ
    )


def start_session(settings: Settings) -> Tripwire:
    """Arm this process with these settings. Raises RuntimeError where it is armed, or versions are too old."""
    global _armed, _looks_at_end
    if _armed is not None:
        raise RuntimeError("gradtrace is recording in this process already; stop() it first")
    import torch

    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if found < OLDEST_TORCH or sys.version_info < OLDEST_PYTHON:
        raise RuntimeError(
            f"gradtrace needs torch {_dotted(OLDEST_TORCH)} and Python {_dotted(OLDEST_PYTHON)} or newer, "
            f"this is torch {torch.__version__} and Python {sys.version.split()[0]}"
        )
    from gradtrace_recorder.session.tripwire import Tripwire

    tripwire = Tripwire(settings)
    tripwire.set()
    _armed = tripwire
    _looks_at_end = False
    return tripwire


def stop_session(only: Tripwire | None = None, raised: BaseException | None = None) -> None:
    """Close the recording and remove every hook. Does nothing where none is armed, or another than `only`.

    `raised` is the exception that ends the recording.
    """
    global _armed
    if only is not None and only is not _armed:
        return
    tripwire, _armed = _armed, None
    if tripwire is not None:
        tripwire.stop(60.0, raised)


def is_armed() -> bool:
    """Whether this process records, or waits for its first event."""
    return _armed is not None


def current_session() -> Session | None:
    """The session of this process, begun now if it is armed; None where it is not."""
    return _armed.spring() if _armed is not None else None


def _say(text: str) -> None:
    """As `guard.say`, which may be what cannot be loaded."""
    try:
        from gradtrace_recorder.guard import say

        say(text)
    except Exception:
        return


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
