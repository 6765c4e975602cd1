"""Capture then restore into freshly made objects: every bit comes back, for many kinds of state."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dying import in_a_fork
from torch import nn

import gemini_run
from gemini_run.errors import ConfigError
from gemini_run.memory.segment import scan_slots
from gemini_run.memory.slots import Slot
from gemini_run.wire import EXIT_FATAL, EXIT_REPLAN, MemoryPaths
from gemini_run.worker import capture

Step = Callable[[], torch.Tensor]
Built = tuple[dict[str, Any], Step]


def conv() -> Built:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.2), nn.Flatten(), nn.Linear(288, 2))
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    return objects, lambda: model(torch.randn(2, 4, 8, 8)).square().sum()


class MasterMomentum(torch.optim.Optimizer):
    """Keeps fp32 state for bf16 parameters (which `load_state_dict` would cast), an int, a list and a None."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(momentum=torch.zeros(p.shape), count=0, trail=[], spare=None)
                state["count"] += 1
                state["trail"].append(p.grad.float().sum().reshape(1))
                state["momentum"].mul_(0.9).add_(p.grad.float())
                p.data.add_(-group["lr"] * state["momentum"].bfloat16())


def bf16() -> Built:
    model = nn.Linear(8, 8).bfloat16()
    optimizer = MasterMomentum(model.parameters())
    return {"model": model, "optimizer": optimizer}, lambda: model(torch.randn(2, 8).bfloat16()).float().square().sum()


def lbfgs() -> Built:
    model = nn.Linear(8, 8).double()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    return {"model": model, "optimizer": optimizer}, lambda: model(torch.randn(2, 8).double()).square().sum()


def unused() -> Built:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return {"model": model, "optimizer": optimizer}, lambda: model[0](torch.randn(2, 4)).square().sum()


def tied() -> Built:
    model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    groups = [{"params": list(model.parameters()), "lr": 0.01, "note": ("a", None, 1.5)}]
    optimizer = torch.optim.Adam(groups)
    return {"model": model, "optimizer": optimizer}, lambda: model(torch.randint(8, (8,))).square().sum()


def compiled() -> Built:
    model = torch.compile(nn.Linear(8, 8), backend="eager")
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
    return {"model": model, "optimizer": optimizer}, lambda: model(torch.randn(2, 8)).square().sum()


