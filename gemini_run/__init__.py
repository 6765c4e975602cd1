"""gemini-run: torchrun plus recovery.

``gemini-run train.py`` starts the workers as torchrun does. Each node's agent owns host memory that outlives
its workers; at every iteration boundary a worker copies its shard into a slot there and sends it to a peer
node's memory. After a failure the agents agree on the newest iteration that is complete everywhere, make its
slots complete on their own node (from local memory, a peer's, or the durable tier), and every worker restores
from its own node's memory. One way to restore, whatever was lost.

In a training script::

    ckpt = gemini_run.Checkpointer(model=model, optimizer=optimizer, scheduler=scheduler)
    for step in ckpt.steps(total):
        ...
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Checkpointer", "__version__"]

if TYPE_CHECKING:
    from gemini_run.worker.checkpointer import Checkpointer


def __getattr__(name: str) -> Any:
    # Lazy: `gemini-run status` must not pay for importing torch.
    if name == "Checkpointer":
        from gemini_run.worker.checkpointer import Checkpointer

        return Checkpointer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
