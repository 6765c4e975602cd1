"""The training job that the stall bench checkpoints, and the contenders that checkpoint it."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import gemini_run
from gemini_run.wire import WorkerContext

HIDDEN_LAYERS = 6
BYTES_PER_PARAMETER = 12  #: fp32: the parameter and AdamW's two moments
TIMEOUT = timedelta(minutes=3)
MODELS = ("ddp", "fsdp2")


class Contender:
    """A way to checkpoint: called at the end of every iteration of its blocks, on every rank."""

    def save(self) -> None:
        """The call whose duration is the stall."""

    def finish(self) -> None:
        """Wait until the last checkpoint is as safe as this contender makes it."""

    def close(self) -> None:
        """Free what it holds."""


class Training:
    """The model, its optimizer, and one iteration."""

    def __init__(self, model: str, state_mb: float, batch: int) -> None:
        """
        Args:
            model: one of MODELS. "ddp": every rank holds all of the state; "fsdp2": its own part of a larger one.
            state_mb: of each rank, parameters and moments.
        """
        self.sharded = model == "fsdp2"
        whole_mb = state_mb * (dist.get_world_size() if self.sharded else 1)
        width = max(8, round(math.sqrt(whole_mb * 1e6 / BYTES_PER_PARAMETER / HIDDEN_LAYERS)))
        torch.manual_seed(0)
        layers = [layer for _ in range(HIDDEN_LAYERS) for layer in (nn.Linear(width, width), nn.GELU())]
        self.model = nn.Sequential(*layers)
        if self.sharded:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for layer in self.model:
                fully_shard(layer, mesh=mesh)
            self._wrapped: nn.Module = fully_shard(self.model, mesh=mesh)
        else:
            self._wrapped = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._input = torch.randn(batch, width)

    def iteration(self) -> None:
        self._wrapped(self._input).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def tensors(self) -> list[torch.Tensor]:
        """All of the state, once the first step has made the moments."""
        moments = [v for entry in self.optimizer.state.values() for v in entry.values() if torch.is_tensor(v)]
        return [_local(tensor.detach()) for tensor in (*self.model.parameters(), *moments)]


def _local(state: Any) -> Any:
    """`state` with this rank's part of every sharded tensor."""
    if isinstance(state, dict):
        return {key: _local(value) for key, value in state.items()}
    return state.to_local() if isinstance(state, DTensor) else state


class Nothing(Contender):
    """Training alone: what every slowdown is counted from."""


class Copy(Contender):
    """The state's bytes into mapped, populated shared memory with memmove and nothing else: the floor."""

    def __init__(self, training: Training, directory: Path) -> None:
        self._sources = [(t.data_ptr(), t.numel() * t.element_size()) for t in training.tensors()]
        self.num_bytes = sum(length for _, length in self._sources)
        path = directory / f"floor.{os.getpid()}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, self.num_bytes)
            self._map = mmap.mmap(descriptor, self.num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        finally:
            os.close(descriptor)
            path.unlink()
        self._target = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def save(self) -> None:
        at = self._target
        for pointer, length in self._sources:
            ctypes.memmove(at, pointer, length)
            at += length


class GeminiRun(Contender):
    """gemini_run.Checkpointer: a slot in host memory, and the peers' replicas where there are other nodes."""

    def __init__(self, training: Training) -> None:
        if WorkerContext.from_env() is None:
            raise RuntimeError("not started by gemini-run: there is no node memory to checkpoint into")
        self._checkpointer = gemini_run.Checkpointer(model=training.model, optimizer=training.optimizer)
        self._checkpointer.restore()

    def save(self) -> None:
        self._checkpointer.step()

    def finish(self) -> None:
        committer = self._checkpointer._committer
        if committer is None:
            raise RuntimeError("the checkpointer does not run")
        committer.wait()
        if committer.problem is not None:
            raise RuntimeError(committer.problem)
        if committer.record.iteration != self._checkpointer.iteration:
            raise RuntimeError(
                f"iteration {self._checkpointer.iteration} was not checkpointed, only {committer.record.iteration}"
            )

    def close(self) -> None:
        self._checkpointer.close()


class TorchSave(Contender):
    """torch.save beside the old file, then os.replace: by rank 0, the usual pattern with DDP; with FSDP2 every rank
    its own part, which is cheaper than gathering the whole."""

    def __init__(self, training: Training, directory: Path) -> None:
        self._training = training
        self._saves = training.sharded or dist.get_rank() == 0
        self._path = directory / f"torch-save.{dist.get_rank()}.pt"

    def save(self) -> None:
        if self._saves:
            beside = self._path.with_suffix(".new")
            torch.save(_local(self._training.state()), beside)
            os.replace(beside, self._path)

    def close(self) -> None:
        self._path.unlink(missing_ok=True)


class Dcp(Contender):
    """torch.distributed.checkpoint.save by all ranks, into two directories in turn: the one before stays whole."""

    def __init__(self, training: Training, directory: Path, name: str) -> None:
        self._training = training
        self._directories = [directory / f"{name}.{index}" for index in (0, 1)]
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self._turn = 0

    def save(self) -> None:
        dcp.save(self._training.state(), checkpoint_id=self._next(), process_group=self._group)

    def _next(self) -> Path:
        self._turn ^= 1
        return self._directories[self._turn]

    def close(self) -> None:
        if dist.get_rank() == 0:
            for directory in self._directories:
                shutil.rmtree(directory, ignore_errors=True)


class DcpAsync(Dcp):
    """torch.distributed.checkpoint.async_save, each awaited before the next one; staging as it is by default."""

    def __init__(self, training: Training, directory: Path, name: str, kind: AsyncCheckpointerType) -> None:
        super().__init__(training, directory, name)
        self._kind = kind
        self._pending: Future[Any] | None = None

    def save(self) -> None:
        self.finish()
        response = dcp.async_save(
            self._training.state(), checkpoint_id=self._next(), process_group=self._group,
            async_checkpointer_type=self._kind,
        )  # fmt: skip
        self._pending = response if isinstance(response, Future) else response.upload_completion

    def finish(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()


CONTENDERS: dict[str, Callable[[Training, Path], Contender]] = {
    "none": lambda training, directory: Nothing(),
    "copy": lambda training, directory: Copy(training, directory),
    "gemini-run": lambda training, directory: GeminiRun(training),
    "torch.save": lambda training, directory: TorchSave(training, directory),
    "dcp.save": lambda training, directory: Dcp(training, directory, "dcp-save"),
    "dcp.async_save": lambda training, directory: DcpAsync(
        training, directory, "dcp-async", AsyncCheckpointerType.THREAD
    ),
    "dcp.async_save process": lambda training, directory: DcpAsync(
        training, directory, "dcp-async-process", AsyncCheckpointerType.PROCESS
    ),
}
