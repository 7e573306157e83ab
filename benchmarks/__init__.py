"""Benchmarks of the recipes and of their alternatives, such as plain PyTorch loops: ``python -m benchmarks``.

A section is a module of `benchmarks.sections` with ``run(options, progress)``, which returns a `Section` of
`benchmarks.harness.measurements`. `benchmarks.gpu` measures on a GPU, `benchmarks.faults` breaks runs.
"""

__all__ = ["SECTIONS"]

SECTIONS = {
    "training_loop": "a step of the recipe, of plain PyTorch loops, of stock Lightning and of other libraries",
    "time_to_accuracy": "seconds to 99 % on MNIST's test set, compared with PyTorch's example",
    "input_pipeline": "seconds to load and augment an epoch of MNIST",
    "images": "photographs a second that a core loads, compared with ImageFolder and with the decoder alone",
    "callbacks_cost": "microseconds that the callbacks add to an update",
    "checkpoint_cost": "how long training is blocked while a checkpoint is saved",
    "start_up": "seconds to the first step, by part, and of --help",
    "fine_tuning": "seconds of a step with a frozen backbone, and of an epoch with cached features",
    "seq2seq": "target tokens a second and BLEU of a translator in training",
    "decoding": "sentences a second that a beam search translates",
    "scaling": "throughput of more processes on this machine",
    "equal_bits": "an update with sums whose bits do not depend on the processes, compared with PyTorch's own",
}
"""Sections in the order in which they run, and what each measures."""
