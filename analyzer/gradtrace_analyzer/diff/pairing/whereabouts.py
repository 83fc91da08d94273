"""What a row of a link table is of, in a few words: for rows that are counted and not shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradtrace_analyzer.diff.links import LINK_TABLE, Of
from gradtrace_analyzer.sql.views import text_literal


def whereabouts_sql(table: str) -> str:
    """The words, of a row of `differing_<table>`; NULL where it has none."""
    parts = [
        text_literal(part) if isinstance(part, str) else _column(part)
        for part in LINK_TABLE[table].whereabouts
    ]
    return " || ".join(parts) or "CAST(NULL AS VARCHAR)"


def _column(of: Of) -> str:
    column = f"key_{of.column}[1]" if of.is_list else f"key_{of.column}"
    return column if of.otherwise is None else f"coalesce({column}, {text_literal(of.otherwise)})"


def whereabouts(table: str, key: Mapping[str, Any]) -> str | None:
    """The same words from the key columns of a row, by name without `key_`; None where it has none."""
    said = [
        part if isinstance(part, str) else _said(part, key)
        for part in LINK_TABLE[table].whereabouts
    ]
    known = [text for text in said if text is not None]
    return "".join(known) if said and len(known) == len(said) else None


def _said(of: Of, key: Mapping[str, Any]) -> str | None:
    value = key.get(of.column)
    if of.is_list:
        value = value[0] if value else None
    return of.otherwise if value is None else str(value)
