"""A device without hardware: torch takes its tensors for those of an accelerator, and their numbers are real.

It is torch's own way to add a device in Python, the backend PrivateUse1. A tensor of it is a wrapper subclass around a
CPU tensor; each operation runs the CPU's kernel on what is inside. So a run on it has the numbers of a run on the CPU,
and code that chooses by ``device.type`` takes the accelerator's way. As on CUDA, tensors of the CPU and of the device
do not mix, but for CPU scalars in pointwise operations; `Wait` records what makes the host wait for the device, as
``torch.cuda.set_sync_debug_mode`` finds it, and who asked; a copy to the host that is ``non_blocking`` arrives when an
event behind it, or the device, is synchronized, and until then the host reads NaN, or the smallest integer.

What it cannot show: the rounding of the device's kernels, speed, streams, the caching allocator, pinned memory, cuDNN,
NCCL and graphs. It needs a process of its own (`tests.support.ranks`), since torch does not forget a backend.
"""

import contextlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch._dynamo.eval_frame
from lightning.pytorch.accelerators import CPUAccelerator
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

try:
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
except ImportError:  # As in torch 2.9.
    pytest.skip(f"torch {torch.__version__} has no device that is written in Python", allow_module_level=True)

NAME = "standin"
ROOT = str(Path(__file__).resolve().parents[2])
_NOT_SHOWN = {__file__, torch._compile.__file__, torch._dynamo.eval_frame.__file__}

