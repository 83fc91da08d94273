"""`replays_equal`: Nodes that disagree with themselves, on which ranks, and how many of them are told one by one."""

from pathlib import Path

from gradtrace_analyzer.check.law import Findings
from gradtrace_analyzer.check.laws.replays import replays_equal
from support.synthetic_runs.data_parallel import (
    Job,
    checked,
    edit,
    findings,
    laws,
    matching,
    violation,
)


def test_node_that_disagrees_on_one_rank_alone_points_to_its_device(tmp_path: Path) -> None:
    rows = Job().made()
    edit(rows, "node_events", {}, replay_equal=True)
    node = matching(rows, "node_events", rank=1, step=2)[0]
    node.update(replay_equal=False, replay_error=0.25)
    answer = checked(tmp_path, rows)
    found = violation(answer, "replays_equal")
    assert laws(answer) == ["replays_equal"] and answer["verdict"] == "violated"
    assert (found["step"], found["rank"], found["count"]) == (2, 1, 1)
    assert (found["relative_error"], found["node_name"]) == (0.25, node["node_name"])
    assert found["explanation"].endswith(
        "on ranks 0-1, by 2.5e-01 at most): a faulty device of rank 1, or a nondeterministic kernel or Function (on "
        "rank 0 it gave the same each time), not the data."
    )
    assert answer["judged"]["replays_equal"] == len(rows["node_events"])


def test_difference_that_is_no_number_is_told_without_one(tmp_path: Path) -> None:
    rows = Job().made()
    name = matching(rows, "node_events", step=1)[0]["module_fqn"]
    edit(rows, "node_events", {"step": 1, "module_fqn": name}, replay_equal=False)
    found = violation(checked(tmp_path, rows), "replays_equal")
    assert found["ranks"] == [0, 1] and found["rank"] is None and found["relative_error"] is None
    assert found["explanation"].endswith(
        "on ranks 0-1): a nondeterministic kernel, a Function that draws or keeps something, or a faulty device, not "
        "the data."
    )


def test_of_many_nodes_the_first_are_told_and_the_others_named(tmp_path: Path) -> None:
    rows = Job(1).made()
    first = matching(rows, "node_events", rank=0, step=0)[0]
    for number in range(30):
        more = {**first, "event_index": 100 + number, "module_fqn": f"layers.{number}"}
        rows["node_events"].append(more | {"node_name": "OddBackward0", "replay_equal": False})
    answer = checked(tmp_path, rows, rank_count=1)
    assert laws(answer).count("replays_equal") == 20
    assert "10 more Nodes disagree with themselves: OddBackward0." in answer["cover"]["notes"]


def test_nodes_that_agree_with_themselves_are_counted(tmp_path: Path) -> None:
    rows = Job().made()
    edit(rows, "node_events", {"step": 1}, replay_equal=True)
    found = findings(tmp_path, replays_equal, rows)
    assert (found.violations, found.compared) == ([], 6)


def test_node_that_disagrees_with_itself_has_its_place(tmp_path: Path) -> None:
    rows = Job().made()
    place = {"rank": 1, "step": 1, "event_index": 1}
    edit(rows, "node_events", place, replay_equal=False, replay_error=0.5)
    (v,) = findings(tmp_path, replays_equal, rows).violations
    assert (v.law, v.severity, v.step, v.rank) == (replays_equal, "error", 1, 1)
    assert (v.ranks, v.backward_index, v.event_index, v.microbatch) == ((1,), 0, 1, 0)
    assert (v.root, v.module_fqn, v.node_name) == (0, "head", "AddmmBackward0")
    assert (v.relative_error, v.count) == (0.5, 1)


def test_run_without_replays_lacks_nothing_unless_it_has_no_nodes(tmp_path: Path) -> None:
    assert findings(tmp_path / "unasked", replays_equal, Job().made()) == Findings()
    found = findings(tmp_path / "none", replays_equal, {})
    assert (found.compared, found.not_judged) == (0, "no Node was run again (GRADTRACE_REPLAY)")
