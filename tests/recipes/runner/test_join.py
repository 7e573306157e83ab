import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from datamodules import UserError
from recipes.runner import join
from recipes.runner.join import Request, rendezvous
from recipes.runner.launch import Command, Launch
from tests.support.ranks import free_port

COMMAND = Command("python -m r", [])


@pytest.mark.parametrize(("nodes", "devices"), [(3, 2), (2, 1)])
def test_a_node_that_was_started_as_part_of_another_run_is_named_on_both(nodes: int, devices: int):
    port = free_port()
    zero = Launch("manual", 2, 2, address="127.0.0.1", port=port, spawns=True)
    one = Launch("manual", nodes, devices, node_rank=1, address="127.0.0.1", port=port, spawns=True)
    with ThreadPoolExecutor() as pool:
        requests = [Request(launch, {}, 5.0, COMMAND) for launch in (zero, one)]
        joined = [pool.submit(rendezvous, request) for request in requests]
    for result in joined:
        with pytest.raises(UserError, match=f"as one of {nodes} nodes x {devices} devices, node 0 as one of 2 x 2; "):
            result.result()


def test_an_address_of_another_machine_is_refused_on_node_0_before_it_waits_for_the_others():
    launch = Launch("manual", 2, 1, address="192.0.2.1", port=free_port())
    with pytest.raises(UserError, match="node 0 cannot connect to itself at 192.0.2.1:.*`master_addr` "):
        rendezvous(Request(launch, {}, 60.0, COMMAND))


def test_a_process_with_other_settings_is_named_on_both():
    port = free_port()
    requests = [
        Request(
            Launch("manual", 2, 1, node, address="127.0.0.1", port=port),
            {"lr": lr, "accumulate": {0: 4}},
            20.0,
            COMMAND,
        )
        for node, lr in ((0, 0.1), (1, 0.2))
    ]
    with ThreadPoolExecutor() as pool:
        joined = [pool.submit(rendezvous, request) for request in requests]
    for result in joined:
        with pytest.raises(UserError, match=r"rank 1 \(node 1, .*\): lr is 0.2, on rank 0 0.1"):
            result.result()


def test_a_process_that_ends_during_the_rendezvous_does_not_leave_the_others_waiting(monkeypatch):
    monkeypatch.setattr(join, "_SEEN_WITHIN", 1.0)
    port = free_port()
    zero, one = (
        Request(Launch("manual", 2, 1, node, address="127.0.0.1", port=port), {}, 20.0, COMMAND) for node in (0, 1)
    )
    with ThreadPoolExecutor() as pool:
        joined = pool.submit(rendezvous, zero)
        while True:
            try:
                store = join._connect(one, "127.0.0.1", port)
                break
            except OSError:
                time.sleep(0.1)
        join.append(store, join._RECORDS, one.record)  # And then it is killed.
    with pytest.raises(UserError, match="rank 1 ended during the rendezvous; see its own output"):
        joined.result()


def test_two_processes_that_claim_to_be_one_rank_are_told():
    port = free_port()
    launches = [Launch("manual", 3, 1, node, address="127.0.0.1", port=port) for node in (0, 1, 1)]
    with ThreadPoolExecutor() as pool:
        joined = [pool.submit(rendezvous, Request(launch, {}, 20.0, COMMAND)) for launch in launches]
    for result in joined:
        with pytest.raises(UserError, match="two processes claim to be rank 1 .node 1.; give each node its own"):
            result.result()
