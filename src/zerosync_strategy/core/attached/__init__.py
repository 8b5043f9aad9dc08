"""One attached engine: its parts, what ZeRO's stages do with parameters, and the overrides of DeepSpeed's methods."""
