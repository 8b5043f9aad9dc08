"""One DeepSpeed engine while ZeroSync is attached to it: what every stage shares, and what each has of its own."""
