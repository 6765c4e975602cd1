"""Imports go one way. The table is the architecture; ARCHITECTURE.md explains it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gemini_run

ROOT = Path(gemini_run.__file__).parent
BASE = {"ids", "errors", "wire", "journal", "config", "terminal"}
STORES = {"memory", "peers", "durable"}

#: layer -> what it may import besides itself
ALLOWED = {
    **{name: BASE for name in BASE},
    "plan": BASE,
    **{name: STORES | {"plan"} | BASE for name in STORES},
    "agent": STORES | {"plan"} | BASE,
    "worker": STORES | {"plan"} | BASE,
    "cli": {"agent", "worker"} | STORES | {"plan"} | BASE,
    "testing": {"agent", "worker"} | STORES | {"plan"} | BASE,
}
#: external module -> the only files that may import it
ONLY_IN = {
    "boto3": {"durable/s3.py", "testing/s3.py"},
    "botocore": {"durable/s3.py", "testing/s3.py"},
}
#: torch's elastic machinery, whose inner names change between releases
ELASTIC_INNER = ("torch.distributed.elastic.multiprocessing", "torch.distributed.elastic.agent")
ELASTIC_FILES = {"agent/elastic.py", "agent/rendezvous.py", "agent/launch.py"}
ELASTIC_PUBLIC = "torch.distributed.elastic.multiprocessing.errors"  # documented: how a worker leaves its exception
#: what a pure module must not import
IMPURE = {
    "torch", "numpy", "os", "io", "time", "threading", "socket", "subprocess", "pathlib", "asyncio", "random",
    "datetime", "aiohttp", "multiprocessing",
}  # fmt: skip


def sources() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def imports(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """(dotted module name, line) of every import anywhere in the file, those inside functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield node.module or "", node.lineno
            if node.module == "gemini_run":
                for alias in node.names:
                    yield f"gemini_run.{alias.name}", node.lineno


def layer(relative: str) -> str:
    return relative.split("/")[0].removesuffix(".py")


def test_layers() -> None:
    faults = []
    for relative, tree in sources():
        own = layer(relative)
        if own == "__init__":
            continue  # the package's front door: one lazy import
        assert own in ALLOWED, f"{relative}: which layer is this?"
        for name, line in imports(tree):
            parts = name.split(".")
            if parts[0] != "gemini_run" or len(parts) == 1 or parts[1] == "__version__":
                continue
            if parts[1] != own and parts[1] not in ALLOWED[own]:
                faults.append(f"{relative}:{line}: {own} imports {name}")
    assert faults == []


def test_the_base_has_no_circles_and_no_torch() -> None:
    order = ("ids", "errors", "terminal", "journal", "wire", "config")
    for relative, tree in sources():
        own = layer(relative)
        if own in order:
            for name, line in imports(tree):
                assert name.split(".")[0] != "torch", f"{relative}:{line}"
                if name.startswith("gemini_run."):
                    assert order.index(name.split(".")[1]) < order.index(own), f"{relative}:{line}: {name}"


def test_plan_is_pure() -> None:
    faults = [
        f"{relative}:{line}: {name}"
        for relative, tree in sources()
        if layer(relative) == "plan"
        for name, line in imports(tree)
        if name.split(".")[0] in IMPURE
    ]
    faults += [
        f"{relative}:{node.lineno}: open()"
        for relative, tree in sources()
        if layer(relative) == "plan"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open"
    ]
    assert faults == []


def test_external_modules_with_one_home() -> None:
    faults = [
        f"{relative}:{line}: {name}"
        for relative, tree in sources()
        for name, line in imports(tree)
        if relative not in ONLY_IN.get(name.split(".")[0], {relative})
    ]
    assert faults == []


def test_torch_elastic_hooks_have_their_files() -> None:
    faults = [
        f"{relative}:{line}: {name}"
        for relative, tree in sources()
        for name, line in imports(tree)
        if name.startswith(ELASTIC_INNER) and name != ELASTIC_PUBLIC and relative not in ELASTIC_FILES
    ]
    assert faults == []


def test_memory_and_the_reading_commands_do_not_need_torch() -> None:
    """`gemini-run status` answers in a fraction of the time that importing torch takes."""
    for relative, tree in sources():
        if layer(relative) == "memory" or relative in ("cli/main.py", "cli/status.py", "cli/view.py"):
            for node in tree.body:
                for name, line in imports(ast.Module([node], [])):
                    assert name.split(".")[0] != "torch", f"{relative}:{line}"


def test_an_agent_starts_without_what_only_uploads_need() -> None:
    """The import of torch.distributed.checkpoint alone would cost a replacement node a second before it can join."""
    code = "import sys, gemini_run.agent.launch; print('torch.distributed.checkpoint' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "False"
