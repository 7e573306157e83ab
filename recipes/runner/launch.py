"""Detection of the launcher and the rank of this process, from the environment, the flags and the devices.

This happens before any process waits for another process. A launch that cannot succeed is rejected with the corrected
command. Lightning's environment classes are not sufficient: they read ``os.environ`` one value at a time, and do not
compare the values with each other, the flags and the devices. For `SLURMEnvironment`, the first host of
"rack[1-2]n[7,8]" is "rack1", and all steps of a job have the same port.
"""

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from datamodules.contract import Advanced, Transient
from datamodules.errors import UserError, spelled
from datamodules.notes import warn
from datamodules.ranges import NATURAL, SECONDS, Range, check_ranges
from recipes.runner.command import DEFAULT_PORT, Command
from recipes.runner.machine import Machine, check_cores, detect_machine, devices_of, number_of_devices
from recipes.runner.settings import TrainerSettings, check_strategy, micro_batches_of_update
from recipes.runner.variables import (
    first_number,
    integer_of,
    is_by_torchrun,
    is_slurm_step,
    restarts_by_torch,
    slurm_hosts,
)

LOOPBACK = "127.0.0.1"
_NODES = re.compile(r"[0-9]+(:[0-9]+)?")
_PORTS = Range(1, 65535, whole=True)
# Below the range of ephemeral ports, so that no outgoing connection uses the port.
_FIRST_PORT = 15000
_NUMBER_OF_PORTS = 17000


@dataclass(frozen=True)
class LaunchSettings:
    """Settings for the start of a run's processes, their rendezvous and their restarts.

    Args:
        num_nodes: number of nodes; with MIN:MAX, nodes may leave and join during training.
        node_rank: number of this node, from 0, if the run is started manually on each node; also NODE_RANK.
        master_addr: host name or address of node 0; also MASTER_ADDR.
        master_port: free TCP port of node 0, by default 29500; also MASTER_PORT.
        max_restarts: maximum number of restarts from the newest checkpoint after the loss of a process.
        rendezvous_timeout: seconds to wait for node 0 and for the other nodes, at the start and in a restart.
        collective_timeout: seconds that a rank waits for other ranks in a collective call before it fails.
    """

    num_nodes: Transient[str | int] = 1
    node_rank: Transient[int | None] = None
    master_addr: Transient[str | None] = None
    master_port: Transient[int | None] = None
    max_restarts: Transient[int] = 0
    rendezvous_timeout: Advanced[Transient[float]] = 60.0
    collective_timeout: Advanced[Transient[float]] = 1800.0

    def __post_init__(self) -> None:
        check_ranges(
            node_rank=(self.node_rank, NATURAL),
            max_restarts=(self.max_restarts, NATURAL),
            master_port=(self.master_port, _PORTS),
            rendezvous_timeout=(self.rendezvous_timeout, SECONDS),
            collective_timeout=(self.collective_timeout, SECONDS),
        )
        if not _NODES.fullmatch(str(self.num_nodes)) or not 1 <= self.nodes[0] <= self.nodes[1]:
            problem = "expected a number of nodes, or MIN:MAX as in 1:4"
            raise UserError(problem, setting="num_nodes", value=self.num_nodes)

    @property
    def nodes(self) -> tuple[int, int]:
        """The minimum and the maximum number of nodes."""
        minimum, _, maximum = str(self.num_nodes).partition(":")
        return int(minimum), int(maximum or minimum)


