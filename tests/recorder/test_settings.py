"""Every variable: what it reads, and the sentence for what it cannot read."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gradtrace_recorder.settings import variables as settings
from gradtrace_recorder.settings.chosen_numbers import Numbers
from gradtrace_recorder.settings.variables import (
    VARIABLES,
    SettingsError,
    Variable,
    settings_from,
    settings_of,
)

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = [variable for variable in VARIABLES if variable.is_setting]
# Variables that only tests and scripts ask for are theirs, and not declared.
SHIPPED = ("recorder", "analyzer", "schemas")


def test_no_directory_is_no_recording() -> None:
    assert settings_from({}) is None
    assert settings_from({"GRADTRACE_DIR": "", "GRADTRACE_DETAIL": "nonsense"}) is None


def test_defaults_record_everything() -> None:
    settings = settings_from({"GRADTRACE_DIR": "runs/a"})
    assert settings is not None
    assert (settings.detail, settings.summary, settings.device_times) == ("nodes", "full", "stages")
    assert 10**9 in settings.steps and settings.wants_rank(7) and settings.wants_module("a.b")


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("0:10,100:110,::50", [0, 9, 50, 100, 109, 150], [10, 99, 111]),
        ("5", [5], [4, 6]),
        ("3:", [3, 10**6], [2]),
        ("1:8:3", [1, 4, 7], [0, 2, 8, 10]),
        ("0, 8-15", [0, 8, 15], [1, 7, 16]),
        ("3-3,5:7", [3, 5, 6], [2, 4, 7]),
    ],
)
def test_steps_and_ranks_are_written_alike(
    text: str, inside: list[int], outside: list[int]
) -> None:
    for chosen in (settings_of("d", steps=text).steps, settings_of("d", ranks=text).ranks):
        assert all(n in chosen for n in inside) and not any(n in chosen for n in outside)
    assert 3 in Numbers()


def test_what_the_rank_file_says_of_numbers_can_be_read_again() -> None:
    settings = settings_of("d", ranks="0,8-15,20:30,::50", steps="0:10,7,::3")
    told = settings.as_json()
    assert told["ranks"] == ["0-0", "8-15", "20-29", "0::50"]
    assert told["steps"] == ["0:10:1", "7:8:1", "0::3"]
    again = settings_of("d", ranks=",".join(settings.ranks.as_spans()))
    assert again.ranks == settings.ranks


def test_module_globs_take_what_lies_inside_a_match() -> None:
    settings = settings_of("d", modules="blocks.*.attn, head")
    wanted = ["blocks.0.attn", "blocks.11.attn.proj", "head"]
    assert all(settings.wants_module(fqn) for fqn in wanted)
    assert not any(settings.wants_module(fqn) for fqn in ["", "blocks.0", "blocks.0.mlp", "ahead"])


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("DETAIL", "node", "GRADTRACE_DETAIL is 'node'; it can be steps, params, modules, nodes"),
        ("SUMMARY", "ful", "GRADTRACE_SUMMARY is 'ful'; it can be off, norms, full"),
        ("STEPS", "0:x", "GRADTRACE_STEPS is '0:x', of which 'x' is no whole number from 0"),
        ("STEPS", "1:2:3:4", "GRADTRACE_STEPS is '1:2:3:4', of which '1:2:3:4' is no slice"),
        ("STEPS", "::0", "GRADTRACE_STEPS is '::0', of which '::0' has a stride of 0"),
        ("STEPS", "-3:", "GRADTRACE_STEPS is '-3:', of which '-3' is no whole number from 0"),
        ("STEPS", "10:5", "GRADTRACE_STEPS is '10:5', of which '10:5' holds no number"),
        ("STEPS", "4-", "GRADTRACE_STEPS is '4-', of which '4-' is no whole number from 0"),
        ("STEP_OFFSET", "1_0", "GRADTRACE_STEP_OFFSET is '1_0', which is no whole number from 0"),
        ("RANKS", "5-2", "GRADTRACE_RANKS is '5-2', of which '5-2' runs backwards"),
        ("RANKS", "all", "GRADTRACE_RANKS is 'all', of which 'all' is no whole number from 0"),
        ("STRICT", "yes", "GRADTRACE_STRICT is 'yes'; it can be 0, 1"),
    ],
)
def test_value_that_cannot_be_read_is_named_with_what_it_can_be(
    name: str, value: str, said: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        settings_from({"GRADTRACE_DIR": "d", f"GRADTRACE_{name}": value})
    assert str(caught.value).startswith(said)


def test_setting_that_there_is_not_is_refused() -> None:
    with pytest.raises(TypeError, match="there is no setting 'sumary'"):
        settings_of("d", sumary="full")


def test_replay_is_globs_and_steps() -> None:
    replay = settings_of("d", replay="blocks.*.attn, Mul*, python:My*@0:2,9").replay
    assert replay is not None and 1 in replay.steps and 9 in replay.steps and 2 not in replay.steps
    assert replay.chooses("blocks.3.attn.wq", "AddmmBackward0") and replay.chooses(
        None, "MulBackward0"
    )
    assert not replay.chooses("head", "AddmmBackward0") and not replay.chooses(
        None, "AddmmBackward0"
    )
    assert replay.chooses_by_request(None, "MyBackward")
    assert not replay.chooses_by_request("blocks.3.attn", "MulBackward0")
    assert settings_of("d", replay="*").as_json()["replay"] == "*"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"replay": "@3"}, "GRADTRACE_REPLAY is '@3', which names no Node; write"),
        ({"replay": "python:"}, "GRADTRACE_REPLAY is 'python:', which names no Node; write"),
        ({"replay": "*@"}, "GRADTRACE_REPLAY is '*@', which names no step behind the @; write"),
        ({"replay": "*@a"}, "GRADTRACE_REPLAY is 'a', of which 'a' is no whole number from 0"),
        (
            {"replay": "*", "detail": "params"},
            "GRADTRACE_DETAIL is 'params'; Nodes are run again where",
        ),
        (
            {"mode": "flight", "flight_steps": "0"},
            "GRADTRACE_FLIGHT_STEPS is '0'; a recording of no step",
        ),
        ({"mode": "short"}, "GRADTRACE_MODE is 'short'; it can be whole, flight"),
    ],
)
def test_replay_and_mode_that_cannot_be_read_are_told(given: dict[str, str], said: str) -> None:
    with pytest.raises(SettingsError) as told:
        settings_of("d", **given)
    assert said in str(told.value)


def ids(variable: Variable) -> str:
    return variable.name


@pytest.mark.parametrize("variable", SETTINGS, ids=ids)
def test_declared_default_is_what_an_unset_variable_gives(variable: Variable) -> None:
    assert bool(variable.default) != bool(variable.unset), "one of the two says what unset means"
    unset = getattr(settings_of("d"), variable.setting)
    if variable.default:
        assert variable.read(variable.name, variable.default) == unset
    else:
        assert unset in (None, (), Numbers()), "what no text says leaves nothing out"


@pytest.mark.parametrize("variable", SETTINGS, ids=ids)
def test_declared_example_is_read_and_changes_something(variable: Variable) -> None:
    given = settings_from({"GRADTRACE_DIR": "d", variable.variable: variable.example})
    assert given is not None and given != settings_of("d")


def test_every_variable_that_the_code_names_is_declared() -> None:
    named = {
        name
        for folder in SHIPPED
        for path in (ROOT / folder).rglob("*.py")
        for name in re.findall(r"\bGRADTRACE_[A-Z_]*[A-Z]\b", path.read_text())
    }
    assert named and named <= {variable.variable for variable in VARIABLES}
    apart = [v for v in vars(settings).values() if isinstance(v, Variable) and v not in VARIABLES]
    assert apart == []


def test_reading_the_variables_loads_the_standard_library_alone() -> None:
    code = (
        "import sys, gradtrace_recorder.settings.variables;"
        "print(*sorted({n.partition('.')[0] for n in sys.modules} - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(ROOT / "recorder")},
    )
    assert done.stdout.split() == ["__main__", "gradtrace_recorder"]


@pytest.mark.parametrize(
    ("name", "remark"),
    [
        ("GRADTRACE_SUMARY", "_SUMARY is no variable of gradtrace's, and not used; is GRADTRACE_SUMMARY meant?"),
        ("GRADTRACE_MODULE", "is GRADTRACE_MODULES meant?"),
        ("gradtrace_steps", "is GRADTRACE_STEPS meant?"),
        ("GRADTRACE_DIRECTORY", "is GRADTRACE_DIR meant?"),
        ("GRADTRACE_XYZZY_PLUGH", "there are GRADTRACE_DIR, GRADTRACE_CONFIG, "),
    ],
)  # fmt: skip
def test_variable_that_there_is_not_is_remarked_on(name: str, remark: str) -> None:
    settings = settings_from({"GRADTRACE_DIR": "d", name: "1", "GRADTRACE_EMPTY": "", "PATH": "p"})
    assert settings is not None
    [told] = settings.remarks
    assert remark in told


@pytest.mark.parametrize(
    ("directory", "said"),
    [
        (" ", "GRADTRACE_DIR is ' ', which names no directory; write runs/a"),
        ("s3://bucket/run", "GRADTRACE_DIR is 's3://bucket/run', an address; write a directory of"),
    ],
)  # fmt: skip
def test_what_names_no_directory_is_told(directory: str, said: str) -> None:
    with pytest.raises(SettingsError) as told:
        settings_from({"GRADTRACE_DIR": directory})
    assert str(told.value).startswith(said)


def test_directory_is_absolute_and_knows_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert settings_of("runs/a").directory == str(tmp_path / "runs" / "a")
    assert settings_of("~/a").directory == str(tmp_path / "home" / "a")
    assert settings_of(tmp_path / "b").directory == str(tmp_path / "b")
