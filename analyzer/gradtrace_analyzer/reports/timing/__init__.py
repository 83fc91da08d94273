"""The answers of `analyzer timing` as text, JSON and CSV."""
