"""Values and flags between the ranks.

Lightning's `Strategy.broadcast` and torch's ``all_gather_object`` unpickle what arrives, and whoever can reach a rank's
ports may have sent it. Here a value is JSON in a uint8 tensor, over gloo and NCCL alike.

A rank that acts on a flag of its own leaves the others waiting: all take part in an all-reduce of it, and act alike.
"""

import base64
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from torch import Tensor


def _as_json(value: Any) -> Any:
    """A value as what JSON holds without loss: a list, or a pair of a kind and its content in a dict."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_as_json(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [_as_json(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[_as_json(key), _as_json(item)] for key, item in value.items()]}
    if isinstance(value, Path):
        return {"path": str(value)}
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), base64.b64encode(data).decode()]}
    raise TypeError(
        f"ranks exchange numbers, strings, lists, tuples, dicts, paths and tensors, not {type(value).__name__}: a"
        " pickle of it could run code"
    )


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tuple":
        return tuple(map(_from_json, content))
    if kind == "dict":
        return {_from_json(key): _from_json(item) for key, item in content}
    if kind == "path":
        return Path(content)
    if kind != "tensor":
        raise ValueError(f"{kind!r} is no kind of value that ranks exchange")
    name, shape, data = content
    dtype: torch.dtype = getattr(torch, name)
    buffer = bytearray(base64.b64decode(data))
    return (torch.frombuffer(buffer, dtype=dtype) if buffer else torch.empty(0, dtype=dtype)).reshape(shape)


def encode(value: Any) -> bytes:
    """A value as bytes.

    Raises:
        TypeError: it holds something else than numbers, strings, lists, tuples, dicts, paths and tensors.

    Example:
        >>> encode({"best": ("a.ckpt", 0.5)})
        b'{"dict": [["best", {"tuple": ["a.ckpt", 0.5]}]]}'
    """
    return json.dumps(_as_json(value)).encode()


def decode(data: bytes) -> Any:
    """The value that was encoded; tensors on the CPU.

    Example:
        >>> decode(encode({1: [None, torch.ones(2)], "b": Path("c")}))
        {1: [None, tensor([1., 1.])], 'b': ...Path('c')}
    """
    return _from_json(json.loads(data))


def _device(strategy: Strategy) -> torch.device:
    """Where the tensors of a collective call lie: gloo takes those of the CPU, NCCL only its device's."""
    return torch.device("cpu") if "gloo" in dist.get_backend() else strategy.root_device


def _several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized()


def broadcast(strategy: Strategy, value: Any, src: int = 0) -> Any:
    """The value of rank `src`, on all ranks; to be called on all of them."""
    if not _several_ranks():
        return strategy.broadcast(value, src)  # One process, or a strategy without torch.distributed.
    device, sends = _device(strategy), dist.get_rank() == src
    data = torch.frombuffer(bytearray(encode(value) if sends else b"\0"), dtype=torch.uint8).to(device)
    size = torch.tensor(len(data), device=device)
    dist.broadcast(size, src)
    data = data if sends else torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(data, src)
    return decode(data.cpu().numpy().tobytes())


def gather(strategy: Strategy, value: Any) -> list[Any]:
    """The values of all ranks, by rank; to be called on all of them."""
    if not _several_ranks():
        return [value]
    return [broadcast(strategy, value, rank) for rank in range(dist.get_world_size())]


def without_pickles(strategy: Strategy) -> None:
    """Have a strategy's own `broadcast`, which Lightning's callbacks and loggers call, exchange values in this way."""
    stock = strategy.broadcast

    def exchanged(obj: Any, src: int = 0) -> Any:
        return broadcast(strategy, obj, src) if _several_ranks() else stock(obj, src)

    strategy.broadcast = exchanged  # type: ignore[method-assign]


class FlagAllReduce:
    """Whether a flag is set on any rank, over gloo, so that no device is waited for.

    The ranks have to call the same methods in the same order. On one process the flag is its own.

    Args:
        world_size: the number of ranks.
        timeout: how long to wait for the others; by default half an hour.
    """

    def __init__(self, world_size: int, timeout: timedelta | None = None) -> None:
        self._single = world_size == 1
        # A group of its own: what others reduce, on devices or in another order, does not interfere.
        self._group: Any = None if self._single else dist.new_group(backend="gloo", timeout=timeout)
        self._flags = torch.zeros(1, dtype=torch.int64)
        self._pending: dist.Work | None = None

    def start(self, flag: bool) -> bool:
        """Starts the all-reduce of a flag, and returns the result of the one before, which costs no waiting."""
        if self._single:
            return flag
        result = self.wait()
        self._flags.fill_(flag)
        self._pending = dist.all_reduce(self._flags, group=self._group, async_op=True)
        return result

    def wait(self) -> bool:
        """Whether any rank set the flag in the last all-reduce; False when called again."""
        if self._pending is None:
            return False
        self._pending.wait()
        self._pending = None
        return bool(self._flags.item())

    def maximum(self, *values: float) -> list[float]:
        """The largest of each value over the ranks."""
        found = torch.tensor(values, dtype=torch.float64)
        if not self._single:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return list(found.tolist())
