"""A settings file: what it says is read like the variables, which win; what it cannot say is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradtrace_recorder.settings.variables import SettingsError, settings_from, settings_of


def test_file_says_what_variables_say(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text(
        'dir = "runs/a"\ndetail = "params"\nsteps = ["0:10", 50]\nranks = 3\nmodules = ["a.*", "head"]\n'
        'strict = true\nflight_steps = 9\n'
    )  # fmt: skip
    assert settings_from({"GRADTRACE_CONFIG": str(file)}) == settings_of(
        tmp_path / "runs/a", detail="params", steps="0:10,50", ranks="3", modules="a.*,head", strict=True,
        flight_steps=9,
    )  # fmt: skip


def test_variables_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text('dir = "runs/a"\ndetail = "params"\nsummary = "norms"\n')
    given = {"GRADTRACE_DIR": "/runs/b", "GRADTRACE_DETAIL": "steps", "GRADTRACE_SUMMARY": ""}
    assert settings_from({"GRADTRACE_CONFIG": str(file), **given}) == settings_of(
        "/runs/b", detail="steps", summary="norms"
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pyproject.toml", '[project]\nname = "x"\n[tool.gradtrace]\ndir = "/a"\n'),
        ("x.toml", '[gradtrace]\ndir = "/a"\n[other]\ny = 1\n'),
    ],
)
def test_table_of_ours_may_stand_among_others(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert settings_from({"GRADTRACE_CONFIG": str(tmp_path / name)}) == settings_of("/a")


def test_file_without_a_directory_switches_nothing_on(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text('detail = "params"\n')
    assert settings_from({"GRADTRACE_CONFIG": str(tmp_path / "x.toml")}) is None


@pytest.mark.parametrize("text", ['DIR = "/a"\n', '[tool.gradtrace]\ndir = "/a"\n'])
def test_file_that_means_a_directory_and_names_none_is_told(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(SettingsError, match="is no setting, and not used"):
        settings_from({"GRADTRACE_CONFIG": str(tmp_path / "x.toml")})


def test_pyproject_of_the_directory_is_not_read_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.gradtrace]\ndir = "/a"\ndetail = "steps"\n')
    monkeypatch.chdir(tmp_path)
    assert settings_from({}) is None
    assert settings_from({"GRADTRACE_DIR": "/b"}) == settings_of("/b")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("detail = params\n", "no TOML: "),
        ("detail = 1.5\n", "detail in '{file}' is 1.5; it can be a text in quotes, a whole number"),
        ("[detail]\nx = 1\n", "detail in '{file}' is {{'x': 1}}; it can be a text in quotes"),
        ('detail = "all"\n', "detail in '{file}' is 'all'; it can be steps, params, modules, nodes"),
        ('steps = "x"\n', "steps in '{file}' is 'x', of which 'x' is no whole number from 0"),
        ('dir = ""\n', "dir in '{file}' is '', which names no directory"),
        ('gradtrace = 3\n', "GRADTRACE_CONFIG names '{file}', which has no table [gradtrace]"),
        ('replay = "*"\ndetail = "steps"\n', "replay in '{file}' is '*', and detail in '{file}' is 'steps'; "),
    ],
)  # fmt: skip
def test_what_a_file_cannot_say_is_named(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text(text if text.startswith(("dir", "gradtrace")) else f'dir = "/a"\n{text}')
    with pytest.raises(SettingsError) as told:
        settings_from({"GRADTRACE_CONFIG": str(file)})
    assert said.format(file=file) in str(told.value)


def test_file_that_there_is_not_is_named(tmp_path: Path) -> None:
    for place in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(SettingsError, match=f"GRADTRACE_CONFIG names '{place}': "):
            settings_from({"GRADTRACE_CONFIG": str(place)})


def test_pyproject_without_our_table_is_named(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.other]\nx = 1\n")
    with pytest.raises(SettingsError, match=r"has no table \[tool.gradtrace\]"):
        settings_from({"GRADTRACE_CONFIG": str(tmp_path / "pyproject.toml")})


def test_key_that_there_is_not_is_remarked_on(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text('dir = "/a"\nsumary = "full"\nnative_cache = "/c"\n')
    settings = settings_from({"GRADTRACE_CONFIG": str(file)})
    assert settings is not None
    assert settings.remarks == (
        f"sumary in '{file}' is no setting, and not used; is summary meant?",
        f"native_cache in '{file}' is not used: the build reads no file; set GRADTRACE_NATIVE_CACHE",
    )
