"""The observer in C++: the sources, how they are built against the job's own torch, and the Python side of them."""
