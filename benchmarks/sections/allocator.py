"""glibc's allocator at its defaults and as the command line tunes it, in processes of their own.

Large activations are otherwise mapped and returned to the system at every step, and each of their pages faults again.
"""

import json
import resource
import sys
import time
from collections import defaultdict
from functools import partial
from statistics import median

from benchmarks.harness.measurements import Column, Goal, Options, Progress, Section, Spread, alternate, available_cores
from benchmarks.harness.processes import answer_of

__all__ = ["run"]

CASES = {"default network, batch 256": ("default", 256), "classic network, batch 512": ("classic", 512)}
GOAL = 1.2


def train(network: str, batch_size: int, steps: int, threads: int, tuned: bool) -> dict[str, float]:
    """Seconds, page faults and peak megabytes of a step in this process, after two that do not count."""
    import torch
    import torch.nn.functional as F

    from callbacks.lib.memory import peak_memory
    from recipes.launch.host_tuning import stop_gpu_search, tune_allocator
    from recipes.mnist.network import ClassicNet, MNISTNet

    stop_gpu_search()
    if tuned:
        tune_allocator()
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    model = {"default": MNISTNet, "classic": ClassicNet}[network]()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    images, labels = torch.randn(batch_size, 1, 28, 28), torch.randint(10, (batch_size,))
    start = faults = 0.0
    for step in range(2 + steps):
        if step == 2:
            start, faults = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    seconds = time.perf_counter() - start
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    return {
        "seconds": seconds / steps,
        "faults": faults / steps,
        "megabytes": peak_memory(torch.device("cpu")) / 2**20,
    }


def run(options: Options, progress: Progress | None = None) -> Section:
    """Trains each network with both allocators in turn."""
    threads = options.threads or available_cores()
    steps, repeats = (2, options.repeats or 1) if options.quick else (30, options.repeats or 5)
    found: dict[str, list[dict[str, float]]] = defaultdict(list)

    def measure(name: str, network: str, batch_size: int, tuned: bool) -> float:
        answer = answer_of(
            "-m", "benchmarks.sections.allocator", json.dumps([network, batch_size, steps, threads, tuned]),
        )  # fmt: skip
        found[name].append(answer)
        return float(answer["seconds"])

    contenders = {
        f"{case}, {kind}": partial(measure, f"{case}, {kind}", *CASES[case], kind == "tuned")
        for case in CASES
        for kind in ("default", "tuned")
    }
    timings = alternate(contenders, repeats, progress=progress)
    rows: dict[str, list[Spread | None]] = {}
    for name in contenders:
        case = name.rpartition(", ")[0]
        rows[name] = [
            timings.spread(name, 1e-3),
            timings.ratio(f"{case}, default", name) if name.endswith("tuned") else None,
        ]
    ratios = {case: timings.ratio(f"{case}, default", f"{case}, tuned") for case in CASES}
    return Section(
        title="allocator: large blocks kept between steps",
        header={
            "network": "MNIST's two, AdamW in one kernel, one batch again and again",
            "threads": f"{threads} of torch, on {available_cores()} cores",
            "precision": "float32",
            "repeats": f"{timings.rounds} rounds of processes in turn, {steps} steps each, after 1 that does not count",
        },
        columns=[Column("milliseconds a step", ".1f"), Column("times faster", ".2f")],
        rows=rows,
        goals=[
            Goal(f"{case}: {GOAL} times faster", f"{r.median:.2f} ({r.low:.2f} to {r.high:.2f})", r.median >= GOAL)
            for case, r in ratios.items()
        ],
        notes=["glibc on Linux only"],
        interrupted=timings.interrupted,
        details={
            name: {
                "page faults a step": median(answer["faults"] for answer in answers),
                "peak megabytes": median(answer["megabytes"] for answer in answers),
            }
            for name, answers in found.items()
        },
    )


if __name__ == "__main__":
    print(json.dumps(train(*json.loads(sys.argv[1]))))
