"""``zerosync doctor``: what is wrong with an installation, a configuration or a link, each with its remedy.

Imported by the command alone, or by a program that asks for it.
"""
