"""`make storms`: in full length what CI does briefly. Each storm is the same test, told to last longer.

python -m tests.chaos.storms                            # all of them, about three quarters of an hour
python -m tests.chaos.storms tail --minutes 60
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Storm:
    """A test, and the environment that makes it long."""

    test: str
    environment: Mapping[str, str] = field(default_factory=dict)


def storms(given: argparse.Namespace) -> dict[str, Storm]:
    """Name -> storm."""
    cut = {"HEADRACE_CUT_S": str(given.cut_s)}
    return {
        "broker": Storm("tests/crash/test_broker.py", cut),
        "database-cut-off": Storm("tests/crash/test_database_cut_off.py", cut),
        "database-crashes": Storm(
            "tests/crash/test_database_restarts.py", {"HEADRACE_RESTARTS": str(given.restarts)}
        ),
        "freezes": Storm("tests/crash/test_freezes.py", {"HEADRACE_FREEZES": str(given.freezes)}),
        "tail": Storm("tests/contracts/test_tail.py", {"HEADRACE_TAIL_S": str(given.minutes * 60)}),
    }


def carried_out(storm: Storm) -> bool:
    """Whether the test passed. A component that is missing is a failure: nothing was shown."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", storm.test],
        env={**os.environ, **storm.environment, "CI": "true"},
        check=False,
    )
    return done.returncode == 0


def main(given: argparse.Namespace) -> int:
    known = storms(given)
    lines = []
    for name in given.names or known:
        begun = time.monotonic()
        passed = carried_out(known[name])
        said = "passed" if passed else "FAILED"
        lines.append((f"{name:18}{time.monotonic() - begun:8.0f} s  {said}", passed))
    print("\n".join(line for line, _ in lines))
    return 0 if all(passed for _, passed in lines) else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.storms", description=__doc__)
    parser.add_argument(
        "--cut-s", type=float, default=30.0, help="how long Kafka or the database is cut off"
    )
    parser.add_argument("--restarts", type=int, default=20, help="how often Postgres crashes")
    parser.add_argument("--freezes", type=int, default=200, help="how often processes are frozen")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long the tail is tested")
    names = sorted(storms(parser.parse_args([])))
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}")
    given = parser.parse_args()
    if unknown := set(given.names) - set(names):
        parser.error(f"there is no storm {', '.join(sorted(unknown))}; there are {names}")
    return given


if __name__ == "__main__":
    sys.exit(main(arguments()))
