"""Compares what a change has to leave as it was: the weights of 19 runs, predictions, and what 73 commands print.

    python -m benchmarks.before_after --write before.json        # on the commit before the change
    python -m benchmarks.before_after --against before.json      # after it

The commands are run in a folder with a little data of each form. Times, sizes, process ids and folders in their output
are left out.
"""

import argparse
import difflib
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.harness.processes import ROOT

__all__ = ["COMMANDS", "RUNS", "main"]

_DIGITS = "python -m recipes.mnist --dataset digits --batch-size 64 --global-batch-size 128"
_PHOTOS = "python -m recipes.resnet --data-dir photos --arch resnet18 --weights none --image-size 32 --batch-size 4"
_PAIRS = "python -m recipes.seq2seq --data-file pairs.tsv --batch-size 8"
_GRAY = "python -m recipes.mnist --batch-size 8 --max-steps 3"
_HASH_ROWS = "--output rows.json; echo SHA-256 $(sha256sum < rows.json) && rm rows.json"
_QUICK = "--max-steps 2 --no-enable-progress-bar"

RUNS = {
    "digits on one device": f"{_DIGITS} --max-epochs 2",
    "digits on two": f"{_DIGITS} --max-epochs 2 --devices 2",
    "digits by torchrun": f"torchrun --standalone --nproc-per-node 2 -m {_DIGITS.split(' -m ')[1]} --max-epochs 2",
    "digits, stopped on two devices and resumed on one": (
        f"{_DIGITS} --max-epochs 2 --max-steps 7 --devices 2 --name stopped --save-every 1"
        f" && {_DIGITS} --max-epochs 2 --max-steps -1 --name stopped --resume auto"
    ),
    "photographs on two": f"{_PHOTOS} --max-steps 3 --devices 2",
    "sentences on two": f"{_PAIRS} --max-steps 3 --devices 2",
    # The forms of images, and the two pipelines: tensors in memory, and files.
    "photographs of a zip": f"{_PHOTOS.replace('photos', 'photos.zip')} --max-steps 3 --name zip",
    "photographs of a list": f"{_PHOTOS.replace('photos', 'photos.csv')} --max-steps 3 --augment light",
    "class folders, balanced, with parts held out": (
        f"{_PHOTOS.replace('photos', 'photos/train')} --max-steps 3 --balance loss"
        " --val-fraction 0.2 --test-fraction 0.1"
    ),
    "large photographs from a cache, mixed, with workers": (
        f"{_PHOTOS} --image-size 64 --max-epochs 2 --mixup 0.2 --cutmix 1 --num-workers 2 --cache-gb 1"
    ),
    "cached features": f"{_PHOTOS} --max-epochs 2 --augment none --freeze-until fc --bn eval --cache-features",
    "colored arrays": f"{_PHOTOS.replace('photos', 'colors.npz')} --max-steps 3 --val-fraction 0.2",
    "colored digits": "python -m recipes.resnet --dataset digits --arch resnet20 --max-steps 3",
    "idx files": f"{_GRAY} --data-dir idx --name idx",
    "clothes": f"{_GRAY} --data-dir idx --dataset fashion-mnist --val-fraction 0.2",
    "drawings": f"{_GRAY} --data-dir drawings --val-fraction 0.2 --balance loss --name drawings",
    "inverted drawings": f"{_GRAY} --data-dir drawings --invert --rotation 0 --scale 0 --shift 0",
    "gray arrays": f"{_GRAY} --data-dir gray.npz --columns images=x,labels=y --flip",
    "arrays of a program": "python program.py data=gray.npz",
    # Predictions.
    "predictions of photographs": (
        f"python -m recipes.resnet predict --ckpt runs/resnet/zip/checkpoints/last.ckpt photos text.ckpt {_HASH_ROWS}"
    ),
    "predictions of drawings": (
        f"python -m recipes.mnist predict --ckpt runs/mnist/drawings/checkpoints/last.ckpt drawings photos {_HASH_ROWS}"
    ),
    "predictions of a part": "python program.py predict=gray.npz",
    "scores of the test part": f"python -m recipes.mnist test --ckpt runs/mnist/idx/checkpoints/last.ckpt {_HASH_ROWS}",
}
"""Runs whose weights are compared, in this order; the first three end with the same ones. Then what is predicted."""

