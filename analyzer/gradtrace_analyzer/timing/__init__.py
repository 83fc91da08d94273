"""Where the time of a step goes: the parts of a step, and the reductions of gradient buckets between ranks."""