@dataclass(frozen=True)
class Launch:
    """The position of this process in its run: ranks, sizes and the address of node 0.

    Args:
        launcher: starter of the processes: local (this program), manual (the user, on each node), torchrun or slurm.
        devices: processes on each node, one for each device.
        address: the address of node 0; None for a run of one process.
        port: the port of node 0; None if node 0 chooses a free port.
        starts_agent: whether this process starts the processes of its node, and does not train itself.
        min_nodes: the minimum number of nodes with which the run continues.
        max_restarts: the maximum number of restarts by the agent.
        restarts: whether the launcher may restart the processes, perhaps with another number of nodes.
        collective_timeout: seconds that a rank waits for other ranks in a collective call.
        store_prefix: the prefix of this start's keys in the store of our agents; empty without our agents.
    """

    launcher: str
    num_nodes: int
    devices: int
    node_rank: int = 0
    local_rank: int = 0
    address: str | None = None
    port: int | None = None
    starts_agent: bool = False
    min_nodes: int = 1
    max_restarts: int = 0
    restarts: bool = False
    collective_timeout: float = 1800.0
    store_prefix: str = ""

    def of_worker(self, env: Mapping[str, str], store_prefix: str) -> "Launch":
        """Return the launch of a worker from this launch, the launch of our agent.

        Args:
            env: the environment variables of the worker, set by torch's agent.

        Raises:
            UserError: the nodes have different numbers of processes.
        """
        world = int(env["WORLD_SIZE"])
        nodes = int(env["GROUP_WORLD_SIZE"])
        restarts_made, restarts_allowed = restarts_by_torch(env)
        if nodes * self.devices != world:
            raise UserError(
                f"this node has {self.devices} of the {world} processes of {nodes} nodes; expected as many on each"
                " node: start all with the same --devices"
            )
        return replace(
            self,
            launcher="local" if nodes == 1 else "manual",
            num_nodes=nodes,
            node_rank=int(env["RANK"]) // self.devices,
            local_rank=int(env["LOCAL_RANK"]),
            address=env["MASTER_ADDR"],
            port=int(env["MASTER_PORT"]),
            starts_agent=False,
            restarts=restarts_made < restarts_allowed,
            store_prefix=store_prefix,
        )

    @property
    def world_size(self) -> int:
        """Number of processes of the run."""
        return self.num_nodes * self.devices

    @property
    def rank(self) -> int:
        """The global rank of this process."""
        return self.node_rank * self.devices + self.local_rank

    @property
    def where(self) -> str:
        """The node of this process, for messages."""
        return f"node {self.node_rank}, {socket.gethostname()}"

    @property
    def is_elastic(self) -> bool:
        """Whether nodes may leave and join."""
        return self.min_nodes < self.num_nodes

    def describe(self) -> str:
        """Return the launcher and the rendezvous address, for the first line of a run."""
        starts = {"local": "started here", "manual": "started manually", "slurm": "started by Slurm"}
        parts = [
            starts.get(self.launcher, f"started by {self.launcher}"),
            f"{self.num_nodes} node{'s' * (self.num_nodes > 1)} x {self.devices} device{'s' * (self.devices > 1)}",
        ]
        if self.address is not None:
            parts.append(f"{self.address}:{self.port}")
        return ", ".join(parts)


def first_host(nodes: str) -> str:
    """Return the first host of a list in Slurm's notation.

    Example:
        >>> [first_host(text) for text in ("tux03", "tux[03-05,9],gpu1", "rack[1-2]n[7,8]", "a,b")]
        ['tux03', 'tux03', 'rack1n7', 'a']
    """
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^,\-\]]*)[^\]]*\]", r"\1", match[0] if match else "")