COMMANDS = (
    # Help and names.
    *("python -m recipes", "python -m recipes.mnist --help", "python -m recipes.resnet --help-all"),
    *("python -m recipes.seq2seq predict --help", "python -m recipes.mnist --version", "python -m recipes.mnist list"),
    *("python -m recipes.mnist --lerning-rate 0.1", "python -m recipes.mnist --epochs 3"),
    *("python -m recipes.mnist --trainer.max_epochs 3", "python -m recipes.mnist --trainer.benchmrk true"),
    *("python -m recipes.mnist -max-epochs 3", "python -m recipes.mnist fitt", "python -m recipes.mnist fit extra"),
    *("lightning-recipes", "lightning-recipes mnist --gpus 2", "lightning-recipes nothing"),
    # Values.
    *(f"{_DIGITS} {wrong}" for wrong in ("--lr -1", "--lr", "--max-epochs many", "--schedule cubic", "--warmup 5x")),
    *(f"{_DIGITS} {wrong}" for wrong in ("--precision 12", "--optimizer adamm", "--optimizer_args '{beta: 1}'")),
    *(f"{_DIGITS} {wrong}" for wrong in ("--max-time soon", "--save-every often", "--logger paper", "--ema 2")),
    *(f"{_DIGITS} {wrong}" for wrong in ("--global-batch-size 100", "--accumulate 3", "--patience 0", "--threads 0")),
    *(f"{_DIGITS} {wrong}" for wrong in ("--config nothing.yaml", "--config wrong.yaml", "--val-check-interval 0")),
    *(f"{_DIGITS} {wrong}" for wrong in ("--devices 3 --global-batch-size 128", "--devices 0", "--accelerator gpu")),
    *(f"{_DIGITS} {wrong}" for wrong in ("--num-nodes 2", "--num-nodes 1:2", "--node-rank 1", "--num-nodes 2:1")),
    *(f"{_DIGITS} {wrong}" for wrong in ("--strategy fsdp", "--limit-val-batches 0.5 --devices 2", "--name a/b")),
    # Data.
    *("python -m recipes.mnist --data-dir nowhere", "python -m recipes.resnet --data-dir empty"),
    *("python -m recipes.seq2seq --data-dir photos", "python -m recipes.resnet --data-dir broken"),
    *(f"{_PHOTOS} --image-size 0", f"{_PHOTOS} --arch resnet1", f"{_PAIRS} --source-column de"),
    # Checkpoints, other commands and runs.
    *("python -m recipes.mnist test", "python -m recipes.mnist test --ckpt nowhere.ckpt"),
    *("python -m recipes.mnist predict --ckpt text.ckpt a.png", f"{_DIGITS} --resume nowhere.ckpt"),
    *(f"{_DIGITS} {_QUICK} --name one", f"{_DIGITS} {_QUICK} --name one --resume auto"),
    *(f"{_DIGITS} {_QUICK} --name one --resume auto --lr 0.5", f"{_DIGITS} {_QUICK} --name one --resume auto --seed 2"),
    "python -m recipes.resnet test --ckpt runs/mnist/one/checkpoints/last.ckpt --data-dir photos",
    "python -m recipes.mnist test --ckpt runs/mnist/one/checkpoints/last.ckpt --output scores.json",
    "python -m recipes.mnist predict --ckpt runs/mnist/one/checkpoints/last.ckpt digit.png",
    "python -m recipes.mnist export --ckpt runs/mnist/one/checkpoints/last.ckpt --format state-dict",
    *("python -m recipes.mnist verify runs/mnist/one", "python -m recipes.mnist verify nowhere"),
    f"{_DIGITS} {_QUICK} --devices 2 --ema 0.99 --fast-dev-run true",
    f"{_DIGITS} {_QUICK} --resume auto --name fresh",
    # A program.
    *("python program.py devices=1", "python program.py devices=2", "python program.py lr=-1 devices=2"),
    *("python program.py max_epoch=1", "python program.py data=nowhere"),
)
"""What people type, right and wrong, in this order: later commands use the runs of earlier ones."""

