"""What `agent/elastic.py`, `agent/launch.py` and `worker/fetching.py` rely on in the installed torch.

A failure here names what changed.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.run as torchrun
from torch.distributed.elastic.agent.server.api import RunResult, SimpleElasticAgent, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api as multiprocessing_api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.launcher import api as launcher_api
from torch.utils.data import dataloader

from gemini_run.plan.recovery import worker_ranks


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(inspect.unwrap(function)).parameters)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (LocalElasticAgent._monitor_workers, ["self", "worker_group"]),
        (LocalElasticAgent._rendezvous, ["self", "worker_group"]),
        (LocalElasticAgent._assign_worker_ranks, ["self", "store", "group_rank", "group_world_size", "spec"]),
        (LocalElasticAgent._start_workers, ["self", "worker_group"]),
        (LocalElasticAgent._restart_workers, ["self", "worker_group"]),
        (LocalElasticAgent._exit_barrier, ["self"]),
        (LocalElasticAgent._invoke_run, ["self", "role"]),
        (SubprocessHandler._popen, ["self", "args", "env"]),
        (SubprocessHandler.close, ["self", "death_sig"]),
        (torchrun.run, ["args"]),
        (torchrun.get_args_parser, []),
        (torchrun.parse_min_max_nnodes, ["nnodes"]),
        (launcher_api._get_addr_and_port, ["rdzv_parameters"]),
        (launcher_api._get_entrypoint_name, ["entrypoint", "args"]),
    ],
)
def test_signatures(function: Any, expected: list[str]) -> None:
    assert parameters(function) == expected


def test_how_workers_are_stopped() -> None:
    """In older torch the agent ends the rendezvous with them, unless it is told that this is a restart."""
    older = "shutdown_timeout" not in parameters(LocalElasticAgent.__init__)
    last = ["is_restart"] if older else []
    assert parameters(LocalElasticAgent._stop_workers) == ["self", "worker_group", *last]
    assert parameters(LocalElasticAgent._shutdown) == ["self", "death_sig", "is_restart" if older else "timeout"]
    if older:
        assert "if not is_restart and self._rdzv_handler" in inspect.getsource(LocalElasticAgent._shutdown)


def test_launch_agent_takes_these_first() -> None:
    assert parameters(launcher_api.launch_agent)[:3] == ["config", "entrypoint", "args"]


def test_the_agents_constructor_takes_what_ours_passes() -> None:
    wanted = {"spec", "logs_specs", "start_method", "log_line_prefix_template"}
    assert wanted <= set(parameters(LocalElasticAgent.__init__))


def test_the_handlers_constructor_takes_keywords_only_from_torch() -> None:
    source = inspect.getsource(multiprocessing_api.SubprocessContext._start)
    assert "get_subprocess_handler(" in source
    assert "entrypoint=self.entrypoint" in source


def test_the_start_of_workers_looks_up_the_signal_handler() -> None:
    source = inspect.getsource(multiprocessing_api.PContext.start)
    assert re.search(r"signal\.signal\((sig|signal\.SIGTERM), _terminate_process_handler\)", source)
    assert list(inspect.signature(multiprocessing_api._terminate_process_handler).parameters) == ["signum", "frame"]


def test_the_loop_looks_up_what_we_replace() -> None:
    loop = inspect.getsource(SimpleElasticAgent._invoke_run)
    for name in (
        "self._monitor_workers(self._worker_group)",
        "self._restart_workers(self._worker_group)",
        "self._stop_workers(self._worker_group)",
        "self._exit_barrier()",
        "self._remaining_restarts > 0",
        "self._remaining_restarts -= 1",
        "rdzv_handler.num_nodes_waiting()",
    ):
        assert name in loop, name
    assert "spec.max_restarts - self._remaining_restarts" in inspect.getsource(LocalElasticAgent._start_workers)
    assert "launch_agent(" in inspect.getsource(launcher_api.elastic_launch.__call__)
    assert "_remaining_restarts = self._worker_group.spec.max_restarts" in inspect.getsource(
        SimpleElasticAgent.__init__
    )


def test_the_data_we_read_and_write() -> None:
    assert {"max_restarts", "monitor_interval", "rdzv_handler"} <= {f.name for f in dataclasses.fields(WorkerSpec)}
    assert not WorkerSpec.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert {"group_rank", "group_world_size", "workers", "store"} <= set(WorkerGroup.__slots__)
    assert {"master_addr", "master_port"} <= set(WorkerGroup.__slots__)
    assert {"state", "return_values", "failures"} <= {f.name for f in dataclasses.fields(RunResult)}


def test_ranks_of_workers_are_those_that_torch_gives() -> None:
    """gemini-run works them out without torch's exchange through the store, which would wait for a node that died."""
    nodes = [(2, "trainer"), (3, "reader"), (1, "trainer"), (2, "trainer")]
    store = dist.HashStore()

    def theirs(node_rank: int) -> list[tuple[int, ...]]:
        size, role = nodes[node_rank]
        spec = SimpleNamespace(local_world_size=size, role=role)
        workers = SimpleElasticAgent._assign_worker_ranks(SimpleNamespace(), store, node_rank, len(nodes), spec)
        return [(w.global_rank, w.world_size, w.role_rank, w.role_world_size) for w in workers]

    with ThreadPoolExecutor(len(nodes)) as pool:
        for node_rank, workers in enumerate(pool.map(theirs, range(len(nodes)))):
            first, world_size, first_of_role, role_world_size = worker_ranks(nodes, node_rank)
            mine = [(first + i, world_size, first_of_role + i, role_world_size) for i in range(nodes[node_rank][0])]
            assert mine == workers


def test_a_data_loaders_iterator_has_the_names_that_ours_overrides() -> None:
    """`worker.fetching`: the first index batch of a resumed pass goes to the worker whose turn it is."""
    iterator = dataloader._MultiProcessingDataLoaderIter
    assert "self._worker_queue_idx_cycle" in inspect.getsource(iterator._reset)
    assert "next(self._worker_queue_idx_cycle)" in inspect.getsource(iterator._try_put_index)
    assert "self._try_put_index()" in inspect.getsource(iterator._reset)
    assert "_MultiProcessingDataLoaderIter(self)" in inspect.getsource(dataloader.DataLoader._get_iterator)
    # The base seed is drawn after the first iter() of the index sampler, worker processes begin before the second.
    assert "iter(self._index_sampler)" in inspect.getsource(dataloader._BaseDataLoaderIter.__init__)
    assert "self._reset(loader, first_iter=True)" in inspect.getsource(iterator.__init__)
