"""Why ranks wait in vain, as an error that says it on every rank.

What a rank knows of itself is a ``RankState``. ``rank_status`` keeps this rank's and raises the ``RankError``,
``inquiry`` asks all ranks for theirs over the store, ``verdict`` concludes the cause from all of them. ``agreement``
and ``aborted`` find what differs between ranks.
"""
