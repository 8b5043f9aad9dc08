"""Optimizers: which are right on flat shards, steps by part, states, frozen parameters."""
