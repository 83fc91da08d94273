"""Arithmetic on recorded numbers: what rounding explains, and columns of Arrow tables as arrays. Runs no SQL."""
