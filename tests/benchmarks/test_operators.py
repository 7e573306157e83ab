import json

import torch

from benchmarks.operators import RESULTS, THREADS, _operators, dependent, numbers


def test_the_inputs_are_the_same_numbers_on_any_machine() -> None:
    values = [0.48496127128601074, -0.20947575569152832, -0.41154003143310547]
    assert numbers(3).tolist() == values
    assert torch.equal(numbers(2, 3).flatten(), numbers(6))
    assert numbers(1000, seed=2).abs().max() <= 1


def test_an_operator_depends_on_the_threads_if_one_hash_differs() -> None:
    runs = {"1": {"sum": "a", "relu": "b"}, "2": {"sum": "a", "relu": "b"}, "4": {"sum": "c", "relu": "b"}}
    assert dependent({threads: {"hashes": hashes} for threads, hashes in runs.items()}) == ["sum"]


def test_published_tables_cover_operators_on_all_thread_counts() -> None:
    paths = sorted(RESULTS.glob("*.json"))
    assert paths
    for path in paths:
        for of_threads in json.loads(path.read_text())["modes"].values():
            assert list(of_threads) == [str(threads) for threads in THREADS]
            assert all(run["hashes"].keys() == _operators().keys() for run in of_threads.values())
