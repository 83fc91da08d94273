"""The first promise at its edges: jobs that forbid, count, turn into errors or profile what a recorder is made of.

Each job runs bare and recorded by both observers: its output, its stderr and its exit code are the same.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from support.environment.native_observer import CACHE, build_or_skip
from support.launching.launcher import JobResult, run_job

OBSERVERS = ("python", "native")
START = """
import sys, threading, warnings, torch
from torch import nn
torch.manual_seed(0)
x = torch.ones(2, 4)
def small(): return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
def bits(net): return [p.grad.view(torch.int32).sum().item() for p in net.parameters()]
"""

COMPILED_FIRST = """
net = small()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
inner = torch.compile(lambda x: net(x) * 2, backend="eager", fullgraph=True)
step = torch.compile(optimizer.step, backend="eager")
for p in net.parameters(): p.grad = torch.zeros_like(p)
inner(x); step()  # compiled before anything can be recorded
{forbid}
for n in range(3):
    loss = inner(x).sum(); loss.backward(); step()
    print(loss.item(), bits(net))
    small()(x).sum().backward()
    optimizer.zero_grad(set_to_none=False)
"""
STANCE = COMPILED_FIRST.format(forbid='torch.compiler.set_stance("fail_on_recompile")')
CONFIG = COMPILED_FIRST.format(forbid="torch._dynamo.config.error_on_recompile = True")

ERRORS = """
warnings.simplefilter("error")
net = small()
compiled = torch.compile(net, backend="eager")
compiled(x).sum().backward()
compiled(x).sum().backward()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    compiled(x).sum().backward()
print(bits(net), [str(w.message) for w in caught])
print(torch.export.export(net, (x,), strict=True).graph_module.code)
nn.modules.module.register_module_forward_hook(lambda *a: None)
compiled(x)  # of the job's own hook it is warned: as an error
"""

LEVELS = """
net = small()
net.register_full_backward_hook(lambda module, into, out: None)
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", module="__main__")
    net(x).sum().backward()
net(x).sum().backward()
engine = torch.autograd.Variable._execution_engine
engine.run_backward((net(x).sum(),), (torch.ones(()),), False, True, (), True, True)
scaler = torch.amp.GradScaler("cpu")
class Warns(torch.optim.SGD):
    def step(self):
        warnings.warn("from a step", stacklevel=4)
        return super().step()
optimizer = Warns(net.parameters(), lr=0.1)
scaler.scale(net(x).sum()).backward()
scaler.step(optimizer); scaler.update()
print(bits(net))
warnings.filterwarnings("error", module="__main__")
net(x).sum().backward()
"""

OWN_NAMES = """
class Mine(nn.Linear):
    def register_forward_hook(self, hook): return super().register_forward_hook(lambda *a: hook(*a))
