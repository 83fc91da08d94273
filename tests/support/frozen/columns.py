"""Arrow columns as few bytes: values of one kind side by side, each byte of theirs with its like, then zstd.

Every kind of column that a recording has, and no other. A column comes back equal, NaN and null included.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import zstandard

Array = npt.NDArray[Any]

_LEVEL = 19
_WINDOW_LOG = 25  # so that what a candidate shares with a baseline far above is found


class Writer:
    """Blocks by name, compressed one by one."""

    def __init__(self) -> None:
        self.blocks: dict[str, bytes] = {}
        parameters = zstandard.ZstdCompressionParameters.from_level(
            _LEVEL, window_log=_WINDOW_LOG, enable_ldm=True
        )
        self._compressor = zstandard.ZstdCompressor(compression_params=parameters)

    def put(self, name: str, data: bytes) -> None:
        assert name not in self.blocks, name
        self.blocks[name] = self._compressor.compress(data)

    def put_json(self, name: str, value: object) -> None:
        self.put(name, json.dumps(value).encode())

    def put_array(self, name: str, values: Array) -> None:
        """A 1-D array of fixed width, its bytes transposed."""
        values = np.ascontiguousarray(values)
        width = values.dtype.itemsize
        self.put(name, values.view(np.uint8).reshape(len(values), width).T.tobytes())


class Reader:
    """The blocks of a Writer."""

    def __init__(self, get: Callable[[str], bytes]) -> None:
        self._get = get
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=1 << _WINDOW_LOG)

    def get(self, name: str) -> bytes:
        return self._decompressor.decompress(self._get(name))

    def get_json(self, name: str) -> Any:
        return json.loads(self.get(name))

    def get_array(self, name: str, dtype: str) -> Array:
        width = np.dtype(dtype).itemsize
        raw = np.frombuffer(self.get(name), np.uint8)
        return np.ascontiguousarray(raw.reshape(width, -1).T).reshape(-1).view(dtype)


def put_column(out: Writer, name: str, column: pa.Array) -> None:
    """A column without chunks or offset."""
    kind = column.type
    nulls = column.is_null().to_numpy(zero_copy_only=False)
    if nulls.any():
        out.put(f"{name}.null", np.packbits(nulls).tobytes())
    if pa.types.is_list(kind):
        filled = np.where(nulls, 0, column.value_lengths().fill_null(0).to_numpy())
        out.put_array(f"{name}.lengths", filled.astype("<i4"))
        put_column(out, f"{name}.item", column.flatten())
    elif pa.types.is_string(kind):
        words = column.dictionary_encode()
        out.put_json(f"{name}.words", words.dictionary.to_pylist())
        out.put_array(name, words.indices.fill_null(0).to_numpy().astype("<i4"))
    elif pa.types.is_boolean(kind):
        out.put(name, np.packbits(column.fill_null(False).to_numpy(zero_copy_only=False)).tobytes())
        out.put_json(f"{name}.count", len(column))
    else:
        values = bits_of(column)
        if name.endswith("_ns"):
            values = np.diff(values, prepend=values.dtype.type(0))
        out.put_array(name, values)
        out.put_json(f"{name}.count", len(column))


def get_column(
    blocks: Reader, has: Callable[[str], bool], name: str, kind: pa.DataType
) -> pa.Array:
    """The column of that type."""

    def nulls(count: int) -> Array | None:
        if not has(f"{name}.null"):
            return None
        return np.unpackbits(
            np.frombuffer(blocks.get(f"{name}.null"), np.uint8), count=count
        ).astype(bool)

    if pa.types.is_list(kind):
        lengths = blocks.get_array(f"{name}.lengths", "<i4")
        items = get_column(blocks, has, f"{name}.item", kind.value_type)
        return list_array(lengths, items, nulls(len(lengths)), kind)
    if pa.types.is_string(kind):
        indices = blocks.get_array(name, "<i4")
        words = pa.array(blocks.get_json(f"{name}.words"), pa.string())
        mask = nulls(len(indices))
        return pa.DictionaryArray.from_arrays(pa.array(indices, mask=mask), words).cast(pa.string())
    count = blocks.get_json(f"{name}.count")
    if pa.types.is_boolean(kind):
        bits = np.unpackbits(np.frombuffer(blocks.get(name), np.uint8), count=count).astype(bool)
        return pa.array(bits, mask=nulls(count))
    values = blocks.get_array(name, f"<i{kind.bit_width // 8}")
    if name.endswith("_ns"):
        values = np.cumsum(values, dtype=values.dtype)
    return of_bits(values, nulls(count), kind)


def bits_of(column: pa.Array) -> Array:
    """The bits of numbers as whole numbers of the same width; null is 0."""
    width = column.type.bit_width // 8
    bits = column.view(pa.int64() if width == 8 else pa.int32())
    values: Array = bits.fill_null(0).to_numpy().astype(f"<i{width}")
    return values


def of_bits(values: Array, nulls: Array | None, kind: pa.DataType) -> pa.Array:
    """The column of which `bits_of` gave these."""
    return pa.array(values, mask=nulls).view(kind)


def list_array(lengths: Array, items: pa.Array, nulls: Array | None, kind: pa.DataType) -> pa.Array:
    """Lists of so many items each, one after another."""
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype("<i4")
    if nulls is None:
        return pa.ListArray.from_arrays(pa.array(offsets), items, type=kind)
    holes = np.append(nulls, False)
    return pa.ListArray.from_arrays(pa.array(offsets, mask=holes), items, type=kind)
