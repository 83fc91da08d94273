"""Which attempt a rank joins, by what it knows without a process group: quick, many starts in one process."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from gradtrace_recorder.launch import claim as claims
from gradtrace_recorder.launch.claim import claim_place
from gradtrace_recorder.launch.identity import Identity
from gradtrace_recorder.launch.launchers import How, Launcher, current_launcher
from gradtrace_schemas import layout

HOUR = 3600 * 10**9


def rank(
    number: int,
    key: str = "address/10.0.0.1/29500",
    how: How = "address",
    *,
    size: int | None = 3,
    is_certain: bool = False,
    parent: str = "shell",
) -> Identity:
    launcher = Launcher("variables", number, size, number, how, key, is_certain, 0, parent)
    return Identity(number, size, number, "host", os.getpid(), launcher, has_group=False)


def attempts(run: Path, *identities: Identity) -> list[int]:
    return [claim_place(run, identity, {}).attempt for identity in identities]


def long_ago(run: Path, attempt: int) -> None:
    """The attempt's ranks ended an hour ago."""
    path = layout.attempt_file(run, attempt)
    facts = json.loads(path.read_text())
    path.write_text(json.dumps({**facts, "started_unix_ns": time.time_ns() - HOUR}))
    for place in (run / layout.RANKS).glob(f"*-{attempt}.json"):
        ended = {"complete": True, "wall_end_ns": time.time_ns() - HOUR + 1}
        place.write_text(json.dumps({**json.loads(place.read_text()), **ended}))


def test_ranks_of_one_address_are_an_attempt_in_any_order(tmp_path: Path) -> None:
    assert attempts(tmp_path, rank(1), rank(0)) == [0, 0]


def test_second_start_is_the_next_attempt(tmp_path: Path) -> None:
    assert attempts(tmp_path, rank(0), rank(1), rank(1), rank(0)) == [0, 0, 1, 1]


def test_attempt_of_the_same_address_that_ended_before_this_process_began_is_not_joined(
    tmp_path: Path,
) -> None:
    attempts(tmp_path, rank(0))
    long_ago(tmp_path, 0)
    assert attempts(tmp_path, rank(1), rank(0)) == [1, 1]


def test_ids_that_are_one_starts_alone_are_joined_however_late(tmp_path: Path) -> None:
    step = {"key": "slurm//4711/0/0", "how": "ids", "is_certain": True}
    attempts(tmp_path, rank(0, **step))  # type: ignore[arg-type]
    long_ago(tmp_path, 0)
    assert attempts(tmp_path, rank(1, **step)) == [0]  # type: ignore[arg-type]


def test_two_jobs_at_once_stay_apart_whatever_the_order(tmp_path: Path) -> None:
    first, second = "address/10.0.0.1/1", "address/10.0.0.1/2"
    found = attempts(tmp_path, rank(0, first), rank(0, second), rank(1, first), rank(1, second))
    assert found == [0, 1, 0, 1]


def test_jobs_of_another_size_stay_apart(tmp_path: Path) -> None:
    assert attempts(tmp_path, rank(0), rank(1, size=4), rank(0, size=4)) == [0, 1, 1]


def test_ranks_that_share_their_number_alone_prefer_their_shell_and_join_neither_of_two_others(
    tmp_path: Path,
) -> None:
    def of(number: int, parent: str) -> Identity:
        return rank(number, "world of 2", "world", parent=parent)

    assert attempts(tmp_path, of(0, "one"), of(0, "two")) == [0, 1]
    assert attempts(tmp_path, of(1, "two"), of(1, "one")) == [1, 0]
    assert attempts(tmp_path, of(0, "one"), of(0, "two"), of(1, "a third")) == [2, 3, 4]


def test_loop_in_a_shell_is_one_attempt_though_no_two_ranks_live_at_once(tmp_path: Path) -> None:
    of = {"key": "world of 2", "how": "world"}
    attempts(tmp_path, rank(0, **of))  # type: ignore[arg-type]
    long_ago(tmp_path, 0)
    assert attempts(tmp_path, rank(1, **of)) == [0]  # type: ignore[arg-type]


def test_processes_of_no_start_are_attempts_of_their_own(tmp_path: Path) -> None:
    assert attempts(tmp_path, *[rank(0, "process 1", "alone", size=1)] * 2) == [0, 1]


