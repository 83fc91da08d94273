"""Looks for the origins of one step: first where each rank first differs, then, where asked, all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gradtrace_analyzer.diff.difference import Difference
from gradtrace_analyzer.diff.judged_rows import JudgedRows
from gradtrace_analyzer.diff.links import LOCAL_LINKS
from gradtrace_analyzer.diff.origin import (
    BucketInputOrigin,
    BucketSettingsOrigin,
    CodeOrigin,
    FailureOrigin,
    GradientsOrigin,
    NodeOrigin,
    Origin,
    StructureOrigin,
    SyncOrigin,
)
from gradtrace_analyzer.diff.origins.dataflow import Dataflow
from gradtrace_analyzer.diff.origins.first_differences import by_rank, first_origins, origin_of
from gradtrace_analyzer.diff.origins.from_code import CodeSplit, origin_of_code, split_by_code
from gradtrace_analyzer.diff.origins.independent import Join, independent, same_place_merged
from gradtrace_analyzer.diff.origins.stage_edges import received_apart
from gradtrace_analyzer.diff.origins.step_reader import StepReader
from gradtrace_analyzer.failures.failed_passes import OneSidedFailure


class StepSearch:
    """The differences of a step; with `exceeding`, those beyond tolerance."""

    def __init__(
        self,
        judged: JudgedRows,
        here: StepReader,
        failures: Sequence[OneSidedFailure],
        steps: Sequence[int],
        *,
        joins: Sequence[Join] = (),
        exceeding: bool,
    ) -> None:
        """`steps` are all that both sides recorded; `joins` say which origins are one."""
        self._joins = joins
        step, structure = here.step, judged.structure
        self._judged = judged
        self._here = here
        self._exceeding = exceeding
        differences = judged.differences_at(step)
        apart = CodeSplit(differences, [])
        # Compiled code computes the same within rounding: what differs by more does not follow from it.
        if any(not entry.is_compiled for entry in structure.code):
            apart = split_by_code(
                differences,
                structure,
                judged.rng_differs(step),
                exceeding=exceeding,
                is_proven=any(earlier < step for earlier in steps),
            )
        self._differences = apart.others
        self._edges = here.stage_edges()
        self._modules = {
            d.rank: judged.module_fqns(step, d.rank, d.key["root"])
            for d in _module_calls(self._differences)
        }
        forwards = any(d.table in ("inputs", "module_calls") for d in self._differences)
        # Two passes of a step may fail, one after another: the first is the reason.
        failed = {f.rank: f for f in reversed(failures) if f.step == step}
        self._of_code: list[CodeOrigin] = []
        if apart.following and not apart.others and not failed:
            changed = judged.first_changed(step)
            self._of_code = [
                origin_of_code(structure, apart.following, changed, exceeding=exceeding)
            ]
        self._rows = by_rank(self._differences, exceeding=exceeding)
        self._first_origins = first_origins(
            self._rows,
            # Parameters that one side alone has took random numbers: that the generators differ is no news.
            () if structure.has_parameters else judged.rng_to_blame(step),
            self._modules,
            exceeding=exceeding,
            failures=failed,
            unused=here.unused_forwards() if forwards else {},
        )
        if self._edges is not None:
            edges = self._edges
            self._first_origins = [
                edges.lone_action(first, differences) for first in self._first_origins
            ]

    @property
    def first_origins(self) -> list[Origin]:
        """Where ranks first differ by themselves, or, where none does, where they first differ together."""
        if self._of_code:
            return [*self._of_code]
        local = [o for o in self._first_origins if _is_of_its_rank(o)]
        return self._placed(same_place_merged(local or self._first_origins))

    def origins(self) -> tuple[list[Origin], list[Origin]]:
        """(origins, inherited): all that do not follow from another, and what ranks without one first inherit.

        Where all follows from changed code, that is the origin.
        """
        if self._of_code:
            return [*self._of_code], []
        step = self._here.step
        # A generator that stood elsewhere when the next step began may have been disturbed in this one.
        disturbed = self._judged.rng_differs(step) | self._judged.rng_differs(step + 1)
        dataflow = self._here.dataflow(self._rows)
        origins, inherited = independent(
            self._first_origins,
            self._rows,
            dataflow,
            self._here.step_facts(self._differences, disturbed),
            self._origin_of,
            edges=self._edges,
            joins=self._joins,
            exceeding=self._exceeding,
        )
        origins = [_with_positions(self._here, o) for o in origins]
        origins = _with_one_activation(origins, dataflow)
        return self._placed(origins), self._placed(inherited)

    def _placed(self, origins: Sequence[Origin]) -> list[Origin]:
        """The origins with the stage, microbatch and half that they are in."""
        if self._edges is None:
            return list(origins)
        apart = received_apart(self._differences)
        return [self._edges.placed(origin, apart) for origin in origins]

    def _origin_of(self, rank: int, own: list[Difference]) -> Origin:
        modules = self._modules.get(rank, ())
        return origin_of(own, rng_differs=False, modules=modules, exceeding=self._exceeding)


def _with_one_activation(origins: list[Origin], dataflow: Dataflow) -> list[Origin]:
    """The origins, marked where modules called with the same tensor each gave some gradients otherwise: a change of
    that tensor, which both saved, would explain them together."""
    called_with: dict[object, list[int]] = {}
    for n, origin in enumerate(origins):
        key = origin.difference.key
        if isinstance(origin, NodeOrigin) and origin.positions and origin.rewritten is None:
            names = ("microbatch", "root", "module_fqn")
            place = (origin.difference.rank, *(key[name] for name in names))
            row = dataflow.call("baseline", *place, call_index=key["call_index"])
            if row is not None and row.arrived != (None,):
                called_with.setdefault((origin.difference.rank, row.arrived), []).append(n)
    shared = {n for together in called_with.values() if len(together) > 1 for n in together}
    return [
        replace(o, shares_input=True) if isinstance(o, NodeOrigin) and n in shared else o
        for n, o in enumerate(origins)
    ]


def _is_of_its_rank(origin: Origin) -> bool:
    """Whether it lies in what the rank does by itself."""
    if isinstance(origin, FailureOrigin) and origin.failure.row["node_name"] is None:
        return False  # it failed while it waited, or in a check: another rank may be the reason
    return (
        origin.link in LOCAL_LINKS
        or origin.link == "stage"
        or isinstance(
            origin, (StructureOrigin, SyncOrigin, BucketSettingsOrigin, BucketInputOrigin)
        )
    )


def _with_positions(here: StepReader, origin: Origin) -> Origin:
    """A Node's origin with those of its gradients that differ, where not all do; one alone gives the numbers."""
    d = origin.difference
    if not isinstance(origin, GradientsOrigin) or None in d.event_indices:
        return origin
    direction = "grad_output" if origin.between else "grad_input"
    gradients, before, after = here.node_gradients(d, direction)
    if before != after:
        return replace(origin, gradient_counts=(before, after))
    apart = {n: g for n, g in enumerate(gradients) if g is not None and g.differs}
    if not apart or len(apart) == sum(g is not None for g in gradients):
        return origin
    change = next(iter(apart.values())) if len(apart) == 1 else origin.change
    count = sum(g is not None for g in gradients)
    return replace(origin, positions=tuple(apart), position_count=count, change=change)


def _module_calls(differences: Sequence[Difference]) -> list[Difference]:
    """The first differing module call of each rank."""
    first: dict[int, Difference] = {}
    for difference in differences:
        if difference.table == "module_calls":
            first.setdefault(difference.rank, difference)
    return list(first.values())
