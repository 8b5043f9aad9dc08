"""Errors that say, on every rank, why ranks wait in vain.

A ``RankState`` is what a rank knows of itself. ``rank_status`` keeps the state of this rank and raises the
``RankError``. ``inquiry`` collects the states of all ranks over the store. ``verdict`` concludes the cause from them,
and ``words`` puts it into a text. ``agreement`` compares ranks that do not fail.
"""
