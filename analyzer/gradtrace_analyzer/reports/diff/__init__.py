"""The answer of `analyzer diff` as text, JSON and JUnit XML."""
