"""`make stack`: Headrace on the real components, a process per consumer, without Docker. Each process
logs in with an account of its own, as in docker-compose.yml.

python -m tests.stack up DIR [--detach]     # everything below DIR; DIR/env is what a shell needs
python -m tests.stack down DIR
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from infra.operations.local import home
from infra.operations.local.free_port import free_port
from infra.operations.local.supervisor import supervise
from infra.settings.settings import BadSetting, Settings
from schemas.errors import HeadraceError
from tests.stack.accounts import Passwords, make_service_accounts
from tests.stack.components import components

START_S = 1200.0
"""Long: the first start builds the S3 store from source and fetches Kafka."""
STOP_S = 90.0


def up(directory: Path) -> int:
    """Start everything, and stay until told to stop."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    passwords = Passwords()
    with components(directory, passwords.kafka_users) as found:
        ours = {
            **found.environment,
            "HEADRACE_HOME": str(directory / "home"),
            "HEADRACE_URL": f"http://127.0.0.1:{free_port()}",
            "HEADRACE_WORKERS": "each",
        }
        os.environ.update(ours)  # boto3 reads its credentials from there, in this process too
        settings = Settings.load(os.environ)
        identities = make_service_accounts(found.environment, passwords)
        supervise(
            settings,
            os.environ,
            on_ready=lambda: _tell(directory, ours),
            identities=identities,
        )
    (directory / "env").unlink(missing_ok=True)
    return 0


def _tell(directory: Path, environment: dict[str, str]) -> None:
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in environment.items()]
    scratch = directory / "env.part"
    scratch.touch(mode=0o600)
    scratch.write_text("".join(lines))
    scratch.rename(directory / "env")
    sys.stdout.write(
        f"the stack is ready at {environment['HEADRACE_URL']}; in a shell: . {directory}/env\n"
    )
    sys.stdout.flush()


def detach(directory: Path) -> int:
    """Start it in the background; returns once it is ready, or with its last words."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    if home.owner(directory / "home") is not None:
        sys.stderr.write(f"a stack runs in {directory} already; stop it with: make stack-down\n")
        return 1
    (directory / "env").unlink(missing_ok=True)
    log = directory / "stack.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.stack", "up", str(directory)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_S
    while not (directory / "env").exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.terminate()
            sys.stderr.write(log.read_text()[-2000:])
            return 1
        time.sleep(0.2)
    sys.stdout.write(log.read_text())
    return 0


def down(directory: Path) -> int:
    """Stop the stack of a directory; waits until all of it is gone."""
    pid = home.owner(directory / "home")
    if pid is None:
        sys.stderr.write(f"no stack runs in {directory}\n")
        return 1
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_S
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    return 0 if not Path(f"/proc/{pid}").exists() else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stack", description=__doc__)
    parser.add_argument("what", choices=("up", "down"))
    parser.add_argument("directory", type=lambda text: Path(text).absolute())
    parser.add_argument("--detach", action="store_true")
    given = parser.parse_args()
    if given.what == "down":
        return down(given.directory)
    if given.detach:
        return detach(given.directory)
    try:
        return up(given.directory)
    except (HeadraceError, BadSetting) as error:
        sys.stderr.write(f"{error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
