"""DDP's reductions: equal bits in every way of reducing, and a row for each bucket that says what happened."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from support.launching.launcher import run_job
from support.recordings.in_process import rows
from whole.test_unchanged import same

JOB = Path(__file__).resolve().parents[1] / "support" / "jobs" / "reductions.py"

# What torch 2.13 refuses on a CPU with gloo, whoever watches: only its words can be compared.
REFUSED = {
    "mixed_precision",
    "create_graph",
    "hook_quantize_per_tensor",
    "hook_quantize_per_channel",
    "overlapped_optimizer",
    "unfinished",
}


def left_by(folder: Path, ranks: int, recorded: Path | None, *only: str) -> list[dict[str, Any]]:
    """What the job left on each rank, by way."""
    folder.mkdir()
    chosen = ("--only", *only) if only else ()
    job = run_job(
        JOB, "--out", folder, *chosen, ranks=ranks, recorded=recorded, timeout=200, forked=ranks > 2
    )
    job.must_succeed()
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(ranks)]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The recording of all ways on two ranks, and what they left."""
    folder = tmp_path_factory.mktemp("reductions")
    return folder / "run", left_by(folder / "recorded", 2, folder / "run")


def test_every_way_of_reducing_is_equal_bit_for_bit(
    two_ranks: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    bare = left_by(tmp_path / "bare", 2, None)
    assert_same(bare, two_ranks[1])


@pytest.mark.slow
def test_every_way_of_reducing_is_equal_on_three_ranks(tmp_path: Path) -> None:
    """Where dividing by the world size and multiplying by its inverse differ."""
    bare = left_by(tmp_path / "bare", 3, None)
    assert_same(bare, left_by(tmp_path / "recorded", 3, tmp_path / "run"))


def assert_same(bare: list[dict[str, Any]], seen: list[dict[str, Any]]) -> None:
    assert len(bare[0]) >= 55
    assert {name for name, left in bare[0].items() if isinstance(left[0], str)} == REFUSED | {
        "refusals"
    }
    for rank, (a, b) in enumerate(zip(bare, seen, strict=True)):
        changed = [name for name in a if not same(a[name], b[name])]
        assert not changed, f"recording changed these ways of reducing on rank {rank}: {changed}"


def test_noop_and_a_reduction_by_hand_give_the_reference(
    two_ranks: tuple[Path, list[dict[str, Any]]],
) -> None:
    for rank in two_ranks[1]:
        assert bool(rank["noop_then_by_hand"][0].all())


def test_compressing_hooks_stay_close_to_no_hook(
    two_ranks: tuple[Path, list[dict[str, Any]]],
) -> None:
    ways = two_ranks[1][0]
    plain = ways["hook_allreduce"]
    for name, relative, absolute in (
        ("builtin_allreduce", 1e-5, 1e-7),
        ("hook_plain_future", 1e-5, 1e-7),
        ("hook_fp16_compress", 1e-2, 1e-4),
        ("builtin_fp16_compress", 1e-2, 1e-4),
    ):
        for a, b in zip(plain, ways[name], strict=True):
            assert torch.allclose(a, b, rtol=relative, atol=absolute), name


def test_every_bucket_has_a_row(two_ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    """First pass one bucket, then rebuilt ones; each launched, done, and summarised on both sides."""
    found = rows(
        two_ranks[0],
        "SELECT rank, step, bucket_index, is_last, layout_index, parameter_fqns, size_bytes, numel, dtype, divisor, "
        "ready_ns <= launched_ns AND launched_ns <= done_ns, before_numel, after_numel "
        "FROM buckets WHERE root = 0 ORDER BY rank, step, bucket_index",
    )
    last = ["4.bias", "4.weight", "2.bias", "2.weight"]
    registered = [f"{layer}.{kind}" for layer in (0, 2, 4) for kind in ("weight", "bias")]
    one = (0, True, 0, registered, 4 * 215, 215, "float32", 2, True, 215, 215)
    rebuilt = [
        (0, False, 1, last, 4 * 138, 138, "float32", 2, True, 138, 138),
        (1, True, 1, ["0.bias", "0.weight"], 4 * 77, 77, "float32", 2, True, 77, 77),
    ]
    per_rank = [(0, *one), *((step, *row) for step in (1, 2, 3) for row in rebuilt)]
    assert found == [(rank, *row) for rank in (0, 1) for row in per_rank]


def test_ranks_share_the_number_of_their_collective(
    two_ranks: tuple[Path, list[dict[str, Any]]],
) -> None:
    """Rows with one group and number were reduced together: they hold the same parameters."""
    apart = rows(
        two_ranks[0],
        'SELECT "group", collective_seq, count(*), count(DISTINCT (root, bucket_index, parameter_fqns)) '
        "FROM buckets WHERE collective_seq IS NOT NULL GROUP BY ALL "
        "HAVING count(*) <> 2 OR count(DISTINCT (root, bucket_index, parameter_fqns)) <> 1",
    )
    noop = rows(
        two_ranks[0], "SELECT count(*) FROM buckets WHERE hook_name = 'debugging_hooks.noop_hook'"
    )
    assert len(apart) <= noop[0][0]  # which starts no collective of its own


def test_where_equal_bits_cannot_be_had_nothing_is_installed_and_it_is_said(
    two_ranks: tuple[Path, list[dict[str, Any]]],
) -> None:
    found = rows(
        two_ranks[0],
        "SELECT unobserved, count(*), count(DISTINCT b.root) FROM groups g LEFT JOIN buckets b USING (rank, root) "
        "WHERE g.module_fqn IS NOT NULL AND rank = 0 AND unobserved IS NOT NULL GROUP BY ALL ORDER BY 1",
    )
    sparse, views = found
    assert "views of its buckets" in views[0] and views[1] >= 10 and views[2] == 0
    assert "sparse gradients" in sparse[0] and sparse[1] == 2 and sparse[2] == 0
    reduced = rows(
        two_ranks[0],
        "SELECT count(*) FROM gradients JOIN groups USING (rank, root) WHERE point = 'reduced' AND "
        "unobserved IS NOT NULL",
    )
    assert reduced[0][0] > 100  # which needs no bucket


def test_hooks_are_named(two_ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    names = {name for (name,) in rows(two_ranks[0], "SELECT DISTINCT hook_name FROM buckets")}
    assert names >= {
        None,
        "default_hooks.allreduce_hook",
        "default_hooks.fp16_compress_hook",
        "powerSGD_hook.powerSGD_hook",
        "debugging_hooks.noop_hook",
        "BuiltinCommHookType.ALLREDUCE",
        "BuiltinCommHookType.FP16_COMPRESS",
        "__main__.mean_by_future",
    }


def test_shadows_and_shards_are_told_from_buckets(
    two_ranks: tuple[Path, list[dict[str, Any]]],
) -> None:
    found = rows(
        two_ranks[0],
        "SELECT kind, rank, count(*), max(before_norm), count(done_ns) FROM buckets "
        "WHERE kind <> 'all_reduce' GROUP BY ALL ORDER BY ALL",
    )
    # Rank 0 has two batches and rank 1 three, in both joins: one pass of two buckets is shadowed in each.
    assert found[-1] == ("shadow", 0, 4, 0.0, 4)
    assert [(kind, rank, count, done) for kind, rank, count, _, done in found[:-1]] == [
        ("reduce_scatter", 0, 9, 9),
        ("reduce_scatter", 1, 9, 9),
    ]


def test_passes_say_whether_they_reduce(two_ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    """Three microbatches, of which the last reduces; the steps count the passes."""
    (root,) = rows(
        two_ranks[0],
        "SELECT min(root) FROM buckets WHERE microbatch = 2 AND kind = 'all_reduce'",
    )[0]
    steps = f"SELECT DISTINCT step FROM buckets WHERE root = {root}"
    found = rows(
        two_ranks[0],
        f"SELECT DISTINCT microbatch, ddp_sync FROM backward_passes WHERE rank = 0 AND step IN ({steps}) ORDER BY 1",
    )
    assert found == [(0, "no_sync"), (1, "no_sync"), (2, "sync")]
    counts = rows(
        two_ranks[0], f"SELECT DISTINCT backward_count FROM steps WHERE step IN ({steps})"
    )
    assert counts == [(3,)]


def test_groups_are_recorded_once(two_ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    found = rows(
        two_ranks[0],
        "SELECT name, ranks, backend, role, count(*) FROM groups WHERE module_fqn IS NULL AND rank = 1 "
        "GROUP BY ALL ORDER BY 1",
    )
    assert ("0", "[0, 1]", "gloo", None, 1) in found
    assert all(count == 1 for *_, count in found)


ELEVEN = """
import time, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
net = DDP(nn.Sequential(*(nn.Linear(20, 20) for _ in range(11))), bucket_cap_mb=0.004)
for _ in range(2):
    net.zero_grad()
    net(torch.randn(3, 20)).sum().backward()
dist.destroy_process_group()
time.sleep(0.1)
"""


def test_the_last_bucket_alone_is_last(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(ELEVEN)
    run_job(tmp_path / "job.py", ranks=2, recorded=tmp_path / "run", forked=True).must_succeed()
    found = rows(
        tmp_path / "run",
        "SELECT rank, backward_index, list(is_last ORDER BY bucket_index) FROM buckets "
        "GROUP BY ALL HAVING count(*) > 3",
    )
    assert len(found) >= 2
    for _, _, last in found:
        assert last == [*[False] * (len(last) - 1), True]


PEER_DIES = """
import datetime, os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=3))
net = DDP(torch.nn.Linear(3, 3))
for _ in range(2):  # buckets are rebuilt, by collectives, before the second
    net(torch.ones(1, 3)).sum().backward()
if dist.get_rank() == 1:
    import time
    time.sleep(6)
    os._exit(0)
try:
    loss = net(torch.ones(1, 3)).sum()
    print("SAID", end=" ", flush=True)
    loss.backward()
except Exception as error:
    print(type(error).__name__, str(error), flush=True)
os._exit(0)
"""


def test_a_collective_that_fails_raises_what_it_raises_unrecorded(tmp_path: Path) -> None:
    """A hook's callback gives errors another text; the reducer's own is put back."""
    (tmp_path / "job.py").write_text(PEER_DIES)
    bare = run_job(tmp_path / "job.py", ranks=2, forked=True).stdout
    seen = run_job(tmp_path / "job.py", ranks=2, recorded=tmp_path / "run", forked=True).stdout
    assert "SAID RuntimeError" in bare, bare
    assert "callback" not in seen
    assert bare.split("]")[-1] == seen.split("]")[-1]
    found = rows_of_a_living_run(tmp_path / "run")
    assert None not in [done for _, done in found[:2]] and found[2:] == [(2, None)]


def rows_of_a_living_run(run: Path) -> list[tuple[Any, ...]]:
    import contextlib

    from gradtrace_analyzer.runs.opening import open_run
    from gradtrace_analyzer.sql.views import connect

    with contextlib.closing(connect([open_run(run)])) as connection:
        return connection.execute(
            "SELECT backward_index, done_ns FROM buckets WHERE rank = 0 ORDER BY record_index"
        ).fetchall()


KILLED_IN_A_REDUCTION = """
import os, signal, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
net = DDP(torch.nn.Linear(3, 3))
pids = [torch.zeros(1, dtype=torch.long) for _ in range(2)]
dist.all_gather(pids, torch.tensor([os.getpid()]))
for _ in range(2):
    net(torch.ones(1, 3)).sum().backward()
if dist.get_rank() == 1:
    time.sleep(2)
    os.kill(int(pids[0]), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
net(torch.ones(1, 3)).sum().backward()
"""


def test_a_bucket_under_way_outlives_a_kill(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(KILLED_IN_A_REDUCTION)
    run_job(tmp_path / "job.py", ranks=2, recorded=tmp_path / "run", forked=True)
    found = rows_of_a_living_run(tmp_path / "run")
    assert [index for index, _ in found] == [0, 1, 2]
    assert found[2][1] is None and None not in [done for _, done in found[:2]]


WRAPPED_AGAIN = """
import time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = torch.nn.Linear(3, 3)
for _ in range(3):
    net = DDP(model)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    optimizer.zero_grad()
    net(torch.randn(2, 3)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
time.sleep(0.1)
"""


def test_a_model_that_is_wrapped_again_misses_no_bucket(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(WRAPPED_AGAIN)
    run_job(tmp_path / "job.py", ranks=2, recorded=tmp_path / "run", forked=True).must_succeed()
    command = ["-m", "gradtrace_analyzer.cli", "check", str(tmp_path / "run"), "--format", "json"]
    said = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=60)
    answer = json.loads(said.stdout)
    assert answer["verdict"] == "clean" and answer["violations"] == [], answer["explanation"]
    assert answer["judged"]["reduction_is_mean"] == 3
