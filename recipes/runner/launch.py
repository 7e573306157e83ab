"""How this process was started, and which rank of the run it is: a function of environment, flags and devices.

Every way to start a run is resolved here, before any process waits for another. A launch that cannot succeed is refused
with the command to type instead. Lightning's environment classes do not serve here: they read ``os.environ`` one value
at a time when a strategy asks, and do not compare the values with each other, the flags and the devices;
`SLURMEnvironment` finds "rack1" for the first host of "rack[1-2]n[7,8]", and gives all steps of a job the same port.
"""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from datamodules.contract import OneCall, Rare
from datamodules.errors import UserError
from datamodules.ranges import NATURAL, SECONDS, Range, check_ranges
from recipes.runner.command import DEFAULT_PORT, Command, flag_of
from recipes.runner.machine import Machine, number_of_devices
from recipes.runner.network import LOOPBACK
from recipes.runner.worker import is_worker

_PROCESSES_OF_A_CORE = 8
_NODES = re.compile(r"[0-9]+(:[0-9]+)?")


@dataclass(frozen=True)
class LaunchSettings:
    """How the processes of a run are started, find each other, and are started again.

    Args:
        num_nodes: nodes of the run; MIN:MAX lets nodes leave and join while it trains.
        node_rank: number of this node, from 0, where the run is started manually on each node; also NODE_RANK.
        master_addr: host name or address of node 0; also MASTER_ADDR.
        master_port: free TCP port of node 0, 29500 where none is given; also MASTER_PORT.
        max_restarts: how often the processes are started again, from the newest checkpoint, after one was lost.
        rendezvous_timeout: seconds to wait for node 0 and for the other nodes, at the start and in a restart.
        collective_timeout: seconds that a rank waits for the others in a collective call before it fails.
    """

    num_nodes: OneCall[str | int] = 1
    node_rank: OneCall[int | None] = None
    master_addr: OneCall[str | None] = None
    master_port: OneCall[int | None] = None
    max_restarts: OneCall[int] = 0
    rendezvous_timeout: Rare[OneCall[float]] = 60.0
    collective_timeout: Rare[OneCall[float]] = 1800.0

    def __post_init__(self) -> None:
        check_ranges(
            node_rank=(self.node_rank, NATURAL),
            max_restarts=(self.max_restarts, NATURAL),
            master_port=(self.master_port, Range(1, 65535, whole=True)),
            rendezvous_timeout=(self.rendezvous_timeout, SECONDS),
            collective_timeout=(self.collective_timeout, SECONDS),
        )
        if not _NODES.fullmatch(str(self.num_nodes)) or not 1 <= self.nodes[0] <= self.nodes[1]:
            raise UserError(f"num_nodes={self.num_nodes}: expected a number of nodes, or MIN:MAX as in 1:4")

    @property
    def nodes(self) -> tuple[int, int]:
        """The fewest and the most nodes."""
        fewest, _, most = str(self.num_nodes).partition(":")
        return int(fewest), int(most or fewest)


@dataclass(frozen=True)
class Launch:
    """Which process of the run this one is.

    Args:
        launcher: what started the processes: local (this program), manual (the user, on each node), torchrun or slurm.
        devices: processes on each node, one for each device.
        address: of node 0; None where the run is one process.
        port: of node 0; None where node 0 chooses a free one.
        starts_agent: this process starts those of its node, and does not train itself.
        min_nodes: the fewest nodes with which the run goes on.
        max_restarts: how often the agent starts the processes again.
        restarts: the launcher may start the processes again, or with another number of nodes.
        collective_timeout: seconds that a rank waits for the others in a collective call.
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

    @property
    def world_size(self) -> int:
        """Processes of the run."""
        return self.num_nodes * self.devices

    @property
    def rank(self) -> int:
        """The global rank of this process."""
        return self.node_rank * self.devices + self.local_rank

    @property
    def is_elastic(self) -> bool:
        """Whether nodes may leave and join."""
        return self.min_nodes < self.num_nodes

    def describe(self) -> str:
        """The launcher and the rendezvous address: the start of a run's first line."""
        who = {"local": "started here", "manual": "started manually", "slurm": "started by Slurm"}
        nodes = f"{self.num_nodes} node{'s' if self.num_nodes > 1 else ''} x {self.devices}"
        text = f"{who.get(self.launcher, f'started by {self.launcher}')}, {nodes} device{'s' * (self.devices > 1)}"
        return text if self.address is None else f"{text}, {self.address}:{self.port}"


