"""How often `diff` is right: models, legal changes, faults, and the page of what was measured."""
