"""The sentences of origins: one template a kind, found by its type."""