_FIRST_PORT, _PORTS = 15000, 17000  # Below the range of ephemeral ports.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # From here on: the batch script, the shell of salloc, processes that ssh has started.


def _number(env: Mapping[str, str], *names: str) -> int:
    """The first of these variables that is a number, or 0."""
    return next((int(env[name]) for name in names if env.get(name, "").isdigit()), 0)


def _integer(env: Mapping[str, str], name: str) -> int | None:
    """An integer from an environment variable that the user may have set."""
    if not (text := env.get(name, "").strip()):
        return None
    if not text.isdigit():
        raise UserError(f"the environment says {name}={text}, which is not a whole number; unset or correct it")
    return int(text)


def first_host(nodes: str) -> str:
    """The first host of a list in Slurm's notation.

    Example:
        >>> [first_host(text) for text in ("tux03", "tux[03-05,9],gpu1", "rack[1-2]n[7,8]", "a,b")]
        ['tux03', 'tux03', 'rack1n7', 'a']
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^,\-\]]*)[^\]]*\]", r"\1", first[0] if first else "")


def _is_slurm_step(env: Mapping[str, str]) -> bool:
    """Whether srun has started this process, and not a batch script or a shell: of salloc, or ``srun --pty bash``.

    A step within the shell of an srun inherits its SLURM_PTY_PORT, but not its terminal.
    """
    typed = env.get("SLURM_TASK_PID") != str(os.getpid()) and sys.stdin is not None and sys.stdin.isatty()
    of_srun = {"SLURM_STEP_ID", "SLURM_PROCID"} <= env.keys() and _number(env, "SLURM_STEP_ID") < _FIRST_SPECIAL_STEP
    return of_srun and not ("SLURM_PTY_PORT" in env and typed)


@dataclass(frozen=True)
class _Start:
    """How this process was started, as `plan_launch` is told."""

    env: Mapping[str, str]
    settings: LaunchSettings
    asked: Any
    here: Machine
    command: Command

    @property
    def master(self) -> str | None:
        """The address of node 0: the flag or MASTER_ADDR."""
        return self.settings.master_addr or self.env.get("MASTER_ADDR")

    @property
    def port(self) -> int | None:
        """The port of node 0: the flag, whose range is checked where it is read, or MASTER_PORT."""
        if self.settings.master_port is not None:
            return self.settings.master_port
        value = _integer(self.env, "MASTER_PORT")
        if value is not None and not 1 <= value <= 65535:
            raise UserError(f"MASTER_PORT {value} is not a TCP port; expected 1 to 65535, such as {DEFAULT_PORT}")
        return value

    def check_agreement(self, nodes: int, devices: int, who: str, command: Command) -> None:
        """Refuse flags that contradict the processes that exist; the defaults contradict nothing."""
        count, of_nodes = number_of_devices(self.asked, self.here), self.settings.nodes[1]
        devices_given = str(self.asked) not in ("auto", "-1")
        if (devices_given and count != devices) or (of_nodes > 1 and of_nodes != nodes):
            raise UserError(
                f"{who} has started {nodes} x {devices} = {nodes * devices} processes, and --num-nodes {of_nodes}"
                f" --devices {count} are {of_nodes * count}; {who} decides: {command.split(nodes, devices)}"
            )

    def by_variables(self) -> Launch:
        """For processes that an agent, mpirun or a script has started, with their ranks in the environment."""
        env, own = self.env, is_worker(self.env)
        torchrun = "TORCHELASTIC_RUN_ID" in self.env and not own
        world = _integer(env, "WORLD_SIZE") or 1
        devices = _integer(env, "LOCAL_WORLD_SIZE") or world
        nodes, who = world // devices, "torchrun" if torchrun else "LOCAL_WORLD_SIZE"
        restarts = bool(_integer(env, "TORCHELASTIC_MAX_RESTARTS") or _integer(env, "TORCHELASTIC_RESTART_COUNT"))
        command = self.command.started_by(who, nodes, devices)
        rank, local, address = _integer(env, "RANK"), _integer(env, "LOCAL_RANK"), self.master or LOOPBACK
        if rank is None or local is None or (world > 1 and self.master is None):
            raise UserError(
                f"WORLD_SIZE says that this is one of {world} processes; set RANK, LOCAL_RANK and MASTER_ADDR too, or"
                " start them by torchrun, as torchrun -m in place of python -m, or unset it"
            )
        if own and nodes * devices != world:
            raise UserError(
                f"this node has {devices} of {world} processes; expected as many on each node: start all with the same"
                " --devices"
            )
        if nodes * devices != world or rank % devices != local:
            raise UserError(
                f"process {rank} (RANK) of {world} (WORLD_SIZE) is process {local} of {devices} on its node"
                " (LOCAL_RANK, LOCAL_WORLD_SIZE); expected as many on each node, numbered node by node:"
                f" {command.using()}"
            )
        if not restarts and not own:
            self.check_agreement(nodes, devices, who, command)
        flags_of = vars(self.settings)
        given = {name: flags_of[name] for name in ("master_addr", "master_port") if flags_of[name] is not None}
        if torchrun and given:
            flags = " ".join(f"{flag_of(name)} {value}" for name, value in given.items())
            raise UserError(
                f"torchrun decides where the processes meet; pass {flags} to torchrun itself, or leave it out:"
                f" {command.using(**dict.fromkeys(given))}"
            )
        launcher = "torchrun" if torchrun else ("local" if own and nodes == 1 else "manual")
        launch = Launch(launcher, nodes, devices, rank // devices, local, restarts=restarts)
        if world == 1 and not own:
            return launch
        # The flags of a worker of ours are those of its agent, whose store the variables name.
        port = _integer(env, "MASTER_PORT") if own else self.port
        return replace(launch, address=env["MASTER_ADDR"] if own else address, port=port or DEFAULT_PORT)

    def by_slurm(self, tasks: int) -> Launch:
        """For the processes that srun has started."""
        env, nodes = self.env, _number(self.env, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES") or 1
        devices, each = tasks // nodes, env.get("SLURM_STEP_TASKS_PER_NODE", "")
        if tasks % nodes:
            raise UserError(
                f"Slurm has started {tasks} processes on {nodes} nodes; expected as many on each:"
                f" {self.command.started_by('slurm', nodes, -(-tasks // nodes)).using()}"
            )
        command = self.command.started_by("slurm", nodes, devices)
        if "," in each:
            raise UserError(
                f"Slurm has started {each} processes on the nodes, one number for each; expected as many on each:"
                f" {command.using()}"
            )
        self.check_agreement(nodes, devices, "Slurm", command)
        lists = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
        hosts = next((env[name] for name in lists if env.get(name)), "")
        address = self.master or (first_host(hosts) if nodes > 1 and hosts else LOOPBACK)
        # All processes compute the port from the numbers of the job and the step.
        port = _FIRST_PORT + (7 * _number(env, "SLURM_JOB_ID") + _number(env, "SLURM_STEP_ID")) % _PORTS
        ranks = _number(env, "SLURM_NODEID"), _number(env, "SLURM_LOCALID")
        return Launch("slurm", nodes, devices, *ranks, address, self.port or port)

    def manual(self, nodes: int, devices: int) -> Launch:
        """Started by the user on each of several nodes."""
        command, address, port = self.command, self.master, self.port or DEFAULT_PORT
        node = _integer(self.env, "NODE_RANK") if self.settings.node_rank is None else self.settings.node_rank
        if node is not None and node >= nodes:
            raise UserError(
                f"node {node} of {nodes}: nodes are counted from 0, so expected were 0 to {nodes - 1}:"
                f" {command.using(num_nodes=nodes, node_rank=nodes - 1)} or {command.using(num_nodes=node + 1)}"
            )
        if nodes > 1 and (node is None or address is None):
            place = {"node_rank": "I" if node is None else node, "master_addr": address or "HOST", "master_port": port}
            numbers = "0 or 1" if nodes == 2 else f"0 to {nodes - 1}"
            torchrun, srun = (command.started_by(who, nodes, devices).using() for who in ("torchrun", "slurm"))
            raise UserError(
                f"num_nodes={nodes} does not tell how the nodes find each other. Type on each node, I being"
                f" {numbers} and HOST the address of node 0: {command.using(**place)} or use torchrun: {torchrun} or"
                f" Slurm: {srun}"
            )
        return Launch("manual", nodes, devices, node or 0, 0, address, port, starts_agent=True)

    def refuse_one_process_of_many(self, devices: int) -> None:
        """Refuse a program that was started once, without srun, in a Slurm job that has more for it."""
        env, nodes = self.env, _number(self.env, "SLURM_JOB_NUM_NODES", "SLURM_NNODES") or 1
        of_node = _number(env, "SLURM_NTASKS_PER_NODE") or -(-_number(env, "SLURM_NTASKS") // nodes) or 1
        if "SLURM_JOB_ID" not in env or (nodes == 1 and (of_node == 1 or devices > 1)):
            return
        tasks = f" and {nodes * of_node} tasks" if of_node > 1 else ""
        what = f"{nodes} node{'s' * (nodes > 1)}{tasks}"
        of_node = devices if devices > 1 else max(of_node, _number(env, "SLURM_GPUS_PER_NODE"))
        several, one = (self.command.started_by("slurm", *split).using() for split in ((nodes, of_node), (1, 1)))
        lines = f"{several} or as one process: {one}"
        if "SLURM_PTY_PORT" in env:
            # The shell of srun is a step that holds the processors of the job.
            lines = lines.replace("srun --nodes", "srun --overlap --nodes")
        raise UserError(f"this Slurm job has {what}, and the program was started once, without srun: {lines}")

    def plan(self) -> Launch:
        """Which of these it is; what the processes' own variables say wins over the flags."""
        env, (fewest, nodes), devices = self.env, self.settings.nodes, number_of_devices(self.asked, self.here)
        if "TORCHELASTIC_RUN_ID" in env:
            return self.by_variables()
        by_slurm, tasks = _is_slurm_step(env), _number(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
        if by_slurm and tasks > 1:
            return self.by_slurm(tasks)
        if (_integer(env, "WORLD_SIZE") or 1) > 1 and env.keys() & {"RANK", "LOCAL_RANK"}:
            return self.by_variables()
        manual = replace(self.manual(nodes, devices), min_nodes=fewest, max_restarts=self.settings.max_restarts)
        if nodes > 1:
            return manual
        if not by_slurm:
            self.refuse_one_process_of_many(devices)
        if devices == 1 and not manual.max_restarts:
            return Launch("local", 1, 1)
        return replace(manual, launcher="local", address=LOOPBACK, port=None)


def plan_launch(
    env: Mapping[str, str], settings: LaunchSettings, asked: Any, here: Machine, command: Command
) -> Launch:
    """Find out which process of which run this one is.

    Args:
        env: the environment variables of this process.
        asked: ``--devices``.
        here: the devices of this machine.
        command: what the user typed, for the corrected command.

    Raises:
        UserError: the run could not start, or would wait for ever.
    """
    launch = _Start(env, settings, asked, here, command).plan()
    launch = replace(launch, collective_timeout=settings.collective_timeout)
    if here.count is None:
        _check_processors(launch, asked, command)
        return launch
    if launch.devices <= here.count:
        return launch
    command = command.started_by(launch.launcher, launch.num_nodes, launch.devices)
    if here.count == 0:
        raise UserError(f"there is no {here.kind} device here: {command.using(accelerator='cpu')}")
    per_task = launch.launcher == "slurm"
    hint = " (does the job ask for --gpus-per-task? --gpus-per-node shows each task all of them)" if per_task else ""
    raise UserError(
        f"{launch.devices} devices were requested and this machine has {here.count} ({here.kind}){hint}:"
        f" {command.split(launch.num_nodes, here.count)}"
    )


def _check_processors(launch: Launch, asked: Any, command: Command) -> None:
    """Refuse processes on a CPU that have numbers, or are many more than its cores."""
    if not launch.starts_agent:
        return
    if "," in str(asked):
        raise UserError(
            f"devices={asked} names devices by number, and the processes of a CPU have none:"
            f" {command.using(devices=launch.devices)}"
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if launch.devices > _PROCESSES_OF_A_CORE * cores:
        raise UserError(
            f"devices={launch.devices} starts {launch.devices} processes on {cores} cores, and each of them needs"
            f" memory for a whole model; expected at most {_PROCESSES_OF_A_CORE * cores}, and {cores} train fastest:"
            f" {command.using(devices=cores)}"
        )
