"""Columns of Arrow tables as arrays, without a copy where that can be."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gradtrace_schemas.table import numpy_dtype

Array = npt.NDArray[Any]


class Side:
    """One side's summaries of one role, as arrays with an element for each row.

    `whole` is where there are fingerprint and norm; `has_norms_alone`, where there is no fingerprint. Elements of
    `fingerprint` and `norm` mean nothing where there is none; `numel` is -1 there.
    """

    def __init__(self, rows: pa.Table, prefix: str) -> None:
        self.rows, self.prefix = rows, prefix
        self.fingerprint, self.has_fingerprint = values_of(rows, prefix + "fingerprint")
        self.norm, has_norm = values_of(rows, prefix + "norm")
        self.numel = numbers_of(rows, prefix + "numel")
        self.whole = self.has_fingerprint & has_norm
        # Norms alone are compared in more columns than are read here.
        self.has_norms_alone = has_norm & ~self.has_fingerprint


def _array(rows: pa.Table, name: str) -> Any:
    """A column as one Arrow array, copied where it lies in several chunks."""
    column = rows.column(name)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


# What says that no value is null is the same for all columns.
_ALL = np.ones(1 << 16, bool)
_ALL.setflags(write=False)


def all_true(count: int) -> npt.NDArray[np.bool_]:
    """`count` times True, not to be written to: short ones share their memory."""
    return _ALL[:count] if count <= len(_ALL) else np.ones(count, bool)


def values_of(rows: pa.Table, name: str) -> tuple[Array, npt.NDArray[np.bool_]]:
    """(values, whether there is one), without a copy where none is null."""
    return _values(_array(rows, name))


def _values(array: Any) -> tuple[Array, npt.NDArray[np.bool_]]:
    """(values as a view of the array's buffer, whether there is one); booleans alone are copied."""
    kind = numpy_dtype(array.type)
    count, offset = len(array), array.offset
    valid, data = array.buffers()
    if pa.types.is_boolean(array.type):
        values = _bits(data, offset, count)
    else:
        values = np.frombuffer(data, kind, count, offset * kind.itemsize)
    if not array.null_count:
        return values, all_true(count)
    return values, _bits(valid, offset, count)


def _bits(buffer: Any, offset: int, count: int) -> npt.NDArray[np.bool_]:
    """Bits of a buffer, in Arrow's order, as an array of `count` booleans."""
    packed = np.frombuffer(buffer, np.uint8)
    return np.unpackbits(packed, bitorder="little")[offset : offset + count].astype(bool)


def numbers_of(rows: pa.Table, name: str) -> Array:
    """An integer column as an array, -1 where it is null."""
    array = _array(rows, name)
    values, has = _values(array)
    return np.where(has, values, -1) if array.null_count else values


def codes_of(rows: pa.Table, name: str) -> tuple[Array, list[str]]:
    """(each row's place among the texts, the texts); a null is the place behind the last."""
    column = rows.column(name)
    if column.num_chunks > 1:
        column = column.unify_dictionaries()
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    names: list[str] = array.dictionary.to_pylist()
    codes, has = _values(array.indices)
    return (np.where(has, codes, len(names)) if array.null_count else codes), names


def sketches_of(rows: pa.Table, name: str) -> tuple[Array, npt.NDArray[np.bool_]]:
    """(a row of lanes each, whether there is one). All have as many lanes as the first, or count as absent."""
    array = _array(rows, name)
    count = len(array)
    offsets = np.frombuffer(array.buffers()[1], np.int32, count + 1, 4 * array.offset)
    flat, _ = _values(array.values)
    lengths = np.diff(offsets)
    lanes = int(lengths.max(initial=0))
    if (lengths == lanes).all():
        return flat[offsets[0] : offsets[-1]].reshape(count, lanes), all_true(count)
    has = lengths == lanes
    made = np.zeros((count, lanes), flat.dtype)
    made[has] = flat[(offsets[:-1][has][:, None] + np.arange(lanes))]
    return made, has
