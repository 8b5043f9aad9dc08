"""The synchronisation itself: torch and DeepSpeed only, no training framework."""
