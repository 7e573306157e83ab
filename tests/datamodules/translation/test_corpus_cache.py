import os
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from datamodules.errors import UserError
from datamodules.translation.corpus import Corpus
from datamodules.translation.corpus_cache import cached_corpus
from datamodules.translation.data_module import TranslationDataModule


def _write(path: Path, letter: str = "a", count: int = 300) -> Path:
    path.write_text("".join(f"{letter} {i:04} {'x ' * (i % 7)}\tb {i:04}\n" for i in range(count)))
    return path


def _data(folder: Path, cache: Path | None, **options: Any) -> TranslationDataModule:
    files = {"data_file": str(folder / "pairs.tsv"), "val_file": str(folder / "val.tsv")}
    data = TranslationDataModule(**files, cache_dir=cache and str(cache), batch_size=16, **options)
    data.setup("fit")
    return data


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    _write(tmp_path / "pairs.tsv")
    _write(tmp_path / "val.tsv", "c", 20)
    return tmp_path


def _batches(data: TranslationDataModule) -> list[torch.Tensor]:
    loaders = data.train_dataloader(), data.val_dataloader(), data.test_dataloader()
    return [part for loader in loaders for batch in loader for part in batch]


def test_a_cached_corpus_gives_the_same_batches_counts_and_vocabularies(folder: Path) -> None:
    plain = _data(folder, None, max_length=6)
    for _ in range(2):
        cached = _data(folder, folder / "cache", max_length=6)
        assert all(torch.equal(a, b) for a, b in zip(_batches(cached), _batches(plain), strict=True))
        assert cached.vocabularies() == plain.vocabularies()
        assert (cached.info, cached.left_out, cached.sizes) == (plain.info, plain.left_out, plain.sizes)
        assert cached.target_sentences(cached.rows["val"]) == plain.target_sentences(plain.rows["val"])
    assert len(list((folder / "cache").glob("*.corpus"))) == 1


def test_the_text_is_read_again_when_a_file_or_a_setting_changes(folder: Path) -> None:
    cache, path = folder / "cache", folder / "pairs.tsv"
    first = _data(folder, cache)
    times = path.stat().st_mtime_ns
    _write(path, "z")
    os.utime(path, ns=(times, times))
    # Neither the size nor the time has changed: the text is not read.
    assert _data(folder, cache).source_vocabulary == first.source_vocabulary
    for options in (
        {"seed": 2},
        {"reverse": True},
        {"max_length": 5},
        {"normalisation": "unicode"},
        {"train_share": 0.5},
    ):
        assert "z" in "".join(
            sum((vocabulary.tokens for vocabulary in _data(folder, cache, **options).vocabularies()), [])
        )
    os.utime(path, ns=(times + 1, times + 1))
    assert "z" in _data(folder, cache).source_vocabulary.tokens


@pytest.mark.parametrize("damage", ["byte", "cut", "empty"])
def test_a_damaged_file_and_what_a_stopped_run_has_left_are_not_used(folder: Path, damage: str) -> None:
    cache = folder / "cache"
    plain = _data(folder, None)
    _data(folder, cache)
    (path,) = cache.glob("*.corpus")
    content = bytearray(path.read_bytes())
    if damage == "byte":
        content[len(content) // 2] ^= 1
    path.write_bytes({"byte": content, "cut": content[:-100], "empty": b""}[damage])
    (cache / f"{path.stem}.1.partial").write_bytes(content[:1000])
    again = _data(folder, cache)
    assert all(torch.equal(a, b) for a, b in zip(_batches(again), _batches(plain), strict=True))
    assert len(path.read_bytes()) == len(content)
    assert not list(cache.glob("*.partial"))


def test_of_two_runs_at_once_one_packs_and_the_other_waits(folder: Path) -> None:
    made: list[Corpus] = []
    corpus = _data(folder, None)._load()

    def make() -> Corpus:
        made.append(corpus)
        return corpus

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: cached_corpus(folder / "cache", "key", make), range(4)))
    assert len(made) == 1
    assert all(torch.equal(one.source.tokens, corpus.source.tokens) for one in found)


def test_a_full_disk_is_told_in_one_line_and_leaves_no_file(folder: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        with pytest.raises(UserError, match=r"cannot be written to .*cache: .*; make room, pass another `cache_dir`"):
            _data(folder, folder / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.suffix for path in (folder / "cache").iterdir()] == [".lock"]
    (folder / "file").touch()
    with pytest.raises(UserError, match="cannot be written to"):
        _data(folder, folder / "file" / "cache")
