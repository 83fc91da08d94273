"""Runs of changed code: the comparison goes on around it, and what follows from it is told from what does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradtrace_analyzer.diff.pairing.step_index as step_index
from gradtrace_analyzer.diff.compare import compare
from gradtrace_analyzer.diff.names.renames import rename_of
from gradtrace_analyzer.diff.scope.selection import Selection, chosen
from gradtrace_analyzer.errors import BadRename
from gradtrace_analyzer.reports.diff.json_object import as_object
from gradtrace_analyzer.reports.diff.text import lines
from gradtrace_analyzer.runs.opening import open_run
from support.models.wrong_derivative import Scale
from support.recordings.in_process import recording


class Block(nn.Module):
    factor, gain = 1.0, 1.0

    def __init__(self, code: str, inner: str) -> None:
        super().__init__()
        self.code, self.inner = code, inner
        setattr(self, inner, nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> Any:
        h = getattr(self, self.inner)(x)
        if self.code == "fused":
            h = torch.add(x, h, alpha=0.5)
        elif self.code == "split":
            h = (x * 1.0) * 1.0 + h * 0.5
        elif self.code == "order":
            x = x.exp().log() * 0 + x
            h = x + h * 0.5
        else:
            h = h * 0.5 + x
        return Scale.apply((h * h).tanh() * self.gain, self.factor)  # type: ignore[no-untyped-call]


class Net(nn.Module):
    def __init__(
        self, code: str = "", name: str = "blocks", inner: str = "up", adapter: str = ""
    ) -> None:
        super().__init__()
        self.name, self.adapted = name, adapter
        self.inp = nn.Linear(6, 8)
        setattr(self, name, nn.ModuleList(Block(code, inner) for _ in range(3)))
        self.head = nn.Linear(8, 2)
        if adapter:
            self.adapter = nn.Linear(8, 8)
        if adapter == "inert":
            self.adapter.requires_grad_(False).weight.zero_()
            self.adapter.bias.zero_()

    def forward(self, x: torch.Tensor) -> Any:
        x = self.inp(x)
        for number, block in enumerate(getattr(self, self.name)):
            x = block(x)
            if self.adapted and number == 1:
                x = x + self.adapter(x)
        return self.head(x)


class Wrapper(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x)


class Stranger(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 2))


Fault = Callable[[int, Any], None]


def nothing(step: int, net: Any) -> None:
    """No fault."""


def wrong_derivative(step: int, net: Any) -> None:
    getattr(net, net.name)[0].factor = 1.01 if step == 2 else 1.0


def wrong_output(step: int, net: Any) -> None:
    getattr(net, net.name)[0].gain = 1.01


def job(directory: Path, net: Any, fault: Fault = nothing, top: Any = None) -> Path:
    top = net if top is None else top
    optimizer = torch.optim.AdamW(top.parameters(), lr=1e-2)
    draw = torch.Generator().manual_seed(1)
    with recording(directory):
        for step in range(4):
            fault(step, net)
            optimizer.zero_grad()
            top(torch.randn(5, 6, generator=draw)).square().mean().backward()
            optimizer.step()
    return directory


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A run of a net made so, with a fault, recorded once."""
    place, made = tmp_path_factory.mktemp("runs"), dict[str, Path]()

    def run(fault: Fault = nothing, *, wrapped: bool = False, **code: str) -> Path:
        name = f"{fault.__name__}-{wrapped}-{'-'.join(f'{k}.{v}' for k, v in code.items())}"
        if name not in made:
            torch.manual_seed(0)
            with torch.no_grad():
                net = Net(**code)
            made[name] = job(place / name, net, fault, Wrapper(net) if wrapped else None)
        return made[name]

    return run


def diff(a: Path, b: Path, *renames: str, chosen: Selection | None = None) -> dict[str, Any]:
    as_given = [rename_of(r) for r in renames]
    return as_object(compare(open_run(a), open_run(b), renames=as_given, chosen=chosen))


def alone(answer: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(e["kind"], e["name"], e["only_in"]) for e in answer["structure"]]


def place(first: dict[str, Any]) -> tuple[Any, ...]:
    return first["step"], first["module_fqn"], first["node_name"]


Runs = Callable[..., Path]