_PROGRAM = """
import hashlib
import json
import sys

import numpy as np
import yaml

from datamodules import MNISTDataModule
from recipes import fit, predict

if __name__ == "__main__":
    options = {"dataset": "digits", "max_steps": 2, "batch_size": 64}
    for arg in sys.argv[1:]:
        name, value = arg.split("=", 1)
        options[name] = yaml.safe_load(value)
    part = options.pop("predict", None)
    if str(options.get("data")).endswith(".npz"):
        arrays = np.load(options["data"])
        options |= {"data": (arrays["x"], arrays["y"]), "dataset": "custom"}
    result = fit("mnist", **options)
    print(result.weights_sha256)
    if part:
        rows = predict(result.model, MNISTDataModule("digits"))
        print("SHA-256", hashlib.sha256(json.dumps(rows).encode()).hexdigest())
"""

_LEFT_OUT = (
    (r"\x1b\[[\d;?]*[A-Za-z]|\r", ""),
    (r"\d{4}-\d\d-\d\d[_T ]\d\d[-:]\d\d[-:]\d\d(-\d+)?", "TIME"),
    (r"(?<![\w.])[\d.,]+ ?(s|ms|samples/s|tokens/s|images/s|GB|MB|KB|min|minutes?)\b", r"N \1"),
    (r"start-up [\d.]+", "start-up N"),
    (r"process \d+|pid \d+", "process N"),
    (r"127\.0\.0\.1:\d+", "127.0.0.1:PORT"),
    (r'File "[^"]*", line \d+', "File"),
    (r"/tmp/[\w./-]*/", "/"),
)
"""What differs between two runs of a command."""


def _prepare(folder: Path) -> None:
    """Write a little data of each kind, and a program."""
    for name in ("empty", "broken/train/a", "broken/train/b"):
        (folder / name).mkdir(parents=True)
    for label in "ab":
        (folder / f"broken/train/{label}/image.png").write_bytes(b"no image")
        for part, number in (("train", 12), ("val", 4)):
            place = folder / "photos" / part / label
            place.mkdir(parents=True)
            for i in range(number):
                color = (15 * i + number, 200 if label == "a" else 40, 7 * i)
                Image.new("RGB", (40, 36), color).save(place / f"{i}.png")
    Image.new("L", (28, 28), 9).save(folder / "digit.png")
    _prepare_arrays(folder)
    images = sorted((folder / "photos").rglob("*.png"))
    with zipfile.ZipFile(folder / "photos.zip", "w") as archive:
        for path in images:
            archive.write(path, path.relative_to(folder))
    lines = [f"{path.relative_to(folder)},{path.parent.name},{path.parent.parent.name}" for path in images]
    (folder / "photos.csv").write_text("\n".join(["path,label,split", *lines]))
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    pairs = [f"{a} {b}\t{b.upper()} {a.upper()}\n" for a in words for b in words]
    (folder / "pairs.tsv").write_text("".join(pairs))
    (folder / "text.ckpt").write_text("no checkpoint")
    (folder / "wrong.yaml").write_text("lerning_rate: 1\n")
    (folder / "program.py").write_text(_PROGRAM)


