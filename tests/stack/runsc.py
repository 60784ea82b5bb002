"""gVisor's program runsc, built once from its Go module at the version pinned here, and kept in a cache
(`make gvisor`). A build takes about a minute of both cores.

One file of gVisor is changed: a goroutine of platform `systrap` looks every 0.4 ms whether calls are
fast, also when nothing runs, which takes 4 percent of a core for each idle sandbox. Here it looks less
often while nothing runs.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from infra.sandbox.levels.gvisor_program import VERSION, built_runsc
from schemas.errors import InvalidConfig
from tests.stack.go_builds import build_once

MODULE = "gvisor.dev/gvisor"
TOOLCHAIN = "go1.23.6"
"""gVisor relies on the layout of the runtime of its own Go. With a newer one it builds, and then panics
in every third start."""

BUILD_S = 1800.0
CHANGED_FILE = "pkg/sentry/platform/systrap/metrics.go"
TICK = """	for {
		time.Sleep(recordingPeriod)

"""
PATIENT_TICK = """	pause := recordingPeriod
	before := uint64(0)
	for {
		time.Sleep(pause)
		now := latencies.total()
		isIdle := now == before
		before = now
		if isIdle && !fastpath.usedStubFastPath.Load() && !fastpath.usedSentryFastPath.Load() {
			pause = min(2*pause, maxIdlePause)
			continue
		}
		pause = recordingPeriod

"""
ADDED = """
// maxIdlePause is the longest time between two looks while nothing runs.
const maxIdlePause = 20 * time.Millisecond

// total returns how much was recorded since the last reset.
func (l *latencyRecorder) total() uint64 {
	sum := uint64(0)
	for i := range l.stubBound {
		sum += l.stubBound[i].Load() + l.sentryBound[i].Load()
	}
	return sum
}
"""


def program() -> Path:
    """The program, built now if it is not in the cache. Raises InvalidConfig when it cannot be built."""
    target = built_runsc()
    return build_once(target, _build, otherwise=f"put runsc at {target}")


def tick_less_when_idle(source: str) -> str:
    """Return the source of CHANGED_FILE with the change. Raises InvalidConfig for another source."""
    if source.count(TICK) != 1:
        raise InvalidConfig(
            f"{CHANGED_FILE} of gVisor {VERSION} has no such loop any more; compare it with {__file__}"
        )
    return source.replace(TICK, PATIENT_TICK) + ADDED


def _build(go: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        # A program that loads libraries cannot run where there are none.
        toolchain = {"CGO_ENABLED": "0", "GOTOOLCHAIN": TOOLCHAIN}
        environment = {**os.environ, **toolchain, "GOBIN": scratch}
        told = json.loads(
            _run(go, "mod", "download", "-json", f"{MODULE}@{VERSION}", env=environment)
        )
        original = Path(told["Dir"]) / CHANGED_FILE
        changed, overlay = Path(scratch) / "metrics.go", Path(scratch) / "overlay.json"
        changed.write_text(tick_less_when_idle(original.read_text()))
        overlay.write_text(json.dumps({"Replace": {str(original): str(changed)}}))
        wanted = ("-overlay", str(overlay), "-ldflags", "-s -w", f"{MODULE}/runsc@{VERSION}")
        _run(go, "install", *wanted, env=environment)
        (Path(scratch) / "runsc").rename(target)


def _run(go: str, *arguments: str, env: Mapping[str, str]) -> str:
    """Run Go and return its output. Raises InvalidConfig with what it says when it fails."""
    done = subprocess.run(
        ["nice", "-n", "10", go, *arguments],
        env=env,
        cwd=env["GOBIN"],
        capture_output=True,
        text=True,
        timeout=BUILD_S,
        check=False,
    )
    if done.returncode:
        raise InvalidConfig(f"runsc {VERSION} cannot be built; Go says: {done.stderr[-800:]}")
    return done.stdout


def main() -> int:
    """Build the program into the cache, for `make gvisor`."""
    try:
        sys.stdout.write(f"runsc {VERSION} is at {program()}\n")
    except InvalidConfig as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
