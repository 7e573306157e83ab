"""Checkpoints that are whole or the old ones, whatever happens while they are written."""

import enum
import fcntl
import os
import resource
import signal
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from callbacks.checkpointing.exact_checkpoint import ExactCheckpoint, save_interval
from callbacks.checkpointing.verified_io import (
    VerifiedCheckpointIO,
    as_loadable,
    describe_damage,
    remove_leftovers,
    write_checkpoint,
)
from datamodules import UserError
from tests.support.ranks import run_ranks
from tests.support.tables import Tiny, image_network, noisy_images, quiet_trainer


@dataclass
class Shape:
    width: int
    folder: Path


Color, Level = enum.Enum("Color", {"RED": "red"}), enum.IntEnum("Level", {"HIGH": 3})


def checkpoint(seed: int, size: int = 1000) -> dict:
    return {"state_dict": {"weight": torch.randn(size, generator=torch.Generator().manual_seed(seed))}, "seed": seed}


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Path("data"), "data"),
        (Shape(3, Path("x")), {"width": 3, "folder": "x"}),
        (Color.RED, "red"),
        ({Level.HIGH: [np.float32(0.5), np.int64(7)]}, {3: [0.5, 7]}),
        (frozenset({1}), {1}),
        (np.bool_(True), True),
    ],
)
def test_values_of_any_kind_load_back_in_their_plain_form(value, plain, tmp_path):
    assert as_loadable(value) == plain
    torch.save(as_loadable(value), tmp_path / "value.pt")
    assert torch.load(tmp_path / "value.pt", weights_only=True) == plain


def test_arrays_become_tensors():
    array = np.arange(6.0).reshape(2, 3)
    assert torch.equal(as_loadable({"a": array})["a"], torch.arange(6.0).reshape(2, 3).double())


def test_a_plain_state_dict_stays_the_same_object():
    state = image_network().state_dict()
    assert as_loadable({"state_dict": state})["state_dict"] is state


def test_what_has_no_plain_form_is_named():
    lost: list[str] = []
    plain = as_loadable({"act": torch.relu_, "make": lambda x: x, "kind": Shape}, lost)
    assert plain["kind"] == "tests.callbacks.checkpointing.test_verified_io.Shape"
    assert lost == ["act", "make", "kind"]


class Hoarder(Tiny):
    """Has hyper-parameters that pickle by reference to code."""

    def __init__(self, shape: Shape, act: object, rate: np.floating) -> None:
        super().__init__(image_network(), torch.optim.SGD, lr=0.1)
        self.save_hyperparameters()


def test_hyper_parameters_of_any_kind_leave_a_valid_checkpoint(tmp_path):
    loader = torch.utils.data.DataLoader(list(zip(*noisy_images(8))), batch_size=4)
    trainer = quiet_trainer(ExactCheckpoint(tmp_path, filename="best"), plugins=[VerifiedCheckpointIO()])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Hoarder(Shape(3, Path("x")), torch.nn.functional.relu, np.float64(0.5)).double(), loader)
    loaded = torch.load(tmp_path / "best.ckpt", weights_only=True)["hyper_parameters"]
    assert loaded == {"shape": {"width": 3, "folder": "x"}, "act": "torch.nn.functional.relu", "rate": 0.5}


def test_a_flipped_bit_never_changes_what_is_loaded(tmp_path):
    path = tmp_path / "last.ckpt"
    write_checkpoint(checkpoint(1, 200), path)
    good, expected = path.read_bytes(), torch.load(path, weights_only=True)
    missed = 0
    for place in range(0, len(good), 11):
        path.write_bytes(good[:place] + bytes([good[place] ^ 0x10]) + good[place + 1 :])
        if describe_damage(path) is None:
            missed += 1
            try:
                loaded = torch.load(path, weights_only=True)
            except RuntimeError:  # torch looks at more of the headers.
                continue
            assert loaded["seed"] == expected["seed"]
            assert torch.equal(loaded["state_dict"]["weight"], expected["state_dict"]["weight"])
    assert missed < len(good) / 11 / 2


