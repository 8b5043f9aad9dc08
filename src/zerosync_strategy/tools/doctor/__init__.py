"""``zerosync doctor``: what is wrong with an installation, a configuration or a checkpoint, each with its remedy."""
