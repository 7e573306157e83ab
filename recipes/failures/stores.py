"""The key-value stores of torch.distributed. They are open to whoever reaches their ports."""

import json
import os
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from recipes.failures.protocol import listen
from recipes.launch.interfaces import address_for_others
from recipes.launch.plan import Launch

__all__ = ["AgentsStore", "serve_store"]


def serve_store(launch: Launch, address: str) -> TCPStore:
    """The store on rank 0, at a free port; torch.distributed shares it, since it runs in the same process."""
    options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "multi_tenant": True}
    port = 0
    if launch.num_nodes == 1:
        # Of itself the store listens on all interfaces. It takes this descriptor over, and closes it.
        listener = listen(0, loopback=True)
        port, options["master_listen_fd"] = listener.getsockname()[1], listener.detach()
    return TCPStore(address, port, timeout=timedelta(seconds=5), **options)


class AgentsStore:
    """Where rank 0 tells the others its address under torchrun, which lets it change when processes are started again.

    In the agents' own store the processes of a restart would find the keys of those before them, and gloo would wait
    for ever. The same as TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which only the agents read.
    """

    def __init__(self, launch: Launch) -> None:
        assert launch.address is not None
        assert launch.port is not None
        self._master = (launch.address, launch.port)
        self._store = TCPStore(launch.address, launch.port, is_master=False, wait_for_workers=False)
        # Without the number of restarts: each agent counts only the rounds that it asked for itself.
        self._key = f"lightning_recipes/{os.environ.get('TORCHELASTIC_RUN_ID')}/{launch.world_size}/rank 0"

    @staticmethod
    def is_used() -> bool:
        """Whether torchrun tells its processes to use the agents' store."""
        return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    def own_address(self) -> str:
        """The address of this machine for the other nodes."""
        return address_for_others(*self._master)

    def publish(self, address: str, port: int) -> None:
        """Tell the others where rank 0 listens."""
        self._store.set(self._key, json.dumps([address, port]))

    def find(self) -> tuple[str, int] | None:
        """Where rank 0 listens, or did before a restart; None while it has not said so."""
        if not self._store.check([self._key]):
            return None
        try:
            address, port = json.loads(self._store.get(self._key))
            return str(address), int(port)
        except (ValueError, TypeError, OverflowError, RecursionError):
            return None
