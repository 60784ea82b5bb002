"""A connection that shows the rows of some workspaces only, whatever its statements ask for.

The policies of the tables (`sql/schema.sql`, row-level security) read the setting `headrace.visible`. It
belongs to the session, so it is sent only when the next user of the connection sees other workspaces
than the one before.
"""

from collections.abc import Set

from infra.spine.postgres.known_types import KnownTypes

ALL = ""
"""The value of the setting that shows all rows; a new connection has it."""

SHOW = "select set_config('headrace.visible', $1, false)"


class ConfinedConnection(KnownTypes):
    """A connection that remembers whose rows it shows."""

    shown = ALL

    async def show_rows_of(self, workspaces: Set[str] | None) -> None:
        """Show only rows of these workspaces (ids) from now on; None for all rows."""
        wanted = ALL if workspaces is None else as_array(workspaces)
        if wanted != self.shown:
            # If this fails half-way, the next caller must not take the connection for a confined one.
            self.shown = "unknown"
            await self.execute(SHOW, wanted)
            self.shown = wanted


def as_array(workspaces: Set[str]) -> str:
    """Ids as the text of an array of PostgreSQL."""
    quoted = ('"' + one.replace("\\", "\\\\").replace('"', '\\"') + '"' for one in workspaces)
    return "{" + ",".join(sorted(quoted)) + "}"
