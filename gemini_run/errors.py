"""The exception tree. A class says who must act; the message says what is wrong, where, and the remedy."""

from __future__ import annotations


class GeminiError(Exception):
    """Root of all errors that gemini-run raises on purpose. The CLI prints one line and exits 1."""

    exit_code = 1


class ConfigError(GeminiError):
    """The user gave something that cannot work. Exit code 2."""

    exit_code = 2


class UnknownRun(GeminiError):
    """No run of that id (or none at all) is known on this machine."""


class MemoryFull(GeminiError):
    """The host-memory tier has not the room for the slots. Carries the numbers.

    Attributes:
        needed_bytes: what the slots of this worker (own and replicas) need.
        free_bytes: what the file system had free.
    """

    def __init__(self, message: str, *, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class ReplicaCorrupt(GeminiError):
    """A copy is torn, truncated or fails its checksum. The next source must be taken."""


class FormatVersionError(ReplicaCorrupt):
    """The file was written in a format version that this release does not know."""


class PeerLost(GeminiError):
    """Another node did not answer, or ended, while something was expected of it."""


class CallerLate(PeerLost):
    """Another node refused what this one sent: it is of a round that is over there."""


class DurableError(GeminiError):
    """The durable tier (S3 or a directory) cannot be used: unreachable, not writable, no such bucket."""


class Unrecoverable(GeminiError):
    """No complete checkpoint was found where one is required."""


class UnsupportedState(GeminiError):
    """A piece of training state cannot be captured bit for bit. Said before the first step."""
