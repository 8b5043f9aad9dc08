"""ZeRO-3's parameters: the order of gathers, what is held, and what is unsharded for a reader."""
