from concurrent.futures import ThreadPoolExecutor

import pytest

from datamodules import UserError
from recipes.failures.rendezvous import rendezvous
from recipes.launch.plan import Launch
from recipes.launch.settings import Command
from tests.support.ranks import free_port


@pytest.mark.parametrize(("nodes", "devices"), [(3, 2), (2, 1)])
def test_a_node_that_was_started_as_part_of_another_run_is_named_on_both(nodes: int, devices: int):
    port = free_port()
    zero = Launch("manual", 2, 2, address="127.0.0.1", port=port, spawns=True)
    one = Launch("manual", nodes, devices, node_rank=1, address="127.0.0.1", port=port, spawns=True)
    with ThreadPoolExecutor() as pool:
        joined = [pool.submit(rendezvous, launch, {}, 5.0, Command("python -m r", [])) for launch in (zero, one)]
    for result in joined:
        with pytest.raises(UserError, match=f"as one of {nodes} nodes x {devices} devices, node 0 as one of 2 x 2; "):
            result.result()
