"""The journal, which hooks write and nothing else: records, threads' places, a ring of steps. No torch."""
