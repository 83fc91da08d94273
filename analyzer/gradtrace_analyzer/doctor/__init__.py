"""Whether a job that would be started here is recorded, and what of a run was not: `analyzer doctor`."""