class Odd(nn.Module):
    """Buffers of many dtypes and layouts, a non-persistent one, extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4).t())
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("fp16", torch.randn(3).half())
        self.register_buffer("fp8", torch.randn(5).to(torch.float8_e4m3fn))
        self.register_buffer("u16", torch.arange(4).to(torch.uint16))
        self.register_buffer("freqs", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("none", torch.empty(0, 4))
        self.register_buffer("scalar", torch.tensor(7))
        self.register_buffer("view", torch.arange(12.0).view(3, 4)[:, ::2])
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for name in ("fp16", "hidden", "view"):
            buffer = getattr(self, name)
            buffer.copy_(torch.randn(buffer.shape))
        self.scalar += 1
        self.flags.logical_not_()
        return x @ self.weight

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "pair": (1, float("inf"))}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def odd() -> Built:
    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    values: dict[Any, Any] = {"seen": 0, 3: [1, (2, None)]}
    history: list[float] = []

    def loss() -> torch.Tensor:
        values["seen"] += 1
        history.append(random.random() + float(np.random.rand()))
        return model(torch.randn(2, 4)).square().sum()

    return {"model": model, "optimizer": optimizer, "values": values, "history": history}, loss


BUILDERS = [conv, bf16, lbfgs, unused, tied, compiled, odd]


def train(objects: dict[str, Any], loss: Step) -> None:
    optimizer = objects["optimizer"]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()
    if "scheduler" in objects:
        objects["scheduler"].step()


def snapshot_of(objects: dict[str, Any]) -> list[Any]:
    """Everything that must come back equal, as comparable values."""

    def flat(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            value = value.detach()
            raw = value.resolve_conj().contiguous().view(-1) if value.numel() else value
            body = raw.view(torch.uint8).tolist() if value.numel() else []
            return (str(value.dtype), tuple(value.shape), body)
        if isinstance(value, dict):
            return {k: flat(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [type(value).__name__, *map(flat, value)]
        return repr(value)

    model = objects["model"]
    found = [flat({n: t for n, t in [*model.named_parameters(), *model.named_buffers()]})]
    optimizer = objects["optimizer"]
    for group in optimizer.param_groups:
        found.append(flat({k: v for k, v in group.items() if k != "params"}))
        found += [flat(dict(optimizer.state[p])) if p in optimizer.state else None for p in group["params"]]
    for name in ("scheduler",):
        if name in objects:
            found.append(flat(objects[name].state_dict()))
    found += [flat(objects[name]) for name in ("values", "history") if name in objects]
    found += [flat(torch.get_rng_state()), repr(random.getstate()), repr(np.random.get_state())]
    return found


def fresh(build: Callable[[], Built], seed: int) -> Built:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    return build()


@pytest.mark.parametrize("build", BUILDERS, ids=lambda b: b.__name__)
def test_resumed_run_equals_the_uninterrupted_one(build: Callable[[], Built], as_worker: Any) -> None:
    as_worker()
    objects, loss = fresh(build, 1)
    ckpt = gemini_run.Checkpointer(**objects)
    assert ckpt.restore() == 0
    at_4: list[Any] = []
    for _ in range(7):
        train(objects, loss)
        ckpt.step()
        if ckpt.iteration == 4:
            at_4 = snapshot_of(objects)
            ckpt.close()  # what follows is no longer captured: the slot of 4 stays the newest
    at_7 = snapshot_of(objects)

    as_worker(round=1, restore_iteration=4, restore_source="local")
    objects, loss = fresh(build, 2)
    ckpt = gemini_run.Checkpointer(**objects)
    assert ckpt.restore() == 4
    assert snapshot_of(objects) == at_4
    for _ in range(3):
        train(objects, loss)
        ckpt.step()
    ckpt.close()
    assert snapshot_of(objects) == at_7


def test_tied_weights_are_stored_once_and_tied_after(as_worker: Any, memory: MemoryPaths) -> None:
    as_worker()
    objects, loss = fresh(tied, 1)
    ckpt = gemini_run.Checkpointer(**objects)
    for _ in ckpt.steps(2):
        train(objects, loss)
    ckpt.close()
    slot = Slot(next(i.path for i in scan_slots(memory) if i.usable))
    names = [item.name for item in slot.manifest(slot.header()).items]
    assert names.count("model.0.weight") == 1 and "model.1.weight" not in names
    as_worker(round=1, restore_iteration=2, restore_source="local")
    objects, _ = fresh(tied, 2)
    gemini_run.Checkpointer(**objects).restore()
    assert objects["model"][0].weight is objects["model"][1].weight


def test_frozen_tensors_are_copied_once_into_each_slot(
    as_worker: Any, memory: MemoryPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once they change behind every flag's back they are copied again."""
    as_worker()
    model = nn.Sequential(nn.Linear(300, 300).requires_grad_(False), nn.Linear(300, 3))
    optimizer = torch.optim.AdamW(model[1].parameters())
    frozen, copied = model[0].weight.numel() * 4, []
    copy = capture._copy_and_check

    def counted(sources: Any, base: int, lenders: Any) -> list[int]:
        pairs = zip(sources, lenders, strict=True)
        copied.append(sum(source.length == frozen for source, lender in pairs if lender < 0))
        return copy(sources, base, lenders)

    monkeypatch.setattr(capture, "_copy_and_check", counted)
    ckpt = gemini_run.Checkpointer(model=model, optimizer=optimizer)
    ckpt.restore()
    for step in range(9):
        optimizer.zero_grad()
        model(torch.ones(1, 300)).sum().backward()
        optimizer.step()
        if step == 6:
            model[0].weight.numpy()[299, 299] += 1.0
        ckpt.step()
        ckpt._committer.wait()  # type: ignore[union-attr]
        for info in scan_slots(memory):  # every tensor's bytes against its checksum
            if info.usable:
                Slot(info.path).verify()
    ckpt.close()
    # The seventh time it is seen to have changed, and copied after all; then into the other slot.
    assert copied == [1, 1, 0, 0, 0, 0, *(0, 1), 1, 0]
    want = [p.clone() for p in model.parameters()]
    as_worker(round=1, restore_iteration=9, restore_source="local")
    fresh_model = nn.Sequential(nn.Linear(300, 300).requires_grad_(False), nn.Linear(300, 3))
    fresh_optimizer = torch.optim.AdamW(fresh_model[1].parameters())
    assert gemini_run.Checkpointer(model=fresh_model, optimizer=fresh_optimizer).restore() == 9
    assert all(map(torch.equal, fresh_model.parameters(), want))


def test_the_two_newest_iterations_are_kept_and_sealed(as_worker: Any, memory: MemoryPaths) -> None:
    as_worker()
    objects, loss = fresh(conv, 1)
    ckpt = gemini_run.Checkpointer(**objects)
    for _ in ckpt.steps(5):
        train(objects, loss)
    ckpt.close()
    headers = [i.header for i in scan_slots(memory) if i.header is not None]
    assert sorted(h.iteration for h in headers) == [4, 5]
    assert all(h.sealed and h.complete for h in headers)


