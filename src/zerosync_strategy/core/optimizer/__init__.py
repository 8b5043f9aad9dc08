"""Optimizers: which are right on shards, the step slice by slice, states, access to pending gradients."""
