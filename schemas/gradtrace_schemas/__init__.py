"""The language that recorder and analyzer share: tables, files, journal records, tensor summaries."""

from gradtrace_schemas.catalogue import ALL_TABLES, SCHEMA_VERSION, TABLES

__all__ = ["ALL_TABLES", "SCHEMA_VERSION", "TABLES"]
