"""One attached engine: its parts, what each stage does with parameters, and the overrides of DeepSpeed's methods."""
