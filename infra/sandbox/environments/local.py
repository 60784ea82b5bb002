"""The environments of packages on this machine, for a command that needs no server."""

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from infra.sandbox.environments.environments import PackageEnvironments
from infra.sandbox.levels.probe import choose_level
from infra.sandbox.sandbox import BUILDER
from infra.settings.packages import INDEX
from infra.settings.sandbox_level import TRUSTED
from infra.settings.settings import Settings

INDEXES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
"""The user's own variables with the address of an index, which is used if the platform names none."""


def load_settings() -> Settings:
    """The settings of this machine, with the index of the user."""
    return Settings.load(with_index(os.environ))


def with_index(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment, in which the platform's index is the user's own if it names none."""
    own = next((value for name in INDEXES if (value := environ.get(name))), None)
    return {**environ} if environ.get(INDEX) or own is None else {**environ, INDEX: own}


@asynccontextmanager
async def open_environments(settings: Settings) -> AsyncIterator[PackageEnvironments]:
    """The environments of packages on this machine, until the block ends."""
    level = choose_level(TRUSTED if settings.sandbox == TRUSTED else BUILDER)
    environments = PackageEnvironments(level, settings.packages)
    try:
        yield environments
    finally:
        environments.close()
        await level.aclose()
