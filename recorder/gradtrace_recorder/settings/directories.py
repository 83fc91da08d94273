"""The run's directory from what a person wrote. Standard library only."""

from __future__ import annotations

import os
import re
import sys

from gradtrace_recorder.settings.readers import SettingsError


def absolute(label: str, text: str, base: str | None = None) -> str:
    """The path that `text` names, which `label` is the name of. A relative one is resolved now: a job may change its
    directory later. `base` is the directory that it begins in, None for that in which the process was started.

    Raises SettingsError for what names no directory of a file system.
    """
    if not text.strip() or "\0" in text:
        raise SettingsError(f"{label} is {text!r}, which names no directory; write runs/a")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", text):
        raise SettingsError(
            f"{label} is {text!r}, an address; write a directory of this machine, and copy it afterwards"
        )
    return os.path.join(_started_in() if base is None else base, os.path.expanduser(text))


def _started_in() -> str:
    """Where this process was started; for a child of `multiprocessing`, where the first of its parents was.

    Such a child begins where its parent is by then, which may have changed directory (Hydra's jobs do).
    Source: Lib/multiprocessing/spawn.py, `get_preparation_data` (3.11): `orig_dir`.
    """
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None and process.ORIGINAL_DIR:
        return str(process.ORIGINAL_DIR)
    try:
        return os.getcwd()
    except OSError as error:
        raise SettingsError(
            "the directory in which this process was started is gone; give an absolute path"
        ) from error
