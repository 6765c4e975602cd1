"""Stable identities: what a run, a node and a rank are called, everywhere."""

from __future__ import annotations

import re
import secrets
from typing import NewType

RunId = NewType("RunId", str)
NodeId = NewType("NodeId", str)

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


def new_run_id() -> RunId:
    """A fresh run id, used where the user gave no ``--rdzv-id``."""
    return RunId(secrets.token_hex(4))


def new_node_id(hostname: str) -> NodeId:
    """A fresh node id. A node's identity is that of its host memory: it is made when the memory
    directory is, and kept in it, so an agent that finds the directory again is the same node."""
    return NodeId(f"{safe_name(hostname.split('.')[0])[:40]}-{secrets.token_hex(3)}")


def safe_name(text: str) -> str:
    """`text` as one path component. Distinct texts that need escaping stay distinct."""
    escaped = _UNSAFE.sub(lambda m: f"%{ord(m.group()):02x}", text)
    return f"%{escaped}" if escaped in ("", ".", "..") else escaped
