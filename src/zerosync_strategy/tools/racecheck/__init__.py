"""A happens-before checker of streams, and what it is told by: a simulated device, or CUDA's own streams."""