def _prepare_arrays(folder: Path) -> None:
    """Write MNIST's files, arrays, and drawings in class folders, some of them light on dark and of other sizes."""
    random = np.random.default_rng(1)
    (folder / "idx").mkdir()
    for stem, number in (("train", 60), ("t10k", 30)):
        pixels = random.integers(0, 256, (number, 28, 28), np.uint8)
        header = b"\0\0\x08\x03" + np.array(pixels.shape, ">u4").tobytes()
        (folder / f"idx/{stem}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
        header = b"\0\0\x08\x01" + np.array([number], ">u4").tobytes()
        (folder / f"idx/{stem}-labels-idx1-ubyte").write_bytes(header + bytes(i % 10 for i in range(number)))
    labels = np.arange(40) % 3
    np.savez(folder / "gray.npz", x=random.integers(0, 256, (40, 28, 28), np.uint8), y=labels)
    np.savez(folder / "colors.npz", images=random.random((40, 3, 32, 32)), labels=np.array(["a", "b", "c"])[labels])
    for number in range(150):
        name = folder / f"drawings/{'012'[number % 7 % 3]}/{number}.png"
        name.parent.mkdir(parents=True, exist_ok=True)
        side = 28 if number % 2 else 40
        pixels = np.full((side, side), 20 if number % 5 else 230, np.uint8)
        pixels[6 : 8 + number % 16, 9:14] = random.integers(100, 140)
        Image.fromarray(pixels).save(name)


def _run(command: str, folder: Path) -> tuple[int, str]:
    """Run a command in a folder, and return its status and output."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "TORCHELASTIC_"))}
    env |= {"OMP_NUM_THREADS": "1", "COLUMNS": "120", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True, timeout=600, check=False
    )
    return done.returncode, done.stdout + done.stderr


def _plain(output: str) -> list[str]:
    """Return the lines of an output, without what differs between two runs."""
    for pattern, replacement in _LEFT_OUT:
        output = re.sub(pattern, replacement, output)
    return output.splitlines()


def measure(runs: bool, commands: bool) -> dict[str, Any]:
    """Return the hash of each run, and the status and output of each command."""
    found: dict[str, Any] = {"runs": {}, "commands": {}}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        _prepare(folder)
        for name, command in RUNS.items() if runs else ():
            status, output = _run(command, folder)
            hashes = re.findall(r"(?:SHA-256 |^)([0-9a-f]{64})", output, re.MULTILINE)
            found["runs"][name] = hashes[-1] if hashes and not status else f"ended with {status}"
            print(f"{name}: {found['runs'][name][:12]}", flush=True)
        for command in COMMANDS if commands else ():
            status, output = _run(command, folder)
            found["commands"][command] = [status, _plain(output)]
            print(f"{status}  {command}", flush=True)
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return what has changed, in lines; commands that only one of both knows are left out."""
    lines = []
    for name, sha256 in after["runs"].items():
        earlier = before["runs"].get(name, sha256)
        if sha256 != earlier:
            lines.append(f"{name}: {earlier[:12]} before, {sha256[:12]} now")
    for command, (status, output) in after["commands"].items():
        earlier_status, earlier_output = before["commands"].get(command, (status, output))
        if (status, output) == (earlier_status, earlier_output):
            continue
        lines.append(f"$ {command}    ({earlier_status} before, {status} now)")
        changes = difflib.unified_diff(earlier_output, output, lineterm="", n=0)
        lines += [f"    {line}" for line in changes if not line.startswith(("---", "+++", "@@"))]
    return lines


def main(args: list[str] | None = None) -> None:
    """Run the commands, and write or compare what they gave."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.before_after", description=__doc__)
    parser.add_argument("--write", type=Path, help="file for what was found")
    parser.add_argument("--against", type=Path, help="file of an earlier --write")
    parser.add_argument("--only", choices=("runs", "commands"))
    options = parser.parse_args(args)
    found = measure(options.only != "commands", options.only != "runs")
    if options.write:
        options.write.write_text(json.dumps(found, indent=1))
    if options.against:
        changed = differences(json.loads(options.against.read_text()), found)
        print("\n".join(changed) if changed else "nothing has changed")
        sys.exit(bool(changed))


if __name__ == "__main__":
    main()
