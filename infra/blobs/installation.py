"""One database and one blob store belong together, because the log names artifacts that are in the
blobs.

The blob store carries an id, which the first process that opens it makes. The database remembers the id
of the blobs that it was used with. A process whose blobs have another id belongs to another
installation. It is refused with the name of the installation that owns the database, whether that one
runs now or not.
"""

import socket
from contextlib import suppress
from urllib.parse import parse_qs, urlsplit
from uuid import uuid4

from infra.ports.services import BlobExists, Blobs
from infra.settings.settings import Settings
from infra.spine.postgres.pool import Database
from schemas.errors import Conflict, CorruptData

KEY = "installation"
"""The blob that holds the id."""


async def belong(database: Database, blobs: Blobs, settings: Settings) -> str:
    """The id of the installation that this process is part of. Raises Conflict when the database belongs
    to another one."""
    own = await identity(blobs)
    await database.durable.execute(
        "insert into installation (id, blobs, place) values ($1, $2, $3) on conflict do nothing",
        own,
        settings.blobs,
        whereabouts(settings),
    )
    owner = await database.durable.fetchrow("select id, blobs, place, since from installation")
    if owner["id"] == own:
        return own
    if owner["blobs"] == settings.blobs:
        raise Conflict(
            f"the blobs in {settings.blobs} are not those that the database was used with since "
            f"{owner['since']:%Y-%m-%d %H:%M}: they were removed or replaced. Bring them back, or "
            f"start with an empty database: {_how_to_start_over(database.url)}"
        )
    raise Conflict(
        f"the database belongs to the installation of {owner['place']}, whose blobs are in "
        f"{owner['blobs']} (since {owner['since']:%Y-%m-%d %H:%M}); this one has its blobs in "
        f"{settings.blobs}: name another database in HEADRACE_DATABASE_URL, or the same blobs in "
        "HEADRACE_BLOBS"
    )


def _how_to_start_over(url: str) -> str:
    """How to get an empty database. The data of an embedded one is a directory, which is named."""
    directory = parse_qs(urlsplit(url).query).get("host", [""])[0]
    if directory.startswith("/"):
        return f"stop the processes that use it and remove {directory}"
    return "name one in HEADRACE_DATABASE_URL"


def whereabouts(settings: Settings) -> str:
    """Where this installation is, as text for people."""
    return f"{settings.home} on {socket.gethostname()}"


async def adopt(blobs: Blobs, identity_: str) -> None:
    """Give an empty store the id of the installation whose blobs are restored into it. A store that has
    this id already may hold some of them. Raises Conflict when the store is another installation's."""
    with suppress(BlobExists):
        await blobs.put_blob(KEY, f"{identity_}\n".encode(), create_only=True)
    if await identity(blobs) != identity_:
        raise Conflict(
            "the blob store belongs to another installation; name an empty one in HEADRACE_BLOBS, and "
            "restore again"
        )


async def identity(blobs: Blobs) -> str:
    """The id of this blob store, which is made now if it has none. Raises CorruptData when it cannot be
    read."""
    uri = await blobs.exists(KEY)
    if uri is None:
        uri = await _name(blobs)
    text = (await blobs.get_blob(uri)).decode(errors="replace").strip()
    if len(text) != 32:
        raise CorruptData(
            f"{uri} does not hold the id of a blob store; check what else writes there"
        )
    return text


async def _name(blobs: Blobs) -> str:
    try:
        return await blobs.put_blob(KEY, f"{uuid4().hex}\n".encode(), create_only=True)
    except BlobExists as error:
        uri = await blobs.exists(KEY)
        if uri is None:
            raise CorruptData(
                f"blob {KEY} was removed while it was read; check what else writes there"
            ) from error
        return uri
