"""What samplers and datasets draw from: the state of generators wherever they hang, and samplers that are replayed."""

from __future__ import annotations

import base64
import json
import operator
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader

from gemini_run.worker import codec
from gemini_run.worker.codec import Json

State = dict[str, Any]

_PLAIN = (bool, int, float, str, type(None))


def freeze(value: Any) -> bytes:
    """`value`, tensors included, as JSON bytes. `thaw` gives it back."""

    def inline(tensor: torch.Tensor, path: str) -> Json:
        array = tensor.detach().cpu().contiguous().numpy()
        return {"$tensor": [array.dtype.str, list(array.shape), base64.b64encode(array.tobytes()).decode()]}

    return json.dumps(codec.encode(value, "", inline), separators=(",", ":")).encode()


def thaw(data: bytes) -> Any:
    """What `freeze` was given. Only in the worker that made it: may unpickle."""

    def tensor(leaf: dict[str, Any]) -> torch.Tensor:
        dtype, shape, body = leaf["$tensor"]
        return torch.from_numpy(np.frombuffer(base64.b64decode(body), np.dtype(dtype)).reshape(shape).copy())

    return codec.decode(json.loads(data), tensor, allow_pickle=True)


def process_state() -> State:
    """The CPU generators of this process: torch, numpy, Python, as bytes, arrays and numbers."""
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


def set_process_state(state: State) -> None:
    torch.set_rng_state(_byte_tensor(state["torch"]))
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])


def generator_state(value: Any) -> Any:
    """The state of `value` if it is a generator of torch, numpy or Python, else None."""
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    return None


def set_generator_state(value: Any, state: Any) -> None:
    if isinstance(value, torch.Generator):
        value.set_state(_byte_tensor(state))
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = state
    elif isinstance(value, np.random.RandomState):
        value.set_state(state)
    elif isinstance(value, random.Random):
        value.setstate(state)


class StatefulGenerator:
    """A generator of torch, numpy or Python with the two methods of anything stateful."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def state_dict(self) -> State:
        return {"state": generator_state(self._generator)}

    def load_state_dict(self, state: State) -> None:
        set_generator_state(self._generator, state["state"])


class Holder:
    """One object (a sampler, a dataset) whose attributes decide what is drawn next.

    Its own `state_dict` says it where it has one; else its generators are taken, and with `plain` its numbers and
    strings too (an epoch, a seed).
    """

    def __init__(self, target: Any, *, plain: bool) -> None:
        self.target = target
        self._plain = plain
        self._stateful = has_state(target)

    def state(self) -> State:
        if self._stateful:
            return {"state_dict": self.target.state_dict()}
        drawn, plain = {}, {}
        for key, value in vars(self.target).items() if hasattr(self.target, "__dict__") else ():
            if (state := generator_state(value)) is not None:
                drawn[key] = state
            elif self._plain and type(value) in _PLAIN:
                plain[key] = value
        return {"generators": drawn, "values": plain}

    def set_state(self, state: State) -> None:
        if "state_dict" in state:
            self.target.load_state_dict(state["state_dict"])
            return
        table = vars(self.target) if hasattr(self.target, "__dict__") else {}
        for key, drawn in state["generators"].items():
            set_generator_state(table.get(key), drawn)
        for key, value in state["values"].items():
            if key in table and table[key] != value:
                setattr(self.target, key, value)


def has_state(target: Any) -> bool:
    return callable(getattr(target, "state_dict", None)) and callable(getattr(target, "load_state_dict", None))


class Draws:
    """All that decides which index batches come next: this process's generators and those of the samplers."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._generator = loader.generator
        self.samplers = [Holder(o, plain=True) for o in _chain(loader, ("batch_sampler", "sampler"))]
        # Read in this process only without worker processes; theirs is told by `worker.fetching`.
        self._datasets = dataset_holders(loader.dataset) if loader.num_workers == 0 else []

    def own(self) -> State:
        """The state of the loader's objects; this process's generators are not among it."""
        return {
            "loader": generator_state(self._generator),
            "samplers": [holder.state() for holder in self.samplers],
            "datasets": [holder.state() for holder in self._datasets],
        }

    def set_own(self, state: State) -> None:
        set_generator_state(self._generator, state["loader"])
        for holder, saved in zip(self.samplers, state["samplers"], strict=False):
            holder.set_state(saved)
        for holder, saved in zip(self._datasets, state["datasets"], strict=False):
            holder.set_state(saved)

    def state(self) -> State:
        return {"process": process_state(), "own": self.own()}

    def set_state(self, state: State) -> None:
        set_process_state(state["process"])
        self.set_own(state["own"])

    def base_seed_state(self) -> bytes:
        """Of the generator that a DataLoader draws its base seed from."""
        generator = torch.default_generator if self._generator is None else self._generator
        return bytes(generator.get_state().numpy().tobytes())

    def set_base_seed_state(self, state: bytes) -> None:
        generator = torch.default_generator if self._generator is None else self._generator
        generator.set_state(_byte_tensor(state))


def dataset_holders(dataset: Any) -> list[Holder]:
    """The dataset and those it wraps (`Subset` and the like)."""
    return [Holder(o, plain=False) for o in [dataset, *_chain(dataset, ("dataset",))]]


def _chain(root: Any, names: tuple[str, ...]) -> list[Any]:
    """The objects under the attributes `names` of `root`, and under theirs, each once."""
    found: list[Any] = []
    todo = [root]
    while todo:
        current = todo.pop(0)
        for name in names:
            value = getattr(current, name, None)
            if value is None or type(value) in (*_PLAIN, list, tuple, dict) or any(value is o for o in found):
                continue
            found.append(value)
            todo.append(value)
    return found


class Indices(Iterator[Any]):
    """The index batches of one pass, the first `skip` of them drawn and dropped. No sample is loaded for those.

    Attributes:
        digest: of all index batches that were dropped or taken so far; equal in an exact replay.
        short: the sampler ended before `skip`.
    """

    def __init__(self, draw: Iterator[Any], skip: int, on_first: Callable[[], None]) -> None:
        self._draw = draw
        self._skip = skip
        self._on_first: Callable[[], None] | None = on_first
        self._ahead: list[bytes] = []
        self.digest = b""
        self.short = False

    def begin(self) -> None:
        """Let the sampler make its first draw now, and drop what is to be skipped."""
        if self._on_first is None:
            return
        self._on_first()
        self._on_first = None
        for _ in range(self._skip):
            try:
                index = next(self._draw)
            except StopIteration:
                self.short = True
                return
            self._fold(_said(index))

    def __next__(self) -> Any:
        self.begin()
        index = next(self._draw)
        self._ahead.append(_said(index))
        return index

    def take(self) -> bool:
        """Training takes the oldest index batch that was drawn. False if there is none: the sampler itself failed."""
        if self._ahead:
            self._fold(self._ahead.pop(0))
            return True
        return False

    def _fold(self, said: bytes) -> None:
        self.digest = xxhash.xxh3_64_digest(self.digest + said)


def _said(index: Any) -> bytes:
    """The index batch as bytes, the same in every process; empty where its objects are not numbers or strings."""
    try:
        return json.dumps(index, default=operator.index).encode()
    except (TypeError, ValueError):
        return b""


def _byte_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
