"""Names of the candidate that stand for other names of the baseline."""
