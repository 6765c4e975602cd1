"""Who takes a place in a round that is being formed, and when it may begin. Pure: times are arguments."""

from __future__ import annotations

import dataclasses

PLACE_SECONDS = 0.5  #: how long a place must be empty before a spare takes it: who re-forms leaves for a moment


@dataclasses.dataclass(frozen=True)
class Forming:
    """A round that is being formed, as the members see it. Nodes by name.

    Attributes:
        joined: are in.
        coming: wait to be let in.
        least, most: nodes that the job runs with (``--nnodes MIN:MAX``).
    """

    joined: frozenset[str]
    coming: frozenset[str]
    least: int
    most: int

    def place_for(self, name: str) -> bool:
        """Whether node `name`, which was not in the round before, may have a place. Those who were come first."""
        return len((self.joined | self.coming) - {name}) < self.most


@dataclasses.dataclass(frozen=True)
class Before:
    """The round before, as a node remembers it that was in it.

    Attributes:
        nodes: how many there were.
        living: those that it does not know to be lost, itself not included.
    """

    nodes: int
    living: frozenset[str]


def may_begin(forming: Forming, before: Before, *, waited: float, shrink_after: float, limit: float) -> bool:
    """Whether the round may begin with those who have joined.

    Who lives is waited for, and who is on its way, up to `limit`. If then there are fewer than before, the lost get
    their chance to be replaced: `shrink_after`. All in seconds; `waited` counts from when this node began to re-form.
    """
    have = len(forming.joined)
    if have >= forming.most:
        return True
    if have < forming.least:
        return False
    if (forming.coming | before.living) - forming.joined and waited < limit:
        return False
    return have >= before.nodes or waited >= shrink_after
