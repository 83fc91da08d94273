"""What may explain the origins of a step: one plug-in a file, listed in `registry`."""
