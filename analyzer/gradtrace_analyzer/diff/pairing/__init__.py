"""Rows of both runs into pairs, and of these the ones that differ; only the steps that matter are opened."""
