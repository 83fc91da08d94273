"""Each pair that differs held against what rounding, or measured noise, explains."""
