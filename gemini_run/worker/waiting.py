"""Waiting for the other ranks of a round, through its store."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from gemini_run.errors import PeerLost
from gemini_run.wire import KEY_LEFT

#: How long a rank waits for the others. As long as c10d's own collectives wait: one rank may evaluate for minutes while
#: the others are done with the step.
PATIENCE = timedelta(minutes=30)
_POLL = timedelta(seconds=1)


def wait_for(keys: Sequence[str], store: dist.Store, *, left: Callable[[], str], late: Callable[[], str]) -> None:
    """Block until all `keys` are set.

    Args:
        left: what to say where a rank has ended, so that they never will be; `late`: after PATIENCE.

    Raises:
        PeerLost: one of these.
    """
    end = time.monotonic() + PATIENCE.total_seconds()
    while True:
        try:
            store.wait(list(keys), _POLL)
            return
        except dist.DistStoreError:
            pass  # a slice of the wait is over; a dead store raises another error
        if store.add(KEY_LEFT, 0) > 0 and not store.check(list(keys)):
            raise PeerLost(left())
        if time.monotonic() > end:
            raise PeerLost(late())
