"""The rank of this process in the run: a function of environment, flags and devices.

Every way to start a run is resolved here, before any process waits for another. A launch that cannot succeed is refused
with the command to type instead. Lightning's environment classes do not serve here: they read ``os.environ`` one value
at a time when a strategy asks, and do not compare the values with each other, the flags and the devices.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from datamodules.errors import UserError
from recipes.launch.devices import Machine, number_of_devices
from recipes.launch.settings import DEFAULT_PORT, Command, LaunchSettings, flag_of
from recipes.launch.slurm import SlurmStep, shell_of_srun, slurm_allocation, slurm_step

__all__ = ["LAUNCHER_VARIABLE", "RENDEZVOUS_VARIABLE", "Launch", "plan_launch"]

LAUNCHER_VARIABLE = "LIGHTNING_RECIPES_LAUNCHER"
RENDEZVOUS_VARIABLE = "LIGHTNING_RECIPES_RENDEZVOUS"
"""Address and port of rank 0, for the processes that the first one of their node starts. MASTER_PORT is the store's."""


@dataclass(frozen=True)
class Launch:
    """Which process of the run this one is.

    Args:
        launcher: what started the processes: local (this program), manual (the user, on each node), torchrun or slurm.
        devices: processes on each node, one for each device.
        address: of node 0; None where the run is one process.
        port: of node 0; None where node 0 chooses a free one.
        spawns: this process starts the other processes of its node.
        joins: another process of the node started this one, after the rendezvous of the nodes.
        elastic: torchrun may start the processes again, and with another number of nodes.
    """

    launcher: str
    num_nodes: int
    devices: int
    node_rank: int = 0
    local_rank: int = 0
    address: str | None = None
    port: int | None = None
    spawns: bool = False
    joins: bool = False
    elastic: bool = False

    @property
    def world_size(self) -> int:
        """Processes of the run."""
        return self.num_nodes * self.devices

    @property
    def rank(self) -> int:
        """The global rank of this process."""
        return self.node_rank * self.devices + self.local_rank

    @property
    def first_ranks(self) -> list[int]:
        """The ranks of the rendezvous: the first of each node where these start the others, else all."""
        return list(range(0, self.world_size, self.devices if self.spawns else 1))

    def describe(self) -> str:
        """The launcher and the rendezvous address: the start of a run's first line."""
        who = {"local": "started here", "manual": "started manually", "slurm": "started by Slurm"}
        nodes = f"{self.num_nodes} node{'s' if self.num_nodes > 1 else ''} x {self.devices}"
        text = f"{who.get(self.launcher, f'started by {self.launcher}')}, {nodes} device{'s' * (self.devices > 1)}"
        return text if self.address is None else f"{text}, {self.address}:{self.port}"


def _check_devices(launch: Launch, here: Machine, command: Command) -> None:
    if here.count is None or launch.devices <= here.count:
        return
    command = command.started_by(launch.launcher, launch.num_nodes, launch.devices)
    if here.count == 0:
        raise UserError(f"there is no {here.kind} device here: {command.using(accelerator='cpu')}")
    per_task = launch.launcher == "slurm"
    hint = " (does the job ask for --gpus-per-task? --gpus-per-node shows each task all of them)" if per_task else ""
    raise UserError(
        f"{launch.devices} devices were requested and this machine has {here.count} ({here.kind}){hint}:"
        f" {command.split(launch.num_nodes, here.count)}"
    )


def _integer(env: Mapping[str, str], name: str) -> int | None:
    """An integer from an environment variable."""
    if not (text := env.get(name, "").strip()):
        return None
    if not text.isdigit():
        raise UserError(f"the environment says {name}={text}, which is not a whole number; unset or correct it")
    return int(text)


def _port(settings: LaunchSettings, env: Mapping[str, str]) -> int | None:
    """The port of node 0: the flag, whose range is checked where it is read, or MASTER_PORT."""
    if settings.master_port is not None:
        return settings.master_port
    value = _integer(env, "MASTER_PORT")
    if value is not None and not 1 <= value <= 65535:
        raise UserError(f"MASTER_PORT {value} is not a TCP port; expected 1 to 65535, such as {DEFAULT_PORT}")
    return value


def _check_agreement(found: tuple[int, int], asked: tuple[Any, int], here: Machine, who: str, command: Command) -> None:
    """Refuse flags that contradict the processes that exist; the defaults contradict nothing."""
    nodes, devices = found
    devices_given = str(asked[0]) not in ("auto", "-1")
    count = number_of_devices(asked[0], here)
    if (devices_given and count != devices) or (asked[1] > 1 and asked[1] != nodes):
        raise UserError(
            f"{who} has started {nodes} x {devices} = {nodes * devices} processes, and --num-nodes {asked[1]} --devices"
            f" {count} are {asked[1] * count}; {who} decides: {command.split(nodes, devices)}"
        )


