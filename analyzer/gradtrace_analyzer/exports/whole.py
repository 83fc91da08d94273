"""Files that are whole or not there: written under another name, which goes when the writing is broken off."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gradtrace_analyzer.errors import CannotWrite


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Where to write what is to lie at `path`; it takes its place when the `with` ends well.

    Raises CannotWrite where the system refuses.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.writing")
    try:
        try:
            yield temporary
            os.replace(temporary, path)
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                raise
            raise CannotWrite(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)
