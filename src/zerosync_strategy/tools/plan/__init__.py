"""``zerosync plan``: what a training step will send and hold, measured by a replay of the real engine on one CPU.

Imported by the command alone, or by a program that asks for it: :func:`zerosync_strategy.tools.plan.plan.plan`.
"""