def _by_torchrun(
    env: Mapping[str, str], settings: LaunchSettings, asked: tuple[Any, int], here: Machine, command: Command
) -> Launch:
    world, local = _integer(env, "WORLD_SIZE") or 1, _integer(env, "LOCAL_WORLD_SIZE") or 1
    nodes = _integer(env, "GROUP_WORLD_SIZE") or world // local
    elastic = bool(_integer(env, "TORCHELASTIC_MAX_RESTARTS") or _integer(env, "TORCHELASTIC_RESTART_COUNT"))
    if nodes * local != world:
        raise UserError(
            f"torchrun has started {world} processes on {nodes} nodes, {local} of them on this one; expected as many"
            f" on each: {command.torchrun(nodes, local)}"
        )
    command = command.started_by("torchrun", nodes, local)
    if not elastic:
        _check_agreement((nodes, local), asked, here, "torchrun", command)
    given = {name: value for name in ("master_addr", "master_port") if (value := getattr(settings, name)) is not None}
    if given:
        flags = " ".join(f"{flag_of(name)} {value}" for name, value in given.items())
        raise UserError(
            f"torchrun decides where the processes meet; pass {flags} to torchrun itself, or leave it out:"
            f" {command.using(**dict.fromkeys(given))}"
        )
    return Launch(
        "torchrun",
        nodes,
        local,
        _integer(env, "GROUP_RANK") or 0,
        _integer(env, "LOCAL_RANK") or 0,
        env.get("MASTER_ADDR", "127.0.0.1") if world > 1 else None,
        _integer(env, "MASTER_PORT") if world > 1 else None,
        elastic=elastic,
    )


def _by_slurm(
    step: SlurmStep,
    env: Mapping[str, str],
    settings: LaunchSettings,
    asked: tuple[Any, int],
    here: Machine,
    command: Command,
) -> Launch:
    if step.tasks % step.nodes:
        raise UserError(
            f"Slurm has started {step.tasks} processes on {step.nodes} nodes; expected as many on each:"
            f" {command.srun(step.nodes, -(-step.tasks // step.nodes))}"
        )
    devices = step.tasks // step.nodes
    if "," in (each := env.get("SLURM_STEP_TASKS_PER_NODE", "")):
        raise UserError(
            f"Slurm has started {each} processes on the nodes, one number for each; expected as many on each:"
            f" {command.srun(step.nodes, devices)}"
        )
    command = command.started_by("slurm", step.nodes, devices)
    _check_agreement((step.nodes, devices), asked, here, "Slurm", command)
    address = settings.master_addr or env.get("MASTER_ADDR") or step.first_host
    port = _port(settings, env)
    return Launch("slurm", step.nodes, devices, step.node, step.local, address, port or step.port)


def _refuse_one_process_of_many(env: Mapping[str, str], devices: int, command: Command) -> None:
    """Refuse a program that was started once, without srun, in a Slurm job that has more for it."""
    job = slurm_allocation(env)
    if job is None or (job.nodes == 1 and (job.tasks_per_node == 1 or devices > 1)):
        return
    tasks = job.nodes * job.tasks_per_node
    what = f"{job.nodes} node{'s' * (job.nodes > 1)}" + (f" and {tasks} tasks" if tasks > job.nodes else "")
    of_node = devices if devices > 1 else max(job.tasks_per_node, job.gpus_per_node)
    lines = f"{command.srun(job.nodes, of_node)} or as one process: {command.srun(1, 1)}"
    if "SLURM_PTY_PORT" in env:
        # The shell of srun is a step that holds the processors of the job.
        lines = lines.replace("srun --nodes", "srun --overlap --nodes")
    raise UserError(f"this Slurm job has {what}, and the program was started once, without srun: {lines}")


def _by_parent(env: Mapping[str, str], asked: tuple[Any, int], here: Machine) -> Launch:
    """For the processes that the first one of their node has started."""
    node, local = _integer(env, "NODE_RANK") or 0, _integer(env, "LOCAL_RANK") or 0
    nodes, devices = asked[1], number_of_devices(asked[0], here)
    address, _, port = env[RENDEZVOUS_VARIABLE].rpartition(":")
    return Launch(env[LAUNCHER_VARIABLE], nodes, devices, node, local, address, int(port), joins=True)