def test_what_the_script_imported_is_told_to_the_next_zygote(as_worker: Any, tmp_path: Path) -> None:
    """After the first iteration, since a worker that is killed says nothing at its end."""
    as_worker()
    seen = tmp_path / "imports.json"
    seen.write_text(json.dumps(["of_an_earlier_worker"]))
    model = nn.Linear(2, 2)
    ckpt = gemini_run.Checkpointer(model=model)
    for _ in ckpt.steps(1):
        assert json.loads(seen.read_text()) == ["of_an_earlier_worker"]
    ckpt.close()
    names = json.loads(seen.read_text())
    assert names[0] == "of_an_earlier_worker" and {"torch", "torch.nn", "pytest", "xxhash"} <= set(names)
    assert not {"json", "gemini_run", "__main__", "mpi4py"} & set(names)


def test_durable_iterations_are_held_until_released(as_worker: Any, memory: MemoryPaths) -> None:
    as_worker(durable_iterations=3)
    objects, loss = fresh(conv, 1)
    ckpt = gemini_run.Checkpointer(**objects)
    for _ in ckpt.steps(5):
        train(objects, loss)
    found = {i.header.iteration: i.header.hold for i in scan_slots(memory) if i.header}
    assert found == {3: True, 4: False, 5: False}
    held = next(i.path for i in scan_slots(memory) if i.header and i.header.hold)
    Slot(held, writable=True).set_hold(False)
    for _ in range(2):
        train(objects, loss)
        ckpt.step()
    ckpt.close()
    found = {i.header.iteration: i.header.hold for i in scan_slots(memory) if i.header}
    assert found.keys() >= {6, 7}
    # 6 was due; whether it was decided on before or after the release is the commit thread's to know.
    assert sorted(k for k, hold in found.items() if hold) in ([6], [7])


def test_a_durable_tier_that_is_slow_takes_one_slot(as_worker: Any, memory: MemoryPaths, capfd: Any) -> None:
    as_worker(durable_iterations=1)
    objects, loss = fresh(conv, 1)
    ckpt = gemini_run.Checkpointer(**objects)
    for _ in ckpt.steps(6):
        train(objects, loss)
    ckpt.close()
    found = {i.header.iteration: i.header.hold for i in scan_slots(memory) if i.header}
    assert found == {1: True, 5: False, 6: False}
    # The next round as well: what an earlier one held is still being read.
    as_worker(durable_iterations=1, round=1, restore_iteration=6, restore_source="local")
    objects, loss = fresh(conv, 2)
    ckpt = gemini_run.Checkpointer(**objects)
    for _ in ckpt.steps(9):
        train(objects, loss)
    ckpt.close()
    found = {i.header.iteration: i.header.hold for i in scan_slots(memory) if i.header}
    assert found == {1: True, 8: False, 9: False}
    assert capfd.readouterr().err.count("is still being stored") == 2, "once a round"


def test_outside_gemini_run_it_only_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GEMINI_WORKER", raising=False)
    objects, loss = fresh(conv, 1)
    ckpt = gemini_run.Checkpointer(**objects)
    seen = []
    for step in ckpt.steps(3):
        train(objects, loss)
        seen.append(step)
    assert seen == [0, 1, 2] and ckpt.iteration == 3 and ckpt.restore() == 3


@pytest.mark.parametrize("argument", [3, object(), None])
def test_what_cannot_be_captured_is_refused_at_once(argument: object) -> None:
    with pytest.raises(ConfigError, match="Checkpointer"):
        gemini_run.Checkpointer(thing=argument)


class Left(BaseException):
    """Stands for os._exit in these tests."""


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where torch's agents have a worker leave its exception."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


