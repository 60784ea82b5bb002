"""`headrace train verify`: check that a run matches its event log."""

import time
from collections.abc import Iterator

from producers.cli.client import Client, path_segment
from producers.cli.display.output import Document, Output, Part, table
from producers.cli.display.units import count_of
from producers.cli.display.waiting import told_while_waiting
from producers.cli.errors import Failure, Interrupted

POLL_S = 0.3


def verify_run(client: Client, run: str, *, quiet: bool = False) -> Output:
    """Request a verification, wait for it and return what it found. Says that it waits, unless `quiet`.
    Raises Failure when it fails, Interrupted on SIGINT; the verification continues then."""
    requested: Document = client.post(f"/runs/{path_segment(run)}/verify")["verification"]
    with told_while_waiting(lambda: f"rebuilding {run} from its log", quiet=quiet):
        found = _wait(client, str(requested["id"]), run)
    if found["status"] == "failed":
        raise Failure("VERIFY_FAILED", f"the verification of {run} failed: {found['error']}")
    differs = Failure(
        "DIFFERS",
        f"{run} differs from its log: {len(found['findings'])} finding(s); see the table of "
        "findings",
    )
    failure = None if found["status"] == "verified" else differs
    return Output({"verification": found}, _describe(run, found), failure=failure)


def _wait(client: Client, identity: str, run: str) -> Document:
    try:
        while True:
            found: Document = client.get(f"/verifications/{path_segment(identity)}")["verification"]
            if found["status"] != "running":
                return found
            time.sleep(POLL_S)
    except KeyboardInterrupt as error:
        raise Interrupted(
            f"stopped waiting; the verification of {run} continues", f"headrace train verify {run}"
        ) from error


def _describe(run: str, found: Document) -> Iterator[Part]:
    for step in found["forks"]:
        yield f"{run}: from step {step} on, the bits diverge (advanced.allow_divergence)"
    if found["findings"]:
        rows = [(f["kind"], f["what"], _bytes(f), f["message"]) for f in found["findings"]]
        yield table(f"{run} differs from its log", ("kind", "what", "bytes", "message"), rows)
        return
    if found["forks"]:
        yield (
            f"{run}: only steps of machines like this one are rebuilt; each fork was read, not rebuilt"
        )
    yield (
        f"{run}: {count_of(found['steps'], 'step')} rebuilt from the log, "
        f"{count_of(found['checkpoints'], 'checkpoint')} and {count_of(found['artifacts'], 'artifact')} "
        f"verified; last rebuilt version {found['adapter_sha256']}"
    )


def _bytes(finding: Document) -> str | None:
    if finding.get("first_byte") is None:
        return None
    return f"{finding['first_byte']}-{finding['last_byte']}"
