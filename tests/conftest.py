"""Every test proves that it left nothing of the recorder's in the process."""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from support.environment.native_observer import NOWHERE, build, build_or_skip
from support.launching.counted_reruns import Reruns

if TYPE_CHECKING:
    from support.frozen.capture import Capture

CAPTURE: pytest.StashKey[Capture] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--observer", choices=("python", "native"), default="python", help="which observer the tests record with"
    )  # fmt: skip
    parser.addoption(
        "--keep-runs",
        metavar="FOLDER",
        help="keep there what the analyzer is asked about, see support.frozen",
    )


# Before click 8.2 a runner mixes stderr into stdout unless it is told otherwise, and cannot be told afterwards.
if "mix_stderr" in inspect.signature(CliRunner).parameters:
    CliRunner.__init__ = functools.partialmethod(CliRunner.__init__, mix_stderr=False)  # type: ignore


def pytest_configure(config: pytest.Config) -> None:
    """Jobs choose by what is built: with `--observer native` it is, else there is nothing to be found."""
    os.environ["GRADTRACE_NATIVE_CACHE"] = str(NOWHERE)
    os.environ["GRADTRACE_QUIET"] = (
        "1"  # tests/whole/test_told_at_start.py reads what this leaves out
    )
    config.pluginmanager.register(Reruns())
    if folder := config.getoption("--keep-runs"):
        from support.frozen.capture import Capture

        config.stash[CAPTURE] = Capture(Path(folder))
        config.stash[CAPTURE].begin()
    if config.getoption("--observer") == "native":
        from gradtrace_recorder.observers.native.build import NotBuilt

        try:
            build()
        except NotBuilt as error:
            pytest.exit(f"nothing is tested with the native observer: {error}", returncode=0)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """What the tests recorded and did not ask about is kept too, while it is there; where others run them, by these."""
    others_do = (
        not hasattr(session.config, "workerinput")
        and session.config.getoption("dist", "no") != "no"
    )
    if (capture := session.config.stash.get(CAPTURE, None)) is not None and not others_do:
        capture.end([session.config._tmp_path_factory.getbasetemp()])  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def native_cache_stays() -> Iterator[None]:
    """A test that builds the native observer for itself leaves the next ones without."""
    before = os.environ["GRADTRACE_NATIVE_CACHE"]
    yield
    os.environ["GRADTRACE_NATIVE_CACHE"] = before


@pytest.fixture(scope="module")
def native_library() -> Iterator[None]:
    """The native observer is built, and what this module starts finds it."""
    before = os.environ["GRADTRACE_NATIVE_CACHE"]
    build_or_skip()
    yield
    os.environ["GRADTRACE_NATIVE_CACHE"] = before


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """After a test no hook, patch or thread of ours is left."""
    yield
    from gradtrace_recorder import bootstrap

    if bootstrap.is_armed():
        bootstrap.stop_session()
        pytest.fail("the test left a session armed")
    assert [t.name for t in threading.enumerate() if t.name.startswith("gradtrace")] == []
    import sys

    assert not getattr(sys.modules.get("gradtrace_recorder.drain.drain"), "DRAINING", None)
    if "torch" not in sys.modules:
        return
    import torch
    from torch.nn.modules import module
    from torch.optim import optimizer

    assert not module._global_forward_pre_hooks and not module._global_forward_hooks
    has_any_global_hook = getattr(module, "_has_any_global_hook", None)
    if has_any_global_hook is not None:  # torch 2.6 asks its tables one by one
        assert not has_any_global_hook()
        assert has_any_global_hook.__code__.co_filename.startswith(torch.__path__[0])
    assert not optimizer._global_optimizer_pre_hooks and not optimizer._global_optimizer_post_hooks
    assert not any(type(finder).__module__.startswith("gradtrace") for finder in sys.meta_path)
    backward = sys.modules.get("torch.distributed.pipelining._backward")
    if backward is not None:
        assert backward.stage_backward.__code__.co_filename == backward.__file__
    assert type(torch.autograd.Variable._execution_engine).__name__ == "_EngineBase"
    for function in (
        torch.autograd.graph._engine_run_backward,
        torch.autograd.profiler._run_on_profiler_start,
    ):
        assert function.__code__.co_filename.startswith(torch.__path__[0])
    assert torch.amp.GradScaler.step.__module__ == "torch.amp.grad_scaler"
    assert not hasattr(torch.amp.GradScaler.step, "__wrapped__")
    from torch.nn.parallel import DistributedDataParallel

    for wrapped in (
        vars(torch.distributed)["_register_comm_hook"],
        vars(torch.distributed)["_register_builtin_comm_hook"],
        DistributedDataParallel._ddp_init_helper,
        torch.distributed.algorithms.join.Join.notify_join_context,
    ):
        assert not hasattr(wrapped, "__wrapped__"), wrapped
