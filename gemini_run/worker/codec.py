"""Values that are not tensors, as JSON: exact, typed, and readable without running anyone's code.

What JSON can say is said in JSON; what it cannot is tagged with a ``$`` key. Tensors are left in the payload
and named by their item index. Only objects of classes unknown here fall back to pickle, and only a worker of
the same run (whose script brings the classes) ever unpickles them: agents, `status` and `recover` never do.
"""

from __future__ import annotations

import base64
import collections
import json
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from gemini_run.errors import FormatVersionError, ReplicaCorrupt, UnsupportedState

OBJECTS_VERSION = 2
Json = Any

#: gives the tree that stands for a tensor ({"$tensor": item index, ...}), called as (tensor, path)
TensorSink = Callable[[torch.Tensor, str], Json]

_PLAIN = (type(None), bool, int, float, str)


def encode(value: Any, path: str, sink: TensorSink) -> Json:
    """`value` as a JSON tree; its tensors go to `sink`.

    Raises:
        UnsupportedState: neither JSON nor pickle can say it; names `path`.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return value if _all_plain(value) else [encode(v, f"{path}.{i}", sink) for i, v in enumerate(value)]
    if kind is tuple:
        plain = _all_plain(value)
        return {"$tuple": list(value) if plain else [encode(v, f"{path}.{i}", sink) for i, v in enumerate(value)]}
    if kind is dict or kind is collections.OrderedDict:
        return _encode_dict(value, path, sink, ordered=kind is not dict)
    if isinstance(value, torch.Tensor):
        return sink(value, path)
    if kind is np.ndarray and not value.dtype.hasobject and value.dtype.fields is None:
        return {"$ndarray": [value.dtype.str, list(value.shape), _b64(value.tobytes())]}
    if isinstance(value, np.generic) and not value.dtype.hasobject and value.dtype.fields is None:
        return {"$npscalar": [value.dtype.str, _b64(value.tobytes())]}
    if kind is bytes:
        return {"$bytes": _b64(value)}
    if kind is complex:
        return {"$complex": [value.real, value.imag]}
    if kind is torch.Size:
        return {"$size": list(value)}
    if kind is torch.dtype:
        return {"$dtype": str(value).removeprefix("torch.")}
    if kind is torch.device:
        return {"$device": str(value)}
    if kind is set or kind is frozenset:
        name = "$set" if kind is set else "$frozenset"
        return {name: [encode(v, f"{path}.{i}", sink) for i, v in enumerate(value)]}
    if kind is collections.deque:
        return {"$deque": [value.maxlen, [encode(v, f"{path}.{i}", sink) for i, v in enumerate(value)]]}
    try:
        return {"$pickle": _b64(pickle.dumps(value))}
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise UnsupportedState(
            f"{path}: a {kind.__module__}.{kind.__qualname__} cannot be checkpointed ({error}): leave it out of "
            "what the Checkpointer is given, or give the object a state_dict() without it"
        ) from error


def _encode_dict(value: dict[Any, Any], path: str, sink: TensorSink, *, ordered: bool) -> Json:
    simple = not ordered and all(type(k) is str and not k.startswith("$") for k in value)
    if simple:
        return {k: encode(v, f"{path}.{k}", sink) for k, v in value.items()}
    pairs = [[encode(k, path, sink), encode(v, f"{path}.{k}", sink)] for k, v in value.items()]
    return {"$odict" if ordered else "$dict": pairs}


def _all_plain(values: Sequence[Any]) -> bool:
    return all(type(v) in _PLAIN for v in values)


def decode(tree: Json, tensors: Callable[[dict[str, Any]], Any], *, allow_pickle: bool = False) -> Any:
    """The value that `encode` was given.

    Args:
        tree: what `encode` returned.
        tensors: gives the tensor for a leaf ``{"$tensor": index, ...}``.
        allow_pickle: only in the worker that made it; else a pickled leaf becomes a `Pickled` note.
    """
    if isinstance(tree, list):
        return [decode(v, tensors, allow_pickle=allow_pickle) for v in tree]
    if not isinstance(tree, dict):
        return tree
    tag = next(iter(tree), "")
    if not tag.startswith("$"):
        return {k: decode(v, tensors, allow_pickle=allow_pickle) for k, v in tree.items()}
    body = tree[tag]
    if tag == "$tensor":
        return tensors(tree)
    if tag == "$pickle":
        raw = base64.b64decode(body)
        return pickle.loads(raw) if allow_pickle else Pickled(len(raw))
    if tag == "$ndarray":
        dtype, shape, data = body
        return np.frombuffer(base64.b64decode(data), dtype=np.dtype(dtype)).reshape(shape).copy()
    if tag == "$npscalar":
        return np.frombuffer(base64.b64decode(body[1]), dtype=np.dtype(body[0]))[0]
    if tag == "$bytes":
        return base64.b64decode(body)
    if tag == "$complex":
        return complex(*body)
    if tag == "$size":
        return torch.Size(body)
    if tag == "$dtype":
        return getattr(torch, body)
    if tag == "$device":
        return torch.device(body)
    if tag in ("$dict", "$odict"):
        pairs = [
            (decode(k, tensors, allow_pickle=allow_pickle), decode(v, tensors, allow_pickle=allow_pickle))
            for k, v in body
        ]
        return dict(pairs) if tag == "$dict" else collections.OrderedDict(pairs)
    if tag == "$deque":
        return collections.deque(decode(body[1], tensors, allow_pickle=allow_pickle), maxlen=body[0])
    makers: dict[str, Callable[[Any], Any]] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}
    if tag not in makers:
        raise ReplicaCorrupt(f"object state has an unknown tag {tag!r}")
    return makers[tag](decode(body, tensors, allow_pickle=allow_pickle))


class Pickled:
    """Stands for an object that only the training script can read."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def __repr__(self) -> str:
        return f"<pickled object, {self.num_bytes} bytes>"


