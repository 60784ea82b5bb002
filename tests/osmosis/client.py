"""The vendor's command line `osmosis`, unmodified, in an environment of its own."""

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.agents.newer_python import find_newer_python
from tests.kit.package_environment import locked_environment

LOCK = Path(__file__).with_name("requirements.txt")
LONGEST_S = 240
NOWHERE = "http://127.0.0.1:9"
"""A proxy at which nobody answers. The client asks it for everything that is not on this machine."""


def osmosis_program() -> Path:
    """The program, from its package of the lock."""
    return locked_environment(LOCK, interpreter=find_newer_python()).with_name("osmosis")


class Refused(AssertionError):
    """The command ended with an error. `error` has its code, its message and its details."""

    def __init__(self, arguments: tuple[str, ...], error: Mapping[str, Any]) -> None:
        super().__init__(f"osmosis {' '.join(arguments)}: {error}")
        self.error = error

    @property
    def code(self) -> str:
        return str(self.error["code"])

    @property
    def message(self) -> str:
        return str(self.error["message"])


@dataclass(frozen=True)
class Osmosis:
    """The command line of one person. What it stores is in `home`, and it runs in `directory`. Without
    an `api_key` it uses the login that it stored."""

    program: Path
    url: str
    home: Path
    directory: Path
    api_key: str | None = None
    more: Mapping[str, str] = field(default_factory=dict)

    def run(self, *arguments: str, given: str | None = None) -> Any:
        """What the command prints as JSON. Raises Refused."""
        done = self.process("--json", *arguments, given=given)
        if done.returncode == 0:
            return json.loads(done.stdout)
        raise Refused(arguments, _error_of(done.stderr))

    def text(self, *arguments: str) -> str:
        """What the command prints for people without colours. Raises Refused."""
        done = self.process("--plain", *arguments)
        if done.returncode == 0:
            return done.stdout
        raise Refused(arguments, {"code": "", "message": done.stderr})

    def refused(self, *arguments: str, given: str | None = None) -> Refused:
        """The error with which the command ends."""
        try:
            said = self.run(*arguments, given=given)
        except Refused as error:
            return error
        raise AssertionError(f"osmosis {' '.join(arguments)} was not refused: {said}")

    def process(
        self, *arguments: str, given: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.program), *arguments],
            cwd=self.directory,
            env=self.environment,
            input=given,
            stdin=subprocess.DEVNULL if given is None else None,
            capture_output=True,
            text=True,
            check=False,
            timeout=LONGEST_S,
        )

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PATH", "TMPDIR", "LANG") if name in os.environ}
        login = (
            {"OSMOSIS_TOKEN": self.api_key, "OSMOSIS_TOKEN_PLATFORM_URL": self.url}
            if self.api_key
            else {}
        )
        return {
            **kept,
            "HOME": str(self.home),
            "OSMOSIS_PLATFORM_URL": self.url,
            "OSMOSIS_TOKEN_STORE": "file",
            "HTTP_PROXY": NOWHERE,
            "HTTPS_PROXY": NOWHERE,
            "NO_PROXY": "127.0.0.1,localhost",
            "GIT_TERMINAL_PROMPT": "0",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            **login,
            **self.more,
        }


def _error_of(said: str) -> Mapping[str, Any]:
    """The error in what the command wrote to stderr, where warnings may come before it."""
    begin = said.find('{"')
    begin = said.find("{\n") if begin < 0 else begin
    assert begin >= 0, said
    error: Mapping[str, Any] = json.loads(said[begin:])["error"]
    return error
