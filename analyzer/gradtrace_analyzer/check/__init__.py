"""One run held against laws that need no second run: `check` is where it begins, `laws` holds one family a module."""
