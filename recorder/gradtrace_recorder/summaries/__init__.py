"""Ways to compute the same tensor summary."""
