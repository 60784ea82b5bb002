"""Runs user code in confined processes, one for a rollout's workflow and one for its grader. They are
kept warm between calls.

A sample that crashes its process must fail only itself. When a process ends during several calls, each
of them runs again, alone in a process of its own, which shows which call ends it. A process that ended
once may have been killed from outside, so only a call that ends its process every time is at fault.
"""

import asyncio
import compileall
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import headrace
from infra.held_directory import make_held_directory
from infra.ports.packages import DeclaredPackages, ResolvedPackages
from infra.ports.services import GatewaySockets, SandboxOwner
from infra.sandbox.calls import CallingUserCode, UserCall
from infra.sandbox.environments.environments import PackageEnvironments
from infra.sandbox.host_messages import CallAnswer, FirstMessage
from infra.sandbox.interpreter import Interpreter
from infra.sandbox.levels.level import ProcessLimits
from infra.sandbox.levels.probe import choose_level
from infra.sandbox.process import ConfinedProcess, ProcessEnded
from infra.sandbox.trees import UnpackedTrees, unpack
from infra.sandbox.user_process import UNPRIVILEGED
from infra.sandbox.warm_processes import WarmProcesses
from infra.settings.packages import PackageSettings
from infra.settings.sandbox_level import REFUSES_PUSHES, TRUSTED
from infra.settings.sandbox_limits import load_sandbox_limits
from schemas.artifact_refs import ArtifactRef
from schemas.errors import CallInterrupted, FailureCategory, Refused, UserCodeError
from schemas.specs import DiscoveredRollout, Entrypoint, PackageEnvironment, RolloutRef

Fetch = Callable[[ArtifactRef], Awaitable[bytes]]

HostKey = tuple[str, str, str, int]
"""Run, role, rollout, and a hash of the values of secrets that only this process can compute."""

PREFIX = "headrace-code-"
"""The name prefix of directories with user code, and the file in each that its owner keeps locked."""

BUILDER = "bwrap"
"""The level at which environments are built. Packages are not run while they are installed."""

NO_ENVIRONMENTS: Mapping[str, PackageEnvironment] = {}

WARM = 8
"""How many processes are kept warm. An idle one ends when another host needs its place."""

TRIES = 3
"""How many processes in a row must end before the code that they ran counts as the cause."""

DISCOVER_S = 600.0
"""How long the entry points of one commit may take to load, one after the other."""

NOT_LOADED = (
    f"not loaded, because those before it took {DISCOVER_S:.0f} s; do less when they are imported"
)

ALONE = 4
"""How many suspected calls run at the same time, each in a process of its own."""


@dataclass(frozen=True, slots=True)
class _Host:
    """A process to run calls in: a role of a rollout, for one owner. Its key holds no secrets, and
    changes when one of their values changes."""

    rollout: RolloutRef
    owner: SandboxOwner
    role: str

    @property
    def key(self) -> HostKey:
        values = hash(frozenset(self.owner.secrets.items()))
        return (self.owner.run, self.role, self.rollout.model_dump_json(), values)


def _category_of_death(call: UserCall) -> FailureCategory:
    """The category of a call that ended its process although it ran alone. A sample did so by what the
    policy wrote, for example where the workflow runs its code, so the attempt counts as one that raised.
    Otherwise a policy could have its bad answers left out of the figures."""
    return FailureCategory.PROCESS if call.role == "grader" else FailureCategory.AGENT


def _host(call: UserCall) -> _Host:
    return _Host(call.rollout, call.owner, call.role)


