"""Many run directories as one small file, and as directories again: equal rows, equal bytes of all other files.

A pack is a zip of blocks (see `columns`): for each table and schema the rows of all runs together, summaries apart
(see `summaries`); which part of which run holds which of them; every file that is no readable part as it is. A part's
rows, their order and its metadata come back; how Parquet lays them out is pyarrow's, as in the recorder.
"""

from __future__ import annotations

import base64
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from support.frozen.columns import (
    Reader,
    Writer,
    bits_of,
    get_column,
    list_array,
    of_bits,
    put_column,
)
from support.frozen.summaries import Pool, PoolReader

Array = npt.NDArray[Any]

NUMBERS = ("norm", "abs_max", "sum", "nan_count", "inf_count", "fingerprint")
_NUMBERS_WIDTH = 2 * len(NUMBERS) + 1
LANES = (4, 16)
_BLOCK = 4096
_NOTHING: Array = np.zeros(0, np.int64)


@dataclass(frozen=True)
class _Part:
    """A part of a run: `group` is the number of its table and schema; `lanes` are its sketches' by their prefix."""

    run: str
    file: str
    group: int
    rows: int
    lanes: Mapping[str, int]
    metadata: Mapping[str, str]


def pack(place: Path, runs: Sequence[str], likened: Mapping[str, str], target: Path) -> None:
    """Write these runs, folders of `place`, to a file. `likened` names for a run one that comes before it and is much
    like it."""
    out = Writer()
    files: list[tuple[str, str, int, list[int]]] = []
    contents: list[bytes] = []
    schemas: list[pa.Schema] = []
    tables: list[list[pa.Table]] = []
    parts: list[_Part] = []
    pools = _pools()
    seen: dict[tuple[str, str, str, str], Array] = {}
    for run in runs:
        for path in sorted((place / run).rglob("*")):
            file = str(path.relative_to(place / run))
            if not path.is_file():
                continue
            table = read_rows(path)
            if table is None:
                blocks, data = _without_holes(path.read_bytes())
                files.append((run, file, path.stat().st_size, blocks))
                contents.append(data)
                continue
            rows, metadata = table
            schema = rows.schema.remove_metadata()
            if schema not in schemas:
                schemas.append(schema)
                tables.append([])
            group = schemas.index(schema)
            tables[group].append(_without_summaries(rows))
            lanes = {prefix: _lanes(rows, prefix) for prefix in _prefixes(schema)}
            parts.append(_Part(run, file, group, len(rows), lanes, metadata))
            for prefix, count in lanes.items():
                for kind, values in _summaries(rows, prefix, count).items():
                    before = seen.get((likened.get(run, ""), file, prefix, kind), _NOTHING)
                    seen[run, file, prefix, kind] = pools[kind].add(values, before)
    for group, many in enumerate(tables):
        together = pa.concat_tables(many)
        for name in together.column_names:
            put_column(out, f"{group}.{name}", together[name].combine_chunks())
    for kind, pool in pools.items():
        pool.put(out, f"summaries.{kind}")
    out.put("files", b"".join(contents))
    schema_bytes = [base64.b64encode(s.serialize().to_pybytes()).decode() for s in schemas]
    out.put_json("contents", {
        "runs": list(runs),
        "likened": dict(likened),
        "files": files,
        "schemas": schema_bytes,
        "parts": [asdict(part) for part in parts],
    })  # fmt: skip
    with zipfile.ZipFile(target, "w") as archive:
        for name, data in sorted(out.blocks.items()):
            archive.writestr(zipfile.ZipInfo(name), data)


def unpack(source: Path, place: Path) -> list[str]:
    """Make the runs again under `place`; their names."""
    with zipfile.ZipFile(source) as file:
        names = set(file.namelist())
        blocks = Reader(file.read)
        contents = blocks.get_json("contents")
        schemas = [
            pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text))) for text in contents["schemas"]
        ]
        columns = [
            {
                name: get_column(
                    blocks, names.__contains__, f"{group}.{name}", schema.field(name).type
                )
                for name in _plain_names(schema)
            }
            for group, schema in enumerate(schemas)
        ]
        pools = {
            kind: PoolReader(blocks, f"summaries.{kind}", pool.width)
            for kind, pool in _pools().items()
        }
        data, at = blocks.get("files"), 0
    for run, name, size, numbers in contents["files"]:
        path = place / run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        at += _write_with_holes(path, size, numbers, data, at)
    begun = [0] * len(schemas)
    seen: dict[tuple[str, str, str, str], Array] = {}
    for part in (_Part(**about) for about in contents["parts"]):
        schema, first = schemas[part.group], begun[part.group]
        found = {name: c.slice(first, part.rows) for name, c in columns[part.group].items()}
        begun[part.group] += part.rows
        for prefix, lanes in part.lanes.items():
            values = []
            for kind in ("numbers", f"sketch{lanes}"):
                before = seen.get(
                    (contents["likened"].get(part.run, ""), part.file, prefix, kind), _NOTHING
                )
                words, numbers = pools[kind].take(part.rows, before)
                seen[part.run, part.file, prefix, kind] = numbers
                values.append(words)
            found |= _columns_of(schema, prefix, *values)
        rows = pa.table([found[field.name] for field in schema], schema=schema)
        write_rows(place / part.run / part.file, rows, part.metadata)
    return list(contents["runs"])


