"""The data position: a DataLoader that goes on in the middle of a pass where the last snapshot stands.

A pass (one `iter(loader)`) is replayed, not stored: the generators and samplers are put where they stood when it
began, the index batches that training has taken are drawn and dropped without loading a sample, and then everything
is put where the snapshot has it. That the replay gave the same index batches is proved by a digest.

The position is that of the batches which the training loop has taken at the iteration boundary; what the loader has
fetched ahead is fetched again.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from gemini_run.terminal import say
from gemini_run.worker import codec, rng
from gemini_run.worker.codec import Json, TensorSink
from gemini_run.worker.components import Component
from gemini_run.worker.fetching import Loader, Tagged, loader_like
from gemini_run.worker.layout import PlanBuilder
from gemini_run.worker.loading import PayloadReader
from gemini_run.worker.passes import Frames, Pass, unframed
from gemini_run.worker.sampling import Draws, Indices, State, freeze, has_state, thaw

_POSITION = "_gemini_position"  #: attribute of a followed loader
_FOLLOWED = "_gemini_followed"  #: of its class


class Batches(Iterator[Any]):
    """What `iter(loader)` gives."""

    def __init__(self, position: Position) -> None:
        self._position = position
        self._restores = position.restores
        self._pass, self._inner = position.begin()
        position.follow(self)

    @property
    def unfinished(self) -> bool:
        return not self._pass.finished

    def __next__(self) -> Any:
        position = self._position
        if self._restores != position.restores:  # made before restore()
            self._restores = position.restores
            self._pass, self._inner = position.begin()
            position.follow(self)
        try:
            item = next(self._inner)
        except StopIteration:
            self._pass.finished = True
            raise
        except Exception:
            position.took(self._pass, None)  # the loader goes on behind the batch that failed
            raise
        return position.took(self._pass, item)

    def __len__(self) -> int:
        return len(self._position.loader)


class Position(Component):
    """Where training stands in the data of one plain DataLoader."""

    kind = "loader"
    private = True

    def __init__(self, name: str, loader: DataLoader[Any]) -> None:
        super().__init__(name)
        self.loader = loader
        self.restores = 0
        self._attached = False
        self._iterable = isinstance(loader.dataset, IterableDataset)
        self._draws = Draws(loader)
        self._passes = 0
        self._pass = Pass({}, finished=True)
        self._newest: weakref.ref[Batches] | None = None
        self._live: weakref.WeakSet[Batches] = weakref.WeakSet()
        self._pending: Pass | None = None  #: to go on with at the next iter()
        self._own: State | None = None  #: of the loader's objects, as restored; set again after the replay
        self._boundary: dict[str, Any] | None = None  #: this process's generators, as restored
        self._workers: dict[int, bytes] = {}  #: their generators after the last batch that training took from each
        self._base_seed: bytes | None = None  #: the generator at the draw that seeded persistent workers
        self._inner: Loader | None = None  #: with persistent workers
        self._constructing = self._rebuilding = False
        self._frames = Frames()
        self._said: set[str] = set()

    # --- iterating -----------------------------------------------------------------------------------

    def attach(self) -> None:
        """From now on `iter(loader)` is followed; where it cannot be, one line says why."""
        problem = _why_not(self.loader)
        if problem is not None:
            self._warn(f"its position is not checkpointed, after a restart its data begins anew: {problem}")
            return
        self._attached = True
        self.loader.__dict__[_POSITION] = weakref.ref(self)
        self.loader.__class__ = _followed(type(self.loader))

    def begin(self) -> tuple[Pass, Iterator[Any]]:
        """Begin the next pass, or go on with the one that was restored."""
        replayed, self._pending = self._pending, None
        if replayed is None:
            self._passes += 1
            this = Pass(self._draws.state(), seeds=self._inner is None and self._base_seed is None)
            if not self.loader.persistent_workers:
                self._workers = {}
        else:
            this = replayed
            if not self._iterable:
                self._draws.set_state(this.at_iter)
        self._pass = this
        inner = self._iterate(this)
        if replayed is not None:
            self._replay(this)
        self._own = self._boundary = None
        this.after_iter = self._draws.state()
        return this, inner

    def follow(self, batches: Batches) -> None:
        """`batches` is the iterator of the newest pass."""
        self._newest = weakref.ref(batches)
        self._live.add(batches)

    def took(self, this: Pass, item: Any) -> Any:
        """Training takes `item`, the next batch of `this`; returns it as the script's own loader would give it."""
        if this.indices is None or this.indices.take():
            this.taken += 1
        if not isinstance(item, Tagged):
            return item
        if this is self._pass and item.state is not None:
            self._workers[item.worker] = item.state
        return item.batch

    def _iterate(self, this: Pass) -> Iterator[Any]:
        if self._iterable:
            return DataLoader.__iter__(self.loader)
        persistent = self.loader.persistent_workers
        self._constructing = self._rebuilding = False
        if persistent and self._inner is not None:
            return iter(self._inner)
        inner = loader_like(self.loader, _IndexSampler(self), dict(self._workers))
        inner.first = this.skip
        self._constructing = True
        # Workers that an earlier pass made in an earlier process: seeded as then, and no draw of it counts here.
        self._rebuilding = persistent and not this.seeds
        if persistent:
            self._inner = inner
        return iter(inner)

    def draw(self) -> Iterator[Any]:
        """`iter()` of the index sampler. A DataLoader that starts workers calls it twice, its base seed between."""
        constructing, self._constructing = self._constructing, False
        this = self._pass
        if self._rebuilding and constructing and self._base_seed is not None:
            self._draws.set_base_seed_state(self._base_seed)
            return iter(())
        if self._rebuilding:
            self._draws.set_state(this.at_iter)
        sampler = self.loader.sampler if self.loader.batch_sampler is None else self.loader.batch_sampler
        position = weakref.ref(self)

        def at_first() -> None:
            if (alive := position()) is not None:
                alive._at_first(this)

        this.indices = Indices(iter(sampler), this.skip, at_first)
        if constructing and self.loader.persistent_workers:
            self._base_seed = self._draws.base_seed_state()
        return this.indices

    def _at_first(self, this: Pass) -> None:
        """The sampler is about to make its first draw of the pass."""
        if this.at_first is not None:
            self._draws.set_state(this.at_first)
        elif this.after_iter is not None:
            now = freeze(self._draws.state())
            if now != freeze(this.after_iter):
                this.at_first, this.frozen = thaw(now), None

    def _replay(self, this: Pass) -> None:
        if this.skip and this.indices is not None:
            this.indices.begin()
            if this.indices.short or this.indices.digest != this.expected:
                self._warn(
                    f"its sampler did not draw the {this.skip} batches that training has seen of this pass again (it "
                    "draws from what training draws from too, or keeps a state of its own): samples may come twice or "
                    "not at all in this pass; give the sampler state_dict() and load_state_dict()"
                )
        if self._own is not None and not self._iterable:
            self._draws.set_own(self._own)
        if self._boundary is not None:
            rng.restore(self._boundary)

    # --- the component -------------------------------------------------------------------------------

    def build(self, builder: PlanBuilder) -> Json:
        return {"kind": self.kind}

    def check(self) -> None:
        return

    def dynamic(self, sink: TensorSink) -> Json:
        if not self._attached:
            return None
        this = self._pass if self._pending is None else self._pending
        newest = None if self._newest is None else self._newest()
        if sum(batches.unfinished for batches in self._live) > 1:
            self._warn("more than one iterator over it is in use, and only the newest one's position is checkpointed")
        workers = [self._workers.get(worker, b"") for worker in range(self.loader.num_workers)]
        state = {
            "passes": self._passes,
            "open": self._pending is not None or (newest is not None and not this.finished),
            "taken": this.taken,
            "digest": this.digest().hex(),
            "seeds": this.seeds,
            "own": self._draws.own() if self._own is None else self._own,
            "start": self._frames.frame("start", this.start())[0],
            "base_seed": None if self._base_seed is None else self._frames.frame("base_seed", self._base_seed)[0],
            "workers": dict(enumerate(self._frames.frame("workers", *workers))),
        }
        return codec.encode(state, self.name, sink)

    def restore(self, static: Json, dynamic: Json, reader: PayloadReader) -> None:
        saved = codec.decode(dynamic, lambda leaf: reader.fresh(leaf["$tensor"]), allow_pickle=True)
        if saved is None or not self._attached:
            return
        self.restores += 1
        at_iter, at_first = thaw(unframed(saved["start"]))
        this = Pass(
            at_iter, at_first, skip=saved["taken"], expected=bytes.fromhex(saved["digest"]), seeds=saved["seeds"],
            taken=saved["taken"], finished=not saved["open"],
        )  # fmt: skip
        self._passes = saved["passes"]
        self._base_seed = None if saved["base_seed"] is None else unframed(saved["base_seed"])
        self._workers = {worker: data for worker, frame in saved["workers"].items() if (data := unframed(frame))}
        self._inner = None
        self._own = saved["own"] if saved["open"] else None
        self._draws.set_own(saved["own"])
        self._pass = this
        self._pending = this if saved["open"] else None

    def settle(self) -> None:
        self._boundary = rng.capture()

    def _warn(self, text: str) -> None:
        if text not in self._said and os.environ.get("LOCAL_RANK", "0") == "0":
            say(f"warning: Checkpointer({self.name}=...): {text}")
        self._said.add(text)


