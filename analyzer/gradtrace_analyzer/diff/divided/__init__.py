"""Runs whose work is divided otherwise: over ranks, shards, stages, accumulation."""
