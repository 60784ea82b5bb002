"""The process beside the sandbox that attacks aim at, and what has become of it."""

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from infra.sandbox.user_process import UNPRIVILEGED
from tests.kit.ordinary_users import may_be_reached_by_all

ANSWER_S = 5.0


@dataclass(frozen=True)
class State:
    """What an attack could change about a process."""

    memory: str
    priority: int
    limits: str
    cores: frozenset[int]
    blame: str


class Neighbour:
    """A running `victim.py`. As root it is a process of the user that runs user code."""

    def __init__(self, directory: Path, python: str, secrets: Mapping[str, str]) -> None:
        other = UNPRIVILEGED if os.geteuid() == 0 else None
        self._process = subprocess.Popen(
            [
                python,
                "-I",
                "-S",
                str(Path(__file__).with_name("victim.py")),
                str(directory / "own"),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={"SECRET": secrets["environment of a neighbour"]},
            user=other,
            group=other,
            extra_groups=None if other is None else (),
            start_new_session=True,
        )
        for name in ("memory", "open file", "anonymous file"):
            self._say(secrets[f"{name} of a neighbour"])
        self.pid = self._process.pid
        address, length = self._hear().split()
        self.address, self.length = int(address), int(length)
        self._before = self._state()

    def changes(self) -> list[str]:
        """What has happened to it since it started."""
        if self._process.poll() is not None:
            return [f"a neighbour died with {self._process.returncode}"]
        status = Path(f"/proc/{self.pid}/status").read_text()
        fields = dict(line.split(":\t", 1) for line in status.splitlines())
        if fields["State"][0] in "Tt":
            return ["a neighbour was stopped"]
        now = self._state()
        return [
            f"the {name} of a neighbour changed"
            for name in State.__dataclass_fields__
            if getattr(now, name) != getattr(self._before, name)
        ]

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                assert stream is not None
                stream.close()

    def _state(self) -> State:
        self._say("")
        return State(
            memory=self._hear(),
            priority=os.getpriority(os.PRIO_PROCESS, self.pid),
            limits=Path(f"/proc/{self.pid}/limits").read_text(),
            cores=frozenset(os.sched_getaffinity(self.pid)),
            blame=Path(f"/proc/{self.pid}/oom_score_adj").read_text(),
        )

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line + "\n")

    def _hear(self) -> str:
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], ANSWER_S)
        return self._process.stdout.readline() if readable else ""


def python_of_victims() -> str:
    """A Python that every user can run."""
    here = Path(sys.executable).resolve()
    return str(here) if may_be_reached_by_all(here) else "/usr/bin/python3"
