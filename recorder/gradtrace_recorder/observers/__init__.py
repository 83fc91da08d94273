"""Ways to watch the Nodes of a graph: one behaviour."""
