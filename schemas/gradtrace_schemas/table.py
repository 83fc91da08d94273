"""Column and Table: name, type, unit, key and meaning of everything that lies on disk, in one frozen value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pyarrow as pa

Encoding = Literal["dictionary", "delta", "plain"]

SKETCH_LANES = 16
NODE_SKETCH_LANES = 4

STRING = pa.string()
STRINGS = pa.list_(pa.string())
SHAPE = pa.list_(pa.int64())
SKETCH = pa.list_(pa.float32())
INT32 = pa.int32()
INT64 = pa.int64()
FLOAT = pa.float64()
BOOL = pa.bool_()

# Not Arrow's own `to_pandas_dtype`: before pyarrow 26 it cannot be asked where pandas is absent.
_NUMPY_NAMES = {
    pa.bool_(): "bool",
    pa.float32(): "f4",
    pa.float64(): "f8",
    **{getattr(pa, f"int{8 * n}")(): f"i{n}" for n in (1, 2, 4, 8)},
    **{getattr(pa, f"uint{8 * n}")(): f"u{n}" for n in (1, 2, 4, 8)},
}


@dataclass(frozen=True)
class Column:
    """One column: its Arrow type, what it means, and the unit where its name does not say it.

    `since` is the schema version that brought it: parts of older runs lack it, and read as null.
    """

    name: str
    type: pa.DataType
    doc: str
    nullable: bool = False
    encoding: Encoding | None = None
    since: int = 1

    @property
    def parquet_encoding(self) -> Encoding:
        """How the column lies in Parquet: measured on 19.2 million events, see the design's section 3."""
        if self.encoding is not None:
            return self.encoding
        if pa.types.is_string(self.type):
            return "dictionary"
        return "delta" if pa.types.is_integer(self.type) else "plain"


@dataclass(frozen=True)
class SummaryColumns:
    """A tensor summary inside a row: a group of columns that share a prefix.

    `lanes` is the width of the sketch on disk: the journal always holds 16, folded when drained.
    """

    prefix: str
    doc: str
    lanes: int = SKETCH_LANES

    @property
    def columns(self) -> tuple[Column, ...]:
        """The summary's columns, all of them null where nothing was summarised."""

        def column(
            name: str, type: pa.DataType, doc: str, encoding: Encoding | None = None
        ) -> Column:
            return Column(f"{self.prefix}{name}", type, f"{self.doc}: {doc}", True, encoding)

        return (
            column("numel", INT64, "number of elements."),
            column("dtype", STRING, "dtype, without the `torch.` in front."),
            column("norm", FLOAT, "L2 norm of the finite elements."),
            column("abs_max", FLOAT, "largest magnitude among the finite elements."),
            column("sum", FLOAT, "sum of the finite elements."),
            column("nan_count", INT64, "number of NaN elements."),
            column("inf_count", INT64, "number of infinite elements."),
            column(
                "fingerprint",
                INT64,
                "64 bits that change with any changed bit and with a permutation, as a signed integer.",
                "plain",
            ),
            column(
                "sketch",
                SKETCH,
                f"{self.lanes} floats, a linear projection: |sketch(a) - sketch(b)| estimates |a - b|.",
            ),
        )


@dataclass(frozen=True)
class Table:
    """One table: what a row is, what is unique, and its columns.

    `key` is unique within a run together with nothing else. `journalled` is False for tables that are
    made from other files than journal records (`ranks`).
    """

    name: str
    version: int
    doc: str
    key: tuple[str, ...]
    entries: tuple[Column | SummaryColumns, ...]
    journalled: bool = True

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """All columns in file order, summaries spread out."""
        flat: list[Column] = []
        for entry in self.entries:
            flat.extend(entry.columns if isinstance(entry, SummaryColumns) else (entry,))
        return tuple(flat)

    @cached_property
    def summaries(self) -> tuple[SummaryColumns, ...]:
        """The tensor summaries of a row."""
        return tuple(entry for entry in self.entries if isinstance(entry, SummaryColumns))

    @cached_property
    def plain_columns(self) -> tuple[Column, ...]:
        """The columns that are no part of a summary."""
        return tuple(entry for entry in self.entries if isinstance(entry, Column))

    @cached_property
    def arrow_schema(self) -> pa.Schema:
        """The schema of a part: every column but `rank`, which the folder's name holds."""
        return pa.schema(
            [pa.field(c.name, c.type, nullable=True) for c in self.columns if c.name != "rank"]
        )

    def column(self, name: str) -> Column:
        """The column of that name. Raises KeyError."""
        for column in self.columns:
            if column.name == name:
                return column
        raise KeyError(f"{self.name} has no column {name!r}")


ATTEMPT = Column("attempt", INT32, "Which start of the job, from 0; the same for all its ranks.")
RANK = Column("rank", INT32, "Global rank. In files: the folder's name, `rank=00003`.")
STEP = Column("step", INT32, "Optimizer step, from 0.")
MICROBATCH = Column(
    "microbatch",
    INT32,
    "Accumulating backward passes completed in this step before this row; in an action of a pipeline stage the "
    "microbatch of its schedule.",
)
RECORD_INDEX = Column(
    "record_index", INT64, "Order in which the rank recorded its rows, over all tables, from 1."
)
BACKWARD_INDEX = Column(
    "backward_index",
    INT32,
    "Calls into the autograd engine in this step, from 0, in order of entry.",
)
ROOT = Column("root", INT32, "Root module, numbered by first call.")
MODULE_FQN = Column(
    "module_fqn",
    STRING,
    "Dotted name relative to the root, wrappers stripped; empty for the root itself.",
)
CALL_INDEX = Column(
    "call_index", INT32, "Calls of this module in this step, microbatch and phase, from 0."
)
START_NS = Column(
    "start_ns", INT64, "Start, host's monotonic clock, nanoseconds since the recording began."
)
END_NS = Column("end_ns", INT64, "End, on the same clock.")

IDENTITY = (ATTEMPT, RANK, STEP)


def numpy_dtype(type: pa.DataType) -> np.dtype[Any]:
    """The dtype of an array of a number's or a boolean's Arrow type, in the machine's byte order. Raises KeyError."""
    return np.dtype(_NUMPY_NAMES[type])


def nullable(column: Column, doc: str | None = None) -> Column:
    """The same column where it may be null, with another explanation if one is given."""
    return replace(column, doc=doc or column.doc, nullable=True)


def since(version: int, column: Column) -> Column:
    """The same column, which older schema versions did not have."""
    return replace(column, since=version)
