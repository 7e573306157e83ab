"""Which operators give other bits with another number of threads, or on another kind of processor.

    python -m benchmarks.operators                  # each operator in four modes on 1, 2 and 4 threads, and their cost
    python -m benchmarks.operators --write          # also writes results/portable/PROCESSOR.json
    python -m benchmarks.operators --against FILE   # compares with the file of another processor

The inputs come from integer arithmetic, so they are the same bits on any machine. The modes are environment variables
that limit kernels to older instructions, as MKL's and oneDNN's manuals describe.
"""

import argparse
import datetime
import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness.processes import ROOT, answer_of
from recipes.goldens import processor_kind

RESULTS = ROOT / "benchmarks" / "results" / "portable"
_CAPPED = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2,STRICT"}
MODES: dict[str, dict[str, str]] = {
    "default": {},
    "avx2": _CAPPED,
    "avx2, no oneDNN": _CAPPED | {"NO_ONEDNN": "1"},
    "compatible": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"},
}
"""The variables of each mode; NO_ONEDNN is this program's own."""
THREADS = (1, 2, 4)
_ROUNDS = 7


def numbers(*shape: int, seed: int = 1) -> Tensor:
    """Return float32 numbers from -1 to 1 by integer arithmetic alone."""
    n = torch.arange(int(torch.tensor(shape).prod()), dtype=torch.int64) + seed * 7919
    n = (n * 6364136223846793005 + 1442695040888963407) >> 33
    n = (n ^ (n >> 13)) * 1274126177 & 0xFFFFFF
    return (n.to(torch.float32) / 2**23 - 1).reshape(shape)


