"""Examines the rollouts of a snapshot: chooses their packages, and finds what their entry points define.

What is wrong with the packages of a rollout is an error of that rollout only.
"""

import asyncio
import io
import tarfile
from collections.abc import Sequence

from infra.ports.packages import DeclaredPackages
from infra.ports.services import UserCode
from infra.sandbox.environments.declarations import read_declared
from infra.spine.ports.artifacts import Artifacts
from schemas.errors import Refused
from schemas.specs import DiscoveredRollout, Entrypoint, PackageEnvironment


async def discover_rollouts(
    tree: bytes,
    entrypoints: Sequence[Entrypoint],
    *,
    user: UserCode,
    artifacts: Artifacts,
    owner: str,
) -> tuple[DiscoveredRollout, ...]:
    """Return the definitions of entry points, or why they cannot be used. The pins of their packages are
    stored as artifacts of `owner`."""
    chosen = await choose_packages(tree, entrypoints, user=user, artifacts=artifacts, owner=owner)
    return await examine_rollouts(tree, chosen, user=user)


async def choose_packages(
    tree: bytes,
    entrypoints: Sequence[Entrypoint],
    *,
    user: UserCode,
    artifacts: Artifacts,
    owner: str,
) -> tuple[DiscoveredRollout, ...]:
    """Return the packages of entry points, or why they cannot have them. Nothing is known about their
    definitions yet."""
    declared, refused = await asyncio.to_thread(declared_in, tree, entrypoints)
    environments: dict[str, PackageEnvironment] = {}
    for rollout, packages in declared.items():
        try:
            environments[rollout] = await lock_packages(
                packages, user=user, artifacts=artifacts, owner=owner
            )
        except Refused as error:
            refused[rollout] = error.message
    return tuple(
        DiscoveredRollout(
            entrypoint=entry,
            environment=environments.get(entry.rollout),
            error=refused.get(entry.rollout),
        )
        for entry in entrypoints
    )


async def examine_rollouts(
    tree: bytes, chosen: Sequence[DiscoveredRollout], *, user: UserCode
) -> tuple[DiscoveredRollout, ...]:
    """Install the chosen packages, and return the definitions of entry points, or why they cannot be
    used."""
    usable = tuple(one.entrypoint for one in chosen if one.error is None)
    environments = {
        one.entrypoint.rollout: one.environment for one in chosen if one.environment is not None
    }
    found = await user.discover(tree, usable, environments=environments) if usable else ()
    return (*found, *(one for one in chosen if one.error is not None))


async def lock_packages(
    packages: DeclaredPackages, *, user: UserCode, artifacts: Artifacts, owner: str
) -> PackageEnvironment:
    """Choose the exact versions of packages and store them. Raises Refused."""
    resolved = await user.resolve(packages)
    lock = await artifacts.put_artifact(resolved.pins.encode(), run=owner)
    return PackageEnvironment(
        key=resolved.key,
        lock=lock,
        python=resolved.python,
        platform=resolved.platform,
        packages=resolved.count,
    )


def declared_in(
    tree: bytes, entrypoints: Sequence[Entrypoint]
) -> tuple[dict[str, DeclaredPackages], dict[str, str]]:
    """Return the packages that rollouts ask for, and the rollouts that cannot have theirs, each with the
    reason."""
    declared: dict[str, DeclaredPackages] = {}
    refused: dict[str, str] = {}
    with tarfile.open(fileobj=io.BytesIO(tree)) as tar:
        for rollout in dict.fromkeys(entry.rollout for entry in entrypoints):
            try:
                packages = read_declared(tar, rollout)
            except Refused as error:
                refused[rollout] = error.message
                continue
            if packages is not None:
                declared[rollout] = packages
    return declared, refused
