"""Budgets that set themselves, and what they measure."""
