"""`make audit`: compares every locked package with the published advisories, by pip-audit.

An audit that cannot reach the advisories finds nothing, like one of safe packages. So an old release
with known advisories is audited first, and an audit that does not find those has not taken place.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOCKS = (
    "constraints.txt",
    *(f"locks/{name}.txt" for name in ("build", "control", "worker", "venv", "tools")),
)
VULNERABLE = "urllib3==1.24.1"
"""A release with published advisories. An audit that works finds them."""

AUDIT_S = 900.0
FOUND, NOT_AUDITED = 1, 2
"""Exit codes: advisories were found; nothing was audited."""


@dataclass(frozen=True, slots=True)
class Advisory:
    """A published advisory about a locked package."""

    package: str
    version: str
    id: str
    fixed_in: tuple[str, ...]

    def __str__(self) -> str:
        fixed = f"fixed in {', '.join(self.fixed_in)}" if self.fixed_in else "no fix is published"
        return f"{self.package} {self.version}: {self.id} ({fixed})"


def advisories_of(report: str) -> tuple[Advisory, ...]:
    """Return the advisories in a JSON report of pip-audit, each once."""
    found = [
        Advisory(one["name"], one["version"], each["id"], tuple(each["fix_versions"]))
        for one in json.loads(report)["dependencies"]
        for each in one.get("vulns", ())
    ]
    return tuple(dict.fromkeys(found))


def run_pip_audit(program: Path, requirements: Path, *, hashed: bool = True) -> str:
    """Return pip-audit's JSON report about a file of exact versions. Raises RuntimeError with its last
    line when it does not make one."""
    hashes = ("--require-hashes",) if hashed else ("--no-deps",)
    quietly = ("--disable-pip", "--progress-spinner", "off", "-f", "json")
    done = subprocess.run(
        [program, *quietly, *hashes, "-r", requirements],
        capture_output=True,
        text=True,
        timeout=AUDIT_S,
        check=False,
    )
    if not done.stdout.strip():
        lines = done.stderr.strip().splitlines()
        raise RuntimeError(
            f"pip-audit made no report of {requirements.name}: {(lines or [''])[-1]}"
        )
    return done.stdout


def reaches_advisories(program: Path) -> bool:
    """Whether the advisories can be reached: those of a vulnerable release are found."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "vulnerable.txt"
        file.write_text(f"{VULNERABLE}\n")
        try:
            return bool(advisories_of(run_pip_audit(program, file, hashed=False)))
        except (RuntimeError, subprocess.TimeoutExpired):
            return False


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make audit", description=__doc__)
    parser.add_argument("program", type=Path, help="the pip-audit to run")
    options = parser.parse_args(argv)
    if not reaches_advisories(options.program):
        sys.stderr.write(
            "the advisories of PyPI cannot be reached from here: NOTHING was audited\n"
        )
        return NOT_AUDITED
    found = {
        advisory
        for lock in LOCKS
        for advisory in advisories_of(run_pip_audit(options.program, ROOT / lock))
    }
    for advisory in sorted(found, key=str):
        sys.stdout.write(f"{advisory}\n")
    sys.stdout.write(f"{len(LOCKS)} locks audited, {len(found)} advisories\n")
    return FOUND if found else 0


if __name__ == "__main__":
    sys.exit(main())
