"""Stable identities: what a run, a node and a rank are called, everywhere."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import NewType

RunId = NewType("RunId", str)
NodeId = NewType("NodeId", str)

_BATCH_JOBS = {"SLURM_JOB_ID": "slurm", "PBS_JOBID": "pbs", "LSB_JOBID": "lsf"}
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


def new_run_id() -> RunId:
    """A fresh run id, used where the user gave no ``--rdzv-id``."""
    return RunId(secrets.token_hex(4))


def shared_run_id(meeting: str, command: Sequence[str], environment: Mapping[str, str]) -> RunId:
    """The run id of a job on several nodes that was given none: every node comes to the same one.

    The same command in the same place is the same run, so that starting it again goes on with it; another command there
    is another run, so that nobody's memory is taken for one's own.

    Args:
        meeting: where the nodes meet, "host:port".
        command: script and arguments; must be alike on all nodes.
        environment: of the process; a batch system's job id takes the place of `meeting`.
    """
    batch = next((name for name in _BATCH_JOBS if environment.get(name)), None)
    place = meeting.replace(":", "-") if batch is None else f"{_BATCH_JOBS[batch]}-{environment[batch]}"
    digest = hashlib.sha256("\0".join(command).encode()).hexdigest()[:8]
    return RunId(f"{place}-{digest}")


def new_node_id(hostname: str) -> NodeId:
    """A fresh node id. A node's identity is that of its host memory: it is made when the memory
    directory is, and kept in it, so an agent that finds the directory again is the same node."""
    return NodeId(f"{safe_name(hostname.split('.')[0])[:40]}-{secrets.token_hex(3)}")


def safe_name(text: str) -> str:
    """`text` as one path component. Distinct texts that need escaping stay distinct."""
    escaped = _UNSAFE.sub(lambda m: f"%{ord(m.group()):02x}", text)
    return f"%{escaped}" if escaped in ("", ".", "..") else escaped