class LocalUserCode(CallingUserCode):
    """`infra.ports.services.UserCode` in processes of this machine, confined as `level` says. `fetch`
    reads snapshots and pins. `sockets` opens one for each process of a workflow. `packages` says where
    packages come from."""

    def __init__(
        self,
        level: str,
        *,
        fetch: Fetch,
        sockets: GatewaySockets | None = None,
        packages: PackageSettings | None = None,
    ) -> None:
        self._level = choose_level(level)
        self._limits = ProcessLimits.of_user_code(load_sandbox_limits(os.environ))
        self._builder = choose_level(TRUSTED if level == TRUSTED else BUILDER)
        settings = packages or PackageSettings.load(os.environ)
        self._environments = PackageEnvironments(self._builder, settings)
        self._fetch = fetch
        self._sockets = sockets
        self._root, self._held = code_directory()
        self._sdk = self._root / "sdk"
        shutil.copytree(
            Path(headrace.__file__).parent,
            self._sdk / "headrace",
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        # Otherwise each process of user code would compile it, because it may not write there.
        compileall.compile_dir(self._sdk, quiet=2)
        self._warm: WarmProcesses[ConfinedProcess] = WarmProcesses(WARM, end=self._end)
        self._rollouts: dict[ConfinedProcess, RolloutRef] = {}
        self._trees = UnpackedTrees(self._root)
        self._deaths: dict[str, int] = {}
        self._alone = asyncio.Semaphore(ALONE)

    async def resolve(self, declared: DeclaredPackages) -> ResolvedPackages:
        return await self._environments.resolve(declared)

    async def discover(
        self,
        snapshot: bytes,
        entrypoints: Sequence[Entrypoint],
        *,
        environments: Mapping[str, PackageEnvironment] = NO_ENVIRONMENTS,
    ) -> tuple[DiscoveredRollout, ...]:
        with tempfile.TemporaryDirectory(dir=self._root) as directory:
            tree = Path(directory)
            await asyncio.to_thread(unpack, snapshot, tree)
            wanted = list(entrypoints) or _mains(tree)
            late_at = time.monotonic() + DISCOVER_S
            return tuple(
                [
                    await self._look(tree, e, environments.get(e.rollout))
                    if time.monotonic() < late_at
                    else DiscoveredRollout(entrypoint=e, error=NOT_LOADED)
                    for e in wanted
                    if _entry_file(tree, e) is not None
                ]
            )

    async def aclose(self) -> None:
        """End all processes and remove what was unpacked. A second call does nothing."""
        if self._held < 0:
            return
        held, self._held = self._held, -1
        await self._warm.aclose()
        self._environments.close()
        await self._builder.aclose()
        await self._level.aclose()
        await asyncio.to_thread(shutil.rmtree, self._root, ignore_errors=True)
        os.close(held)

    async def make_call(self, call: UserCall) -> CallAnswer:
        """Make one attempt at a call. Raises CallInterrupted when its process ended during the call. The
        next attempt starts from the beginning, without the model calls that this one has made. Raises
        UserCodeError once it has ended its process TRIES times although it ran alone."""
        name = call.name
        deaths = self._deaths.pop(name, 0)
        try:
            if deaths:
                return await self._call_alone(call)
            host = _host(call)
            async with self._warm.hold(host.key, lambda: self._start(host)) as process:
                return await process.call(name, call.message, deadline_s=call.deadline_s)
        except ProcessEnded as error:
            if deaths < TRIES:
                self._deaths[name] = deaths + 1
                raise CallInterrupted(f"{error}; {name} runs again, alone") from error
            text = f"its process ended whenever {name} ran alone in it: {error}"
            raise UserCodeError(_category_of_death(call), text) from error

    async def _call_alone(self, call: UserCall) -> CallAnswer:
        async with self._alone:
            process = await self._start(_host(call))
            try:
                return await process.call(call.name, call.message, deadline_s=call.deadline_s)
            finally:
                await self._end(process)

    async def _start(self, host: _Host) -> ConfinedProcess:
        rollout = host.rollout
        if rollout.pushed and self._level.name == TRUSTED:
            raise UserCodeError(FailureCategory.VALIDATION, REFUSES_PUSHES)
        tree = await self._tree(rollout.snapshot)
        gateway, python = None, None
        try:
            path = _entry_file(tree, rollout.entrypoint)
            if path is None:
                raise UserCodeError(
                    FailureCategory.VALIDATION, f"the snapshot does not hold {rollout.entrypoint}"
                )
            secrets = {name: value.reveal() for name, value in host.owner.secrets.items()}
            python = await self._python(rollout.environment)
            if host.role != "grader" and self._sockets is not None:
                gateway = await self._sockets.open_socket(host.owner.run, network=rollout.network)
            process, _ = await self._begin(
                host.role,
                tree,
                path,
                {**rollout.env, **secrets},
                gateway=gateway,
                network=rollout.network if gateway else (),
                python=python,
            )
        except BaseException:
            await self._close_socket(gateway)
            self._release(rollout.environment if python else None)
            self._trees.release(rollout.snapshot.sha256)
            raise
        self._rollouts[process] = rollout
        return process

    async def _end(self, process: ConfinedProcess) -> None:
        await process.aclose()
        rollout = self._rollouts.pop(process, None)
        if rollout is not None:
            self._release(rollout.environment)
            self._trees.release(rollout.snapshot.sha256)
        await self._close_socket(process.gateway)

    def _release(self, environment: PackageEnvironment | None) -> None:
        if environment is not None:
            self._environments.release(environment.key)

    async def _close_socket(self, gateway: Path | None) -> None:
        if gateway is not None and self._sockets is not None:
            await self._sockets.close_socket(gateway)

    async def _begin(
        self,
        role: str,
        tree: Path,
        path: Path,
        env: Mapping[str, str],
        *,
        gateway: Path | None = None,
        network: Sequence[str] = (),
        python: Interpreter | None = None,
    ) -> tuple[ConfinedProcess, FirstMessage]:
        """Start a process that loads an entry point. Returns it and its first message. Raises
        UserCodeError, also when TRIES processes in a row ended while they loaded it."""
        for _ in range(TRIES):
            process = ConfinedProcess(
                role,
                level=self._level,
                sdk=self._sdk,
                tree=tree,
                entrypoint=path,
                env=env,
                gateway=gateway,
                network=network,
                python=python,
                limits=self._limits,
            )
            try:
                return process, await process.start()
            except ProcessEnded as error:
                last = error
        raise UserCodeError(FailureCategory.PROCESS, str(last)) from last

    async def _tree(self, snapshot: ArtifactRef) -> Path:
        """The directory with the unpacked snapshot, which stays until the caller releases it."""
        return await self._trees.hold(snapshot.sha256, lambda: self._fetch(snapshot))

    async def _python(self, environment: PackageEnvironment | None) -> Interpreter | None:
        """The Python of an environment. Raises UserCodeError when this machine cannot have it."""
        if environment is None:
            return None
        try:
            return await self._environments.get(environment, await self._fetch(environment.lock))
        except Refused as error:
            raise UserCodeError(FailureCategory.VALIDATION, error.message) from error

    async def _look(
        self, tree: Path, entrypoint: Entrypoint, environment: PackageEnvironment | None
    ) -> DiscoveredRollout:
        path = _entry_file(tree, entrypoint)
        assert path is not None  # noqa: S101 - the caller looked
        try:
            python = await self._python(environment)
            try:
                process, found = await self._begin("discover", tree, path, {}, python=python)
                await process.aclose()
            finally:
                self._release(environment)
        except UserCodeError as error:
            return DiscoveredRollout(entrypoint=entrypoint, error=error.message)
        return DiscoveredRollout.model_validate(
            {"entrypoint": entrypoint, "environment": environment, **found.model_dump()}
        )


def code_directory() -> tuple[Path, int]:
    """Create a directory for user code. Returns it, and a descriptor that keeps it locked until this
    process ends. Only we and the user of user code can enter it. Directories that killed processes left
    behind are removed."""
    root, held = make_held_directory(PREFIX)
    if os.geteuid() == 0:
        os.chown(root, -1, UNPRIVILEGED)
        root.chmod(0o710)
    return root, held


def _mains(tree: Path) -> list[Entrypoint]:
    """The entry points of a tree that names none: the main.py of each rollout."""
    found = sorted(tree.glob("rollouts/*/main.py"))
    return [Entrypoint(rollout=path.parent.name) for path in found]


def _entry_file(tree: Path, entrypoint: Entrypoint) -> Path | None:
    """The entry point's file; None unless it is a Python file inside its rollout."""
    try:
        rollout = (tree / "rollouts" / entrypoint.rollout).resolve()
        path = (rollout / entrypoint.path).resolve()
        inside = path.is_relative_to(rollout) and rollout.is_relative_to(tree.resolve())
        return path if inside and path.is_file() and path.suffix == ".py" else None
    except (OSError, ValueError):  # a name that no file can have
        return None
