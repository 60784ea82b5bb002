"""`headrace train verify`: check that a run matches its event log."""

import time

from producers.cli.client import Client, path_segment
from producers.cli.display.output import Document, print_json, print_table, say
from producers.cli.errors import Failure, Interrupted

POLL_S = 0.3


def verify_run(run: str, *, as_json: bool) -> None:
    """Request a verification, wait for it and print it. Raises Failure when something differs from the
    log, Interrupted on SIGINT; the verification continues then."""
    with Client() as client:
        requested: Document = client.post(f"/runs/{path_segment(run)}/verify")["verification"]
        found = _wait(client, str(requested["id"]), run)
    if found["status"] == "failed":
        raise Failure("VERIFY_FAILED", f"the verification of {run} failed: {found['error']}")
    if as_json:
        print_json({"verification": found})
    else:
        _show(run, found)
    if found["status"] != "verified":
        count = len(found["findings"])
        raise Failure(
            "DIFFERS", f"{run} differs from its log: {count} finding(s); see the table of findings"
        )


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


def _show(run: str, found: Document) -> None:
    for step in found["forks"]:
        say(f"{run}: from step {step} on, the bits are those of a fork (advanced.allow_divergence)")
    if found["findings"]:
        rows = [(f["kind"], f["what"], _bytes(f), f["message"]) for f in found["findings"]]
        print_table(f"{run} differs from its log", ("kind", "what", "bytes", "message"), rows)
        return
    if found["forks"]:
        say(
            f"{run}: only steps of machines like this one are rebuilt; each fork was read, not rebuilt"
        )
    say(
        f"{run}: {found['steps']} steps rebuilt from the log, {found['checkpoints']} checkpoints and "
        f"{found['artifacts']} artifacts verified; last rebuilt version {found['adapter_sha256']}"
    )


def _bytes(finding: Document) -> str | None:
    if finding.get("first_byte") is None:
        return None
    return f"{finding['first_byte']}-{finding['last_byte']}"