@pytest.fixture
def leaves(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        raise Left

    monkeypatch.setattr("gemini_run.worker.checkpointer._leave", leave)
    return codes


def trained(as_worker: Any) -> None:
    as_worker()
    objects, loss = fresh(conv, 1)
    ckpt = gemini_run.Checkpointer(**objects)
    for _ in ckpt.steps(2):
        train(objects, loss)
    ckpt.close()


def newest(memory: MemoryPaths) -> Any:
    return next(i for i in scan_slots(memory) if i.header and i.header.iteration == 2)


@pytest.mark.parametrize("where", ["payload", "objects", "manifest", "checksums"])
def test_a_corrupt_slot_is_refused(
    where: str, as_worker: Any, memory: MemoryPaths, leaves: list[int], capfd: Any
) -> None:
    trained(as_worker)
    info = newest(memory)
    with info.path.open("r+b") as file:
        file.seek(getattr(info.header, f"{where}_offset") + 40)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    as_worker(round=1, restore_iteration=2, restore_source="local")
    objects, _ = fresh(conv, 2)
    with pytest.raises(Left):  # the process ends: its state may be spoilt
        gemini_run.Checkpointer(**objects).restore()
    assert leaves == [EXIT_REPLAN]
    assert "refuses its checkpoint" in capfd.readouterr().err
    assert not any(i.usable and i.header and i.header.iteration == 2 for i in scan_slots(memory))


def test_another_model_is_one_clear_line(as_worker: Any, leaves: list[int], error_file: Path) -> None:
    trained(as_worker)
    as_worker(round=1, restore_iteration=2, restore_source="local")
    objects, _ = fresh(conv, 2)
    objects["model"][0] = nn.Conv2d(4, 9, 3)
    with pytest.raises(Left):
        gemini_run.Checkpointer(**objects).restore()
    assert leaves == [EXIT_FATAL]
    assert "the checkpoint holds float32 [8, 4, 3, 3]" in error_file.read_text()


def test_an_unsupported_tensor_is_refused_before_the_first_step(
    as_worker: Any, leaves: list[int], error_file: Path
) -> None:
    as_worker()
    model = nn.Linear(2, 2)
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    with pytest.raises(Left):
        gemini_run.Checkpointer(model=model).restore()
    assert leaves == [EXIT_FATAL] and "model.sparse" in error_file.read_text()


def test_structure_may_grow(as_worker: Any) -> None:
    """Parameters added on the way, with their own group, are captured from the next boundary on."""
    as_worker()

    def grow(objects: dict[str, Any]) -> None:
        extra = nn.Linear(2, 2)
        objects["model"].add_module("extra", extra)
        objects["optimizer"].add_param_group({"params": list(extra.parameters())})

    objects, loss = fresh(conv, 1)
    ckpt = gemini_run.Checkpointer(**objects)
    for step in ckpt.steps(3):
        train(objects, loss)
        if step == 0:
            grow(objects)
    ckpt.close()
    want = snapshot_of(objects)
    as_worker(round=1, restore_iteration=3, restore_source="local")
    objects, _ = fresh(conv, 2)
    grow(objects)
    gemini_run.Checkpointer(**objects).restore()
    assert snapshot_of(objects) == want


def test_the_iteration_before_the_restored_one_outlives_the_restore(as_worker: Any, memory: MemoryPaths) -> None:
    """It may be the newest one with replicas: nothing but the next snapshot takes its place."""
    trained(as_worker)
    before = {i.header.iteration: i.path for i in scan_slots(memory) if i.usable and i.header}
    assert sorted(before) == [1, 2]
    as_worker(round=1, restore_iteration=2, restore_source="local")
    objects, loss = fresh(conv, 2)
    ckpt = gemini_run.Checkpointer(**objects)
    ckpt.restore()
    assert {i.header.iteration: i.path for i in scan_slots(memory) if i.usable and i.header} == before
    train(objects, loss)
    ckpt.step()
    ckpt.close()
    assert sorted(i.header.iteration for i in scan_slots(memory) if i.usable and i.header) == [2, 3]


@pytest.mark.parametrize("length", [0, 100])
def test_a_file_too_short_to_be_a_slot_is_replaced(as_worker: Any, memory: MemoryPaths, length: int) -> None:
    trained(as_worker)
    [other] = [i.path for i in scan_slots(memory) if i.header and i.header.iteration == 1]
    other.write_bytes(b"x" * length)
    as_worker(round=1, restore_iteration=2, restore_source="local")
    objects, loss = fresh(conv, 2)
    ckpt = gemini_run.Checkpointer(**objects)
    assert ckpt.restore() == 2
    train(objects, loss)
    ckpt.step()
    ckpt.close()
    assert {i.header.iteration: i.path for i in scan_slots(memory) if i.usable and i.header}[3] == other


def test_a_tensor_of_more_than_two_gib(as_worker: Any) -> None:
    """Case A47: nothing on the way counts its bytes in 32 bits with a sign."""
    if shutil.disk_usage("/dev/shm").free < 6 * 2**30:
        pytest.skip("needs 6 GiB in /dev/shm")
    size = 2**31 + 4099
    with tempfile.TemporaryDirectory(prefix="gemini-run-test-", dir="/dev/shm") as folder:
        memory = MemoryPaths(Path(folder))
        memory.slots.mkdir()
        memory.beacons.mkdir()

        def fill(tensor: torch.Tensor) -> torch.Tensor:
            tensor[::4096] = 7
            tensor[-3:] = torch.tensor([1, 2, 3])
            return tensor

        def save() -> None:
            as_worker(memory_dir=folder)
            state = {"large": torch.zeros(size, dtype=torch.uint8)}
            ckpt = gemini_run.Checkpointer(state=state)
            for _ in ckpt.steps(1):
                fill(state["large"])
            ckpt.close()

        assert in_a_fork(save) == 0
        as_worker(memory_dir=folder, round=1, restore_iteration=1, restore_source="local")
        state = {"large": torch.zeros(size, dtype=torch.uint8)}
        assert gemini_run.Checkpointer(state=state).restore() == 1
        assert torch.equal(state["large"], fill(torch.zeros(size, dtype=torch.uint8)))
