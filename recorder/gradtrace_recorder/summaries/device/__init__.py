"""Summaries of tensors on a device: computed there, read later, never waited for in the job's thread."""
