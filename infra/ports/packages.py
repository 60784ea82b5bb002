"""The packages of a rollout: what its files ask for, and the exact versions that were chosen."""

import hashlib
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

LONGEST_LOCK = 4 << 20
"""The most bytes of a lock file, of an author or of ours."""

MOST_REQUIREMENTS = 500
Requirement = Annotated[str, Field(max_length=500)]
Requirements = Annotated[tuple[Requirement, ...], Field(max_length=MOST_REQUIREMENTS)]


class _Packages(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DeclaredPackages(_Packages):
    """The dependencies in the `pyproject.toml` at `path`, which is for messages. `overrides`,
    `constraints` and `prerelease` are those of [tool.uv]. `lock` is the text of `uv.lock`, if the
    rollout has one."""

    path: Annotated[str, Field(max_length=500)]
    requires_python: Annotated[str, Field(max_length=200)] = ""
    dependencies: Requirements = ()
    overrides: Requirements = ()
    constraints: Requirements = ()
    prerelease: Annotated[str, Field(pattern=r"^[a-z-]{0,40}$")] = ""
    lock: str | None = Field(default=None, max_length=LONGEST_LOCK, repr=False)


class ResolvedPackages(_Packages):
    """The exact versions of all packages with the hashes of their wheels (`pins`, a requirements file),
    for a version of Python (as `3.12`) on a platform. `count` is the number of packages."""

    pins: str = Field(max_length=LONGEST_LOCK, repr=False)
    python: Annotated[str, Field(pattern=r"^3\.\d{1,3}$")]
    platform: Annotated[str, Field(pattern=r"^[a-z0-9_.-]{1,80}$")]
    count: Annotated[int, Field(ge=0)]

    @property
    def key(self) -> str:
        """The hash that names the environment with these packages."""
        return environment_key(self.pins.encode(), self.python, self.platform)


def environment_key(pins: bytes, python: str, platform: str) -> str:
    """Return the hash of pins, Python and platform. Equal keys share one environment."""
    text = f"{python}\n{platform}\n".encode()
    return hashlib.sha256(text + pins).hexdigest()
