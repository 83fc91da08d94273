"""What is written to files for other programs: tables, a DuckDB database, a trace of a time line."""
