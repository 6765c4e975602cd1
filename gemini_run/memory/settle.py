"""Making a complete slot whole: what it borrows is copied in from the lenders' slots, and it is sealed.

The lender's slot is that of the same iteration on the same node, so in the same folder. Should it be damaged, gone,
or written to meanwhile, the checksums that the borrower took of its own state tell.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import xxhash

from gemini_run.errors import ReplicaCorrupt
from gemini_run.memory.header import HEADER_BYTES, SlotHeader
from gemini_run.memory.segment import scan_folder
from gemini_run.memory.slots import Slot
from gemini_run.plan.manifest import Item, Manifest


class LenderGone(ReplicaCorrupt):
    """The lender's slot is not there (any more): its writer may have gone on."""


def settle_file(path: Path) -> SlotHeader:
    """Make the complete slot at `path` whole and sealed, if it is not, and return its header.

    For slots whose writer is dead, or kept away by the caller.

    Raises:
        ReplicaCorrupt: torn or truncated, or a lender does not have what was borrowed.
    """
    slot = Slot(path, writable=True)
    try:
        header = slot.header()
        if not header.complete:
            raise ReplicaCorrupt(f"{path}: torn slot (its writer died before the commit)")
        if not header.sealed:
            slot.seal(slot.manifest(header), header)
        if header.borrowed:
            fill(slot, header, slot.manifest(header))
        return slot.header()
    finally:
        with contextlib.suppress(BufferError):  # a view lives on in a traceback: unmapped when that goes
            slot.close()


def settle_folder(paths: Iterable[Path]) -> None:
    """`settle_file` for all of these, which lie in one folder, and may come from different nodes: a lender may itself
    have to be filled first.

    Raises: ReplicaCorrupt.
    """
    pending = list(paths)
    while pending:
        left, problem = [], None
        for path in pending:
            try:
                settle_file(path)
            except ReplicaCorrupt as error:
                left.append(path)
                problem = error
        if problem is not None and len(left) == len(pending):
            raise problem
        pending = left


def fill(slot: Slot, header: SlotHeader, manifest: Manifest, which: Iterable[int] | None = None) -> None:
    """Copy what `slot` borrows in from the lenders' slots beside it.

    Args:
        which: only these items (indices in the manifest). The slot then goes on borrowing the rest.

    Raises:
        ReplicaCorrupt: a lender's slot is not there, or does not hold what was borrowed.
    """
    payload = slot.payload(header)
    for index, data in _borrowed(slot, header, manifest, which):
        item = manifest.items[index]
        payload[item.offset : item.offset + item.length] = data
    if which is None:
        slot.filled()


def check_borrowed(slot: Slot, header: SlotHeader, manifest: Manifest) -> None:
    """Check what `slot` borrows, where it is. Raises: LenderGone, ReplicaCorrupt."""
    for _ in _borrowed(slot, header, manifest, None):
        pass


def _borrowed(
    slot: Slot, header: SlotHeader, manifest: Manifest, which: Iterable[int] | None
) -> Iterator[tuple[int, memoryview]]:
    """(index, checked bytes) of what is borrowed."""
    lenders = slot.lenders(header)
    checksums = slot.stored_checksums(header)
    wanted = range(len(lenders)) if which is None else which
    from_whom: dict[int, list[int]] = {}
    for index in wanted:
        if lenders[index] >= 0:
            from_whom.setdefault(lenders[index], []).append(index)
    for owner, indices in sorted(from_whom.items()):
        with _Lender(slot.path.parent, owner, header.iteration) as lender:
            for index in indices:
                item = manifest.items[index]
                data = lender.data(item)
                if data is None or xxhash.xxh3_64_intdigest(data) != checksums[index]:
                    kind = ReplicaCorrupt if lender.holds_still() else LenderGone
                    raise kind(
                        f"{slot.path}: tensor {item.name!r}, which is in the slot of rank {owner}, fails its checksum"
                    )
                yield index, data


class _Lender:
    """The slot of `owner` at `iteration` in `folder`, opened to read. A context manager.

    Raises: LenderGone if there is none.
    """

    def __init__(self, folder: Path, owner: int, iteration: int) -> None:
        self._where = f"rank {owner}'s slot of iteration {iteration}"
        paths = [
            info.path
            for info in scan_folder(folder)
            if info.usable and info.header and (info.header.owner, info.header.iteration) == (owner, iteration)
        ]
        if not paths:
            raise LenderGone(f"{folder}: {self._where}, in which others' tensors are, is not here")
        self._open(paths[0])

    def _open(self, path: Path) -> None:
        try:
            self.slot = Slot(path)
        except FileNotFoundError as error:
            raise LenderGone(f"{path}: {self._where} is gone") from error
        try:
            self._header = self.slot.header()
            manifest = self.slot.manifest(self._header)
            lenders = self.slot.lenders(self._header)
            self._payload = self.slot.payload(self._header)
        except BaseException:
            self.slot.close()
            raise
        self._items = {item.name: item for item, lender in zip(manifest.items, lenders, strict=True) if lender < 0}

    def data(self, item: Item) -> memoryview | None:
        """The bytes of the item of that name and length, None if they are not in this slot."""
        mine = self._items.get(item.name)
        if mine is None or mine.length != item.length:
            return None
        return self._payload[mine.offset : mine.offset + mine.length]

    def holds_still(self) -> bool:
        """Whether nobody has written to the slot since it was opened."""
        try:
            with self.slot.path.open("rb") as file:
                now = SlotHeader.unpack(file.read(HEADER_BYTES))
        except (FileNotFoundError, ReplicaCorrupt):
            return False
        return (now.sequence, now.iteration) == (self._header.sequence, self._header.iteration)

    def __enter__(self) -> _Lender:
        return self

    def __exit__(self, *exc: object) -> None:
        self._payload.release()
        with contextlib.suppress(BufferError):
            self.slot.close()