class _IndexSampler:
    """The batch sampler of the inner DataLoader.

    Nothing in that one may keep the position alive, which holds it: freed in a cycle, workers would not end in order.
    """

    def __init__(self, position: Position) -> None:
        self._position = weakref.ref(position)

    def __iter__(self) -> Iterator[Any]:
        position = self._position()
        if position is None:
            raise RuntimeError("the Checkpointer of this loader is gone")
        return position.draw()


def _followed(kind: type[DataLoader[Any]]) -> type[DataLoader[Any]]:
    """`kind`, a DataLoader class, with iterators that are followed."""
    if _FOLLOWED in vars(kind):
        return kind

    def iterate(self: Any) -> Any:
        position = self.__dict__[_POSITION]()
        if position is None or position.loader is not self:  # a copy, or its Checkpointer is gone
            return kind.__iter__(self)
        return Batches(position)

    return type(kind.__name__, (kind,), {"__iter__": iterate, "__module__": kind.__module__, _FOLLOWED: True})


def _why_not(loader: DataLoader[Any]) -> str | None:
    """Why the position of `loader` cannot be followed exactly, or None."""
    kind = type(loader)
    if kind.__iter__ is not DataLoader.__iter__ and _FOLLOWED not in vars(kind):
        return f"its class {kind.__name__} iterates in its own way; give it state_dict() and load_state_dict()"
    if isinstance(loader.dataset, IterableDataset):
        if loader.num_workers:
            return "it reads an IterableDataset in worker processes; torchdata's StatefulDataLoader keeps their state"
        if not has_state(loader.dataset):
            return "its IterableDataset has no state_dict() and load_state_dict()"
    if loader.num_workers and not getattr(loader, "in_order", True):
        return "in_order=False gives the batches in no fixed order"
    return None
