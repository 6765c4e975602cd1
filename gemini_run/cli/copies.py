"""Slots read beside a running job.

It keeps writing them, and nothing here may hold it up, so no lock is taken. A copy counts if the slot's header was the
same before and after, and its checksums hold; else the job was faster.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from gemini_run.errors import ReplicaCorrupt
from gemini_run.memory.header import HEADER_BYTES, SlotHeader
from gemini_run.memory.segment import agent_alive
from gemini_run.memory.settle import LenderGone, check_borrowed
from gemini_run.memory.slots import Slot
from gemini_run.wire import MemoryPaths

_CHUNK = 16 << 20


class Overwritten(Exception):
    """The running job wrote to the slot while it was read: look again."""


@dataclasses.dataclass(frozen=True)
class Copy:
    """One slot file that holds a shard."""

    node: str
    node_rank: int
    path: Path
    header: SlotHeader


def _same(one: SlotHeader, two: SlotHeader) -> bool:
    return (one.sequence, one.iteration, one.round) == (two.sequence, two.iteration, two.round)


def verify_in_place(copy: Copy) -> None:
    """Check every byte of the slot where it is.

    Raises:
        ReplicaCorrupt: it is damaged.
        Overwritten: the job wrote to it meanwhile.
    """
    try:
        slot = Slot(copy.path)
    except FileNotFoundError as error:
        raise Overwritten from error
    try:
        corrupt: ReplicaCorrupt | None = None
        try:
            check_borrowed(slot, *slot.verify(borrowing=True))
        except LenderGone as error:
            if agent_alive(MemoryPaths(copy.path.parent.parent)):
                raise Overwritten from error  # by the time its lender writes again, so does its own rank
            corrupt = error
        except ReplicaCorrupt as error:
            corrupt = error
        if not _holds_still(copy):
            raise Overwritten
        if corrupt is not None:
            raise corrupt
    finally:
        slot.close()


def _holds_still(copy: Copy) -> bool:
    """Whether the file still holds what was found in it. Asked of the path: a slot may be replaced whole."""
    try:
        with copy.path.open("rb") as file:
            return _same(SlotHeader.unpack(file.read(HEADER_BYTES)), copy.header)
    except (FileNotFoundError, ReplicaCorrupt):
        return False


def stage_copy(copy: Copy, target: Path) -> Path:
    """Copy the slot to `target`, check it there, and return `target`. Raises: as `verify_in_place`."""
    try:
        source = os.open(copy.path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise Overwritten from error
    try:
        with target.open("xb") as file:
            offset = 0
            while offset < copy.header.end:
                count = os.sendfile(file.fileno(), source, offset, min(_CHUNK, copy.header.end - offset))
                if count == 0:
                    raise Overwritten
                offset += count
    finally:
        os.close(source)
    if not _holds_still(copy):
        raise Overwritten
    slot = Slot(target, writable=True)
    try:
        if not _same(slot.verify(borrowing=True)[0], copy.header):
            raise Overwritten
    finally:
        slot.close()
    return target