def test_renamed_modules_are_compared_under_their_new_names(runs: Runs) -> None:
    answer = diff(runs(), runs(name="layers", inner="wup"))
    assert answer["verdict"] == "identical" and not answer["structure"]
    assert answer["renames"] == ["blocks.*=layers.*", "layers.*.up=layers.*.wup"]
    assert "under the candidate's names: blocks.*=layers.*" in answer["explanation"]
    answer = diff(runs(), runs(wrong_derivative, name="layers", inner="wup"))
    first = answer["first_divergence"]
    assert place(first) == (2, "layers.0", "ScaleBackward")


def test_rename_of_a_person_is_taken_as_it_is(runs: Runs) -> None:
    answer = diff(runs(), runs(wrong_derivative, name="layers"), "blocks=layers")
    assert answer["renames"] == ["blocks=layers"]
    assert answer["first_divergence"]["module_fqn"] == "layers.0"
    assert answer["structure"] == []
    for pattern, lacks in (("nope=layers", "the baseline"), ("blocks=nope", "the candidate")):
        with pytest.raises(BadRename, match=f"{lacks} has no module or parameter 'nope'"):
            diff(runs(), runs(wrong_derivative, name="layers"), pattern)


def test_model_inside_another_gives_the_same_numbers_by_other_code(runs: Runs) -> None:
    answer = diff(runs(), runs(wrapped=True))
    assert answer["verdict"] == "within_tolerance" and answer["renames"] == ["*=net.*"]
    assert alone(answer) == [("module", "", "candidate")]


def test_operation_that_was_split_or_fused_is_no_difference_of_values(runs: Runs) -> None:
    split = diff(runs(), runs(code="split"))
    assert (split["verdict"], split["first_divergence"]) == ("within_tolerance", None)
    assert alone(split) == [("node", "MulBackward0", "candidate")] * 3
    said = "blocks.0 (and 2 more) runs 2 MulBackward0 in the candidate alone"
    assert f"identical, bit for bit, and {said}" in split["explanation"]
    for pair in ((runs(), runs(code="fused")), (runs(code="fused"), runs())):
        fused = diff(*pair)
        assert fused["verdict"] == "within_tolerance", fused["explanation"]
        assert {name for _, name, _ in alone(fused)} == {"MulBackward0"}


@pytest.mark.parametrize("code", ["split", "fused", "order"])
def test_fault_beside_changed_code_is_found_at_its_place(code: str, runs: Runs) -> None:
    answer = diff(runs(), runs(wrong_derivative, code=code))
    first = answer["first_divergence"]
    assert place(first) == (2, "blocks.0", "ScaleBackward"), answer["explanation"]
    assert answer["structure"] and all(e["is_code"] for e in answer["structure"])


def test_added_layer_is_one_entry_and_what_differs_follows_from_it(runs: Runs) -> None:
    for pair, side in (
        ((runs(), runs(adapter="active")), "candidate"),
        ((runs(adapter="active"), runs()), "baseline"),
    ):
        answer = diff(*pair)
        assert answer["verdict"] == "different"
        assert alone(answer) == [("module", "adapter", side), ("node", "AddBackward0", side)]
        assert answer["structure"][0]["holds"] == {"modules": 1, "parameters": 2}
        first = answer["first_divergence"]
        assert (first["step"], first["link"], first["module_fqn"]) == (0, "structure", "adapter")
        assert (
            f"adapter (Linear: 1 module, 2 parameters) is in the {side} alone"
            in answer["explanation"]
        )
        assert "follows from it, first what blocks.2.up receives" in answer["explanation"]


