"""First code of every worker that is plain Python: runs in the interpreter's start-up, before ``__main__`` exists.

Found because the agent puts this folder first on PYTHONPATH. It takes that back before anything else, so that the
script, its children and the user's own sitecustomize see nothing of it. Standard library only.
"""

import importlib
import os
import sys

TYPE_CHECKING = False  # typing itself is slow to import
if TYPE_CHECKING:
    from typing import Any


def _take_back() -> "dict[str, Any] | None":
    """Undo the injection; the agent's message to this interpreter, or None."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    sys.path_importer_cache.pop(here, None)
    text = os.environ.pop("GEMINI_BOOT", None)
    if text is None:
        return None
    import json

    boot: dict[str, Any] = json.loads(text)
    if boot["pythonpath"] is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = boot["pythonpath"]
    return boot


def _run_the_users_own() -> bool:
    """Import the sitecustomize that this one hides; False if there is none."""
    ours = sys.modules.pop("sitecustomize")
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = ours
        return False
    return True


_boot = _take_back()
if _boot is not None:
    # In a zygote this returns in the forked workers alone, once each.
    importlib.import_module(_boot["bootstrap"]).enter(_boot)
if not _run_the_users_own():
    raise ImportError(name="sitecustomize")  # site.py takes this as: there is none
