"""The command verify: a part of a run trained again."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from callbacks.checkpointing.verified_io import write_checkpoint
from datamodules import MNISTDataModule
from recipes import MNISTClassifier
from recipes.runner.command import Command
from recipes.runner.flags import ParsedArguments, Request, RunClasses
from recipes.runner.saved_run import readable_checkpoints
from recipes.runner.spec import Resolver
from recipes.runner.verify import find_interval
from tests.support.command_lines import contents, typed

FIT = "--name one --threads 2 --max-epochs 2 --precision 32-true --logger none --lr 0.02 --optimizer adamw"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 14 updates, saved every second one and at the ends of its epochs; kept are those of the two epochs."""
    home = tmp_path_factory.mktemp("trained")
    (fit,) = typed(home, f"{FIT} --save-every '2 steps' --save-top-k 2 --accumulate 1 --batch-size 16")
    assert fit.status == 0, fit.err
    return home


def test_an_interval_is_trained_again_after_a_restart(trained: Path) -> None:
    classes = RunClasses(MNISTClassifier, MNISTDataModule)
    request = Request("verify", ParsedArguments({}, {}), trained / "runs" / "quadrants" / "one")
    interval = find_interval(request.folder, readable_checkpoints(request.folder / "checkpoints"))
    request = replace(request, interval=replace(interval, recipe="mnist", config={}))
    resolver = Resolver(classes, Command("python -m recipes.mnist"))
    before = resolver.resolve(request)
    again = resolver.resolve(request, before=before)
    assert before.interval == again.interval == request.interval, "the worker has not looked for it"


def _copy(trained: Path, home: Path, name: str) -> Path:
    return Path(shutil.copytree(trained / "runs" / "quadrants" / "one", home / "runs" / "quadrants" / name))


