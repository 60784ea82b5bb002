"""What a user other than root may reach."""

from pathlib import Path


def may_be_reached_by_all(path: Path) -> bool:
    """Whether every user may pass to this file or directory: a clone below /root is for root alone."""
    whole = path.resolve()
    return all(place.stat().st_mode & 0o001 for place in (whole, *whole.parents))
