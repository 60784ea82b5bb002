"""The end of `make sbom`: checks that a bill of materials lists every locked package and its hashes."""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
IMAGES = ("control", "worker")
PIN = re.compile(r"(?m)^([A-Za-z0-9._-]+)==([^ ;\\]+)")


def pins_of(lock: str) -> frozenset[tuple[str, str]]:
    """Return the packages of a lock with their versions."""
    return frozenset((canonicalize_name(name), version) for name, version in PIN.findall(lock))


def components_of(bill: str) -> frozenset[tuple[str, str]]:
    """Return the packages of a CycloneDX document that state at least one SHA-256."""
    found = json.loads(bill)["components"]
    return frozenset(
        (canonicalize_name(one["name"]), one["version"])
        for one in found
        if any(
            each["alg"] == "SHA-256"
            for reference in one.get("externalReferences", ())
            for each in reference.get("hashes", ())
        )
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make sbom", description=__doc__)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args(argv).directory
    for image in IMAGES:
        pins = pins_of((ROOT / "locks" / f"{image}.txt").read_text())
        file = directory / f"sbom-{image}.json"
        missing = sorted(pins - components_of(file.read_text()))
        if missing:
            sys.stderr.write(f"{file} lacks {missing[0][0]} {missing[0][1]}, or its hash\n")
            return 1
        sys.stdout.write(f"{file}: {len(pins)} packages\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
