"""The command itself: its commands, its exit codes, and what reaches stdout and stderr."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from gradtrace_analyzer.cli import analyzer
from gradtrace_analyzer.errors import GradtraceError
from support.synthetic_runs.builder import build_run

CLI = [sys.executable, "-m", "gradtrace_analyzer.cli"]


def test_help_lists_every_command_with_a_line() -> None:
    result = CliRunner().invoke(analyzer, ["--help"])
    assert result.exit_code == 0
    for name in ("info", "sql"):
        assert any(line.strip().startswith(f"{name} ") for line in result.stdout.splitlines())


@pytest.mark.parametrize("name", analyzer.list_commands(click.Context(analyzer)))
def test_help_of_every_command_ends_with_examples(name: str) -> None:
    """However it is asked for."""
    short, long = (CliRunner().invoke(analyzer, [name, option]) for option in ("-h", "--help"))
    assert short.exit_code == 0 and short.stdout == long.stdout
    _, heading, shown = short.stdout.partition("\n  Examples:\n")
    assert heading and all(f"analyzer {name}" in line for line in shown.splitlines())


def test_version_is_the_packages() -> None:
    result = CliRunner().invoke(analyzer, ["--version"])
    assert result.stdout == f"analyzer, version {version('gradtrace')}\n"


@pytest.mark.parametrize("arguments", [["inof"], ["info"], ["info", "--colour", "x"]])
def test_wrong_usage_is_two_and_tells_on_stderr(arguments: list[str]) -> None:
    result = CliRunner().invoke(analyzer, arguments)
    assert result.exit_code == 2
    assert result.stdout == "" and "Usage:" in result.stderr


def test_persons_mistake_is_one_sentence_without_a_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [*CLI, "info", str(tmp_path / "none")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"analyzer: {tmp_path / 'none'} does not exist; ")
    assert done.stderr.count("\n") == 1


def command_that(action: object) -> click.Command:
    def callback() -> object:
        return action() if callable(action) else action

    return click.Command("probe", callback=callback)


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> object:
    def install(action: object) -> int:
        command = command_that(action)
        monkeypatch.setattr(type(analyzer), "get_command", lambda self, ctx, name: command)
        return CliRunner().invoke(analyzer, ["probe"], catch_exceptions=False).exit_code

    return install


def test_commands_result_is_the_exit_code(probe: object) -> None:
    assert callable(probe)
    assert [probe(code) for code in (None, 0, 1, 2)] == [0, 0, 1, 2]


def test_errors_have_their_own_exit_code_and_ctrl_c_is_not_different(probe: object) -> None:
    assert callable(probe)

    class Odd(GradtraceError):
        exit_code = 7

    def raise_odd() -> None:
        raise Odd("no")

    def interrupt() -> None:
        raise KeyboardInterrupt

    assert probe(raise_odd) == 7
    assert probe(interrupt) == 130


def test_bug_of_ours_keeps_its_traceback(probe: object) -> None:
    assert callable(probe)
    with pytest.raises(ZeroDivisionError):
        probe(lambda: 1 // 0)


def test_bug_of_ours_is_never_the_exit_code_for_different(tmp_path: Path) -> None:
    program = (
        "import sys, gradtrace_analyzer.runs.opening as r, gradtrace_analyzer.cli as c\n"
        "r.found_parts = lambda path: 1 // 0\n"
        f"sys.argv[1:] = ['info', {str(build_run(tmp_path / 'a'))!r}]\n"
        "c.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "Traceback" in done.stderr and "ZeroDivisionError" in done.stderr


def test_reader_that_stops_early_gets_no_complaint(tmp_path: Path) -> None:
    path = build_run(tmp_path / "a")
    process = subprocess.Popen(
        [*CLI, "sql", "SELECT range FROM range(1000000)", str(path), "--format", "csv"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == b"range\n"
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=60) == 141


def test_analyzer_needs_neither_torch_nor_the_recorder(tmp_path: Path) -> None:
    path = build_run(tmp_path / "a", {"steps": [{}]})
    program = (
        "import sys, gradtrace_analyzer.cli as c\n"
        f"sys.argv[1:] = ['info', {str(path)!r}]\n"
        "try:\n    c.main()\nfinally:\n"
        "    print([m for m in ('torch', 'gradtrace_recorder') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.endswith("[]\n")