def _with_gradients(call: Callable[..., Any], *inputs: Tensor) -> list[Tensor]:
    """Return the output of a function and the gradients of its inputs."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    output = call(*leaves)
    output.backward(numbers(*output.shape, seed=9).to(output.dtype))
    return [output, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def _convolution(
    batch: int, channels: int, size: int, kernel: int = 3, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    inputs = numbers(batch, channels, size, size), numbers(16, channels, kernel, kernel, seed=2), numbers(16, seed=3)
    in_layout = [tensor.to(dtype, memory_format=torch.channels_last) for tensor in inputs[:2]]
    return _with_gradients(F.conv2d, *in_layout, inputs[2].to(dtype))


def _batch_norm(layout: torch.memory_format) -> list[Tensor]:
    x = numbers(64, 32, 16, 16).to(memory_format=layout)
    return _with_gradients(
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), x, numbers(32, seed=2), numbers(32, seed=3)
    )


def _recurrent(network: nn.RNNBase) -> list[Tensor]:
    for number, parameter in enumerate(network.parameters()):
        parameter.data.copy_(numbers(*parameter.shape, seed=number + 2) / 8)
    output = network(numbers(32, 20, 64))[0]
    output.backward(numbers(*output.shape, seed=9))
    return [output, *(parameter.grad for parameter in network.parameters() if parameter.grad is not None)]


def _updated(optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> list[Tensor]:
    weights = [nn.Parameter(numbers(300, 500)), nn.Parameter(numbers(500, seed=2))]
    updates = optimizer(weights, lr=0.01, **options)
    for update in range(3):
        for parameter in weights:
            parameter.grad = numbers(*parameter.shape, seed=20 + update)
        updates.step()
    return [parameter.detach() for parameter in weights]


def _drawn() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.rand(1000), torch.randn(7), torch.randn(1000), F.dropout(torch.ones(1000)), torch.randperm(1000)]


def _operators() -> dict[str, Callable[[], Sequence[Tensor]]]:
    """Return a function for each operator, which computes its outputs, and its gradients where it has some."""
    bf16 = torch.bfloat16
    wide = numbers(100_001) * 5
    found: dict[str, Callable[[], Sequence[Tensor]]] = {
        "product, 64": lambda: [numbers(64, 64) @ numbers(64, 64, seed=2)],
        "product, 1024": lambda: [numbers(1024, 1024) @ numbers(1024, 1024, seed=2)],
        "product, 256 x 300 x 500": lambda: [numbers(256, 300) @ numbers(300, 500, seed=2)],
        "linear": lambda: _with_gradients(F.linear, numbers(256, 300), numbers(500, 300, seed=2), numbers(500, seed=3)),
        "batched product": lambda: [torch.bmm(numbers(16, 32, 48), numbers(16, 48, 32, seed=2))],
        "conv2d, 1 channel, 5 x 5": lambda: _convolution(256, 1, 28, 5),
        "conv2d, 3 channels, 7 x 7": lambda: _convolution(16, 3, 64, 7),
        "conv2d, 16 channels": lambda: _convolution(64, 16, 32),
        "conv2d, 64 channels": lambda: _convolution(64, 64, 16),
        "conv2d, depthwise": lambda: _with_gradients(
            lambda x, w: F.conv2d(x, w, padding=1, groups=32), numbers(32, 32, 16, 16), numbers(32, 1, 3, 3, seed=2)
        ),
        "batch_norm": lambda: _batch_norm(torch.contiguous_format),
        "batch_norm, channels_last": lambda: _batch_norm(torch.channels_last),
        "layer_norm": lambda: _with_gradients(
            lambda x, w, b: F.layer_norm(x, (256,), w, b), numbers(32, 20, 256), numbers(256, seed=2), numbers(256)
        ),
        "sum of all, 10 thousand": lambda: [numbers(10_000).sum()],
        "sum of all, 1 million": lambda: [numbers(1_000_000).sum()],
        "sum over the first axis": lambda: [numbers(512, 300).sum(0)],
        "sum over the last axis": lambda: [numbers(512, 300).sum(1)],
        "norm": lambda: [numbers(100_000).norm()],
        "cumsum": lambda: [numbers(100_000).cumsum(0)],
        "pow": lambda: [wide.abs().pow(0.5), wide.abs().pow(1.7)],
        "gelu, silu": lambda: [F.gelu(wide), F.silu(wide)],
        "softmax": lambda: _with_gradients(lambda x: x.softmax(-1), numbers(64, 10, 11)),
        "log_softmax": lambda: _with_gradients(lambda x: x.log_softmax(-1), numbers(100, 1000)),
        "cross_entropy": lambda: _with_gradients(
            lambda x: F.cross_entropy(x, torch.arange(256) % 10).reshape(1), numbers(256, 10)
        ),
        "max_pool2d, avg_pool2d": lambda: [
            F.max_pool2d(numbers(64, 32, 16, 16), 2),
            F.avg_pool2d(numbers(64, 32, 16, 16), 3),
        ],
        "resize, antialiased": lambda: [
            F.interpolate(numbers(4, 3, 97, 131), (64, 64), mode="bilinear", antialias=True)
        ],
        "grid_sample": lambda: [
            F.grid_sample(numbers(4, 3, 32, 32), numbers(4, 32, 32, 2, seed=2), align_corners=False)
        ],
        "embedding": lambda: _with_gradients(lambda w: F.embedding(torch.arange(2000) % 37, w), numbers(50, 64)),
        "index_add": lambda: [torch.zeros(10, 64).index_add(0, torch.arange(1000) % 10, numbers(1000, 64))],
        "GRU": lambda: _recurrent(nn.GRU(64, 128, batch_first=True)),
        "LSTM": lambda: _recurrent(nn.LSTM(64, 128, batch_first=True)),
        "attention": lambda: _with_gradients(
            F.scaled_dot_product_attention, *(numbers(8, 4, 40, 32, seed=seed) for seed in (1, 2, 3))
        ),
        "AdamW, fused": lambda: _updated(torch.optim.AdamW, fused=True),
        "SGD, foreach": lambda: _updated(torch.optim.SGD, foreach=True, momentum=0.9),
        "bf16 product": lambda: [numbers(256, 300).to(bf16) @ numbers(300, 500, seed=2).to(bf16)],
        "bf16 linear": lambda: _with_gradients(F.linear, numbers(256, 300).to(bf16), numbers(500, 300).to(bf16)),
        "bf16 conv2d": lambda: _convolution(64, 16, 32, dtype=bf16),
        "random numbers": _drawn,
    }
    for name in ("exp", "tanh", "sigmoid", "erf", "sin", "expm1"):
        found[name] = lambda name=name: [getattr(torch, name)(wide)]  # type: ignore[misc]
    for name in ("sqrt", "log", "rsqrt", "reciprocal"):
        found[name] = lambda name=name: [getattr(torch, name)(wide.abs() + 0.01)]  # type: ignore[misc]
    return found


def _sha(tensors: Sequence[Tensor]) -> str:
    data = b"".join(tensor.detach().contiguous().float().numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(data).hexdigest()[:8]


def _convolutional_step() -> float:
    """Return the seconds of an update of a small convolutional network, in channels_last as the recipes have it."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    network = nn.Sequential(*layers, nn.Linear(32, 10)).to(memory_format=torch.channels_last)
    images = numbers(64, 3, 32, 32).to(memory_format=torch.channels_last)
    seconds = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        F.cross_entropy(network(images), torch.arange(64) % 10).backward()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def measure_here(threads: int) -> dict[str, Any]:
    """Return the hash of each operator in this process, and the seconds of a step."""
    torch.set_num_threads(threads)
    if "NO_ONEDNN" in os.environ:
        torch._C._set_mkldnn_enabled(False)
    return {"hashes": {name: _sha(call()) for name, call in _operators().items()}, "step": _convolutional_step()}


