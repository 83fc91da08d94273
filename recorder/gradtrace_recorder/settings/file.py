"""A settings file: the variables' names in lower case, in TOML. Standard library only (before Python 3.11: tomli).

Read where GRADTRACE_CONFIG names it, and nowhere else: a pyproject.toml that lies in a job's directory is not asked.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from gradtrace_recorder.settings.readers import SettingsError
from gradtrace_recorder.settings.spelling import meant


@dataclass(frozen=True)
class SettingsFile:
    """What a file says: by setting, what it is called there and its text. `remarks` are keys that there are not."""

    path: str
    values: Mapping[str, tuple[str, str]]
    remarks: tuple[str, ...]


def read_settings_file(label: str, path: str, known: Collection[str]) -> SettingsFile:
    """The file at this absolute path, of which `label` is where it was named. `known` are the settings there are.

    In a pyproject.toml they stand in the table [tool.gradtrace]; elsewhere at the top, or in [gradtrace].
    Raises SettingsError.
    """
    try:
        with open(path, "rb") as file:
            content = _parsed(path, file.read())
    except OSError as error:
        raise SettingsError(
            f"{label} names {path!r}: {error.strerror or error}; give the path of a TOML file"
        ) from error
    values, remarks = {}, []
    for key, value in _table(label, path, content).items():
        if key in known:
            called = f"{key} in {path!r}"
            values[key] = (called, _text(called, value))
        elif key == "native_cache":
            remarks.append(
                f"native_cache in {path!r} is not used: the build reads no file; set GRADTRACE_NATIVE_CACHE"
            )
        else:
            remarks.append(f"{key} in {path!r} is no setting, and not used; {meant(key, [*known])}")
    return SettingsFile(path, values, tuple(remarks))


def _parsed(path: str, data: bytes) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ImportError as error:
            raise SettingsError(
                f"{path!r} is not read: before Python 3.11 that needs tomli (pip install tomli)"
            ) from error
    try:
        return tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SettingsError(
            f'{path!r} is no TOML: {error}; texts stand in quotes, as in detail = "params"'
        ) from error


def _table(label: str, path: str, content: dict[str, Any]) -> dict[str, Any]:
    if os.path.basename(path) == "pyproject.toml":
        where, found = "[tool.gradtrace]", content.get("tool")
        found = found.get("gradtrace") if isinstance(found, dict) else None
    elif "gradtrace" in content:
        where, found = "[gradtrace]", content["gradtrace"]
    else:
        return content
    if not isinstance(found, dict):
        raise SettingsError(f"{label} names {path!r}, which has no table {where}")
    return found


def _text(called: str, value: object) -> str:
    """The value as a variable would have it: `true` is `1`, a list's items are parted by commas."""
    items = value if isinstance(value, list) else [value]
    if any(not isinstance(item, (str, int)) for item in items):
        raise SettingsError(
            f'{called} is {value!r}; it can be a text in quotes, a whole number, true, false, or a list: ["0:10", 50]'
        )
    return ",".join(str(int(item)) if isinstance(item, bool) else str(item) for item in items)