def _without_holes(data: bytes) -> tuple[list[int], bytes]:
    """The numbers of the blocks that are not all zeros, and these: journals are made large, and hold little."""
    blocks = [data[at : at + _BLOCK] for at in range(0, len(data), _BLOCK)]
    kept = [number for number, block in enumerate(blocks) if block.strip(b"\0")]
    return kept, b"".join(blocks[number] for number in kept)


def _write_with_holes(path: Path, size: int, numbers: Sequence[int], data: bytes, at: int) -> int:
    """The file of which these blocks lie in `data` from `at` on; how many bytes they have."""
    taken = 0
    with path.open("wb") as file:
        for number in numbers:
            count = min(_BLOCK, size - number * _BLOCK)
            file.seek(number * _BLOCK)
            file.write(data[at + taken : at + taken + count])
            taken += count
        file.truncate(size)
    return taken


def _pools() -> dict[str, Pool]:
    return {"numbers": Pool(_NUMBERS_WIDTH)} | {f"sketch{n}": Pool(n + 1) for n in LANES}


def read_rows(path: Path) -> tuple[pa.Table, dict[str, str]] | None:
    """The rows of a part and its metadata, None where it is none that can be read."""
    if path.suffix != ".parquet":
        return None
    try:
        file = pq.ParquetFile(path)
        rows = file.read()
    except (OSError, pa.ArrowException):
        return None
    said = file.metadata.metadata or {}
    return rows, {k.decode(): v.decode() for k, v in said.items() if k != b"ARROW:schema"}


def write_rows(path: Path, rows: pa.Table, metadata: Mapping[str, str]) -> None:
    """A part of these rows, in one row group."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with pq.ParquetWriter(path, rows.schema, compression="none", store_schema=False) as writer:
        writer.write_table(rows)
        writer.add_key_value_metadata(dict(metadata))


def _prefixes(schema: pa.Schema) -> list[str]:
    """Of the summaries of a table, those whose columns are all there."""
    found = [name.removesuffix("abs_max") for name in schema.names if name.endswith("abs_max")]
    return [p for p in found if all(f"{p}{n}" in schema.names for n in (*NUMBERS, "sketch"))]


def _plain_names(schema: pa.Schema) -> list[str]:
    taken = {f"{p}{n}" for p in _prefixes(schema) for n in (*NUMBERS, "sketch")}
    return [name for name in schema.names if name not in taken]


def _without_summaries(rows: pa.Table) -> pa.Table:
    return rows.replace_schema_metadata(None).select(_plain_names(rows.schema))


def _lanes(rows: pa.Table, prefix: str) -> int:
    """How many numbers a sketch has at most, of the counts that there are pools for."""
    longest = pc.max(rows[f"{prefix}sketch"].combine_chunks().value_lengths()).as_py() or 0
    return next(count for count in LANES if count >= longest)


def _summaries(rows: pa.Table, prefix: str, lanes: int) -> dict[str, Array]:
    """Words by kind, uint32 of shape (rows, width): all numbers, with a mask of nulls; the sketch, with its length."""
    words = np.zeros((len(rows), _NUMBERS_WIDTH), "<u4")
    for at, name in enumerate(NUMBERS):
        column = rows[prefix + name].combine_chunks()
        words[:, 2 * at : 2 * at + 2] = bits_of(column).view("<u4").reshape(-1, 2)
        words[:, -1] |= _nulls(column).astype("<u4") << at
    sketches = rows[f"{prefix}sketch"].combine_chunks()
    nulls = _nulls(sketches)
    lengths = np.where(nulls, 0, sketches.value_lengths().fill_null(0).to_numpy())
    wide = np.zeros((len(rows), lanes + 1), "<u4")
    wide[:, :lanes][np.arange(lanes) < lengths[:, None]] = bits_of(sketches.flatten()).view("<u4")
    wide[:, -1] = np.where(nulls, lanes + 1, lengths)
    return {"numbers": words, f"sketch{lanes}": wide}


def _columns_of(schema: pa.Schema, prefix: str, words: Array, wide: Array) -> dict[str, pa.Array]:
    """The columns of which `_summaries` gave these."""
    found: dict[str, pa.Array] = {}
    for at, name in enumerate(NUMBERS):
        nulls = (words[:, -1] >> at & 1).astype(bool)
        bits = np.ascontiguousarray(words[:, 2 * at : 2 * at + 2]).view("<i8").reshape(-1)
        found[prefix + name] = of_bits(bits, nulls, schema.field(prefix + name).type)
    lanes = wide.shape[1] - 1
    nulls = wide[:, -1] == lanes + 1
    lengths = np.where(nulls, 0, wide[:, -1]).astype(np.int64)
    items = wide[:, :lanes][np.arange(lanes) < lengths[:, None]].view("<i4")
    kind = schema.field(f"{prefix}sketch").type
    values = of_bits(items, None, kind.value_type)
    found[f"{prefix}sketch"] = list_array(lengths, values, nulls if nulls.any() else None, kind)
    return found


def _nulls(column: pa.Array) -> Array:
    nulls: Array = column.is_null().to_numpy(zero_copy_only=False)
    return nulls