def test_a_bit_flipped_by_the_disk_keeps_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.ckpt"
    write_checkpoint(checkpoint(1), path)
    old, flush = path.read_bytes(), os.fsync

    def flush_with_a_flipped_bit(descriptor: int) -> None:
        (part,) = tmp_path.glob(".*.part")
        data = bytearray(part.read_bytes())
        data[len(data) // 2] ^= 1
        part.write_bytes(data)
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", flush_with_a_flipped_bit)
    with pytest.raises(OSError, match="does not read back"):
        write_checkpoint(checkpoint(2), path)
    assert path.read_bytes() == old
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_damaged_checkpoint_is_rejected_with_its_damage(tmp_path):
    path = tmp_path / "last.ckpt"
    assert describe_damage(path) == "it does not exist"
    write_checkpoint(checkpoint(1), path)
    assert describe_damage(path) is None
    whole = path.read_bytes()
    place = whole.index(checkpoint(1)["state_dict"]["weight"].numpy().tobytes()) + 50
    flipped = whole[:place] + b"!" + whole[place + 1 :]
    damages = (b"", "is empty"), (whole[:-100], "cut off"), (bytes(len(whole)), "overwritten"), (flipped, "checksum")
    for found, named in damages:
        path.write_bytes(found)
        assert named in describe_damage(path)
    with pytest.raises(UserError, match="cannot be read: it is damaged .*pass another checkpoint, or resume=.auto"):
        VerifiedCheckpointIO().load_checkpoint(path)


def _save_for_ever(folder: str, saves: int) -> None:
    """Save until the file of a save after some others is seen half-written."""
    seed = 0

    def watch() -> None:
        while seed <= saves or not list(Path(folder).glob(".*.part")):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    while True:
        seed += 1
        write_checkpoint(checkpoint(seed, 200_000), Path(folder) / "last.ckpt")


def test_a_kill_while_saving_leaves_a_valid_checkpoint(tmp_path):
    leftovers = 0
    for number in range(3):
        with pytest.raises(AssertionError, match="exit status -9"):
            run_ranks(_save_for_ever, 1, str(tmp_path), 1 + number)
        assert describe_damage(tmp_path / "last.ckpt") is None
        loaded = torch.load(tmp_path / "last.ckpt", weights_only=True)
        assert torch.equal(loaded["state_dict"]["weight"], checkpoint(loaded["seed"], 200_000)["state_dict"]["weight"])
        leftovers += len(list(tmp_path.glob(".*.part")))
    assert leftovers, "no kill fell into a save"
    write_checkpoint(checkpoint(0), tmp_path / "last.ckpt")
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_only_dead_writers_files_are_removed(tmp_path):
    (tmp_path / ".last.ckpt.0123abcd.part").write_text("dead")
    (tmp_path / "notes.part").write_text("mine")
    with (tmp_path / ".best.ckpt.4567cdef.part").open("w") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        remove_leftovers(tmp_path)
        assert sorted(file.name for file in tmp_path.iterdir()) == [".best.ckpt.4567cdef.part", "notes.part"]


def _save_on_a_full_disk(folder: str) -> dict:
    path, io = Path(folder) / "last.ckpt", VerifiedCheckpointIO()
    io.save_checkpoint(checkpoint(1), path)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    io.save_checkpoint(checkpoint(2), path)
    failed = dict(io.failures)
    io.remove_checkpoint(path)
    kept = torch.load(path, weights_only=True)["seed"]
    files = [file.name for file in Path(folder).iterdir()]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    io.save_checkpoint(checkpoint(3), path)
    return {"failed": failed, "kept": kept, "files": files, "after": dict(io.failures)}


def test_only_checkpoints_of_the_folder_are_removed(tmp_path):
    # What Lightning's `ModelCheckpoint` asks for after a resume from a checkpoint that names these.
    (tmp_path / "checkpoints").mkdir()
    names = ("thesis.tex", "checkpoints/thesis.tex", "other.ckpt", "checkpoints/best.ckpt")
    for name in names:
        (tmp_path / name).touch()
    for name in ("thesis.tex", "thesis.tex/../../thesis.tex", "../other.ckpt", "best.ckpt"):
        VerifiedCheckpointIO().remove_checkpoint(tmp_path / "checkpoints" / name)
    assert [name for name in names if (tmp_path / name).exists()] == list(names[:3])


def test_a_full_disk_keeps_the_old_checkpoint(tmp_path):
    (answer,) = run_ranks(_save_on_a_full_disk, 1, str(tmp_path))
    assert answer["failed"] == {str(tmp_path / "last.ckpt"): "File too large"}
    assert (answer["kept"], answer["files"], answer["after"]) == (1, ["last.ckpt"], {})
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["seed"] == 3


@pytest.mark.parametrize("text", ["often", "5%", "0 minutes"])
def test_what_is_no_interval_is_rejected(text):
    with pytest.raises(UserError, match='write "500 steps", "2 epochs" or "10 minutes"'):
        save_interval(text)
