"""All that leans on what torch promises nobody: each item with the versions it was proved on, and a self-test."""
