"""Which of a node's ranks copies a tensor that several of them hold alike.

Every rank decides for itself from the same checksums, so all decide alike and nothing is negotiated.
"""

from __future__ import annotations

from collections.abc import Sequence

MIN_BYTES = 4096  #: smaller tensors are copied by every rank: less work than looking after them


def lenders(lengths: Sequence[int], classes: Sequence[Sequence[int]]) -> list[list[int]]:
    """Who copies what, so that ranks copy about equally many bytes.

    Args:
        lengths: of each tensor, in bytes.
        classes: per tensor the class of each local rank: ranks of one class hold the same bytes; -1 = it does not
            take part.

    Returns:
        Per tensor and local rank the local rank that copies it: itself, or another of its class that it borrows
        from; -1 for ranks that do not take part.
    """
    ranks = range(len(classes[0]) if classes else 0)
    load = [0] * len(ranks)
    result = [[rank if row[rank] >= 0 else -1 for rank in ranks] for row in classes]
    # The largest first: the small ones then even out what is left.
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        row = classes[index]
        for name in sorted(set(row) - {-1}):
            members = [rank for rank in ranks if row[rank] == name]
            chosen = min(members, key=lambda rank: (load[rank], rank))
            load[chosen] += lengths[index]
            for rank in members:
                result[index][rank] = chosen
    return result