@pytest.mark.parametrize(
    ("adapter", "fault", "step", "link"),
    [("active", wrong_output, 0, "forward"), ("inert", wrong_derivative, 2, "backward")],
)
def test_fault_that_does_not_follow_from_an_added_layer_is_found(
    adapter: str, fault: Fault, step: int, link: str, runs: Runs
) -> None:
    answer = diff(runs(), runs(fault, adapter=adapter))
    first = answer["first_divergence"]
    assert (first["step"], first["link"], first["module_fqn"]) == (step, link, "blocks.0")
    assert ("module", "adapter", "candidate") in alone(answer)


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (wrong_derivative, {"name": "layers", "inner": "wup"}),
        (nothing, {"code": "split"}),
        (wrong_derivative, {"code": "fused"}),
        (wrong_derivative, {"code": "split", "adapter": "inert"}),
        (nothing, {"adapter": "active"}),
    ],
)
def test_size_of_the_runs_changes_nothing_but_how_much_is_opened(
    code: dict[str, str], fault: Fault, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = runs(), runs(fault, **code)
    opened = diff(*pair)
    monkeypatch.setattr(step_index, "MOST_ROWS", 0)
    sieved = diff(*pair)
    for key in ("verdict", "first_divergence", "origins", "renames", "equal"):
        assert sieved[key] == opened[key], key
    assert alone(sieved) == alone(opened)
    told = (
        sieved["explanation"].replace(" What one side alone has was looked for", "\n").split("\n")
    )
    assert opened["explanation"].startswith(told[0])
    assert len(told) == 1 or sieved["structure"]


def test_step_that_is_asked_for_is_compared_around_changed_code(runs: Runs) -> None:
    pair = runs(), runs(wrong_derivative, code="split", adapter="inert")
    before, at_it = (diff(*pair, chosen=chosen(step, None, (), ())) for step in (1, 2))
    assert (before["cover"]["steps"], at_it["cover"]["steps"]) == ([1], [2])
    assert "All values that pair are identical, but the models differ" in before["explanation"]
    assert place(at_it["first_divergence"]) == (2, "blocks.0", "ScaleBackward")
    assert ("module", "adapter", "candidate") in alone(at_it)


def test_fault_in_a_block_whose_code_was_changed_beside_a_frozen_layer_is_found(runs: Runs) -> None:
    for code in ("split", "order"):
        answer = diff(runs(), runs(wrong_derivative, code=code, adapter="inert"))
        assert place(answer["first_divergence"]) == (2, "blocks.0", "ScaleBackward")


def test_unrelated_models_are_incomparable(runs: Runs, tmp_path: Path) -> None:
    torch.manual_seed(0)
    answer = diff(runs(), job(tmp_path / "stranger", Stranger()))
    assert answer["verdict"] == "incomparable"
    assert "the models have nothing to do with each other" in answer["explanation"]


def test_run_held_against_itself_says_so(runs: Runs) -> None:
    answer = diff(runs(), runs())
    assert answer["verdict"] == "identical"
    assert "the same recording: it was compared with itself" in answer["explanation"]


def test_text_lists_what_is_alone_as_a_person_would(runs: Runs) -> None:
    found = compare(open_run(runs()), open_run(runs(adapter="active", code="fused")))
    text = "\n".join(lines(found, ("a", "b")))
    assert (
        "On one side alone:\n"
        "  adapter (Linear: 1 module, 2 parameters) is in the candidate alone\n"
        "  the root module runs AddBackward0 in the candidate alone\n"
        "  blocks.0 (and 2 more) runs MulBackward0 in the baseline alone\n"
    ) in text


def test_layer_that_draws_before_others_is_named_for_their_first_values(tmp_path: Path) -> None:
    class Shifted(nn.Sequential):
        def __init__(self, extra: bool) -> None:
            more = {"extra": nn.Linear(8, 8)} if extra else {}
            super().__init__()
            for name, module in {"a": nn.Linear(6, 8), **more, "b": nn.Linear(8, 2)}.items():
                self.add_module(name, module)

    made = []
    for extra in (False, True):
        torch.manual_seed(0)
        made.append(job(tmp_path / str(extra), Shifted(extra)))
    answer = diff(made[0], made[1])
    assert answer["first_divergence"]["link"] == "structure"
    said = answer["explanation"]
    assert "extra (Linear: 1 module, 2 parameters) is in the candidate alone" in said
    assert "drawn after another number of random values" in said


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of dynamo, which makes a Function
def test_what_ran_inside_compiled_code_is_said_and_is_no_difference(
    runs: Runs, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    net = Net()
    compiled = job(tmp_path / "compiled", net, top=torch.compile(net, backend="aot_eager"))
    for pair, side, other in (
        ((runs(), compiled), "candidate", "baseline"),
        ((compiled, runs()), "baseline", "candidate"),
    ):
        answer = diff(*pair)
        assert answer["verdict"] == "within_tolerance", answer["explanation"]
        assert (
            f"The {side} is compiled: the calls of 8 modules that the {other} recorded are inside"
            in answer["explanation"]
        )
