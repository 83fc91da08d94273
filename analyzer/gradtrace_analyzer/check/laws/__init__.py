"""The laws that hold within one run: pure functions and their SQL, one module per family of laws."""
