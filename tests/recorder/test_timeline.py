"""The step rule: when a step begins, when it ends, what a microbatch is."""

from __future__ import annotations

from gradtrace_recorder.settings.chosen_numbers import Numbers
from gradtrace_recorder.state.timeline import Timeline


def timeline() -> Timeline:
    return Timeline(Numbers(), 0, 0)


def test_step_begins_at_the_first_activity_after_an_optimizer_step() -> None:
    line = timeline()
    line.activity()
    line.backward_done()
    line.optimizer_stepped()
    assert line.step == 0
    line.activity()
    assert (line.step, line.microbatch) == (1, 0)


def test_optimizer_steps_without_activity_between_them_are_one_step() -> None:
    line = timeline()
    for _ in range(2):
        line.activity()
        line.optimizer_stepped()
        line.optimizer_stepped()
    assert line.step == 1


def test_backward_passes_count_microbatches() -> None:
    line = timeline()
    line.activity()
    line.backward_done()
    assert line.microbatch == 1
    line.backward_done()
    assert line.microbatch == 2
    line.optimizer_stepped()
    line.activity()
    assert line.microbatch == 0


def test_optimizer_step_inside_backward_ends_the_step_with_the_pass() -> None:
    line = timeline()
    line.activity()
    line.optimizer_stepped(inside_backward=True)
    line.activity()
    assert line.step == 0
    line.backward_done()
    line.activity()
    assert line.step == 1


def test_given_step_disables_the_rule() -> None:
    line = timeline()
    line.set_step(40)
    line.activity()
    line.optimizer_stepped()
    line.activity()
    assert line.step == 40
    line.set_step(41)
    assert line.step == 41


def test_every_step_ends_once_also_the_last() -> None:
    line, ended = timeline(), list[int]()
    line.at_end.append(lambda: ended.append(line.step))
    for _ in range(3):
        line.activity()
        line.optimizer_stepped()
    line.finish()
    assert ended == [0, 1, 2]


def test_optimizer_step_before_anything_ends_nothing() -> None:
    line = timeline()
    line.optimizer_stepped()
    line.activity()
    assert line.step == 0


def test_each_step_says_what_ended_it() -> None:
    line, ended = timeline(), list[str | None]()
    line.at_end.append(lambda: ended.append(line.totals.ended_by))
    line.activity()
    line.parameters_changed()
    line.activity()
    line.optimizer_seen = True
    line.optimizer_stepped()
    line.activity()
    line.optimizer_stepped(by_scaler=True)
    line.activity()
    line.optimizer_stepped(inside_backward=True)
    line.backward_done()
    line.activity()
    line.set_step(9)
    line.activity()
    line.finish()
    assert ended == ["parameters", "optimizer", "scaler", "optimizer", "job", None]


def test_scaler_that_leaves_out_one_of_two_optimizers_leaves_the_step_to_the_other() -> None:
    for first in (True, False):
        line = timeline()
        line.activity()
        line.optimizer_stepped(by_scaler=first)
        line.optimizer_stepped(by_scaler=not first)
        assert line.totals.ended_by == "optimizer"


def test_changed_parameters_end_nothing_once_an_optimizer_was_seen_or_the_job_counts() -> None:
    for settle in (
        lambda line: setattr(line, "optimizer_seen", True),
        lambda line: line.set_step(0),
    ):
        line = timeline()
        settle(line)
        line.activity()
        line.parameters_changed()
        line.activity()
        assert line.step == 0


def test_rule_is_the_one_that_holds() -> None:
    line = timeline()
    rules = [line.rule]
    line.activity()
    line.parameters_changed()
    rules.append(line.rule)
    line.optimizer_seen = True
    rules.append(line.rule)
    line.set_step(3)
    rules.append(line.rule)
    assert rules == [None, "parameters", "optimizers", "job"]


def test_first_step_has_the_frameworks_number_unless_another_was_given() -> None:
    line = timeline()
    line.begin_at(40)
    line.activity()
    assert (line.step, line.first_step_from) == (40, "framework")
    line.begin_at(50)  # too late
    assert line.step == 40

    given = Timeline(Numbers(), 7, 0)
    given.begin_at(40)
    given.activity()
    assert (given.step, given.first_step_from) == (7, "offset")

    fresh = timeline()
    fresh.begin_at(40)  # an evaluation before the job has decided
    fresh.begin_at(0)
    fresh.activity()
    assert (fresh.step, fresh.first_step_from) == (0, "0")