def test_a_flipped_bit_anywhere_in_a_run_is_found(trained: Path, tmp_path: Path) -> None:
    run = _copy(trained, tmp_path, "run")
    before = contents(run)
    first, _ = sorted((run / "checkpoints").glob("best-*.ckpt"), key=lambda path: path.stat().st_mtime_ns)

    # In the weights of the checkpoint at which the interval begins, and in the optimizer's state there.
    for name, place in (("weights", "state_dict"), ("state", "optimizer_states")):
        other = _copy(trained, tmp_path, name)
        saved = torch.load(other / "checkpoints" / first.name, weights_only=True)
        tensor = saved["state_dict"]["network.0.weight"]
        if place == "optimizer_states":
            tensor = saved["optimizer_states"][0]["state"][0]["exp_avg"]
        tensor.view(torch.int32)[0, 0] ^= 1 << 20
        write_checkpoint(saved, other / "checkpoints" / first.name)
    # In the record, as if the hardware had made a mistake after the checkpoint; and of other hardware.
    other = _copy(trained, tmp_path, "record")
    lines = [json.loads(line) for line in (other / "weights.jsonl").read_text().splitlines()]
    lines[0]["start"]["environment"] |= {"torch": "1.0", "processor": "abacus"}
    steps = [line["save"]["step"] for line in lines[1:]]
    assert steps == [2, 4, 6, 7, 8, 10, 12, 14]
    lines[1 + steps.index(8)]["save"]["sha256"] = "0" * 64
    (other / "weights.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    foreign = _copy(trained, tmp_path, "foreign") / "weights.jsonl"
    foreign.write_text(foreign.read_text().replace('"recipe": "quadrants"', '"recipe": "resnet"'))
    equal, weights, state, record, scratch, missing, wrong, resnet, two = typed(
        tmp_path,
        *(f"verify runs/quadrants/{name}" for name in ("run", "weights", "state", "record")),
        f"verify --batch-size 16 {trained / 'runs' / 'quadrants' / 'one'}",
        "verify runs/quadrants",
        "verify runs/quadrants/run --lr 0.5 --seed 3",
        "verify runs/quadrants/foreign",
        "verify runs/quadrants/run runs/quadrants/state",
    )
    assert (equal.status, equal.err) == (0, "")
    assert "cpu with 2 threads" in equal.out
    assert "from update 7 (runs/quadrants/run/checkpoints/" in equal.out
    assert " to update 8 (epoch 2)" in equal.out
    assert f"equal to the bit, SHA-256 {json.loads(_line(run, 8))['save']['sha256']}" in equal.out
    assert contents(run) == before
    assert weights.status == state.status == record.status == 1
    assert "NOT EQUAL: the weights in runs/quadrants/weights/checkpoints/best-step=7.ckpt are not those" in weights.err
    assert "NOT EQUAL: trained again from" in state.err
    assert "processor, versions, threads and precision are the same as in the run" in state.err
    assert "processor" in record.err
    assert "and abacus in the run" in record.err
    assert "and 1.0 in the run" in record.err
    assert scratch.status == 0
    assert missing.status == wrong.status == resnet.status == two.status == 2
    assert "one run again, found 2: runs/quadrants/run runs/quadrants/state" in two.err
    assert "runs/quadrants/foreign is a run of the recipe resnet, and this is quadrants" in resnet.err
    assert "there is no runs/quadrants/weights.jsonl" in missing.err
    assert "leave out --lr, --seed" in wrong.err


def test_a_received_run_chooses_no_code(trained, tmp_path):
    touch = {"class_path": "subprocess.Popen", "init_args": {"args": ["touch", str(tmp_path / "touched")]}}
    given: dict[str, dict[str, Any]] = {
        "callback": {"callbacks": [touch]},
        "value": {"lr": touch},
        "strategy": {"strategy": touch},
        "text": {"lr": "fast"},
    }
    for name, config in given.items():
        run = _copy(trained, tmp_path, name)
        lines = [json.loads(line) for line in (run / "weights.jsonl").read_text().splitlines()]
        lines[0]["start"]["config"] |= config
        (run / "weights.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ended = dict(zip(given, typed(tmp_path, *(f"verify runs/quadrants/{name}" for name in given))))
    assert not (tmp_path / "touched").exists()
    for name, one in ended.items():
        assert "Traceback" not in one.err, name
        assert len(one.err.splitlines()) <= 1, (name, one.err)
        assert one.status == 2 or "equal to the bit" in one.out, (name, one)


def _line(run: Path, step: int) -> str:
    return next(line for line in (run / "weights.jsonl").read_text().splitlines() if f'"step": {step},' in line)


def test_a_run_with_one_checkpoint_is_repeated_from_its_start(tmp_path: Path) -> None:
    fit, equal = typed(tmp_path, f"{FIT} --max-epochs 1", "verify runs/quadrants/one")
    assert fit.status == equal.status == 0
    assert "from the beginning to update 7 (epoch 1)" in equal.out


def test_an_interval_from_the_start_needs_the_runs_devices(trained: Path, tmp_path: Path) -> None:
    record = _copy(trained, tmp_path, "one") / "weights.jsonl"
    shutil.rmtree(record.with_name("checkpoints"))
    record.write_text(record.read_text().replace('"devices": 1', '"devices": 2', 1))
    (rejected,) = typed(tmp_path, "verify runs/quadrants/one --devices 1")
    assert rejected.status == 2
    assert "no checkpoint holds the number of samples of an update: pass --devices 2" in rejected.err


def test_a_resume_elsewhere_says_what_differs(trained: Path, tmp_path: Path) -> None:
    last = _copy(trained, tmp_path, "run") / "checkpoints" / "last.ckpt"
    saved = torch.load(last, weights_only=True)
    saved["environment"] |= {"torch": "1.0", "devices": 8}
    write_checkpoint(saved, last)
    (same,) = typed(tmp_path, f"--resume {last} --max-epochs 3")
    assert same.status == 0, same.err
    assert f"bits may differ from here on: torch {torch.__version__}, and 1.0 in the run\n" in same.out


def test_a_resume_keeps_the_threads_unless_it_is_given_others(trained: Path, tmp_path: Path) -> None:
    run = _copy(trained, tmp_path, "run")
    last = run / "checkpoints" / "last.ckpt"
    kept, other, nothing = typed(
        tmp_path,
        f"--resume {last} --max-epochs 3",
        f"--resume {last} --max-epochs 4 --threads 1",
        f"--resume {last} --max-epochs 5 --threads null",
    )
    assert kept.status == other.status == nothing.status == 0, other.err
    assert "cpu with 2 threads" in kept.out
    assert "threads: 2 in each process, and 1 would be the default here; the run has 2, and --threads 1" in kept.out
    assert "bits may differ from here on: 1 thread in each process, and 2 in the checkpoint; set 2" in other.err
    assert "bits may differ" not in kept.out + kept.err + other.out, "one line, where they may"
    assert "cpu with 1 thread," in nothing.out
    record = [json.loads(line) for line in (run / "weights.jsonl").read_text().splitlines()]
    assert [line["start"]["environment"]["threads"] for line in record if "start" in line] == [2, 2, 1, 1]
