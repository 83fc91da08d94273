"""Runs built row by row, without torch, in which it is known what is wrong."""