aten = torch.ops.aten
_WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "bincount"}
_WAITING |= {"_unique2", "unique_dim", "unique_consecutive"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
_COPIES = {aten.copy_.default, aten._to_copy.default, aten._copy_from.default}


class Wait:
    """What made the host wait for the device: an operation, and the functions that asked for it.

    Attributes:
        frames: file, function and line of each function on the stack, the innermost first.
        phase: "training step" and "validation step" go from the fetch of a batch to the end of its hooks, so that
            transfers and loggers are in them; "elsewhere" is the rest, as the start of a run and the end of an epoch.
        update: updates made in the run, in a training step.
        batch: number of the batch in its epoch.
        last: whether it is the last batch of its epoch.
    """

    seen: ClassVar[list["Wait"]] = []

    def __init__(self, operation: str) -> None:
        self.operation, self.phase, self.last = operation, "", False
        self.update = self.batch = -1
        self.frames: list[tuple[str, str, int]] = []
        self._depth: int | None = None
        frame: Any = sys._getframe(1)
        while frame is not None:
            code, owner = frame.f_code, frame.f_locals.get("self")
            if code.co_filename not in _NOT_SHOWN:
                self.frames.append((code.co_filename, code.co_name, frame.f_lineno))
            self._place(code.co_name, type(owner).__name__, owner)
            frame = frame.f_back
        self.phase = self.phase or "elsewhere"
        self.frames = self.frames[: self._depth]  # What started the run asked for nothing.
        Wait.seen.append(self)

    def _place(self, function: str, owner: str, loop: Any) -> None:
        if self.phase:
            return
        depth = len(self.frames)
        if owner in ("_EvaluationLoop", "SharedEvaluationLoop"):
            # Its `run` makes the loaders and the end of the epoch, too.
            if function in ("_evaluation_step", "run"):
                self.phase = "validation step" if function == "_evaluation_step" else "elsewhere"
                self.batch, self._depth = loop.batch_progress.current.ready - 1, depth
        elif owner in ("_TrainingEpochLoop", "UpdateLoop") and function == "advance":
            loop = getattr(loop, "loop", loop)
            self.phase, self.update = "training step", loop.global_step
            self.batch, self.last = loop.batch_progress.current.ready - 1, loop.batch_progress.is_last_batch
            self._depth = depth

    @property
    def site(self) -> str:
        """The innermost function of this project that asked, as "callbacks/train_loss.py:_totals"; else of all."""
        named = [f"{path.removeprefix(ROOT)}:{name}" for path, name, _ in self.frames if not name.startswith("<")]
        ours = [site for site in named if site.startswith(("/callbacks/", "/datamodules/", "/recipes/"))]
        return (ours or named)[0].removeprefix("/")

    def __repr__(self) -> str:
        stack = [f"{Path(path).name}:{line} {name}" for path, name, line in self.frames[:12]]
        return f"{self.phase} {self.batch}: {self.operation} in {self.site} ({' < '.join(stack)})"


class DeviceTensor(Tensor):
    """A tensor of the stand-in device around a CPU tensor, `raw`."""

    raw: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: Tensor) -> "DeviceTensor":
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            layout=raw.layout,
            device=torch.device(NAME, 0),
        )
        made.raw = raw
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    # `module.to` exchanges the parameters of such a subclass, and does not copy half of it.
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["raw"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> "DeviceTensor":
        return DeviceTensor(inner["raw"])

    def __reduce_ex__(self, protocol: Any) -> Any:
        Wait("save")
        _arrive()
        raw = self.raw.detach()
        if isinstance(self, torch.nn.Parameter):
            raw = torch.nn.Parameter(raw, self.requires_grad)
        return raw.__reduce_ex__(protocol)

    def tolist(self) -> Any:
        # torch's rejects every subclass.
        return self.to("cpu").tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError(f"can't convert {NAME}:0 device type tensor to numpy; use Tensor.cpu() before")

    def __repr__(self, **kwargs: Any) -> str:
        return f"DeviceTensor({list(self.shape)}, {self.dtype})"


_generator = torch.Generator()
_on_their_way: list[tuple[Tensor, Tensor]] = []


def _arrive(count: int | None = None) -> None:
    """Finish the copies to the host, the first `count` of them."""
    done = _on_their_way[:count]
    del _on_their_way[:count]
    for target, value in done:
        target.copy_(value)


def _copy_to_host(target: Tensor, value: Tensor, non_blocking: bool) -> Tensor:
    if non_blocking:
        if target.dtype != torch.bool:
            target.fill_(float("nan") if target.is_floating_point() else torch.iinfo(target.dtype).min)
        _on_their_way.append((target, value.clone()))
    else:
        Wait("copy to the host")
        _arrive()
        target.copy_(value)
    return target


def _check_mixture(func: Any, args: Any, kwargs: Any) -> None:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if not any(isinstance(t, DeviceTensor) for t in tensors):
        return
    host = [t for t in tensors if not isinstance(t, DeviceTensor)]
    name = func._schema.name.removeprefix("aten::")
    if name in _INDEXING:
        indices = [t for t in args[1] if t is not None]
        if any(t.dtype in (torch.bool, torch.uint8) for t in indices):
            Wait(f"{name} by a mask")
        if any(not isinstance(t, DeviceTensor) for t in indices):
            Wait(f"{name} by an index of the CPU")
        host = [t for t in host if not any(t is i for i in indices)]
    if not host:
        return
    scalars = all(t.dim() == 0 for t in host) and (torch.Tag.pointwise in func.tags or name in _INDEXING)
    # The steps of an optimizer that is not fused.
    if not scalars and not name.startswith("_foreach"):
        raise RuntimeError(f"Expected all tensors to be on the same device, but {name} got {NAME}:0 and cpu")


def _copy_into(target: Any, source: Any, non_blocking: bool) -> Any:
    if not isinstance(target, DeviceTensor):
        return _copy_to_host(target, source.raw.to(target.dtype).expand(target.shape), non_blocking)
    if not non_blocking and source.dim() > 0:
        Wait("copy_ to the device")
    target.raw.copy_(source)
    return target


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    on_device = any(isinstance(leaf, DeviceTensor) for leaf in leaves)
    device = kwargs.get("device")
    asked = None if device is None else torch.device(device).type
    if not on_device and asked != NAME:
        return func(*args, **kwargs)
    name = func._schema.name.removeprefix("aten::")
    if func is aten.copy_.default and isinstance(args[0], DeviceTensor) != isinstance(args[1], DeviceTensor):
        return _copy_into(args[0], args[1], args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    if func is aten._to_copy.default and asked is not None:
        non_blocking = kwargs.pop("non_blocking", False)
        source = args[0].raw if on_device else args[0]
        copied = func(source, **{**kwargs, "device": torch.device("cpu")})
        if asked == NAME:
            if not on_device and not non_blocking:
                Wait("to the device")
            return DeviceTensor(copied)
        return _copy_to_host(torch.empty_like(copied), copied, non_blocking)
    if func not in _COPIES:
        _check_mixture(func, args, kwargs)
    if name in _WAITING or (name == "repeat_interleave" and kwargs.get("output_size") is None):
        Wait(name)
        _arrive()
    wrappers = {id(leaf.raw): leaf for leaf in leaves if isinstance(leaf, DeviceTensor)}
    if torch.Tag.inplace_view in func.tags:  # As `transpose_`, which changes the shape of the wrapper, too.
        _reshape_wrapper(func, args, kwargs)
    args, kwargs = tree_map(lambda x: x.raw if isinstance(x, DeviceTensor) else x, (args, kwargs))
    if device is not None:
        kwargs["device"] = torch.device("cpu")
    if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
        with _device_generator():
            found = func(*args, **kwargs)
    else:
        found = func(*args, **kwargs)
    if isinstance(found, (bool, int, float)) and name not in _WAITING and on_device:
        Wait(name)  # As `allclose`.
        _arrive()
    if asked not in (None, NAME):
        return found

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return wrappers[id(value)] if id(value) in wrappers else DeviceTensor(value)

    return tree_map(wrap, found)


def _reshape_wrapper(func: Any, args: Any, kwargs: Any) -> None:
    before = torch._C._meta_in_tls_dispatch_include()
    with no_dispatch():
        torch._C._set_meta_in_tls_dispatch_include(True)
        try:
            func(*args, **kwargs)
        finally:
            torch._C._set_meta_in_tls_dispatch_include(before)


@contextlib.contextmanager
def _device_generator() -> Iterator[None]:
    host = torch.default_generator.get_state()
    torch.default_generator.set_state(_generator.get_state())
    try:
        yield
    finally:
        _generator.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(host)


class _Mode(TorchDispatchMode):
    """Sees what makes a tensor of the device from none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class Event:
    """`torch.Event` of the device: torch's cannot be written in Python."""

    def __init__(self, device: Any = None, **kwargs: Any) -> None:
        self._copies = 0

    def record(self, stream: Any = None) -> None:
        self._copies = len(_on_their_way)
        self._newest = _on_their_way[-1][0] if _on_their_way else None

    def synchronize(self) -> None:
        targets = [target for target, _ in _on_their_way]
        _arrive(next((i + 1 for i, target in enumerate(targets) if target is self._newest), 0))

    wait = synchronize

    def query(self) -> bool:
        return not any(target is self._newest for target, _ in _on_their_way)


class _Module(types.ModuleType):
    """``torch.standin``: what torch and this project ask of the module of a device."""

    def __init__(self) -> None:
        super().__init__(f"torch.{NAME}")
        self.Event = Event
        self.is_initialized = self.is_available = lambda: True
        self.current_device, self.device_count, self._is_in_bad_fork = lambda: 0, lambda: 1, lambda: False
        self.manual_seed = self.manual_seed_all = _generator.manual_seed
        self.get_rng_state = lambda _=None: _generator.get_state()
        self.set_rng_state = lambda state, _=None: _generator.set_state(state)
        self.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]

    def synchronize(self, device: Any = None) -> None:
        Wait("synchronize")
        _arrive()


_engine_run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]


def _run_backward(*args: Any, **kwargs: Any) -> Any:
    """Backward in the calling thread: torch starts no thread for a device that is written in Python."""
    with torch.autograd.set_multithreading_enabled(False):
        return _engine_run_backward(*args, **kwargs)


class StandInAccelerator(CPUAccelerator):
    """Lightning's side of the device."""

    def setup_device(self, device: torch.device) -> None:
        pass

    @staticmethod
    def name() -> str:
        return NAME


@contextlib.contextmanager
def stand_in_device() -> Iterator[torch.device]:
    """Add the device to this process, which keeps it, and run a block with it."""
    if torch._C._get_privateuse1_backend_name() != NAME:
        _setup_privateuseone_for_python_backend(NAME, _Module())
        torch.Event = Event  # type: ignore[misc, assignment]
        torch.autograd._engine_run_backward = _run_backward  # type: ignore[attr-defined]
    _generator.manual_seed(0)
    Wait.seen.clear()
    # `torch.tensor(..., device=)` makes a tensor of the CPU and copies it, past all modes without this.
    torch._C._set_only_lift_cpu_tensors(True)
    with _Mode():
        yield torch.device(NAME, 0)
    torch._C._set_only_lift_cpu_tensors(False)