def measure() -> dict[str, Any]:
    """Measure all modes and numbers of threads, each in a process of its own."""
    kind, model = processor_kind()
    measured: dict[str, Any] = {}
    for mode, variables in MODES.items():
        for threads in THREADS:
            answer = answer_of("-m", "benchmarks.operators", "--here", str(threads), **variables)
            measured.setdefault(mode, {})[str(threads)] = answer
    about = {"date": datetime.date.today().isoformat(), "torch": torch.__version__, "model": model}
    return {"processor": kind, **about, "modes": measured}


def dependent(of_threads: dict[str, Any]) -> list[str]:
    """Return the operators whose hash depends on the number of threads in a mode."""
    names = next(iter(of_threads.values()))["hashes"]
    return [name for name in names if len({run["hashes"][name] for run in of_threads.values()}) > 1]


def _print(measured: dict[str, Any]) -> None:
    one_thread = measured["modes"]["default"]["1"]["step"]
    print(f"{measured['processor']}, torch {measured['torch']}, {measured['date']}")
    for mode, of_threads in measured["modes"].items():
        names = dependent(of_threads)
        total = len(of_threads["1"]["hashes"])
        cost = ", ".join(f"{run['step'] / one_thread:.2f} on {threads}" for threads, run in of_threads.items())
        print(f"\n{mode}: {len(names)} of {total} operators depend on the number of threads: {', '.join(names)}")
        print(f"  a step of a convolutional network, in times of the default on one thread: {cost}")


def _compare(measured: dict[str, Any], other: dict[str, Any]) -> None:
    print(f"\non one thread, {measured['processor']} beside {other['processor']}:")
    for mode, of_threads in measured["modes"].items():
        own, theirs = of_threads["1"]["hashes"], other["modes"][mode]["1"]["hashes"]
        differing = [name for name in own if own[name] != theirs.get(name)]
        print(f"  {mode}: {len(own) - len(differing)} of {len(own)} equal; others: {', '.join(differing)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the hashes of this processor")
    parser.add_argument("--against", type=Path, metavar="FILE", help="the hashes of another processor")
    parser.add_argument("--here", type=int, metavar="THREADS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        print(json.dumps(measure_here(args.here)))
        return
    measured = measure()
    _print(measured)
    if args.against:
        _compare(measured, json.loads(args.against.read_text()))
    if args.write:
        RESULTS.mkdir(exist_ok=True)
        name = measured["processor"].lower().replace(" ", "-")
        (RESULTS / f"{name}.json").write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
