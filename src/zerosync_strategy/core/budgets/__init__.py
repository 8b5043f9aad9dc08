"""Automatic budgets, and the memory that they measure."""
