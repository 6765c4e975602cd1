"""Fixtures of `runs`."""

from runs import reference, run

__all__ = ["reference", "run"]
