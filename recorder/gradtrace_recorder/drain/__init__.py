"""The thread that makes parts of the journal's records. No torch."""
