"""What the analyzer says: each question asked through its command line, in this process, as of the same moment.

Nothing of the analyzer is named here but `gradtrace_analyzer.cli.analyzer`. The runs' names are relative and the clock
is set, so that what it says is of the recordings alone.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

JSON, TABLE = "json", "table"
FORMATS = (JSON, TABLE)

# What of an answer depends on when, or where, it is asked: pattern, what stands there instead, why. How long ago a rank
# moved is counted on a clock that is set, but for `ago`: that is of `datetime`, which cannot be.
MASKS = (
    (re.compile(r"^analyzer: .*, \d+ s\n", re.MULTILINE), "", "progress, told of a slow machine"),
    (re.compile(r"[0-9.]+ (?:s|min|h|days) ago"), "T ago", "counted from datetime.now()"),
)


@dataclass(frozen=True)
class Question:
    """A command without its format, asked at `now_ns` of the wall clock in all `formats`. `about` says where it comes
    from."""

    arguments: tuple[str, ...]
    about: str
    now_ns: int
    formats: tuple[str, ...] = FORMATS

    @property
    def name(self) -> str:
        """What it is kept under."""
        return " ".join(self.arguments)


@dataclass(frozen=True)
class Answer:
    """The exit status, what was said, and what was said beside it on stderr; by format."""

    code: int
    said: str
    beside: str


class _Clock:
    """Stands still, for wall time alone."""

    now_ns = 0

    def time_ns(self) -> int:
        return self.now_ns

    def time(self) -> float:
        return self.now_ns / 1e9


_CLOCK = _Clock()


def prepare(place: str) -> None:
    """Make this process one that judges, for good: `place` is where the runs lie."""
    os.chdir(place)
    os.environ.update(TZ="UTC", COLUMNS="120", NO_COLOR="1")
    time.tzset()
    # Before the analyzer could take them by name.
    time.time_ns, time.time = _CLOCK.time_ns, _CLOCK.time
    # One thread of DuckDB: several add in whatever order they come, and the last digits of a tolerance differ.
    os.sched_getaffinity = lambda _: {0}
    os.cpu_count = lambda: 1  # where there is no affinity


def judge(question: Question) -> dict[str, Answer]:
    """The answers by format, in a process that is prepared."""
    return {format: _asked(question, format) for format in question.formats}


def _asked(question: Question, format: str) -> Answer:
    from gradtrace_analyzer.cli import analyzer

    _CLOCK.now_ns = question.now_ns
    command, *rest = question.arguments
    out, err = io.StringIO(), io.StringIO()
    code: object = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            analyzer([command, "--format", format, *rest])
        except SystemExit as left:
            code = left.code
        except Exception as error:  # a bug of ours is an answer that changed too
            code, _ = 2, err.write(f"raised {type(error).__name__}: {error}\n")
    return Answer(
        code if isinstance(code, int) else 2, _masked(out.getvalue()), _masked(err.getvalue())
    )


def _masked(text: str) -> str:
    text = text.replace(f"{Path.cwd()}/", "")
    for pattern, mask, _ in MASKS:
        text = pattern.sub(mask, text)
    return text


def question_of(line: str) -> Question:
    """Of a line of the file of questions."""
    about = json.loads(line)
    return Question(
        tuple(about["arguments"]), about["about"], about["now_ns"], tuple(about["formats"])
    )


def line_of(question: Question) -> str:
    """The line of `question_of`."""
    return json.dumps(asdict(question))


def part_of(questions: Sequence[Question], part: int, parts: int) -> list[Question]:
    """The part-th of so many parts, from 1."""
    return [question for n, question in enumerate(questions) if n % parts == part - 1]
