"""Answers of the analyzer that are held still: recordings kept as files, what was said of them, and the comparison.

`capture` notes what the tests record and ask, `columns`, `recordings` and `packing` keep it small, `unpacking` makes
runs of it again, `judging` asks the analyzer (through its command line alone) and `changes` compares what it says.
"""
