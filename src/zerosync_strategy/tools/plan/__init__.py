"""``zerosync plan``: what a training step will send and hold, found by a replay of the real engine on one CPU."""
