"""Runs as tables of DuckDB: the views, what they hold, and the walls round a person's own queries."""
