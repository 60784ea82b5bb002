"""Follows the refs of a repository: asks for them, and compares each answer with the known ones.

A hint only says that the refs may have moved. While nothing is in flight, a hint requests a round, which
is one listing. While a listing is in flight, one more round is requested, because that listing may be
older than the hint. Further hints decide nothing. So a burst of hints costs two listings, and the last
hint is never missed.

The first listing is a baseline, which is only remembered. A ref that comes back at the commit at which
it vanished is only remembered too, so a repository that is empty for a while pushes nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import assert_never

from infra.spine.runtime.consumer import NOTHING, Decision
from schemas.effects import ListRefs, RefListing
from schemas.events import (
    RefsListed,
    RefsMoved,
    RefsRequested,
    WorkspaceConnected,
    WorkspaceDisconnected,
)
from schemas.specs import RefMove

MOST_GONE = 10_000
"""How many vanished refs are remembered with their commits. The longest gone are forgotten first."""

MOVES_PER_EVENT = 100

RefsEvent = RefsRequested | RefsMoved | RefsListed | WorkspaceConnected | WorkspaceDisconnected


@dataclass(frozen=True, slots=True)
class GoneRef:
    """The commit at which a ref vanished, and the number of that move."""

    commit: str
    number: int


@dataclass(frozen=True, slots=True)
class FollowedRefs:
    """The refs of a workspace's repository. `name` and `url` are the workspace's.

    Rounds count the listings. A listing is in flight while `requested` is above `listed`. The rounds in
    `baselines` are only remembered. `heads` are the refs of the last listing, and `gone` those that
    vanished before it. `moves` counts all moves. `known` means that there was a listing.
    """

    name: str = ""
    url: str | None = None
    requested: int = 0
    listed: int = 0
    baselines: tuple[int, ...] = ()
    heads: Mapping[str, str] = field(default_factory=dict)
    gone: Mapping[str, GoneRef] = field(default_factory=dict)
    moves: int = 0
    known: bool = False
    is_disconnected: bool = False


def fold_refs(refs: FollowedRefs, event: RefsEvent) -> FollowedRefs:
    """Return the refs after one event."""
    match event:
        case RefsRequested():
            baselines = (*refs.baselines, event.round) if event.baseline else refs.baselines
            requested = max(refs.requested, event.round)
            return replace(refs, requested=requested, baselines=tuple(sorted(set(baselines))))
        case RefsMoved():
            return _move(refs, event.moves)
        case RefsListed():
            left = tuple(number for number in refs.baselines if number > event.round)
            known = refs.known or event.error is None
            return replace(refs, listed=event.round, baselines=left, known=known)
        case WorkspaceConnected() | WorkspaceDisconnected():
            return replace(refs, is_disconnected=isinstance(event, WorkspaceDisconnected))
        case _:
            assert_never(event)


def _move(refs: FollowedRefs, moves: Sequence[RefMove]) -> FollowedRefs:
    heads, gone = dict(refs.heads), dict(refs.gone)
    for move in moves:
        if move.after is not None:
            heads[move.ref] = move.after
            gone.pop(move.ref, None)
        elif (before := heads.pop(move.ref, None)) is not None:
            gone[move.ref] = GoneRef(before, move.number)
    for ref in sorted(gone, key=lambda ref: gone[ref].number)[: max(0, len(gone) - MOST_GONE)]:
        del gone[ref]
    return replace(
        refs, heads=heads, gone=gone, moves=max([refs.moves, *(move.number for move in moves)])
    )


def request_listing(refs: FollowedRefs, workspace: str, *, baseline: bool) -> Decision:
    """Decide on a hint. `baseline` asks that the refs are only remembered."""
    if refs.url is None:
        return NOTHING
    waiting = refs.requested - refs.listed
    if waiting > 1:
        if not baseline or refs.requested in refs.baselines:
            return NOTHING
        again = RefsRequested(workspace=workspace, round=refs.requested, baseline=True)
        return Decision(events=(again,))
    number = refs.requested + 1
    request = RefsRequested(workspace=workspace, round=number, baseline=baseline)
    listing = ListRefs(workspace=workspace, url=refs.url, round=number)
    return Decision(events=(request,), effects=() if waiting else (listing,))


def record_listing(refs: FollowedRefs, listing: RefListing) -> Decision:
    """Decide on the answer of the repository. A listing that is late, or that came before, decides
    nothing."""
    effect = listing.effect
    if not _is_awaited(refs, effect):
        return NOTHING
    listed = RefsListed(
        workspace=effect.workspace,
        round=effect.round,
        digest=listing.digest,
        num_refs=len(listing.refs),
        default_branch=listing.default_branch,
    )
    is_baseline = not refs.known or refs.is_disconnected or effect.round in refs.baselines
    pushed, remembered = _compare(refs, listing.refs, is_baseline=is_baseline)
    moved = [
        RefsMoved(
            workspace=effect.workspace,
            workspace_name=refs.name,
            url=effect.url,
            round=effect.round,
            part=part,
            moves=moves,
            baseline=baseline,
        )
        for part, (moves, baseline) in enumerate(
            [(chunk, False) for chunk in _chunks(pushed)]
            + [(chunk, True) for chunk in _chunks(remembered)]
        )
    ]
    return Decision(events=(*moved, listed), effects=_next(refs, effect))


def record_failure(refs: FollowedRefs, effect: ListRefs, message: str) -> Decision:
    """Decide on a listing that failed for good. `message` is short."""
    if not _is_awaited(refs, effect):
        return NOTHING
    listed = RefsListed(workspace=effect.workspace, round=effect.round, error=message)
    return Decision(events=(listed,), effects=_next(refs, effect))


def pushed_commit(decision: Decision, branch: str | None) -> RefMove | None:
    """Return the move by which a decision pushes a branch, or None."""
    for event in decision.events:
        if isinstance(event, RefsMoved) and not event.baseline:
            for move in event.moves:
                if move.ref == f"refs/heads/{branch}" and move.after is not None:
                    return move
    return None


def _is_awaited(refs: FollowedRefs, effect: ListRefs) -> bool:
    return refs.listed < effect.round <= refs.requested


def _next(refs: FollowedRefs, effect: ListRefs) -> tuple[ListRefs, ...]:
    """The listing of the round that was requested while this one was in flight."""
    if refs.requested == effect.round:
        return ()
    url = refs.url or effect.url
    return (ListRefs(workspace=effect.workspace, url=url, round=refs.requested),)


def _compare(
    refs: FollowedRefs, now: Mapping[str, str], *, is_baseline: bool
) -> tuple[list[RefMove], list[RefMove]]:
    """The moves since the last listing: those that are pushes or deletions, and those that are only
    remembered. They are numbered in this order."""
    pushed: list[tuple[str, str | None, str | None]] = []
    remembered: list[tuple[str, str | None, str | None]] = []
    for ref in sorted({*refs.heads, *now}):
        before, after = refs.heads.get(ref), now.get(ref)
        if before == after:
            continue
        gone = refs.gone.get(ref)
        is_back = gone is not None and gone.commit == after
        (remembered if is_baseline or is_back else pushed).append((ref, before, after))
    moves = [
        RefMove(ref=ref, before=before, after=after, number=refs.moves + count)
        for count, (ref, before, after) in enumerate([*pushed, *remembered], start=1)
    ]
    return moves[: len(pushed)], moves[len(pushed) :]


def _chunks(moves: Sequence[RefMove]) -> list[tuple[RefMove, ...]]:
    starts = range(0, len(moves), MOVES_PER_EVENT)
    return [tuple(moves[start : start + MOVES_PER_EVENT]) for start in starts]
