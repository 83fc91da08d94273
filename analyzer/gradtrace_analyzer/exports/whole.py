"""Files that are whole or not there: written under another name, which goes when the writing is broken off."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb

from gradtrace_analyzer.errors import CannotWrite


@contextmanager
def whole_file(path: Path, also: str = "") -> Iterator[Path]:
    """Where to write what is to lie at `path`; it takes its place when the `with` ends well.

    A link is followed; a pipe or device is written to as it is, since nothing may take its place. `also` is the ending
    of a file that the writer puts beside it for a while.

    Raises CannotWrite where the system refuses.
    """
    named, path = path, Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        with _told(named):
            yield path
        return
    folder = path.parent
    if not folder.is_dir():
        raise CannotWrite(f"{named} cannot be written: there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise CannotWrite(f"{named} cannot be written: {folder} may not be written to")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.writing")
    try:
        try:
            with _told(named):
                yield temporary
                os.replace(temporary, path)
        except duckdb.Error as error:
            # DuckDB reads parts and writes files with the same errors: the name tells which it was.
            refused = re.search(re.escape(temporary.name) + r"[^\"]*\": ([^\"]+)", str(error))
            if refused is None:
                raise
            raise CannotWrite(f"{named} cannot be written: {refused[1]}") from None
    finally:
        temporary.unlink(missing_ok=True)
        if also:
            temporary.with_name(temporary.name + also).unlink(missing_ok=True)


@contextmanager
def _told(named: Path) -> Iterator[None]:
    """Raise CannotWrite, which names the file, for what the system refuses inside; a closed pipe is passed on."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CannotWrite(f"{named} cannot be written: {error.strerror or error}") from None
