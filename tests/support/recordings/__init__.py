"""Jobs in the test's own process: recorded, read back, and compared with what they must be."""
