"""`headrace rebuild`: rebuild the read model from the event log."""

import time

from producers.cli.client import Client
from producers.cli.command import command
from producers.cli.display.output import Output
from producers.cli.display.read_model import skipped_events
from producers.cli.errors import Failure

POLL_S = 0.2
STALLED_S = 60.0
"""The longest time without progress before the rebuild counts as stalled. An idle projector starts
within seconds."""


@command(None, "rebuild", example="headrace rebuild")
def rebuild(client: Client) -> Output:
    """Rebuild the read model (the tables that the API reads) from the event log.

    Do this when `headrace status` or `headrace doctor` reports skipped events, after you installed a
    version that corrects the cause. Runs continue meanwhile; lists of runs, datasets and evaluations are
    incomplete until the rebuild ends. Interrupting this command does not interrupt the rebuild.
    """
    begun = client.post("/rebuild")
    before = begun["skipped"]
    found = _wait_until(begun["until"], client)
    document = {"skipped_before": before, **found}
    if not found["skipped"]:
        said = f"the read model is rebuilt; it skipped {before} events before, and none now"
        return Output(document, said)
    message = (
        f"the read model is rebuilt, and it still lacks {skipped_events(found)}; install the "
        "version of Headrace that corrects this error, then run `headrace rebuild` again"
    )
    return Output(document, failure=Failure("SKIPPED", message))


def _wait_until(until: str, client: Client) -> dict[str, object]:
    """Wait until everything up to the cursor `until` is projected, and return the state of the read
    model. Runs append more events meanwhile, so it may never have projected all of them. Raises Failure
    when the projector makes no progress."""
    from infra.spine.ports.event_log import Cursor

    last = ""
    deadline = time.monotonic() + STALLED_S
    while True:
        found: dict[str, object] = client.get("/status")["read_model"]
        cursor = str(found["cursor"])
        if Cursor.parse(cursor) >= Cursor.parse(until):
            return found
        if cursor != last:
            last, deadline = cursor, time.monotonic() + STALLED_S
        if time.monotonic() > deadline:
            raise Failure(
                "STALLED",
                f"the read model still lacks {found['behind']} events, and none was projected for "
                f"{STALLED_S:.0f} s; read the log of the control process, and restart it",
            )
        time.sleep(POLL_S)
