"""Which snapshots of a stream are kept in memory, by the same rules as on Postgres."""

from collections.abc import Sequence

from infra.spine.ports.event_log import Snapshot


def newest(known: Sequence[Snapshot], upto: int | None) -> Snapshot | None:
    """Return the newest of these snapshots (in order of version) that is not above a version."""
    return next((one for one in reversed(known) if upto is None or one.version <= upto), None)


def keep(known: list[Snapshot], new: Snapshot, keep_every: int | None) -> None:
    """Add a new snapshot to those of a stream. Of the others stay those above it, and with `keep_every`
    the oldest in each so many versions."""
    if any(one.version == new.version for one in known):
        return
    kept, blocks = [new], set[int]()
    for one in known:
        block = one.version // (keep_every or 1)
        if one.version > new.version or (keep_every is not None and block not in blocks):
            kept.append(one)
        blocks.add(block)
    known[:] = sorted(kept, key=lambda one: one.version)
