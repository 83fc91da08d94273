"""Puts files and folders of a run into every state that a machine can leave them in, and asks every command.

Rights, sizes, links, folders where files are expected, writings that were broken off, json of other types. A
command may answer, or say in words why it cannot: never a traceback, never without an end.

A process that may read whatever it likes would see no rights: run it as `restricted()` says.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.stress.fuzzing import Fuzzer

SECONDS_A_COMMAND = 30
HUGE = 1 << 43  # bytes that a sparse file claims
DATA = Path(__file__).resolve().parents[2] / "data"


def restricted() -> list[str]:
    """What goes before a command so that rights count for it: nothing for a person, for root a program that drops what
    lets it read all. Raises FileNotFoundError where there is none."""
    if os.geteuid() != 0:
        return []
    if (found := shutil.which("setpriv")) is None:
        raise FileNotFoundError("root sees no rights, and setpriv is not here to drop its own")
    return [found, "--bounding-set=-dac_override,-dac_read_search,-fowner"]


class States:
    """Runs in `folder`, and what may come over them, drawn from `draw`."""

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self.folder, self.draw = folder, draw
        self.valid = {
            "closed": DATA / "schema-5",
            "killed": folder / "fuzzed" / "valid",
        }
        Fuzzer(folder / "fuzzed", draw.randrange(1000))
        self.states: dict[str, Callable[[Path], None]] = {
            "no rights": lambda path: path.chmod(0),
            "no right to write": lambda path: path.chmod(0o555 if path.is_dir() else 0o444),
            "names without what they name": lambda path: path.chmod(0o444),
            "what is named without names": lambda path: path.chmod(0o111),
            "gone": _remove,
            "empty": _emptied,
            "cut": self._cut,
            "longer": self._longer,
            "other bytes": self._other_bytes,
            "huge": _huge,
            "link to nothing": lambda path: _replaced(path).symlink_to("nowhere"),
            "link to itself": lambda path: _replaced(path).symlink_to(path.name),
            "link to above": lambda path: _replaced(path).symlink_to("..", True),
            "a folder": lambda path: _replaced(path).mkdir(),
            "a file": lambda path: _written(path, self.draw.randbytes(40)),
            "a pipe": lambda path: os.mkfifo(_replaced(path)),
            "a socket": _socket,
            "another table": self._another_table,
            "json of other types": self._other_types,
            "deep json": lambda path: _written(path, b"[" * 100_000),
            "writing broken off": self._broken_off,
            "odd names": self._odd_names,
        }

    def apply(self, kind: str, name: str) -> tuple[Path, str]:
        """A copy of the valid run of that name, with something of it in that state; (its path, what)."""
        place = self.folder / "run"
        _remove(place)
        shutil.copytree(self.valid[name], place)
        inside = sorted(place.rglob("*"))
        if kind == "json of other types":
            inside = [path for path in inside if path.suffix == ".json"]
        elif self.draw.random() < 0.1:
            inside = [place]
        path = self.draw.choice(inside)
        self.states[kind](path)
        return place, f"{name}: {path.relative_to(self.folder)}: {kind}"

    def commands(self, run: Path) -> list[list[str]]:
        """Every command, asked of this run."""
        other, out = str(DATA / "schema-5"), self.folder / "out"
        _remove(out)
        out.mkdir()
        return [
            ["info", str(run)],
            ["info", "--format", "json", str(run), other],
            ["diff", str(run), other],
            ["diff", other, str(run), "--timing"],
            ["diff", other, other, "--noise", str(run)],
            ["check", str(run)],
            ["timing", str(run)],
            ["timing", "--stages", str(run)],
            ["timing", "--buckets", str(run)],
            ["failures", str(run)],
            ["failures", "--format", "json", str(run)],
            ["sql", "SELECT count(*) FROM steps", str(run)],
            ["sql", "SELECT * FROM node_events", str(run), "-o", str(out / "rows.parquet")],
            ["sql", "@gradient-norms", str(run)],
            ["export", "--duckdb", str(out / "a.duckdb"), str(run)],
            ["export", "--csv", str(out / "csv"), "--parquet", str(out / "parquet"), str(run)],
            ["export", "--perfetto", str(out / "trace.gz"), str(run)],
            ["trigger", str(run), "--wait", "0"],
            ["repair", "--force", str(run)],
        ]

    def _cut(self, path: Path) -> None:
        if path.is_file():
            os.truncate(path, self.draw.randrange(path.stat().st_size + 1))

    def _longer(self, path: Path) -> None:
        if path.is_file():
            with path.open("ab") as file:
                file.write(self.draw.randbytes(self.draw.choice((1, 100, 100_000))))

    def _other_bytes(self, path: Path) -> None:
        if path.is_file():
            data = bytearray(path.read_bytes())
            for _ in range(self.draw.randint(1, 5)):
                data[self.draw.randrange(len(data))] = self.draw.randrange(256)
            path.write_bytes(data)

    def _another_table(self, path: Path) -> None:
        others = sorted((DATA / "schema-5").rglob("*.parquet"))
        if path.is_file():
            shutil.copyfile(self.draw.choice(others), path)

    def _other_types(self, path: Path) -> None:
        content = json.loads(path.read_text())
        path.write_text(json.dumps(self._other(content, 0)))

    def _other(self, value: Any, depth: int) -> Any:
        if isinstance(value, dict) and depth < 3 and self.draw.random() < 0.9:
            return {key: self._other(inside, depth + 1) for key, inside in value.items()}
        if self.draw.random() < 0.6:
            return value
        odd: list[Any] = [
            None,
            -1,
            10**30,
            1.5,
            float("nan"),
            "text",
            "",
            [],
            [1, "a"],
            {},
            {"a": [0]},
            True,
        ]
        return self.draw.choice(odd)

    def _broken_off(self, path: Path) -> None:
        if path.is_file():
            half = path.read_bytes()[: path.stat().st_size // 2]
            path.with_suffix(".writing").write_bytes(half)
            if self.draw.random() < 0.5:
                path.unlink()

    def _odd_names(self, path: Path) -> None:
        folder = path if path.is_dir() else path.parent
        names = [
            "a\nb.json",
            "rank=x",
            "rank=99999999999999999999",
            "rank=00009-7.json",
            "part-9-0.parquet",
        ]
        names += [f"part-0-{10**20}.parquet", f"rank=00001-{10**20}.json", os.fsdecode(b"\xff\xfe")]
        for name in names:
            _written(folder / name, self.draw.choice((b"{}", b"PAR1")))


def _remove(path: Path) -> None:
    for place, folders, _ in os.walk(path):
        with contextlib.suppress(OSError):
            os.chmod(place, 0o700)
        for name in folders:
            with contextlib.suppress(OSError):
                os.chmod(os.path.join(place, name), 0o700, follow_symlinks=True)
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path)


def _replaced(path: Path) -> Path:
    _remove(path)
    return path


def _written(path: Path, data: bytes) -> None:
    _replaced(path).write_bytes(data)


def _emptied(path: Path) -> None:
    if path.is_dir():
        _replaced(path).mkdir()
    else:
        path.write_bytes(b"")


def _huge(path: Path) -> None:
    if path.is_file():
        os.truncate(path, HUGE)


def _socket(path: Path) -> None:
    _replaced(path)
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as made:
        # Its name may be longer than a socket's may be.
        before = os.getcwd()
        os.chdir(path.parent)
        try:
            made.bind(path.name)
        finally:
            os.chdir(before)


class TooLong(BaseException):
    """A command that does not end."""


def asked(command: list[str]) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of a command, run in this process from where the console script begins."""
    from gradtrace_analyzer.__main__ import main

    def late(*_: object) -> None:
        raise TooLong(f"{command} did not end within {SECONDS_A_COMMAND} s")

    out, err = io.StringIO(), io.StringIO()
    before, sys.argv = sys.argv, ["analyzer", *command]
    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS_A_COMMAND)
    code: object = "none"
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as left:
        code = left.code
    except TooLong:
        err.write(traceback.format_exc())
    finally:
        signal.alarm(0)
        sys.argv = before
    return (code if isinstance(code, int) else -1), out.getvalue(), err.getvalue()


