"""The actor: on whose behalf a request is served, and what that allows.

The guard of the API makes an actor from the API key of a request. While the request is served,
`acting` returns it. So the log can name the actor on each event that a request appends, and queries
can leave out what belongs to other workspaces and organisations, without every caller passing it on.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal, get_args

from infra.spine.ports.appender import APPENDER
from infra.spine.ports.visible_workspaces import VISIBLE

ApiKeyScope = Literal["read", "submit", "control", "admin", "metrics", "inference"]

SCOPES: tuple[ApiKeyScope, ...] = get_args(ApiKeyScope)

CONTAINED: dict[ApiKeyScope, frozenset[ApiKeyScope]] = {
    "read": frozenset({"read"}),
    "submit": frozenset({"submit", "read"}),
    "control": frozenset({"control", "read"}),
    "admin": frozenset(SCOPES),
    "metrics": frozenset({"metrics"}),
    "inference": frozenset({"inference"}),
}
"""Each scope, with the scopes that it contains."""

Role = Literal["owner", "member", "viewer"]
"""The role of a person in an organisation."""

ROLES: tuple[Role, ...] = get_args(Role)

ROLE_SCOPES: dict[Role, frozenset[ApiKeyScope]] = {
    "owner": frozenset(SCOPES) - {"metrics"},
    "member": frozenset({"read", "submit", "control", "inference"}),
    "viewer": frozenset({"read"}),
}
"""Each role, with the scopes that it allows within its organisation. Metrics are about all of them."""

ROOT = "root"
"""The id of the installation's own API key, which comes from its settings and not from the
database."""

ROOT_OWNER = "admin"


MAIN = "main"
"""The organisation of everything that names none: what was there before there were organisations, and
what an API key of the whole installation makes."""

PUSH = "push"
"""The id of the actor that submits the run of a push. It is not the id of an API key."""


@dataclass(frozen=True, slots=True)
class Actor:
    """The sender of a request: the id and the owner of its API key, the key's scopes, the workspace
    (id) that it is bound to (None: to none), the network address of the client, and when the secret
    that it sent expires (None: never).

    `organisation` (id) is the one that the API key is bound to; None for a key of the whole
    installation. `workspaces` are those of that organisation, None for a key of the installation.
    `person_id` and `role` are those of the person whose key it is, None for a key of nobody."""

    api_key: str
    owner: str
    scopes: frozenset[ApiKeyScope]
    workspace: str | None = None
    address: str = ""
    expires_at: datetime | None = None
    organisation: str | None = None
    workspaces: frozenset[str] | None = None
    person_id: str | None = None
    role: Role | None = None

    @property
    def is_confined(self) -> bool:
        """Whether there are things that this actor may not see, because its API key is bound to a
        workspace or to an organisation."""
        return self.visible is not None

    @property
    def visible(self) -> frozenset[str] | None:
        """The workspaces (ids) whose things the actor may see; None for all, and for what belongs to
        none. An actor of an organisation whose workspaces are not known sees nothing."""
        if self.workspace is not None:
            return frozenset((self.workspace,))
        if self.workspaces is None and self.organisation is not None:
            return frozenset()
        return self.workspaces

    @property
    def home(self) -> str:
        """The organisation (id) of what the actor makes."""
        return self.organisation or MAIN

    def may(self, scope: ApiKeyScope) -> bool:
        """Whether the API key has a scope, itself or as a part of another one."""
        return any(scope in CONTAINED[held] for held in self.scopes)

    @property
    def person(self) -> str | None:
        """The owner whose personal secrets this API key reaches: that of a key which belongs to a
        person, or of one of the whole installation. None for other keys that are bound to a workspace
        or an organisation, because their holders need not be the person who created them."""
        if self.person_id is not None and self.workspace is None:
            return self.owner
        return None if self.is_confined else self.owner

    @property
    def name(self) -> str:
        """The owner and the id of the API key, as lists show who made something."""
        return f"{self.owner}/{self.api_key}"

    @property
    def is_recorded(self) -> bool:
        """Whether events name this actor. They do not name a push: the run says which one it is."""
        return self.api_key != PUSH

    def __str__(self) -> str:
        """The form that an event records: `owner/key@address`."""
        return f"{self.name}@{self.address}"


_ACTING: ContextVar[Actor | None] = ContextVar("acting", default=None)


def acting() -> Actor | None:
    """The actor on whose behalf this task runs; None outside of requests."""
    return _ACTING.get()


def visible_workspaces() -> list[str] | None:
    """The workspaces (ids) whose things this task may see, for queries; None when it may see all."""
    actor = _ACTING.get()
    visible = actor.visible if actor is not None else None
    return None if visible is None else sorted(visible)


def visible_organisation() -> str | None:
    """The organisation (id) whose shared things this task may see; None when it may see all."""
    actor = _ACTING.get()
    return actor.home if actor is not None and actor.is_confined else None


def is_confined() -> bool:
    """Whether there are things that this task may not see."""
    actor = _ACTING.get()
    return actor is not None and actor.is_confined


def own_workspace() -> str | None:
    """The workspace (id) of what this task makes without naming one: that of its API key, or the only
    one of the key's organisation. None for a key of the installation, and with several."""
    actor = _ACTING.get()
    visible = actor.visible if actor is not None else None
    return next(iter(visible)) if visible is not None and len(visible) == 1 else None


