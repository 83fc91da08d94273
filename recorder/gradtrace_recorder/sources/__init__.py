"""One source of events each. They see torch and the journal, and no file."""