def pack_objects(iteration: int, static: bytes, dynamic: dict[str, Json]) -> bytes:
    """The objects section of a slot. `static` is the JSON of what changes only with the structure."""
    head = b'{"version":%d,"iteration":%d,"static":' % (OBJECTS_VERSION, iteration)
    return head + static + b',"dynamic":' + json.dumps(dynamic, separators=(",", ":")).encode() + b"}"


def unpack_objects(section: bytes) -> tuple[int, dict[str, Json], dict[str, Json]]:
    """(iteration, static, dynamic) of an objects section.

    Raises: FormatVersionError for an unknown version, ReplicaCorrupt if it cannot be read.
    """
    try:
        body = json.loads(section)
        version = body["version"]
        if version != OBJECTS_VERSION:
            raise FormatVersionError(
                f"object state of format version {version}; this release reads version {OBJECTS_VERSION}"
            )
        return body["iteration"], body["static"], body["dynamic"]
    except (ValueError, KeyError, TypeError) as error:
        raise ReplicaCorrupt(f"unreadable object state: {error}") from error


def state_dicts(section: bytes, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    """A whole shard in torch's own shapes: ``{"iteration": k, <component>: its state_dict, "rng": ...}``.

    Models become ``{name: tensor}``, optimizers ``{"state": {i: {...}}, "param_groups": [...]}`` as
    `torch.optim.Optimizer.state_dict` gives them. `tensors` in manifest order.
    """
    iteration, static, dynamic = unpack_objects(section)

    def tensor(leaf: dict[str, Any]) -> torch.Tensor:
        index: int = leaf["$tensor"]
        return tensors[index]

    result: dict[str, Any] = {"iteration": iteration}
    for name, fixed in static.items():
        fixed_value = decode(fixed, tensor)
        moving = decode(dynamic.get(name), tensor)
        kind = fixed_value["kind"]
        if kind == "module":
            result[name] = {**fixed_value["tensors"], **(moving or {})}
        elif kind == "optimizer":
            state: dict[int, dict[str, Any]] = {}
            for position, entries in fixed_value["state"]:
                state.setdefault(position, {}).update(entries)
            for position, entries in moving["state"]:
                state.setdefault(position, {}).update(entries)
            groups = [
                {**group, "params": params}
                for group, params in zip(moving["param_groups"], fixed_value["params"], strict=True)
            ]
            result[name] = {"state": dict(sorted(state.items())), "param_groups": groups}
        else:
            result[name] = moving
    return result


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
