"""What the tests of launchers ask of a job that `jobs/launched.py` ran: one attempt, whole, and the same bits."""

from __future__ import annotations

import socket
from pathlib import Path

from gradtrace_analyzer.runs.opening import open_run
from support.answers.commands import asked, told

JOB = Path(__file__).resolve().parents[1] / "jobs" / "launched.py"


def free_port() -> int:
    """A port that nobody listens at just now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def bits(out: Path) -> dict[int, str]:
    """By rank, a digest of the parameters that it ended with."""
    return {int(path.name.split("-")[1]): path.read_text() for path in out.glob("rank-*")}


def is_one_attempt(
    path: Path, kind: str, found_by: str, *, attempt: int = 0, ranks: int = 2
) -> None:
    """The newest attempt has that number and all ranks, whole, which say what started them and how they met.

    Children of a parent that never talk do not know how many they are.
    """
    world_size = None if found_by == "parent" else ranks
    run = open_run(path)
    assert run.attempts == tuple(range(attempt + 1))
    assert (run.attempt, sorted(run.ranks)) == (attempt, list(range(ranks)))
    assert (run.incomplete_ranks, run.missing_ranks, run.world_size) == ((), (), world_size)
    facts = [info.facts for info in run.ranks.values()]
    assert [fact["launcher"]["kind"] for fact in facts] == [kind] * ranks
    # The first is there before a store could be asked, where it came before the group.
    assert {fact["launcher"]["found_by"] for fact in facts} == {found_by}
    assert not [problem for fact in facts for problem in fact["problems"]]
    code, said = told("info", path)
    assert code == 0 and (kind in said or kind == "none"), said


def must_be_equal(baseline: Path, candidate: Path) -> None:
    """`diff` of a run and its repeat."""
    code, answer = asked("diff", baseline, candidate, "--format", "json")
    assert (code, answer["verdict"]) == (0, "identical"), answer["explanation"]
