"""From the first event to the last row: what waits, what wires everything, and what it says of itself."""
