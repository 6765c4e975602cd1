"""A torchdata `StatefulDataLoader`: it says its own position; here only the generators are kept where they belong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gemini_run.worker import codec, rng
from gemini_run.worker.codec import Json, TensorSink
from gemini_run.worker.components import Stateful
from gemini_run.worker.loading import PayloadReader

_NEXT, _ITERATOR, _MAKE = "next_iter_state", "_iterator", "_get_iterator"


def is_torchdata(target: Any) -> bool:
    """Whether `target` is a StatefulDataLoader, told by the attributes used here: torchdata need not be installed."""
    named = any(kind.__name__ == "StatefulDataLoader" for kind in type(target).__mro__)
    return named and all(hasattr(target, name) for name in (_NEXT, _ITERATOR, _MAKE))


class StatefulLoader(Stateful):
    """Its position, asked for without side effects.

    Before the first `iter()` its `state_dict()` would make an iterator, which draws a seed and starts workers; and the
    first `iter()` after `load_state_dict()` draws seeds that the uninterrupted run does not draw.
    """

    private = True

    def __init__(self, name: str, target: Any) -> None:
        super().__init__(name, target)
        self._boundary: dict[str, Any] | None = None

    def dynamic(self, sink: TensorSink) -> Json:
        state = getattr(self.target, _NEXT)  # restored, and no iterator was made since
        if state is None:
            state = {} if getattr(self.target, _ITERATOR) is None else self.target.state_dict()
        return codec.encode(state, self.name, sink)

    def restore(self, static: Json, dynamic: Json, reader: PayloadReader) -> None:
        super().restore(static, dynamic, reader)
        if getattr(self.target, _NEXT) is None:
            return
        make: Callable[[], Any] = getattr(self.target, _MAKE)

        def once() -> Any:
            del self.target.__dict__[_MAKE]
            before = rng.capture()
            iterator = make()
            # In a pass: as at the boundary, whatever the script drew on its way here. Behind its end: as found.
            rng.restore(before if iterator._finished or self._boundary is None else self._boundary)
            return iterator

        self.target.__dict__[_MAKE] = once

    def settle(self) -> None:
        self._boundary = rng.capture()
