"""A run's directory: which ranks and parts there are, what journals were left behind, and mending them. No SQL."""
