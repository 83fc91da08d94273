"""The step rule: when a step begins, when it ends, what a microbatch is."""

from __future__ import annotations

from gradtrace_recorder.chosen_numbers import Numbers
from gradtrace_recorder.timeline import Timeline


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
