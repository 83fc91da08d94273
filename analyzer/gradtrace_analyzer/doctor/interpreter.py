"""Asks the Python of a job: processes of it, in this environment and directory. None is loaded into this one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradtrace_analyzer.errors import NoPython

_SECONDS = 180.0
# Of a rank's: a trial is a job of its own, and records rank 0.
_OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


@dataclass(frozen=True)
class Said:
    """What a process left: its JSON, or None and the last line on its stderr, or why there is none.

    `is_late`: it was ended, since it took too long.
    """

    answer: Any
    why: str = ""
    is_late: bool = False


@dataclass(frozen=True)
class Interpreter:
    """A Python that can be started, by its path."""

    path: str

    def examined(self) -> Said:
        """The facts that `python -m gradtrace_recorder examine` prints."""
        return self._asked("gradtrace_recorder", "examine")

    def self_tests(self) -> Said:
        """What of torch the recorder leans on, and whether it is there. An older recorder has no such test."""
        return self._asked("gradtrace_recorder", "self-test", "--json")

    def trial(self, directory: Path | None, settings: Mapping[str, str], seconds: float) -> Said:
        """A small job, bare or recorded into a directory, which has so many seconds."""
        variables = {f"GRADTRACE_{name.upper()}": value for name, value in settings.items()}
        variables |= {"GRADTRACE_DIR": "" if directory is None else str(directory)}
        return self._asked("gradtrace_recorder.trial", variables=variables, seconds=seconds)

    def _asked(
        self,
        module: str,
        *arguments: str,
        variables: Mapping[str, str] | None = None,
        seconds: float = _SECONDS,
    ) -> Said:
        environment = dict(os.environ)
        if variables is not None:
            kept = ("GRADTRACE_NATIVE_CACHE",)
            environment = {
                name: value
                for name, value in os.environ.items()
                if name not in _OF_A_RANK and (name in kept or not name.startswith("GRADTRACE_"))
            }
            environment |= {"GRADTRACE_QUIET": "1", **variables}
        try:
            done = subprocess.run(
                [self.path, "-m", module, *arguments],
                env=environment,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Said(None, f"no answer within {seconds:g} s", is_late=True)
        try:
            answer = json.loads(done.stdout)
        except ValueError:
            lines = done.stderr.strip().splitlines()
            return Said(None, lines[-1] if lines else f"exit status {done.returncode}")
        if not isinstance(answer, dict):
            return Said(None, "what it prints is no answer")
        return Said(answer)


def interpreter(path: str) -> Interpreter:
    """That Python, after it was started once. Raises NoPython."""
    found = shutil.which(path)
    try:
        if found is None:
            raise NoPython(
                f"{path} is no program that can be started; give the Python that runs the job, as in "
                "--python .venv/bin/python"
            )
        done = subprocess.run(
            [found, "-c", "print('here')"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoPython(f"{path} cannot be started: {error}") from error
    if done.stdout.strip() != "here":
        raise NoPython(f"{path} is no Python: it does not run `-c \"print('here')\"`")
    return Interpreter(found)
