"""Reads what gradtrace recorded, anywhere, without torch, and answers questions about it."""