@dataclass(frozen=True)
class _LaunchPlanner:
    """The arguments of `plan_launch`, and a method for each way to start a run."""

    env: Mapping[str, str]
    settings: LaunchSettings
    requested_devices: Any
    machine: Machine
    command: Command

    @property
    def master(self) -> str | None:
        """The address of node 0: the flag or MASTER_ADDR."""
        return self.settings.master_addr or self.env.get("MASTER_ADDR")

    @property
    def port(self) -> int | None:
        """The port of node 0: the flag or MASTER_PORT."""
        port = self.settings.master_port or integer_of(self.env, "MASTER_PORT")
        check_ranges(MASTER_PORT=(port, _PORTS))
        return port

    def check_agreement(self, nodes: int, devices: int, launcher: str) -> None:
        """Raise if flags contradict the number of started processes; defaults never do."""
        count = number_of_devices(self.requested_devices, self.machine)
        node_count = self.settings.nodes[1]
        has_devices_flag = str(self.requested_devices) not in ("auto", "-1")
        if (has_devices_flag and count != devices) or (node_count > 1 and node_count != nodes):
            raise UserError(
                f"{spelled('num_nodes', node_count)} and {spelled('devices', count)} are {node_count * count}"
                f" processes, and {launcher} has started {nodes} x {devices}, and decides:"
                f" {self.command.started_by(launcher, nodes, devices).split(nodes, devices)}"
            )

    def by_variables(self) -> Launch:
        """Plan for processes with ranks in their environment, from torchrun or a script."""
        env = self.env
        launcher = "torchrun" if is_by_torchrun(env) else "manual"
        world = integer_of(env, "WORLD_SIZE") or 1
        devices = integer_of(env, "LOCAL_WORLD_SIZE") or world
        rank = integer_of(env, "RANK")
        local_rank = integer_of(env, "LOCAL_RANK")
        if rank is None or local_rank is None or (world > 1 and self.master is None):
            raise UserError(
                f"WORLD_SIZE says that this is one of {world} processes; set RANK, LOCAL_RANK and MASTER_ADDR too, or"
                " start them by torchrun, as torchrun -m in place of python -m, or unset it"
            )
        if world % devices or rank % devices != local_rank:
            raise UserError(
                f"process {rank} (RANK) of {world} (WORLD_SIZE) is process {local_rank} of {devices} on its node"
                " (LOCAL_RANK, LOCAL_WORLD_SIZE); expected as many on each, numbered node by node"
            )
        nodes = world // devices
        restarts = any(restarts_by_torch(env))
        # torchrun may restart an elastic run with a number of nodes that differs from the flags.
        if not restarts:
            self.check_agreement(nodes, devices, "torchrun" if launcher == "torchrun" else "LOCAL_WORLD_SIZE")
        if launcher == "torchrun" and (self.settings.master_addr or self.settings.master_port):
            raise UserError(
                "torchrun decides where the processes meet: pass --master-addr and --master-port to torchrun itself"
            )
        launch = Launch(launcher, nodes, devices, rank // devices, local_rank, restarts=restarts)
        if world == 1:
            return launch
        return replace(launch, address=self.master, port=self.port or DEFAULT_PORT)

    def by_slurm(self, tasks: int) -> Launch:
        """Plan for the processes that srun has started."""
        env = self.env
        nodes = first_number(env, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES") or 1
        devices = -(-tasks // nodes)
        # Such as 3,1 if the nodes have different numbers of tasks.
        tasks_per_node = env.get("SLURM_STEP_TASKS_PER_NODE", "")
        if tasks % nodes or "," in tasks_per_node:
            raise UserError(
                f"Slurm has started {tasks_per_node or tasks} processes on {nodes} nodes; expected as many on each:"
                f" {self.command.started_by('slurm', nodes, devices).using()}"
            )
        self.check_agreement(nodes, devices, "slurm")
        if self.settings.max_restarts or self.settings.nodes[0] < self.settings.nodes[1]:
            warn(
                f"note: srun has started the processes, so that {spelled('max_restarts')} and nodes that leave and join"
                " have no effect: Slurm requeues a job that has lost a process"
            )
        hosts = slurm_hosts(env)
        address = self.master or (first_host(hosts) if nodes > 1 and hosts else LOOPBACK)
        # All processes compute the port of their step from the numbers of the job and the step.
        number = 7 * first_number(env, "SLURM_JOB_ID") + first_number(env, "SLURM_STEP_ID")
        port = self.port or _FIRST_PORT + number % _NUMBER_OF_PORTS
        node_rank = first_number(env, "SLURM_NODEID")
        return Launch("slurm", nodes, devices, node_rank, first_number(env, "SLURM_LOCALID"), address, port)

    def manual(self, nodes: int, devices: int) -> Launch:
        """Plan for a program that the user has started on each node."""
        port = self.port or DEFAULT_PORT
        node = self.settings.node_rank
        if node is None:
            node = integer_of(self.env, "NODE_RANK")
        if nodes > 1 and (node is None or self.master is None):
            flags = {"node_rank": "I" if node is None else node, "master_addr": self.master or "HOST"}
            torchrun = self.command.started_by("torchrun", nodes, devices).using()
            raise UserError(
                "the nodes do not know how they find each other. Type on each node, I being its number from 0 and HOST"
                " the address of node 0, one of:",
                setting="num_nodes",
                value=self.settings.num_nodes,
                commands=(self.command.using(**flags), torchrun),
            )
        if node is not None and node >= nodes:
            problem = f"expected 0 to {nodes - 1}; the run has {nodes} node{'s' * (nodes != 1)}"
            raise UserError(problem, setting="node_rank", value=node)
        return Launch("manual", nodes, devices, node or 0, 0, self.master, port, starts_agent=True)

    def reject_one_process_of_many(self, devices: int) -> None:
        """Reject a program that was started once, without srun, in a Slurm job with more tasks."""
        env = self.env
        nodes = first_number(env, "SLURM_JOB_NUM_NODES", "SLURM_NNODES") or 1
        tasks = first_number(env, "SLURM_NTASKS_PER_NODE") or -(-first_number(env, "SLURM_NTASKS") // nodes) or 1
        # On one node, our agent can start the processes of several devices itself, and a job of one task may use only
        # one of its GPUs, as in a search with one GPU per run.
        if "SLURM_JOB_ID" not in env or (nodes == 1 and (tasks == 1 or devices > 1)):
            return
        processes = devices if devices > 1 else max(tasks, first_number(env, "SLURM_GPUS_PER_NODE"))
        # The shell of srun is a step that holds the job's processors; another step has to share them.
        typed = replace(self.command, srun="srun --overlap") if "SLURM_PTY_PORT" in env else self.command
        commands = [typed.started_by("slurm", *size).using() for size in ((nodes, processes), (1, 1))]
        raise UserError(
            f"this Slurm job has {nodes} x {tasks} tasks, and the program was started once, without srun; type the"
            " first of these, or for one process the second:",
            commands=commands,
        )

    def plan(self) -> Launch:
        """Detect the launcher; environment variables of the processes win over flags."""
        env = self.env
        min_nodes, nodes = self.settings.nodes
        devices = number_of_devices(self.requested_devices, self.machine)
        # Before Slurm: a step of Slurm may start torchrun, whose processes inherit Slurm's variables.
        if is_by_torchrun(env):
            return self.by_variables()
        by_srun = is_slurm_step(env)
        tasks = first_number(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
        if by_srun and tasks > 1:
            return self.by_slurm(tasks)
        if (integer_of(env, "WORLD_SIZE") or 1) > 1 and env.keys() & {"RANK", "LOCAL_RANK"}:
            return self.by_variables()
        manual = replace(self.manual(nodes, devices), min_nodes=min_nodes, max_restarts=self.settings.max_restarts)
        if nodes > 1:
            return manual
        if not by_srun:
            self.reject_one_process_of_many(devices)
        if devices == 1 and not manual.max_restarts:
            return Launch("local", 1, 1)
        return replace(manual, launcher="local", address=LOOPBACK, port=None)


def plan_launch(
    env: Mapping[str, str], settings: LaunchSettings, asked: Any, here: Machine, command: Command
) -> Launch:
    """Determine the position of this process in its run.

    Args:
        env: the environment variables of this process.
        settings: the flags of the launch.
        asked: ``--devices``.
        here: the devices of this machine.
        command: the user's command, for the corrected command.

    Raises:
        UserError: the run could not start, or would wait forever.
    """
    launch = _LaunchPlanner(env, settings, asked, here, command).plan()
    launch = replace(launch, collective_timeout=settings.collective_timeout)
    if here.count is None:
        if launch.starts_agent:
            check_cores(launch.devices, asked, command)
    elif launch.devices > here.count:
        command = command.started_by(launch.launcher, launch.num_nodes, launch.devices)
        if here.count == 0:
            raise UserError(f"there is no {here.kind} device here: {command.using(accelerator='cpu')}")
        hint = " (does the job ask for --gpus-per-task?)" if launch.launcher == "slurm" else ""
        raise UserError(
            f"{launch.devices} devices were requested and this machine has {here.count} ({here.kind}){hint}:"
            f" {command.split(launch.num_nodes, here.count)}"
        )
    return launch


def plan_processes(command: str, trainer: TrainerSettings, options: LaunchSettings, typed: Command) -> Launch:
    """Determine the position of this process in the run of a command.

    Args:
        command: fit, validate, test, predict or export.
        trainer: the settings with the requested devices.
        options: the settings of the launch.
        typed: the user's command, for the corrected command.

    Raises:
        UserError: the run could not start, or would wait forever.
    """
    if command in ("predict", "export"):
        return Launch("local", 1, 1)
    launch = plan_launch(os.environ, options, trainer.devices, detect_machine(trainer.accelerator), typed)
    check_strategy(trainer.strategy)
    return launch


def on_devices_of(launch: Launch, trainer: TrainerSettings) -> TrainerSettings:
    """Return the Trainer's settings with the devices of the launch on this node."""
    devices = devices_of(launch.devices, trainer.devices, detect_machine(trainer.accelerator))
    return replace(trainer, devices=devices)


def check_shared_update(launch: Launch, samples: int | None, batch_size: Any) -> None:
    """Reject an update that the devices cannot share, before a process starts and reads data.

    Args:
        samples: samples of an update on all devices; None if the number of devices determines it.
        batch_size: samples of a micro-batch; None if it is not known.

    Raises:
        UserError: a device would have nothing to do, or the global batch would change with the nodes.
    """
    if launch.is_elastic and samples is None:
        raise UserError(
            "the number of devices may change, and the global batch would change with it",
            setting="num_nodes",
            value=f"{launch.min_nodes}:{launch.num_nodes}",
            to_type=f"pass {spelled('global_batch_size')}, the samples of an update on all devices",
        )
    micro_batches = micro_batches_of_update(1, samples, batch_size, launch.world_size)
    if micro_batches is not None and micro_batches < launch.world_size:
        raise UserError(
            f"a global batch of {samples} has {micro_batches} micro-batches of {batch_size}, and there are"
            f" {launch.world_size} devices: pass fewer devices, or a {spelled('batch_size')} of"
            f" {max(1, (samples or 1) // launch.world_size)} or less"
        )
