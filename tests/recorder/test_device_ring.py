"""The ring of rows: in any order, from several threads, full, torn, combined, it gives what was left or says lost."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from gradtrace_recorder.summaries.device.ring import Ring
from gradtrace_recorder.summaries.device.rows import (
    CHECK,
    FINGERPRINT,
    TICKET,
    TORN,
    WORDS,
    as_summaries,
    checks,
    row_of,
)
from gradtrace_recorder.summaries.device.torch_rows import TorchRows
from gradtrace_recorder.summaries.torch_ops import TorchSummary
from gradtrace_recorder.summaries.values import Packed, combined
from gradtrace_schemas.summary import STATE_FULL
from support.devices.host_device import HostStream

FULL = TorchSummary(norms_only=False)


def memory(rows: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.zeros((rows, WORDS), np.int64)


def packed(tensor: torch.Tensor) -> Packed:
    numbers = FULL.numbers(tensor)
    return (tensor.numel(), *numbers[:6], *numbers[6], 0, STATE_FULL)


def some(seed: int = 0) -> torch.Tensor:
    return torch.randn(40, generator=torch.Generator().manual_seed(seed))


def states(ring: Ring, tickets: Sequence[int]) -> str:
    """A letter for each: `a`rrived, `l`ost, `w`aiting."""
    _, is_there, is_lost = ring.read(np.array(tickets, np.int64))
    assert not (is_there & is_lost).any()
    return "".join("a" if a else "l" if b else "w" for a, b in zip(is_there, is_lost, strict=True))


def test_rows_are_read_in_whatever_order_they_come() -> None:
    ring = Ring(memory(8))
    own = [ring.ticket() for _ in range(3)]
    assert states(ring, own) == "www"
    for ticket in (own[2], own[0]):
        ring._memory[ticket % 8] = row_of(ticket, packed(some(ticket)))
    assert states(ring, own) == "awa"
    found, _, _ = ring.read(np.array([own[2]]))
    assert as_summaries(found, STATE_FULL)[0]["fingerprint"] == packed(some(own[2]))[6]


def test_a_row_that_newer_ones_have_taken_is_lost_and_never_anothers() -> None:
    ring = Ring(memory(8))
    tickets = [ring.put(packed(some(n))) for n in range(11)]
    assert states(ring, tickets) == "lll" + "a" * 8
    late = ring.ticket()  # its row still holds the summary of the ticket eight before
    assert states(ring, [late]) == "w"


def test_a_row_that_is_half_written_waits() -> None:
    ring = Ring(memory(8))
    ticket = ring.put(packed(some()))
    row = ring._memory[ticket % 8]
    for word in (FINGERPRINT, CHECK, TICKET, CHECK - 1):
        row[word] += 1
        assert states(ring, [ticket]) == "w"
        row[word] -= 1
    assert states(ring, [ticket]) == "a"


def test_a_torn_row_is_lost_at_once() -> None:
    ring = Ring(memory(8))
    ticket = ring.put(packed(some()))
    row = ring._memory[ticket % 8]
    row[TORN] = 1
    row[CHECK] = checks(row[None])[0]
    assert states(ring, [ticket, ring.combination([(0, ticket)])]) == "lw"


def test_combinations_are_those_of_the_cpu() -> None:
    ring = Ring(memory(256))
    parts = [packed(some(n) * 10**n) for n in range(5)]
    tickets = [ring.put(part) for part in parts]
    chosen: list[list[tuple[int, Packed, int]]] = [
        [(p, parts[i], tickets[i]) for p, i in enumerate(order)]
        for order in ([0, 1], [1, 0], [2, 3, 4, 0, 1])
    ] + [[(2, parts[0], tickets[0])], [(2, parts[0], tickets[0]), (70, parts[1], tickets[1])]]
    asked = [ring.combination([(p, t) for p, _, t in parts_of]) for parts_of in chosen]
    outer = ring.combination([(0, asked[0]), (1, asked[1])])  # of combinations
    found, is_there, _ = ring.read(np.array([*asked, outer]))
    assert is_there.all()
    made = as_summaries(found, STATE_FULL)
    expected = []
    for parts_of in chosen:
        full: list[Packed | None] = [None] * 71
        for position, part, _ in parts_of:
            full[position] = part
        expected.append(combined(full))
    expected.append(combined([expected[0], expected[1]]))
    for row, wanted in zip(made, expected, strict=True):
        assert row["fingerprint"] == wanted[6]
        assert (row["abs_max"], row["nan_count"], row["inf_count"]) == (wanted[2], *wanted[4:6])
        assert row["norm"] == pytest.approx(wanted[1]) and row["sum"] == pytest.approx(wanted[3])
        assert row["sketch"] == pytest.approx(np.array(wanted[7:23]), rel=1e-5)


def test_a_combination_waits_for_its_last_part_and_is_lost_with_any() -> None:
    ring = Ring(memory(16))
    first, second = ring.put(packed(some())), ring.ticket()
    whole = ring.combination([(0, first), (1, second)])
    assert states(ring, [whole]) == "w"
    ring._memory[second % 16] = row_of(second, packed(some(1)))
    assert states(ring, [whole]) == "a"
    never = ring.ticket()
    other = ring.combination([(0, never), (1, first)])
    for _ in range(16):
        ring.ticket()
    assert states(ring, [other]) == "l" and not ring._combinations


def test_combinations_that_nobody_completes_are_bounded() -> None:
    ring = Ring(memory(8))
    for _ in range(100):
        ring.combination([(0, ring.ticket())])
    assert len(ring._combinations) <= 8


def test_who_asks_for_a_quarter_wakes_the_reader() -> None:
    woken: list[int] = []
    ring = Ring(memory(8), lambda: woken.append(1))
    for _ in range(8):
        ring.ticket()
    assert len(woken) == 4


def test_threads_and_a_stream_of_their_own_lose_nothing_that_has_room() -> None:
    """Four threads ask, a stream writes behind them, the reader reads all the while: each summary is its tensor's."""
    rows = torch.zeros((512, WORDS), dtype=torch.int64)
    ring, stream = Ring(rows.numpy()), HostStream()
    launcher = TorchRows(rows, torch.device("cpu"))
    asked: dict[int, int] = {}

    def ask(seed: int) -> None:
        for turn in range(40):
            tensor = some(100 * seed + turn)
            ticket = ring.ticket()
            asked[ticket] = int(packed(tensor)[6])
            stream.give(lambda tensor=tensor, ticket=ticket: launcher.launch(tensor, ticket))  # type: ignore[misc]

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    found: dict[int, int] = {}
    while len(found) < 160:
        tickets = np.array(sorted(set(asked.copy()) - set(found)), np.int64)
        rows_found, is_there, is_lost = ring.read(tickets)
        assert not is_lost.any()
        made = as_summaries(rows_found[is_there], STATE_FULL)
        found.update(zip(tickets[is_there].tolist(), made["fingerprint"].tolist(), strict=True))
    for thread in threads:
        thread.join()
    stream.end()
    assert found == asked
