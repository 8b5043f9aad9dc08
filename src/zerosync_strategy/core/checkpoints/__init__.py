"""Checkpoints: manifests of what was saved, and how all ranks save or load, or none."""
