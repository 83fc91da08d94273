"""Keeps the runs that a test session asks the analyzer about, and what it asks: `pytest --keep-runs FOLDER`.

A run is copied as it stands when it is asked about, also while its job lives. FOLDER/<process>-<n>/<name> is a copy,
`about.json` beside it tells which test it is of, when it was taken, and which journals were of living processes; a
line of FOLDER/<process>.jsonl is something that was asked. Made to be packed, see `packing`.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gradtrace_schemas import layout
from gradtrace_schemas.journal import HEADER
from gradtrace_schemas.processes import life_of

KEPT_COMMANDS = ("diff", "check", "failures", "timing")
ABOUT = "about.json"


class Capture:
    """What one process has seen asked. Runs that did not change between two questions are copied once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._copies: dict[tuple[str, tuple[object, ...]], str] = {}
        self._depth = 0

    def begin(self) -> None:
        """Stand between the tests and the analyzer, which must not be imported yet by those who hold its names."""
        assert "gradtrace_analyzer.commands" not in sys.modules
        self._folder.mkdir(parents=True, exist_ok=True)
        opening: Any = importlib.import_module("gradtrace_analyzer.runs.opening")
        opening.open_run = self._around(opening.open_run, self._opened)
        cli: Any = importlib.import_module("gradtrace_analyzer.cli")
        cli.Analyzer.main = self._around(cli.Analyzer.main, self._called)
        compare: Any = importlib.import_module("gradtrace_analyzer.diff.compare")
        compare.compare = self._around(compare.compare, self._compared)
        subprocess.Popen.__init__ = self._around(subprocess.Popen.__init__, self._started)  # type: ignore[method-assign]

    def end(self, places: Iterable[Path]) -> None:
        """Copy the runs under these folders that nothing was asked about."""
        for place in places:
            for path in sorted(place.rglob(layout.RANKS)):
                if path.is_dir() and _is_run(path.parent):
                    self._copy(path.parent)

    def _around(self, function: Callable[..., Any], note: Callable[..., None]) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._depth == 0:
                note(*args, **kwargs)
            self._depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1

        return call

    def _opened(self, path: Any, attempt: int | None = None) -> None:
        if _is_run(Path(path)):
            self._copy(Path(path))

    def _called(self, group: Any, args: Sequence[str] | None = None, *_: Any, **__: Any) -> None:
        self._note([str(argument) for argument in args or ()], Path.cwd())

    def _started(self, process: Any, command: Any = None, *_: Any, **more: Any) -> None:
        words = [] if isinstance(command, (str, bytes)) else [str(word) for word in command or ()]
        for at, word in enumerate(words):
            if word in ("gradtrace_analyzer.cli", "gradtrace_analyzer"):
                self._note(words[at + 1 :], Path(more.get("cwd") or "."))

    def _compared(self, baseline: Any, candidate: Any, **options: Any) -> None:
        if options.get("scale", 1.0) != 1.0:
            return  # no option of the command
        words = ["diff", str(baseline.path), str(candidate.path)]
        words += ["--exact"] * bool(options.get("exact"))
        words += ["--verbose"] * bool(options.get("with_chain"))
        for rename in options.get("renames", ()):
            words += ["--rename", str(rename)]
        for repeat in options.get("repeats", ()):
            words += ["--noise", str(repeat.path)]
        if options.get("precision"):
            words += ["--precision", options["precision"]]
        chosen = options.get("chosen")
        if chosen is not None:
            words += [] if chosen.step is None else ["--at", str(chosen.step)]
            if chosen.ranks is not None:
                words += ["--rank", ",".join(f"{a}-{b}" for a, b in chosen.ranks)]
            for name, values in (("--module", chosen.modules), ("--link", chosen.links)):
                for value in values:
                    words += [name, value]
        self._note(words, Path.cwd())

    def _note(self, words: Sequence[str], cwd: Path) -> None:
        """Copy the runs among the words; keep the question with its runs as copies, `@` before them."""
        kept, skip = [], False
        for word in words:
            if skip:
                skip = False
            elif word in ("--format", "--junit"):
                skip = True
            elif not word.startswith("-") and _is_run(cwd / word):
                kept.append("@" + self._copy(cwd / word))
            else:
                kept.append(word)
        if not kept or kept[0] not in KEPT_COMMANDS or not any(w[0] == "@" for w in kept if w):
            return
        note = {"test": _test(), "arguments": kept}
        with (self._folder / f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(note) + "\n")

    def _copy(self, run: Path) -> str:
        """A copy of the run, relative to the folder."""
        key = (os.path.realpath(run), _state(run))
        if key not in self._copies:
            number = len(self._copies)
            place = Path(f"{os.getpid()}-{number:04}") / (run.resolve().name or "run")
            living = _copied(run, self._folder / place)
            about = {"test": _test(), "now_ns": time.time_ns(), "living": living}
            about["source"] = os.path.realpath(run)
            (self._folder / place.parent / ABOUT).write_text(json.dumps(about))
            self._copies[key] = str(place)
        return self._copies[key]


def _is_run(path: Path) -> bool:
    """Whether it looks like one: `os.path`, since a word of a command may be too long for a path."""
    names = (layout.RUN_FILE, layout.RANKS, layout.JOURNALS)
    return any(os.path.exists(path / name) for name in names)


def _test() -> str:
    return os.environ.get("PYTEST_CURRENT_TEST", "").split(" ")[0].removeprefix("tests/")


def _state(run: Path) -> tuple[object, ...]:
    """What changes when the run does; a journal may without."""
    found: list[object] = []
    for path in sorted(run.rglob("*")):
        if path.suffix == ".journal":
            found.append(time.time_ns() if _lives(path) else path.name)
        if path.is_file():
            stat = path.stat()
            found.append((str(path.relative_to(run)), stat.st_size, stat.st_mtime_ns))
    return tuple(found)


def _lives(journal: Path) -> bool:
    with journal.open("rb") as file:
        data = file.read(HEADER.itemsize)
    if len(data) < HEADER.itemsize:
        return False
    header = np.frombuffer(data, HEADER, 1)[0]
    said = (header[name].item() for name in ("pid", "process_start", "machine"))
    return life_of(*said) == "alive"


def _copied(run: Path, place: Path) -> list[str]:
    """Copy it, journals first, as they are read; the names of those of living processes."""
    place.mkdir(parents=True)
    living = []
    files = [path for path in run.rglob("*") if path.is_file()]
    for path in sorted(files, key=lambda p: (p.suffix != ".journal", p.suffix == ".json", str(p))):
        target = place / path.relative_to(run)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            if path.suffix == ".journal" and _lives(path):
                living.append(path.name)
            subprocess.run(
                ["cp", "--sparse=always", str(path), str(target)], check=True, capture_output=True
            )
        except (OSError, subprocess.CalledProcessError):
            continue  # gone meanwhile: written out, or renamed into place
    return living
