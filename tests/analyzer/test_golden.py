"""What every command says, as a person reads it: on small built runs, in this process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from gradtrace_analyzer.cli import analyzer
from gradtrace_schemas import layout
from support.answers.golden import must_be_golden
from support.synthetic_runs.bucket_times import TimedJob
from support.synthetic_runs.builder import add_part, build_run
from support.synthetic_runs.data_parallel import Job, edit, matching
from support.synthetic_runs.journals import write_journal
from support.synthetic_runs.large import Sizes, build_large

SMALL = Sizes(ranks=2, steps=4, nodes=20, modules=5)
COUNT = "SELECT rank, count(*) AS n, max(grad_input_norm) AS largest FROM node_events GROUP BY rank ORDER BY rank"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every run that the commands below name."""
    place = tmp_path_factory.mktemp("runs")
    base = build_large(place / "base", SMALL)
    for name in ("one event", "noise", "bug"):
        build_large(place / name.replace(" ", "-"), SMALL, name, like=base)
    build_large(place / "later", Sizes(ranks=1, steps=2, nodes=20, modules=5))
    build_run(place / "clean", Job().made(), world_size=2)
    apart = Job().made()
    weight = {"rank": 1, "step": 1, "point": "before", "parameter_fqn": "body.weight"}
    [row] = matching(apart, "parameters", **weight)
    edit(apart, "parameters", weight, fingerprint=row["fingerprint"] + 1)
    build_run(place / "apart", apart, world_size=2)
    TimedJob(late=lambda rank, step, bucket: 20.0 * (rank == 1)).write(place / "late")
    build_run(place / "missing", {"steps": [{}]}, world_size=4, absent=(2, 3))
    write_journal(
        place / "killed",
        [("steps", {"step": 0, "start_ns": 5, "end_ns": 9})],
        running=[{"node_name": "ReluBackward0", "module_fqn": "act", "step": 1, "start_ns": 7}],
        machine=1,
        heartbeat_ns=1,
    )
    flight = {"settings": {"mode": "flight", "flight_steps": 2}}
    build_run(place / "flight", {"steps": [{"step": 7}, {"step": 8}]}, rank_facts=flight)
    newer = build_run(place / "newer", {"steps": [{}]})
    (newer / layout.RUN_FILE).write_text('{"schema_version": 99}')
    damaged = build_run(place / "damaged", {"steps": [{}, {"step": 1}]})
    part = add_part(damaged, "steps", [{"step": 2}])
    part.write_bytes(part.read_bytes()[:-20])
    (place / "empty").mkdir()
    (place / "file").write_text("x")
    return place


CASES = {
    "info": "info clean",
    "info-missing-ranks": "info missing",
    "info-killed": "info killed",
    "info-flight": "info flight",
    "info-damaged": "info damaged",
    "info-newer": "info newer",
    "info-no-run": "info nowhere",
    "info-empty": "info empty",
    "info-file": "info file",
    "info-no-attempt": "info --attempt 3 clean",
    "diff-same": "diff base base",
    "diff-one-event": "diff base one-event",
    "diff-noise": "diff base noise",
    "diff-noise-exact": "diff --exact base noise",
    "diff-bug": "diff base bug",
    "diff-around": "diff -v --top 3 base bug",
    "diff-asked": "diff --at 3 --rank 0 --link forward --link loss base bug",
    "diff-gate": "diff --fail-on backward>=9e-3 --fail-on loss>=1 base bug",
    "diff-gate-passes": "diff --fail-on backward>=0.5 base bug",
    "diff-noise-measured": "diff --noise noise base bug",
    "diff-noise-itself": "diff --noise bug base bug",
    "diff-bad-rename": "diff --rename blocks base bug",
    "diff-bad-gate": "diff --fail-on backward base bug",
    "diff-no-such-step": "diff --at 9 base bug",
    "diff-timing": "diff --timing base late",
    "diff-other-ranks": "diff base later",
    "diff-unlike": "diff base missing",
    "check-clean": "check clean",
    "check-apart": "check apart",
    "timing": "timing late",
    "timing-buckets": "timing --buckets late",
    "timing-no-buckets": "timing --buckets missing",
    "timing-bad-slice": "timing --step 1:x late",
    "failures-none": "failures clean",
    "doctor-clean": "doctor clean",
    "doctor-missing-ranks": "doctor missing",
    "doctor-killed": "doctor killed",
    "doctor-damaged": "doctor damaged",
    "doctor-flight": "doctor flight",
    "doctor-no-python": "doctor --python no/python",
    "doctor-python-of-a-run": "doctor --python python clean",
    "repair-nothing": "repair clean",
    "repair-elsewhere": "repair killed",
    "trigger-no-flight": "trigger --wait 0 clean",
    "sql": f"sql|{COUNT}|base",
    "sql-named": "sql @losses base",
    "sql-parameter": "sql @slowest-nodes -p top=2 base",
    "sql-list": "sql --list",
    "sql-unknown-name": "sql @nothing base",
    "sql-unknown-parameter": "sql @losses -p top=2 base",
    "sql-lacks-parameter": "sql|SELECT $a + $b|base",
    "sql-bad-parameter": "sql -p top @losses base",
    "sql-writes": "sql|DROP VIEW steps|base",
    "sql-mistake": "sql|SELECT stp FROM steps|base",
    "sql-output": "sql @losses base -o losses.csv",
    "sql-odd-output": "sql @losses base -o losses.txt",
    "export-nothing": "export base",
    "export-all": "export base --duckdb base.duckdb --perfetto base.pftrace.gz --parquet tables",
    "export-no-folder": "export base --duckdb no/base.duckdb",
    "export-two": "export base bug --perfetto both.pftrace",
    "usage": "inof",
}


@pytest.mark.parametrize("name", CASES)
def test_command_says_what_it_said(
    name: str, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for run in runs.iterdir():
        (tmp_path / run.name).symlink_to(run)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    case = CASES[name]
    result = CliRunner().invoke(analyzer, case.split("|") if "|" in case else case.split(" "))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    err = result.stderr.replace(os.fspath(tmp_path), "<here>")
    must_be_golden(f"commands/{name}", result.stdout, err, result.exit_code)
