"""All that touches DeepSpeed's internals: tables of them, accessors, and the methods that are overridden."""
