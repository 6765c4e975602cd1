"""The header page of a slot file: where its sections lie, and what proves them. Layout: see `memory.slots`."""

from __future__ import annotations

import dataclasses
import struct
import time

import xxhash

from gemini_run.errors import FormatVersionError, ReplicaCorrupt
from gemini_run.plan.manifest import Manifest, aligned

MAGIC = b"GEMSLOT\0"
SLOT_VERSION = 2
HEADER_BYTES = 4096
FLAG_HOLD = 1  #: kept for the durable tier: the worker must not reuse it until the agent clears the flag

# magic, version, flags, sequence | round, iteration, written_at | owner, world_size |
# manifest offset/length, checksum table offset/count, payload offset/length, objects offset/length |
# checksums: manifest, objects | header checksum | sealed (checksum of the table, 0 = unsealed) |
# borrowed (checksum of the lenders, 0 = all bytes are here)
_HEADER = struct.Struct("<8sIIQ QQd II QQQQQQQQ QQ Q Q Q")
FLAGS = struct.Struct("<I")
U64 = struct.Struct("<Q")
U32 = struct.Struct("<I")
FLAGS_AT = 12
SEQUENCE_AT = 16
_CHECKED_FROM = 24  # flags and sequence change without the header being rewritten
_HEADER_CHECKSUM_AT = _HEADER.size - 24
SEALED_AT = _HEADER.size - 16
BORROWED_AT = _HEADER.size - 8


@dataclasses.dataclass(frozen=True)
class SlotHeader:
    """The header page of a slot. Offsets and lengths in bytes from the start of the file.

    `sequence` 0 means torn; `sealed` is the checksum of the checksum table, 0 while there is none; `borrowed` that of
    the lenders, 0 if every byte is here.
    """

    round: int
    iteration: int
    owner: int
    world_size: int
    manifest_offset: int
    manifest_length: int
    checksums_offset: int
    num_items: int
    payload_offset: int
    payload_length: int
    objects_offset: int
    objects_length: int
    manifest_checksum: int
    objects_checksum: int
    written_at: float
    flags: int = 0
    sequence: int = 0
    sealed: int = 0
    borrowed: int = 0

    @property
    def complete(self) -> bool:
        return self.sequence > 0

    @property
    def hold(self) -> bool:
        return bool(self.flags & FLAG_HOLD)

    @property
    def end(self) -> int:
        """Bytes of the file that mean something."""
        return max(self.objects_offset + self.objects_length, self.payload_offset + self.payload_length)

    def pack(self) -> bytes:
        body = _HEADER.pack(
            MAGIC, SLOT_VERSION, self.flags, self.sequence,
            self.round, self.iteration, self.written_at, self.owner, self.world_size,
            self.manifest_offset, self.manifest_length, self.checksums_offset, self.num_items,
            self.payload_offset, self.payload_length, self.objects_offset, self.objects_length,
            self.manifest_checksum, self.objects_checksum, 0, self.sealed, self.borrowed,
        )  # fmt: skip
        checksum = xxhash.xxh3_64_intdigest(body[_CHECKED_FROM:_HEADER_CHECKSUM_AT])
        return body[:_HEADER_CHECKSUM_AT] + U64.pack(checksum) + body[SEALED_AT:]

    @classmethod
    def unpack(cls, page: bytes) -> SlotHeader:
        """Raises: FormatVersionError for an unknown version, ReplicaCorrupt if this is no intact header."""
        if len(page) < _HEADER.size or page[:8] != MAGIC:
            raise ReplicaCorrupt("not a slot: no header")
        (_, version, flags, sequence, round_, iteration, written_at, owner, world_size,
         m_off, m_len, c_off, num_items, p_off, p_len, o_off, o_len,
         m_sum, o_sum, h_sum, sealed, borrowed) = _HEADER.unpack(page[: _HEADER.size])  # fmt: skip
        if version != SLOT_VERSION:
            raise FormatVersionError(
                f"slot of format version {version}; this release reads version {SLOT_VERSION}: "
                "use the gemini-run that wrote it"
            )
        if h_sum != xxhash.xxh3_64_intdigest(page[_CHECKED_FROM:_HEADER_CHECKSUM_AT]):
            raise ReplicaCorrupt("slot header fails its checksum")
        return cls(
            round=round_, iteration=iteration, owner=owner, world_size=world_size,
            manifest_offset=m_off, manifest_length=m_len, checksums_offset=c_off, num_items=num_items,
            payload_offset=p_off, payload_length=p_len, objects_offset=o_off, objects_length=o_len,
            manifest_checksum=m_sum, objects_checksum=o_sum, written_at=written_at,
            flags=flags, sequence=sequence, sealed=sealed, borrowed=borrowed,
        )  # fmt: skip

    # --- sections, wherever they were read ---

    def checked_manifest(self, text: memoryview | bytes, where: object) -> Manifest:
        """Raises: ReplicaCorrupt if it fails its checksum, FormatVersionError for an unknown version; names `where`."""
        if xxhash.xxh3_64_intdigest(text) != self.manifest_checksum:
            raise ReplicaCorrupt(f"{where}: the manifest fails its checksum")
        try:
            return Manifest.from_json(bytes(text))
        except ReplicaCorrupt as error:
            raise type(error)(f"{where}: {error}") from error

    def checked_objects(self, text: memoryview | bytes, where: object) -> bytes:
        """Raises: ReplicaCorrupt if it fails its checksum."""
        if xxhash.xxh3_64_intdigest(text) != self.objects_checksum:
            raise ReplicaCorrupt(f"{where}: the object state fails its checksum")
        return bytes(text)

    def checked_table(self, table: memoryview | bytes, where: object) -> list[int]:
        """The checksums of all items. Raises: ReplicaCorrupt if the table fails its own."""
        if nonzero(xxhash.xxh3_64_intdigest(table)) != self.sealed:
            raise ReplicaCorrupt(f"{where}: the checksum table fails its checksum")
        return [value for (value,) in U64.iter_unpack(table)]


def layout(manifest_length: int, num_items: int, payload_length: int) -> tuple[int, int, int, int]:
    """Offsets of (manifest, checksum table, payload, objects) for sections of these sizes."""
    checksums = aligned(HEADER_BYTES + manifest_length)
    payload = -(-(checksums + (U64.size + U32.size) * num_items) // 4096) * 4096
    return HEADER_BYTES, checksums, payload, aligned(payload + payload_length)


def nonzero(checksum: int) -> int:
    return checksum or 1  # 0 says "unsealed"


def build_header(
    *, manifest_text: bytes, num_items: int, payload_length: int, objects: bytes,
    round: int, iteration: int, owner: int, world_size: int, hold: bool = False, now: float | None = None,
) -> SlotHeader:  # fmt: skip
    """The header of a slot with these sections, at the offsets that `layout` gives."""
    m_off, c_off, p_off, o_off = layout(len(manifest_text), num_items, payload_length)
    return SlotHeader(
        round=round, iteration=iteration, owner=owner, world_size=world_size,
        manifest_offset=m_off, manifest_length=len(manifest_text), checksums_offset=c_off,
        num_items=num_items, payload_offset=p_off, payload_length=payload_length,
        objects_offset=o_off, objects_length=len(objects),
        manifest_checksum=xxhash.xxh3_64_intdigest(manifest_text),
        objects_checksum=xxhash.xxh3_64_intdigest(objects),
        written_at=time.time() if now is None else now, flags=FLAG_HOLD if hold else 0,
    )  # fmt: skip