class Doubles(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor: return x * 2
class Named(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.name, ctx._sequence_nr, ctx.register_hook, ctx.variable = "mine", 3, None, x
        return x * 2
    @staticmethod
    def backward(ctx, g): return g * 2
def tripled(self, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor: return output * 3
net, doubles = Mine(4, 4), Doubles()
net.register_forward_hook(lambda m, i, o: o * 2)
doubles.register_forward_hook(tripled)
Named.apply(net(torch.jit.script(doubles)(x))).sum().backward()
print(bits(net), torch.jit.trace(Doubles(), x)(x).sum().item())
"""

LARGE = """
import numpy
warnings.simplefilter("error"); numpy.seterr(all="raise")
net = nn.Linear(64, 64, bias=False)
for factor in (1e30, 3e36, 5e36, 1e38, float("nan")):
    (net(torch.ones(64, 64)) * factor).sum().backward()
print(bits(net))
"""

THREADS = """
import _thread, os, time
seen = set()
def look(frame, event, arg): seen.add(threading.get_ident()) if threading.get_ident() != main else None
main = threading.get_ident()
threading.setprofile(look)
net = small()
net(x).sum().backward()
time.sleep(1.1)
threading.setprofile(None)
print(threading.active_count(), [t.name for t in threading.enumerate()], len(seen))
from torch.profiler import ProfilerActivity, profile
def flat(nodes):
    for node in nodes:
        yield node
        yield from flat(node.children)
for _ in range(2):
    with profile(activities=[ProfilerActivity.CPU], with_stack=True) as profiled:
        net(x).sum().backward()
    tree = profiled.profiler.kineto_results.experimental_event_tree()
    print(len({node.start_tid for node in flat(tree)}))
net(x).sum().backward()
print(bits(net))
"""

OTHERS = """
import faulthandler, gc, signal
faulthandler.enable(); gc.collect(); gc.freeze(); gc.disable()
net = small()
calls = []
class Engine:
    def __init__(self, engine): self.engine = engine
    def __getattr__(self, name): return getattr(self.engine, name)
    def run_backward(self, *args, **kwargs):
        calls.append(len(args)); return self.engine.run_backward(*args, **kwargs)
torch.autograd.Variable._execution_engine = Engine(torch.autograd.Variable._execution_engine)
net(x).sum().backward()
class Late(Exception): pass
def late(*args): raise Late
signal.signal(signal.SIGALRM, late)
try:
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    while True: net(x).sum().backward()
except Late: print("late")
print(len(calls) > 1, gc.isenabled(), warnings.filters == filters)
net.zero_grad(); net(x).sum().backward(); print(bits(net))
"""

LAYOUTS = """
class Lays(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strides): ctx.strides = strides; return x.clone()
    @staticmethod
    def backward(ctx, g): return torch.empty_strided(g.shape, ctx.strides).fill_(1), None
net = small()
for shape, strides in (((0, 1), (1, 0)), ((3, 1), (1, 0)), ((1, 1), (5, 0)), ((2, 3), (1, 2))):
    leaf = torch.ones(shape, requires_grad=True)
    kept = leaf * 2
    kept.register_hook(lambda g: print(g.stride()))
    sum(Lays.apply(kept, strides) for _ in range(3)).sum().backward()  # added up in place, in the first one's layout
    print(leaf.grad.stride())
net(x).sum().backward(); print(bits(net))
"""

DESTROYED = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
net = nn.parallel.DistributedDataParallel(small())
loss = net(x).sum()
dist.destroy_process_group()
loss.backward()
print(bits(net))
"""

FROZEN = """
import gc
def trained():
    net = small(); net(x).sum().backward(); print(bits(net)); return net
kept = trained()
gc.freeze()  # the job's module, and the model in it, outlive ours at the interpreter's end
"""

TRAINERS = """
def work(net, xs):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for one in xs:
        optimizer.zero_grad(); net(one).square().mean().backward(); optimizer.step()
nets = [small() for _ in range(4)]
threads = [threading.Thread(target=work, args=(net, torch.randn(60, 4, 4))) for net in nets]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(*map(bits, nets))
"""

FRAMES = """
net = small()
def down(n, function): return function() if n == 0 else down(n - 1, function)
def with_room(n, function):
    frame, depth = sys._getframe(), 0
    while frame: frame, depth = frame.f_back, depth + 1
    return down(sys.getrecursionlimit() - depth - n - 2, function)
def least(function):
    for n in range(1, 99):
        try: with_room(n, function)
        except RecursionError: continue
        return n
for when in ("before", "after"):
    # Nothing is recorded before there is room to begin. A call, a call in a call, a pass, a step.
    found = [least(f) for f in (lambda: net[0](x), lambda: net(x))]
    loss = net(x).sum() if when == "after" else with_room(60, lambda: net(x).sum())
    found.append(least(lambda: loss.backward(retain_graph=True)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found.append(least(optimizer.step))
    print(*found)
for n in range(20, 120):
    net.zero_grad(); with_room(n, lambda: net(x).sum().backward())
print(bits(net), sys.getrecursionlimit())
"""


def outcomes(
    source: str, folder: Path, *, forked: bool = True, problems: bool = False
) -> tuple[JobResult, list[JobResult]]:
    """The job bare, and recorded by each observer, which closes its run without a problem unless some are expected."""
    build_or_skip()
    job = folder / "job.py"
    job.write_text(START + "filters = list(warnings.filters)\n" + source)
    bare = run_job(job, forked=forked)
    seen = []
    for observer in OBSERVERS:
        run = folder / observer
        env = {"GRADTRACE_OBSERVER": observer, "GRADTRACE_NATIVE_CACHE": str(CACHE)}
        seen.append(run_job(job, forked=forked, recorded=run, env=env))
        (about,) = (run / "ranks").iterdir()
        told = json.loads(about.read_text())
        assert told["complete"] and told["observer"]["kind"] == observer, told
        assert bool(told["problems"]) == problems, told["problems"]
        assert told["recorded"]["node_events"] and told["recorded"]["module_calls"]
    return bare, seen


def said(job: JobResult) -> list[str]:
    """Its stderr without times, and without the lines that a profiler tells of itself."""
    lines = [line for line in job.stderr.splitlines() if not line.startswith("USDT:")]
    return [re.sub(r"^W\d+ \S+ \d+", "", line) for line in lines]


def assert_same(bare: JobResult, seen: JobResult) -> None:
    assert (bare.returncode, bare.stdout) == (seen.returncode, seen.stdout), seen.tails()
    if bare.returncode == 0:
        assert said(bare) == said(seen)
    else:  # a traceback goes through our frames
        assert said(bare)[-1] == said(seen)[-1]


EDGES: list[Any] = [
    pytest.param(STANCE, 0, id="no compiling again by stance", marks=pytest.mark.slow),
    pytest.param(CONFIG, 0, id="no compiling again by config", marks=pytest.mark.slow),
    pytest.param(ERRORS, 1, id="warnings are errors", marks=pytest.mark.slow),
    pytest.param(LEVELS, 1, id="warnings by module"),
    pytest.param(OWN_NAMES, 0, id="names of torch's of the job's own"),
    pytest.param(LARGE, 0, id="numbers near the largest"),
    pytest.param(THREADS, 0, id="threads are counted and profiled"),
    pytest.param(LAYOUTS, 0, id="gradients that are added up in place"),
    pytest.param(TRAINERS, 0, id="threads that train at once"),
    pytest.param(FROZEN, 0, id="models outlive the recorder"),
    pytest.param(DESTROYED, 0, id="process group is gone before the pass"),
    pytest.param(OTHERS, 0, id="engine of the job's own, alarms, no collector"),
]


@pytest.mark.parametrize(("source", "code"), EDGES)
def test_job_at_the_edge_is_undisturbed(source: str, code: int, tmp_path: Path) -> None:
    bare, recorded = outcomes(source, tmp_path)
    assert bare.returncode == code, bare.tails()
    for seen in recorded:
        assert_same(bare, seen)


def test_where_frames_run_out_the_job_has_all_but_one_a_call(tmp_path: Path) -> None:
    """Torch itself needs one frame more for a call of a module that has hooks, and ours one for a pass: no more."""
    bare, recorded = outcomes(FRAMES, tmp_path, problems=True)
    *bare_frames, rest = bare.must_succeed().stdout.split("\n", 2)
    for seen in recorded:
        *frames, last = seen.must_succeed().stdout.split("\n", 2)
        for ours, without in zip(frames, bare_frames, strict=True):
            more = [a - b for a, b in zip(numbers(ours), numbers(without), strict=True)]
            assert more == [1, 2, 1, 0]
        assert last == rest
        (line,) = seen.stderr.splitlines()
        assert re.fullmatch(r"gradtrace: \d+ calls are missing: Python had too few frames .*", line)


def numbers(line: str) -> list[int]:
    return [int(word) for word in line.split()]
