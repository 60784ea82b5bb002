"""Runs the corpus at one level, and prints the effects that it found outside.

It is a process of its own, because an attack that escapes may end it, and because it pretends to be the
platform: its environment holds a secret. `python -m tests.escapes.harness LEVEL [FAMILY ...]` prints a
JSON object, attack -> effects.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import importlib
import io
import json
import os
import resource
import secrets
import signal
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from infra.model_api.gateway.server import HttpGateway
from infra.ports.packages import DeclaredPackages
from infra.ports.services import SandboxOwner
from infra.sandbox.sandbox import LocalUserCode
from infra.sandbox.user_process import user_group
from infra.settings.packages import PackageSettings
from schemas.artifact_refs import ArtifactRef
from schemas.errors import TransientError, UserCodeError
from schemas.sampling import Message, SampleRecord
from schemas.specs import Entrypoint, PackageEnvironment, RolloutRef
from tests.escapes.attacks.attack import ATTACKS, Attack
from tests.escapes.outside import ENVIRONMENTS, Outside
from tests.kit.http_victim import Quick
from tests.kit.specs import group_spec, template

HERE = Path(__file__).parent
TRUSTED = "process-trusted"
ATTACKER, NEIGHBOUR = SandboxOwner(run="attacker"), SandboxOwner(run="other")
MOST_GROWTH = 96 << 20
"""How much memory of the platform an attack may cost, in bytes."""
LONGEST_ERROR = 20_000
DELAY_S = 0.4
"""After this time a time bomb has acted."""

SURVIVE_S = 1.5
"""How long after the end of its sandbox a process of an attack may be seen at most."""

FROM_GRADER = (
    "loopback",
    "database_socket",
    "double_fork",
    "write_everywhere",
    "read_secret_files",
    "environment_of_parent",
    "proc_mem",
    "kill_victim",
    "read_segment",
    "change_tree",
    "abstract_socket",
    "new_user_namespace",
)
"""The attacks that also run in a grader."""

MAY = {
    TRUSTED: (),
    "bwrap": (),
    # The kernel of such a sandbox is a program of its own, so its settings and namespaces are too.
    "gvisor": (
        "SYSCALL",
        "NAMESPACE",
        "it is never killed",
        "it has a real-time priority",
        "a packet socket",
        "a raw socket",
        "it added an address",
        "it made a control group",
        "it listens to audit records",
        "it made a device file",
        "it gave a file capabilities",
        "programs may give it new rights",
        "process_madvise was allowed",
        "a file of 8 TiB",
        "it opened /dev/fuse, /dev/net/tun",
        "it is root",
        "8 settings may be written",
    ),
}
"""The claims of attacks that are no effect at a level."""


def load_attacks() -> None:
    for file in sorted((HERE / "attacks").glob("*.py")):
        if file.stem not in ("__init__", "attack"):
            importlib.import_module(f"tests.escapes.attacks.{file.stem}")


def snapshot(targets: str) -> bytes:
    """The tree of the attacking commit."""
    files = {"tests/__init__.py": b"", "tests/escapes/__init__.py": b""}
    for path in (HERE / "attacks").glob("*.py"):
        files[f"tests/escapes/attacks/{path.name}"] = path.read_bytes()
    entries = {"escape": "entry.py", "importing": "import_attacks.py"}
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for rollout, main in entries.items():
            own = {"main.py": (HERE / main).read_bytes(), "targets.json": targets.encode()}
            for name, data in {**files, **own}.items():
                member = tarfile.TarInfo(f"rollouts/{rollout}/{name}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return out.getvalue()


def attacking_rollout(tree: ArtifactRef) -> RolloutRef:
    """The rollout whose workflow and grader attack."""
    return RolloutRef(
        snapshot=tree,
        commit="c" * 40,
        entrypoint=Entrypoint(rollout="escape"),
        workflow="Escape",
        grader="Judge",
        workflow_timeout_s=10.0,
        grader_timeout_s=10.0,
    )


class Corpus:
    """The attacks at one level. `effects` maps an attack to what it did outside."""

    def __init__(self, level: str, outside: Outside) -> None:
        self._level = level
        self._outside = outside
        self._gateway = HttpGateway(Quick(), group=user_group())
        self._session = self._gateway.open(group_spec(template()), 0, deadline_s=600)
        outside.other_path, outside.other_key = self._session.base_path, self._session.api_key
        self._tree = snapshot(json.dumps(dataclasses.asdict(outside.targets())))
        digest = hashlib.sha256(self._tree).hexdigest()
        self._rollout = attacking_rollout(
            ArtifactRef(sha256=digest, size=len(self._tree), uri="test:tree")
        )
        directory = Path(tempfile.gettempdir()) / ENVIRONMENTS
        packages = PackageSettings(directory=directory)
        self._user = LocalUserCode(
            level, fetch=self._fetch, sockets=self._gateway, packages=packages
        )
        self._pins = b""
        self.effects: dict[str, list[str]] = {}
        self.found: dict[str, str] = {}
        self.seconds: dict[str, float] = {}

    async def run(self, attacks: Sequence[Attack]) -> None:
        """Run attacks, one after the other, and look for effects after each of them."""
        await self._gateway.start()
        await self._gateway.open_socket("r1")
        await self._make_environment()
        await self._innocent()
        self._outside.watch_code()
        for attack in attacks:
            await self._attempt(attack)
        if any(attack.family == "timebombs" for attack in attacks):
            await asyncio.sleep(2 * DELAY_S)
            self._add("time bombs", self._outside.changes())
        if len(attacks) > len(FROM_GRADER):
            for name in FROM_GRADER:
                await self._from_grader(name)
            await self._from_import()
        await self._innocent()

    async def finish(self) -> None:
        """Close the sandboxes and look for what outlives them."""
        await self._user.aclose()
        await self._gateway.aclose()
        self._outside.watch_code()
        until = time.monotonic() + SURVIVE_S
        while self._outside.survivors() and time.monotonic() < until:
            await asyncio.sleep(0.05)
        while left := self._outside.survivors():
            for pid, name in left.items():
                self._add(name, ["a process survived its sandbox"])
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)  # what would act at the end of its process has acted
        self._add("the end", self._outside.changes())

    async def _make_environment(self) -> None:
        """Give the attacking rollout an environment, which its neighbours share."""
        declared = DeclaredPackages(path="pyproject.toml", requires_python=">=3.11")
        resolved = await self._user.resolve(declared)
        self._pins = resolved.pins.encode()
        digest = hashlib.sha256(self._pins).hexdigest()
        environment = PackageEnvironment(
            key=resolved.key,
            lock=ArtifactRef(sha256=digest, size=len(self._pins), uri="test:pins"),
            python=resolved.python,
            platform=resolved.platform,
        )
        self._rollout = self._rollout.model_copy(update={"environment": environment})

    async def _attempt(self, attack: Attack) -> None:
        before, began = _memory(), time.monotonic()
        beside: list[asyncio.Task[list[str]]] = []
        if attack.family == "forks" or attack.name == "many_connections":
            beside.append(asyncio.ensure_future(self._innocent_beside()))
        if attack.name in ("own_port", "own_abstract_socket"):
            reach = asyncio.to_thread(self._outside.reach_in, attack.name)
            beside.append(asyncio.ensure_future(reach))
        if attack.name == "race_grader":
            beside.append(asyncio.ensure_future(self._hold_label()))
        text = await self._ask(attack.name)
        self.found[attack.name] = text[:200]
        effects = self._outside.loot(text, may=MAY[self._level])
        for task in beside:
            effects += await task
        if self._session.calls:
            effects.append("it asked the policy in the name of another run's sample")
            self._session.calls.clear()
        if attack.family == "floods" and len(text) > LONGEST_ERROR:
            effects.append(f"it sent {len(text)} characters")
        if _memory() - before > MOST_GROWTH:
            effects.append(f"it cost the platform {_memory() - before >> 20} MiB")
        self._add(attack.name, effects + self._outside.changes())
        self.seconds[attack.name] = round(time.monotonic() - began, 2)

    async def _ask(self, name: str, owner: SandboxOwner = ATTACKER) -> str:
        """The answer of a workflow to an attack's name, or the text of its failure."""
        try:
            result = await self._user.run_workflow(
                self._rollout,
                owner=owner,
                sample=f"{name}-{secrets.token_hex(4)}",
                prompt=[Message(role="user", content=name)],
                metadata={"targets": json.dumps(dataclasses.asdict(self._outside.targets()))},
                base_path="/none",
                api_key="none",
            )
        except (UserCodeError, TransientError) as error:
            return str(error)
        return result.messages[-1].content if result.messages else ""

    async def _innocent(self) -> None:
        """A neighbour's ordinary attempt. It must work at the begin and at the end."""
        said = await self._ask("innocent", NEIGHBOUR)
        if said != "forked":
            self._add("innocent", [f"a neighbour's attempt failed: {said}"])

    async def _innocent_beside(self) -> list[str]:
        await asyncio.sleep(0.15)
        said = await self._ask("innocent", NEIGHBOUR)
        return [] if said == "forked" else [f"a neighbour's attempt failed beside it: {said}"]

    async def _hold_label(self) -> list[str]:
        """Graders that start now, one after the other, and that hold the ground truth."""
        await asyncio.sleep(0.2)
        found = []
        for number in range(3):
            owner = SandboxOwner(run=f"graded-{number}")
            said = await self._grade({"hold_s": 0.05 if number < 2 else 0.6}, owner=owner)
            found += [] if said == "[0.25]" else [f"a neighbour's rewards are {said}"]
        return found

    async def _from_grader(self, name: str) -> None:
        targets = json.dumps(dataclasses.asdict(self._outside.targets()))
        text = await self._grade({"attack": name, "targets": targets}, owner=ATTACKER)
        found = self._outside.loot(text, may=MAY[self._level])
        truth = "it read the secret: ground truth"  # its own
        self._add(f"{name} (grader)", [e for e in found if e != truth] + self._outside.changes())

    async def _grade(self, metadata: dict[str, object], *, owner: SandboxOwner) -> str:
        record = SampleRecord.model_construct(index=0, text="", messages=())
        try:
            grades = (
                await self._user.grade(
                    self._rollout,
                    owner=owner,
                    group=f"group-{secrets.token_hex(4)}",
                    label=self._outside.secrets["ground truth"],
                    metadata=metadata,
                    samples=[record],
                )
            ).grades
        except (UserCodeError, TransientError) as error:
            return str(error)
        return str([grade.reward for grade in grades])

    async def _from_import(self) -> None:
        found = await self._user.discover(self._tree, [Entrypoint(rollout="importing")])
        text = "\n".join(rollout.error or "" for rollout in found)
        effects = self._outside.loot(text, may=MAY[self._level])
        self._add("import (discovery)", effects + self._outside.changes())

    def _add(self, name: str, effects: Sequence[str]) -> None:
        if effects:
            self.effects.setdefault(name, []).extend(effects)

    async def _fetch(self, ref: ArtifactRef) -> bytes:
        return self._pins if ref.uri == "test:pins" else self._tree


def _memory() -> int:
    """The memory that this process uses now, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def attack_all(level: str, families: Sequence[str]) -> dict[str, object]:
    """Run the corpus at a level. Returns what the test reads."""
    load_attacks()
    chosen = [
        a
        for a in ATTACKS.values()
        if (a.is_safe or level != TRUSTED) and (not families or a.family in families)
    ]
    outside = Outside(os.environ["TOKEN"], os.environ["HEADRACE_API_KEY"])
    started = time.monotonic()
    try:
        corpus = Corpus(level, outside)
        try:
            await corpus.run(chosen)
        finally:
            await corpus.finish()
    finally:
        outside.close()
    return {
        "attacks": {a.name: a.family for a in chosen},
        "effects": corpus.effects,
        "found": corpus.found,
        "slowest": dict(sorted(corpus.seconds.items(), key=lambda pair: -pair[1])[:40]),
        "seconds": round(time.monotonic() - started, 1),
    }


def main() -> int:
    with contextlib.redirect_stdout(sys.stderr):
        told = asyncio.run(attack_all(sys.argv[1], sys.argv[2:]))
    sys.stdout.write(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
