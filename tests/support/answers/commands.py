"""The analyzer's commands, run in this process: a new one costs most of a command's time."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

import pytest

from gradtrace_analyzer.cli import analyzer


def told(*arguments: object, is_quiet: bool = False) -> tuple[int, str]:
    """The exit status and the stdout of a command that can tell."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as left,
    ):
        analyzer([str(argument) for argument in arguments])
    assert not (is_quiet and err.getvalue()), err.getvalue()
    assert left.value.code in (0, 1), f"{err.getvalue()}{out.getvalue()}"
    return int(left.value.code), out.getvalue()


def asked(*arguments: object, is_quiet: bool = False) -> tuple[int, dict[str, Any]]:
    """The exit status and the answer of a command with `--format json`."""
    code, said = told(*arguments, is_quiet=is_quiet)
    return code, json.loads(said)
