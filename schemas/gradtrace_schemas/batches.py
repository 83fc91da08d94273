"""Journal records to Arrow tables and Parquet parts, vectorised: no loop over rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from gradtrace_schemas.catalogue import SCHEMA_VERSION
from gradtrace_schemas.journal import (
    DEVICE_NS,
    NULL_BOOL,
    NULL_FLOAT_BITS,
    NULL_INT32,
    NULL_INT64,
    NULL_STRING,
    is_pending_time,
)
from gradtrace_schemas.layout import PART_LAST_RECORD, PART_SCHEMA_VERSION
from gradtrace_schemas.summary import STATE_FULL, STATE_NONE, STATE_NORMS
from gradtrace_schemas.table import (
    SHAPE,
    SKETCH_LANES,
    STRING,
    STRINGS,
    Column,
    SummaryColumns,
    Table,
)

ROW_GROUP_ROWS = 120_000
ZSTD_LEVEL = 1
_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)

Records = npt.NDArray[Any]


def arrow_table(
    table: Table, records: Records, strings: Sequence[str], attempt: int, rank: int | None = None
) -> pa.Table:
    """The rows of records of that table, in their order.

    Without `rank` it has the columns of a part; with it, a column `rank` besides.
    """
    arrays: dict[str, pa.Array] = {}
    for entry in table.entries:
        if isinstance(entry, SummaryColumns):
            arrays.update(_summary_arrays(entry, records[entry.prefix + "summary"], strings))
        elif entry.name == "attempt":
            arrays["attempt"] = pa.array(np.full(len(records), attempt, np.int32))
        elif entry.name == "record_index":
            arrays["record_index"] = pa.array(records["record_number"].astype(np.int64))
        elif entry.name != "rank":
            arrays[entry.name] = _plain_array(entry, records[entry.name], strings)
    made = pa.table([arrays[field.name] for field in table.arrow_schema], schema=table.arrow_schema)
    if rank is not None:
        made = made.append_column("rank", pa.array(np.full(len(records), rank, np.int32)))
    return made


def write_part(path: Path, table: Table, rows: pa.Table, last_record: int) -> None:
    """Write one Parquet part under a temporary name, then rename it.

    `last_record` is the number of the newest journal record that it holds. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    names = {column.name: column.parquet_encoding for column in table.columns}
    metadata = {
        PART_LAST_RECORD: str(last_record).encode(),
        PART_SCHEMA_VERSION: str(SCHEMA_VERSION).encode(),
    }
    temporary = path.with_suffix(".writing")
    try:
        # Not `write_table`: without a stored Arrow schema it writes no metadata of ours either.
        with pq.ParquetWriter(
            temporary,
            rows.schema,
            compression="zstd",
            compression_level=ZSTD_LEVEL,
            data_page_version="1.0",
            store_schema=False,
            use_dictionary=[name for name, how in names.items() if how == "dictionary"],
            column_encoding={
                name: "DELTA_BINARY_PACKED"
                for name, how in names.items()
                if how == "delta" and name in rows.column_names
            },
        ) as writer:
            writer.write_table(rows, row_group_size=ROW_GROUP_ROWS)
            writer.add_key_value_metadata(metadata)
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _summary_arrays(
    group: SummaryColumns, records: Records, strings: Sequence[str]
) -> dict[str, pa.Array]:
    state = records["state"]
    nothing = state == STATE_NONE
    not_full = state != STATE_FULL
    no_norms = not_full & (state != STATE_NORMS)
    with np.errstate(over="ignore"):  # of gradients near the largest number
        lanes = records["sketch"].astype(np.float32)
        if group.lanes != SKETCH_LANES:
            lanes = lanes.reshape(len(records), SKETCH_LANES // group.lanes, group.lanes).sum(
                axis=1, dtype=np.float32
            )
    lanes = np.clip(lanes, -_LARGEST_FLOAT32, _LARGEST_FLOAT32)
    p = group.prefix
    made = {
        p + "numel": pa.array(records["numel"], mask=nothing),
        p + "dtype": _text(np.where(nothing, NULL_STRING, records["dtype"]), strings),
        p + "fingerprint": pa.array(records["fingerprint"], mask=not_full),
        p + "sketch": _lists(lanes.reshape(-1), np.where(not_full, 0, group.lanes), not_full),
    }
    for name in ("norm", "abs_max", "sum", "nan_count", "inf_count"):
        made[p + name] = pa.array(records[name], mask=no_norms)
    return made


def _lists(
    flat: npt.NDArray[np.float32], lengths: npt.NDArray[Any], null: npt.NDArray[np.bool_]
) -> pa.Array:
    width = len(flat) // max(1, len(lengths))
    kept = flat.reshape(len(lengths), width)[~null].reshape(-1) if len(lengths) else flat
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(kept), mask=pa.array(null))


def _plain_array(column: Column, values: Records, strings: Sequence[str]) -> pa.Array:
    if column.type == STRING:
        return _text(values, strings)
    if column.type == STRINGS:
        return _text_lists(values, strings)
    if column.type == SHAPE:
        return _shapes(values)
    values = np.ascontiguousarray(values)
    if pa.types.is_boolean(column.type):
        return pa.array(values == 1, mask=values == NULL_BOOL)
    if pa.types.is_floating(column.type):
        return pa.array(values, mask=values.view(np.int64) == NULL_FLOAT_BITS)
    is_null = values == (NULL_INT32 if column.type == pa.int32() else NULL_INT64)
    if column.name == DEVICE_NS:
        is_null |= is_pending_time(values)
    return pa.array(values, type=column.type, mask=is_null)


def _text(numbers: npt.NDArray[Any], strings: Sequence[str]) -> pa.Array:
    used, places = np.unique(numbers, return_inverse=True)
    texts = [strings[n] if n < len(strings) else None for n in used.tolist()]
    return pa.array(texts, STRING).take(pa.array(places.reshape(-1)))


def _text_lists(numbers: npt.NDArray[Any], strings: Sequence[str]) -> pa.Array:
    used, places = np.unique(numbers, return_inverse=True)
    lists = [_list(strings[n]) if n < len(strings) else None for n in used.tolist()]
    return pa.array(lists, STRINGS).take(pa.array(places.reshape(-1)))


def _list(text: str) -> list[str | None] | None:
    """The names that a text holds; None where a damaged journal holds something else in its place."""
    try:
        names = json.loads(text)
    except ValueError:
        return None
    if isinstance(names, list) and all(n is None or isinstance(n, str) for n in names):
        return names
    return None


def _shapes(values: Records) -> pa.Array:
    ndim = values["ndim"].astype(np.int64)
    null = ndim > values["sizes"].shape[1]  # NULL_BOOL, or a damaged journal
    lengths = np.where(null, 0, ndim)
    kept = np.arange(values["sizes"].shape[1]) < lengths[:, None]
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(
        pa.array(offsets), pa.array(values["sizes"][kept]), mask=pa.array(null)
    )
