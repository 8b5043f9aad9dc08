"""Gradients: the window of one optimizer step, and their reduction into ZeRO's shards."""
