"""The links of a step's chain: which table holds each, what pairs its rows, what it reads and what it writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from gradtrace_analyzer.sql.pipelines import KINDS
from gradtrace_analyzer.words.nouns import OUTSIDE

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
class Of:
    """In the words of a row: what one of its key columns says, `otherwise` where that is null. Of a list, its first."""

    column: str
    otherwise: str | None = None
    is_list: bool = False


@dataclass(frozen=True)
class LinkTable:
    """All that the rows of one table are to a comparison: a table is compared by what is declared here.

    `key` pairs its rows between two runs, besides rank and step. `reads` and `writes` are prefixes of tensor summaries:
    what went into the link and what came out. `values` are plain columns that are compared as they are: in all steps,
    or, where they change nothing that is not `digested` with the rest, in those whose digests differ; of a table with
    `kinds`, rows of another kind are not compared.

    Its rows stand for one `link`, or, by their point, for the one that `points` gives. `whereabouts` are the words of a
    row that is counted and not shown. `module` is the module that a row is of, in SQL over its key columns, whose
    prefix stands for `{}`; None where it is of none. `kind` is the column that rows of one kind agree in, `noise_place`
    the key columns by which its run-to-run noise is told apart: what a row is of, never when it ran; empty where none
    is measured. `holds` is what a row without summaries must fulfil to hold a value of its step; None where none does.
    """

    table: str
    key: tuple[str, ...]
    reads: str | None = None
    writes: str | None = None
    values: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    digested: bool = False
    link: str | None = None
    points: Mapping[str, str] = field(default_factory=dict)
    whereabouts: tuple[str | Of, ...] = ()
    module: str | None = None
    kind: str | None = None
    noise_place: tuple[str, ...] = ()
    holds: str | None = None

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

    @property
    def each_point(self) -> tuple[str | None, ...]:
        """Its points, or None alone where its rows have none."""
        return tuple(self.points) or (None,)

    def link_at(self, point: str | None) -> str:
        """The link that a row stands for. Raises KeyError for a point that it does not have."""
        return self.link if self.link is not None else self.points[point or ""]


_OWNER = "owner_of({}parameter_fqn)"

LINK_TABLES = (
    LinkTable(
        "parameters",
        ("root", "parameter_fqn", "point"),
        writes="",
        values=("requires_grad",),
        digested=True,  # a frozen parameter has no gradients
        points={"before": "parameters", "after": "optimizer"},
        whereabouts=(Of("parameter_fqn"),),
        module=_OWNER,
        kind="point",
        noise_place=("root", "parameter_fqn", "point"),
    ),
    LinkTable(
        "inputs",
        ("microbatch", "root", "call_index", "name"),
        writes="",
        link="inputs",
        whereabouts=(Of("name"),),
    ),
    LinkTable(
        "module_calls",
        ("microbatch", "root", "module_fqn", "phase", "call_index"),
        reads="input_",
        writes="output_",
        link="forward",
        whereabouts=(Of("module_fqn"),),
        module="{}module_fqn",
        kind="phase",
        noise_place=("root", "module_fqn", "phase"),
    ),
    LinkTable(
        "backward_passes",
        ("microbatch", "backward_index", "kind"),
        values=("loss", "ddp_sync"),
        link="loss",
        holds="loss IS NOT NULL",
        noise_place=("kind",),
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
        link="backward",
        whereabouts=(Of("module_fqn", OUTSIDE), " (", Of("node_name"), ")"),
        module="{}module_fqn",
        kind="node_name",
        noise_place=("root", "module_fqn", "node_name", "parameter_fqn"),
    ),
    LinkTable(
        "stage_events",
        ("microbatch", "stage_index", "kind", "occurrence"),
        reads="received_",
        writes="sent_",
        # Waits are looked at by `timing`.
        kinds=KINDS,
        link="stage",
    ),
    LinkTable(
        "buckets",
        ("microbatch", "backward_index", "kind", "root", "module_fqn", "parameter_fqns"),
        reads="before_",
        writes="after_",
        values=("hook_name", "divisor"),
        link="bucket",
        whereabouts=("the bucket of ", Of("parameter_fqns", is_list=True)),
        noise_place=("root", "module_fqn"),
    ),
    LinkTable(
        "gradients",
        ("backward_index", "root", "parameter_fqn", "point"),
        writes="",
        points={
            "carried": "carried_gradient",
            "local": "local_gradient",
            "reduced": "reduced_gradient",
            "final": "clip",
        },
        whereabouts=(Of("parameter_fqn"),),
        module=_OWNER,
        kind="point",
        noise_place=("root", "parameter_fqn", "point"),
    ),
    LinkTable(
        "optimizer_groups",
        ("optimizer_index", "group_index"),
        values=("optimizer_class", "learning_rate", "hyperparameters", "parameter_fqns"),
        link="optimizer",
    ),
)

# The tables whose rows a comparison counts: `steps` names the steps that the others have rows of.
TABLE_NAMES = ("steps", *(table.table for table in LINK_TABLES))

LINK_TABLE = {table.table: table for table in LINK_TABLES}


def link_of(table: str, point: str | None) -> str:
    """The link that a row of a table stands for; `point` is that of `parameters` and `gradients`, else None. Raises
    KeyError.
    """
    # A pass that failed is an event of the backward pass, and no row that pairs.
    return "backward" if table == "failures" else LINK_TABLE[table].link_at(point)