def test_ranks_that_come_at_the_same_moment_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each opens an attempt after another has looked and found none."""
    looks = claims._joinable
    waiting = [rank(1), rank(2)]

    def slow(run: Path, identity: Identity, *more: Any, has_store: bool) -> tuple[int, str] | None:
        found = looks(run, identity, *more, has_store=has_store)
        if waiting:
            met.append(claim_place(run, waiting.pop(), {}).attempt)
        return found

    met: list[int] = []
    monkeypatch.setattr(claims, "_joinable", slow)
    met += attempts(tmp_path, rank(0))
    assert met == [0, 0, 0]


def test_rank_with_no_answer_from_the_store_goes_by_what_else_it_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dead:
        def compare_set(self, *of_it: Any) -> bytes:
            raise ConnectionError

    attempts(tmp_path, rank(0))
    monkeypatch.setattr(claims, "group_store", Dead)
    claimed = claim_place(tmp_path, rank(1), {})
    assert (claimed.attempt, claimed.found_by) == (0, "address")


def test_store_alone_tells_jobs_apart_and_starts_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs of containers whose addresses are called alike, at once; their ranks may call them otherwise, too."""
    stores = {"one": HashStore(), "two": HashStore()}

    def attempt(job: str, number: int, key: str = "address/trainer-0/29500") -> int:
        monkeypatch.setattr(claims, "group_store", lambda: stores[job])
        return claim_place(tmp_path, rank(number, key), {}).attempt

    assert [attempt("one", 0), attempt("two", 1), attempt("one", 1), attempt("two", 0)] == [
        0,
        1,
        0,
        1,
    ]
    assert attempt("one", 2, "address/10.0.0.1/29500") == 0
    # The store outlives the ranks, where an agent keeps it: those that are there already begin the next start.
    assert [attempt("one", 1), attempt("one", 0), attempt("two", 0)] == [2, 2, 3]


def test_rank_that_has_a_store_finds_those_that_came_before_it_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert attempts(tmp_path, rank(0)) == [0]
    store = HashStore()
    monkeypatch.setattr(claims, "group_store", lambda: store)
    assert attempts(tmp_path, rank(2), rank(1, "address/otherwise/29500")) == [0, 0]


VARIABLES: dict[str, tuple[dict[str, str], tuple[str, int, int | None, How]]] = {
    "nothing": ({}, ("none", 0, 1, "alone")),
    "torchrun": (
        {"RANK": "3", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "a"},
        ("torchrun", 3, 4, "ids"),
    ),
    "mpirun within a step": (
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "1"}
        | {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "PMIX_NAMESPACE": "p"},
        ("mpirun", 5, 8, "ids"),
    ),
    "a batch script's own Python": (
        {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
        ("none", 0, 1, "alone"),
    ),
    "intel mpi": ({"PMI_RANK": "1", "PMI_SIZE": "2"}, ("mpirun", 1, 2, "world")),
    "rank without a size": ({"RANK": "1"}, ("variables", 1, None, "alone")),
    "Lightning on the second machine": (
        {"LOCAL_RANK": "1", "NODE_RANK": "1", "WORLD_SIZE": "4"},
        ("none", 0, 4, "world"),
    ),
}


@pytest.mark.parametrize("name", VARIABLES)
def test_variables_say_the_rank(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variables, (kind, number, size, how) = VARIABLES[name]
    prefixes = ("RANK", "WORLD_", "LOCAL_", "MASTER_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI")
    for variable in [v for v in os.environ if v.startswith(prefixes)]:
        monkeypatch.delenv(variable)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    found = current_launcher(None)
    assert (found.kind, found.rank, found.world_size, found.how) == (kind, number, size, how)
    grouped = current_launcher((1, 2))
    assert (grouped.rank, grouped.world_size) == (1, 2)


def test_address_of_a_loopback_is_this_networks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "29500")
    keys = []
    for address in ("localhost", "127.0.0.1", "::1", "10.0.0.1"):
        monkeypatch.setenv("MASTER_ADDR", address)
        keys.append(replace(current_launcher((0, 2))).key)
    assert len(set(keys[:3])) == 1 and ":loopback/" in keys[0]
    assert keys[3] == "address/10.0.0.1/29500"