def own_organisation() -> str:
    """The organisation (id) of what this task makes."""
    actor = _ACTING.get()
    return actor.home if actor is not None else MAIN


def key_workspace() -> str | None:
    """The workspace (id) that this task's API key is bound to; None for a key of several."""
    actor = _ACTING.get()
    return actor.workspace if actor is not None else None


def may_see(workspace: str | None) -> bool:
    """Whether this task may see something that belongs to a workspace (None: to no workspace). The run
    of a push in `main` may also start from what belongs to none."""
    actor = _ACTING.get()
    if actor is None or (visible := actor.visible) is None:
        return True
    is_push_of_main = actor.api_key == PUSH and actor.home == MAIN
    return workspace in visible or (workspace is None and is_push_of_main)


def may_use_dataset(workspace: str | None, organisation: str | None = None) -> bool:
    """Whether this task may read a dataset of a workspace. One that belongs to none is shared within
    its organisation."""
    if workspace is not None:
        return may_see(workspace)
    own = visible_organisation()
    return own is None or own == (organisation or MAIN)


def may_change_shared(organisation: str | None) -> bool:
    """Whether this task may delete what all workspaces of an organisation share: an API key that is
    bound to a workspace may not."""
    actor = _ACTING.get()
    if actor is None or not actor.is_confined:
        return True
    return actor.workspace is None and actor.home == (organisation or MAIN)


def see_added(workspace: str) -> None:
    """Let the rest of this request see a workspace (id) that it has just added to the organisation of
    its API key."""
    actor = _ACTING.get()
    if actor is not None and actor.workspace is None and actor.workspaces is not None:
        added = replace(actor, workspaces=actor.workspaces | {workspace})
        _ACTING.set(added)
        VISIBLE.set(added.visible)


@contextmanager
def narrowed_to(workspace: str, organisation: str) -> Iterator[None]:
    """Let the block see and make only things of one workspace of an organisation (their ids), on behalf
    of the same actor."""
    actor = _ACTING.get()
    if actor is None:
        raise AssertionError("there is no actor to narrow")
    narrowed = replace(actor, workspace=workspace, organisation=organisation)
    token, visible = _ACTING.set(narrowed), VISIBLE.set(narrowed.visible)
    try:
        yield
    finally:
        VISIBLE.reset(visible)
        _ACTING.reset(token)


@contextmanager
def acting_as(actor: Actor) -> Iterator[None]:
    """Run the block on behalf of an actor."""
    before, visible = _ACTING.set(actor), VISIBLE.set(actor.visible)
    appender = APPENDER.set(str(actor) if actor.is_recorded else None)
    try:
        yield
    finally:
        APPENDER.reset(appender)
        VISIBLE.reset(visible)
        _ACTING.reset(before)
