"""Columns of Arrow tables as arrays, without a copy where that can be."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Array = npt.NDArray[Any]


class Side:
    """One side's summaries of one role, as arrays."""

    def __init__(self, rows: pa.Table, prefix: str) -> None:
        self.rows, self.prefix = rows, prefix
        self.fingerprint, self.has_fingerprint = values_of(rows, prefix + "fingerprint")
        self.norm, has_norm = values_of(rows, prefix + "norm")
        self.numel = numbers_of(rows, prefix + "numel")
        self.whole = self.has_fingerprint & has_norm
        # Norms alone are compared in more columns than are read here.
        self.has_norms_alone = has_norm & ~self.has_fingerprint


def _array(rows: pa.Table, name: str) -> Any:
    column = rows.column(name)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def values_of(rows: pa.Table, name: str) -> tuple[Array, npt.NDArray[np.bool_]]:
    """(values, whether there is one), without a copy where none is null."""
    array = _array(rows, name)
    kind = array.type.to_pandas_dtype()
    count, offset = len(array), array.offset
    valid, data = array.buffers()
    if pa.types.is_boolean(array.type):
        values = _bits(data, offset, count)
    else:
        width = np.dtype(kind).itemsize
        values = np.frombuffer(data, kind, count, offset * width)
    if not array.null_count:
        return values, np.ones(count, bool)
    return values, _bits(valid, offset, count)


def _bits(buffer: Any, offset: int, count: int) -> npt.NDArray[np.bool_]:
    packed = np.frombuffer(buffer, np.uint8)
    return np.unpackbits(packed, bitorder="little")[offset : offset + count].astype(bool)


def numbers_of(rows: pa.Table, name: str) -> Array:
    """An integer column, -1 where it is null."""
    values, has = values_of(rows, name)
    return values if has.all() else np.where(has, values, -1)


def codes_of(rows: pa.Table, name: str) -> tuple[Array, list[str]]:
    """(each row's place among the texts, the texts); a null is the place behind the last."""
    column = rows.column(name)
    if column.num_chunks > 1:
        column = column.unify_dictionaries()
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    names: list[str] = array.dictionary.to_pylist()
    codes, has = values_of(pa.table({"codes": array.indices}), "codes")
    return (codes if has.all() else np.where(has, codes, len(names))), names


def sketches_of(rows: pa.Table, name: str) -> tuple[Array, npt.NDArray[np.bool_]]:
    """(a row of lanes each, whether there is one). All have as many lanes as the first, or count as absent."""
    array = _array(rows, name)
    count = len(array)
    offsets = np.frombuffer(array.buffers()[1], np.int32, count + 1, 4 * array.offset)
    flat, _ = values_of(pa.table({"flat": array.values}), "flat")
    lengths = np.diff(offsets)
    lanes = int(lengths.max(initial=0))
    if (lengths == lanes).all():
        return flat[offsets[0] : offsets[-1]].reshape(count, lanes), np.ones(count, bool)
    has = lengths == lanes
    made = np.zeros((count, lanes), flat.dtype)
    made[has] = flat[(offsets[:-1][has][:, None] + np.arange(lanes))]
    return made, has