def _by_environment(
    env: Mapping[str, str], settings: LaunchSettings, asked: tuple[Any, int], here: Machine, command: Command
) -> Launch:
    """For processes that mpirun or a script has started, with their ranks in the environment."""
    address, world = settings.master_addr or env.get("MASTER_ADDR"), _integer(env, "WORLD_SIZE") or 1
    local, rank = _integer(env, "LOCAL_RANK"), _integer(env, "RANK")
    missing = [name for name, value in (("LOCAL_RANK", local), ("MASTER_ADDR", address)) if value is None]
    if address is None or local is None:
        if "PET_NNODES" in env:
            raise UserError(
                "the variables of this PyTorchJob are for torchrun, which starts the processes of a pod: type torchrun"
                " -m in place of python -m"
            )
        raise UserError(
            f"RANK and WORLD_SIZE say that this is one of {world} processes; set {' and '.join(missing)} too, or unset"
            " them to start the processes of this machine from here"
        )
    given = str(asked[0]) not in ("auto", "-1") or here.count is not None
    of_node = number_of_devices(asked[0], here) if given else world // asked[1]
    devices = _integer(env, "LOCAL_WORLD_SIZE") or of_node
    nodes = asked[1] if asked[1] > 1 else max(1, world // max(1, devices))
    if world != nodes * devices:
        raise UserError(
            f"WORLD_SIZE={world} is not {nodes} node{'s' * (nodes > 1)} x {devices} processes; every node needs as many"
            f" processes as the others: {command.using(num_nodes=nodes, devices=max(1, world // nodes))}"
        )
    _check_agreement((nodes, devices), asked, here, "LOCAL_WORLD_SIZE", command)
    told = (_integer(env, name) for name in ("NODE_RANK", "GROUP_RANK"))
    node = next((number for number in told if number is not None), (rank or 0) // devices)
    if rank is not None and rank != node * devices + local:
        raise UserError(
            f"RANK={rank} is not process {local} (LOCAL_RANK) of node {node} where each of {nodes} has {devices};"
            " number them node by node, and set LOCAL_WORLD_SIZE to the number of processes on each node"
        )
    port = _port(settings, env) or DEFAULT_PORT
    return Launch("manual", nodes, devices, node, local, address, port)


def _manual(
    env: Mapping[str, str], settings: LaunchSettings, nodes: int, devices: int, command: Command
) -> Launch | None:
    """Started by the user on each node; None where neither flags nor environment say so."""
    node = settings.node_rank if settings.node_rank is not None else _integer(env, "NODE_RANK")
    address = settings.master_addr or env.get("MASTER_ADDR")
    port = _port(settings, env) or DEFAULT_PORT
    if node is not None and node >= nodes:
        raise UserError(
            f"node {node} of {nodes}: nodes are counted from 0, so expected were 0 to {nodes - 1}:"
            f" {command.using(num_nodes=nodes, node_rank=nodes - 1)} or {command.using(num_nodes=node + 1)}"
        )
    if nodes == 1:
        return None
    if node is None or address is None:
        missing: dict[str, Any] = {
            "node_rank": "I" if node is None else node,
            "master_addr": address or "HOST",
            "master_port": port,
        }
        numbers = "0 or 1" if nodes == 2 else f"0 to {nodes - 1}"
        raise UserError(
            f"--num-nodes {nodes} does not tell how the nodes find each other. Type on each node, I being {numbers} and"
            f" HOST the address of node 0: {command.using(**missing)} or use torchrun:"
            f" {command.torchrun(nodes, devices)} or Slurm: {command.srun(nodes, devices)}"
        )
    return Launch("manual", nodes, devices, node, 0, address, port, spawns=True)


def plan_launch(
    env: Mapping[str, str],
    settings: LaunchSettings,
    asked: tuple[Any, int],
    here: Machine,
    command: Command,
) -> Launch:
    """Find out which process of which run this one is.

    Args:
        env: the environment variables of this process.
        asked: ``--devices`` and ``--num-nodes``.
        here: the devices of this machine.
        command: what the user typed, for the corrected command.

    Raises:
        UserError: the run could not start, or would wait for ever.
    """
    launch = _plan(env, settings, asked, here, command)
    _check_devices(launch, here, command)
    return launch


def _plan(
    env: Mapping[str, str], settings: LaunchSettings, asked: tuple[Any, int], here: Machine, command: Command
) -> Launch:
    nodes, devices = asked[1], number_of_devices(asked[0], here)
    if LAUNCHER_VARIABLE in env and "LOCAL_RANK" in env:
        return _by_parent(env, asked, here)
    if "TORCHELASTIC_RUN_ID" in env:
        return _by_torchrun(env, settings, asked, here, command)
    step = None if shell_of_srun(env) else slurm_step(env)
    if step is not None and step.tasks > 1:
        return _by_slurm(step, env, settings, asked, here, command)
    several = (_integer(env, "WORLD_SIZE") or 1) > 1
    if several and (env.keys() & {"RANK", "LOCAL_RANK"}):
        return _by_environment(env, settings, asked, here, command)
    if (launch := _manual(env, settings, nodes, devices, command)) is not None:
        return launch
    if step is None:
        _refuse_one_process_of_many(env, devices, command)
    if devices == 1:
        return Launch("local", 1, 1)
    return Launch("local", 1, devices, address="127.0.0.1", spawns=True)
