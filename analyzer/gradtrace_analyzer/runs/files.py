"""Opening what lies in a run's directory: files that are files, folders that can be listed, json that is an object.

What is absent is absent: a run is read as far as it goes. What is there and cannot be read is an error, since an answer
without it would be about less than its sentences say.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from gradtrace_analyzer.errors import Unreadable

MOST_JSON_BYTES = 1 << 28  # of one file; those of a rank have a few kB

_WHAT_HELPS = {
    errno.EACCES: "its owner can let you read it (chmod -R u+rX,g+rX)",
    errno.EPERM: "its owner can let you read it (chmod -R u+rX,g+rX)",
    errno.ENOTDIR: "put the folder back, or remove what lies in its place to read the rest",
    errno.ELOOP: "put back what it should lead to, or remove it to read the rest",
    errno.ENOENT: "put back what it leads to, or remove it to read the rest",
}


def unreadable(path: str | os.PathLike[str], error: OSError) -> Unreadable:
    """The error as a sentence: which thing, what about it, what would help."""
    reason = error.strerror or str(error)
    if error.errno == errno.ENOENT:
        reason = "it is a link to nothing"
    helps = _WHAT_HELPS.get(
        error.errno or 0, "remove it to read the rest, or read a copy of the run"
    )
    return Unreadable(f"{os.fspath(path)} cannot be read: {reason}; {helps}")


def names_in(folder: str | os.PathLike[str]) -> list[str]:
    """What a folder holds, sorted; nothing where there is no folder.

    Raises Unreadable: rights, a file in its place, a link that leads nowhere.
    """
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError as error:
        if os.path.islink(folder):
            raise unreadable(folder, error) from None
        return []
    except OSError as error:
        raise unreadable(folder, error) from None


def opened(path: str | os.PathLike[str], *, buffering: int = -1) -> BinaryIO:
    """The file, to be read. Raises OSError, also for what is no file: a pipe would be waited for without an end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
        raise OSError(errno.EINVAL, f"it is {kind} where a file should be", os.fspath(path))
    return os.fdopen(descriptor, "rb", buffering)


class JsonFiles:
    """Reads a run's json; `notices` say what of it could not be understood.

    `understood` splits an object into what it can mean and the names of the rest.
    """

    def __init__(
        self, run: Path, understood: Callable[[dict[str, Any]], tuple[dict[str, Any], list[str]]]
    ) -> None:
        self._run, self._understood = run, understood
        self.notices: list[str] = []

    def __call__(self, path: Path) -> dict[str, Any]:
        """The file's object, empty where it is absent, or is no object (then a notice says so).

        Raises Unreadable for one that is there and may not be read.
        """
        try:
            with opened(path) as file:
                content = file.read(MOST_JSON_BYTES)
        except FileNotFoundError as error:
            if path.is_symlink():
                raise unreadable(path, error) from None
            return {}
        except OSError as error:
            raise unreadable(path, error) from None
        name = f"{self._run}: {path.relative_to(self._run)}"
        whole = parsed(content)
        if whole is None:
            what = "is empty" if not content else "is no whole JSON object"
            self.notices.append(f"{name} {what}; what it said is missing")
            return {}
        found, odd = self._understood(whole)
        if odd:
            self.notices.append(
                f"{name} says of {', '.join(odd)} what {'it' if len(odd) == 1 else 'they'} cannot be; left out"
            )
        return found


def parsed(content: bytes) -> dict[str, Any] | None:
    """The object that JSON in UTF-8 stands for; None where it is anything else, or cut off."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):  # thousands of open brackets
        return None
    return found if isinstance(found, dict) else None
