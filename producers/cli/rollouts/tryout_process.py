"""The process that tries a rollout on this machine (`producers/tryout`), as the command line sees it."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping

from infra.operations.local.death_signal import die_with
from producers.cli.display.output import Document
from producers.cli.errors import Failure
from schemas.errors import Issue

SHOWN = 2000
"""How many characters of the process's log an error shows."""


def run_tryout(request: Mapping[str, object]) -> Iterator[Document]:
    """Send a request and yield the lines of the answer as they come. The process ends with this
    generator. Raises Failure when it refuses the request or crashes."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "producers.tryout"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            preexec_fn=die_with(os.getpid()),
        )
        try:
            assert process.stdin is not None  # noqa: S101 - it is a pipe
            assert process.stdout is not None  # noqa: S101 - it is a pipe
            with contextlib.suppress(BrokenPipeError):  # its log says why it has ended already
                process.stdin.write(json.dumps(request))
                process.stdin.close()
            for line in process.stdout:
                document: Document = json.loads(line)
                if "failure" in document:
                    raise _failure(document["failure"])
                yield document
            if process.wait():
                log.seek(0)
                last = log.read().decode(errors="replace").strip()[-SHOWN:]
                raise Failure("FAILED", f"the try-out ended with {process.returncode}: {last}")
        finally:
            process.terminate()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _failure(document: Document) -> Failure:
    issues = tuple(Issue(str(i["key"]), str(i["message"])) for i in document.get("issues") or ())
    return Failure(str(document["code"]), str(document["message"]), issues=issues)
