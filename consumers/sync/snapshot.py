"""Examines a snapshot before any of its code runs: its hash and its entry points.

Reading a large archive takes time, so it is done in a thread while the control process serves requests.
"""

import asyncio
import hashlib
import io
import tarfile

from schemas.errors import Refused
from schemas.specs import Entrypoint

MAX_ENTRYPOINTS = 64
"""Entry points of one commit; what is found in them must fit into one event."""


async def find_entrypoints(tree: bytes) -> tuple[Entrypoint, ...]:
    """Call `find_entrypoints_in` in a thread."""
    return await asyncio.to_thread(find_entrypoints_in, tree)


async def hash_snapshot(tree: bytes) -> str:
    """Return the SHA-256 of a snapshot, computed in a thread. A snapshot may have 200 MiB."""
    return await asyncio.to_thread(lambda: hashlib.sha256(tree).hexdigest())


def find_entrypoints_in(tree: bytes) -> tuple[Entrypoint, ...]:
    """Return every `rollouts/<name>/main.py` of a snapshot, sorted by name. Raises Refused when there
    are too many."""
    with tarfile.open(fileobj=io.BytesIO(tree)) as tar:
        paths = [member.name.split("/") for member in tar if member.isfile()]
    names = sorted(p[1] for p in paths if len(p) == 3 and p[0] == "rollouts" and p[2] == "main.py")
    if len(names) > MAX_ENTRYPOINTS:
        raise Refused(
            f"the commit has {len(names)} rollouts, more than {MAX_ENTRYPOINTS}; name the entry "
            "point in the run's TOML, or split the workspace"
        )
    return tuple(Entrypoint(rollout=name) for name in names)
