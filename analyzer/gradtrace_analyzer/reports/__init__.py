"""Answers as text: pure functions that neither read files nor print."""
