"""The links of a step's chain: which table holds each, what pairs its rows, what it reads and what it writes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from gradtrace_analyzer.sql.pipelines import KINDS

# In the order of the chain. `first_divergence.link` is one of them.
LINKS = (
    "configuration",
    "parameters",
    "rng",
    "inputs",
    "forward",
    "loss",
    "carried_gradient",
    "backward",
    "local_gradient",
    "bucket",
    "stage",
    "reduced_gradient",
    "clip",
    "optimizer",
    "structure",
)

# What a rank computes from its own data alone; what comes after mixes the ranks of a group.
LOCAL_LINKS = frozenset(LINKS[: LINKS.index("bucket")])


# What of a tensor summary a pair of rows keeps of each side, besides its fingerprint.
STATISTICS = ("numel", "dtype", "norm", "abs_max", "sum", "nan_count", "inf_count", "sketch")


@dataclass(frozen=True)
class LinkTable:
    """How the rows of one table pair between two runs, besides by rank and step.

    `reads` and `writes` are prefixes of tensor summaries: what went into the link and what came out.
    `values` are plain columns that are compared as they are: in all steps, or, where they change nothing that
    is not `digested` with the rest, in those whose digests differ; of a table with `kinds`, rows of another kind are
    not compared.
    """

    table: str
    key: tuple[str, ...]
    reads: str | None = None
    writes: str | None = None
    values: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    digested: bool = False

    @property
    def only(self) -> str:
        """A condition that the rows which are compared fulfil: one that is under way has nothing to compare."""
        if not self.kinds:
            return "true"
        return f"kind IN ({', '.join(map(repr, self.kinds))}) AND end_ns IS NOT NULL"

    @cached_property
    def sides(self) -> tuple[tuple[str, str], ...]:
        """(role, prefix) of each summary."""
        given = (("reads", self.reads), ("writes", self.writes))
        return tuple((role, prefix) for role, prefix in given if prefix is not None)


LINK_TABLES = (
    LinkTable(
        "parameters",
        ("root", "parameter_fqn", "point"),
        writes="",
        values=("requires_grad",),
        digested=True,  # a frozen parameter has no gradients
    ),
    LinkTable("inputs", ("microbatch", "root", "call_index", "name"), writes=""),
    LinkTable(
        "module_calls",
        ("microbatch", "root", "module_fqn", "phase", "call_index"),
        reads="input_",
        writes="output_",
    ),
    LinkTable(
        "backward_passes", ("microbatch", "backward_index", "kind"), values=("loss", "ddp_sync")
    ),
    LinkTable(
        "node_events",
        (
            "microbatch",
            "backward_index",
            "root",
            "module_fqn",
            "call_index",
            "node_name",
            "parameter_fqn",
            "occurrence",
        ),
        reads="grad_output_",
        writes="grad_input_",
    ),
    LinkTable(
        "stage_events",
        ("microbatch", "stage_index", "kind", "occurrence"),
        reads="received_",
        writes="sent_",
        # Waits are looked at by `timing`.
        kinds=KINDS,
    ),
    LinkTable(
        "buckets",
        ("microbatch", "backward_index", "kind", "root", "module_fqn", "parameter_fqns"),
        reads="before_",
        writes="after_",
        values=("hook_name", "divisor"),
    ),
    LinkTable("gradients", ("backward_index", "root", "parameter_fqn", "point"), writes=""),
    LinkTable(
        "optimizer_groups",
        ("optimizer_index", "group_index"),
        values=("optimizer_class", "learning_rate", "hyperparameters", "parameter_fqns"),
    ),
)

# The tables whose rows a comparison counts: `steps` names the steps that the others have rows of.
TABLE_NAMES = ("steps", *(table.table for table in LINK_TABLES))

_BY_POINT = {
    ("parameters", "before"): "parameters",
    ("parameters", "after"): "optimizer",
    ("gradients", "carried"): "carried_gradient",
    ("gradients", "local"): "local_gradient",
    ("gradients", "reduced"): "reduced_gradient",
    ("gradients", "final"): "clip",
}
_BY_TABLE = {
    "inputs": "inputs",
    "module_calls": "forward",
    "backward_passes": "loss",
    "node_events": "backward",
    "failures": "backward",
    "buckets": "bucket",
    "stage_events": "stage",
    "optimizer_groups": "optimizer",
}


def link_of(table: str, point: str | None) -> str:
    """The link that a row of a table stands for; `point` is that of `parameters` and `gradients`, else None. Raises
    KeyError.
    """
    return _BY_TABLE.get(table) or _BY_POINT[(table, point or "")]