def complaint(code: int, out: str, err: str) -> str | None:
    """What is wrong with how a command ended; None where it answered, or said in one sentence why not."""
    if "Traceback" in err or code not in (0, 1, 2):
        return f"exit status {code}: {err[-1500:]}"
    said = [line for line in err.splitlines() if line.startswith(("analyzer: ", "Error: "))]
    if code == 2 and not said and not out.strip():
        return f"exit status 2, and nothing is said: {err}"
    return None


def tried(
    folder: Path, seed: int, seconds: float, most: int, commands_a_state: int = 3
) -> Counter[str]:
    """Many states, each with some commands; exit statuses, counted. Raises AssertionError with all complaints."""
    draw = random.Random(seed)
    states = States(folder, draw)
    ended: Counter[str] = Counter()
    wrong: list[str] = []
    deadline = time.monotonic() + seconds
    number = turn = 0
    while turn < most and time.monotonic() < deadline:
        kinds = sorted(states.states)
        if turn % len(kinds) == 0:
            draw.shuffle(order := kinds)
        place, what = states.apply(order[turn % len(kinds)], ("closed", "killed")[turn % 3 == 0])
        known = states.commands(place)
        for _ in range(commands_a_state):
            command = known[number % len(known)]
            number += 1
            code, out, err = asked(command)
            ended[f"exit {code}"] += 1
            if said := complaint(code, out, err):
                wrong.append(
                    f"seed {seed}, state {turn}: {what}\n$ analyzer {' '.join(command)}\n{said}"
                )
        turn += 1
    _remove(states.folder / "run")
    ended["states"] = turn
    assert not wrong, "\n\n".join([*wrong, f"{len(wrong)} complaints"])
    return ended


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="states-") as place:
        seed = int(sys.argv[2])
        found = tried(
            Path(place), seed, float(sys.argv[1]), int(sys.argv[3]) if sys.argv[3:] else 10**9
        )
    print(f"seed {seed}: {dict(sorted(found.items()))}; each ended with an answer or a sentence")
