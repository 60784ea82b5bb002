"""`python -m producers.core.registry.confined_check FILE KIND NAME VERSION OUT`: reads the archive of an
artifact under limits, writes its manifest and its list of files to OUT, and prints a report as JSON.

It imports only the rules, as the check of datasets does.
"""

import json
import resource
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from producers.core.registry.archives import read_archive
from producers.core.registry.manifests import (
    FILES,
    MAX_BYTES,
    REQUIRED,
    check_manifest,
    parse_manifest,
    summary_of,
)
from schemas.errors import InvalidConfig, Issue
from schemas.ids import ArtifactKind

MEMORY_BYTES = 1 << 30
CPU_S = 600


@dataclass(frozen=True, slots=True)
class ArchiveReport:
    """A summary of an archive, or the issues for which it cannot be published."""

    num_files: int = 0
    unpacked_bytes: int = 0
    summary: str = ""
    issues: tuple[Issue, ...] = ()


def check_archive(
    path: Path, kind: ArtifactKind, *, name: str, version: str, out: Path
) -> ArchiveReport:
    """Check an archive, and write its manifest and its list of files to `out` as JSON."""
    file = FILES[kind]
    try:
        found = read_archive(path, keep=frozenset({file}), keep_bytes=MAX_BYTES)
    except InvalidConfig as error:
        return ArchiveReport(issues=(Issue("archive", error.message),))
    if not found.files:
        return ArchiveReport(issues=(Issue("archive", "holds no files; add some"),))
    data = found.kept.get(file)
    if data is None and REQUIRED[kind]:
        message = "is missing at the top of the archive; pack the folder that holds it"
        return ArchiveReport(issues=(Issue(file, message),))
    try:
        manifest = {} if data is None else parse_manifest(data)
    except InvalidConfig as error:
        return ArchiveReport(issues=(Issue(file, error.message),))
    issues = check_manifest(manifest, kind, name=name, version=version)
    if issues:
        return ArchiveReport(issues=tuple(issues))
    files = [asdict(one) for one in sorted(found.files, key=lambda one: one.path)]
    detail = {"manifest": manifest, "files": files}
    out.write_text(json.dumps(detail, ensure_ascii=False, sort_keys=True, separators=(",", ":")))
    return ArchiveReport(len(files), found.unpacked_bytes, summary_of(manifest))


def main(path: str, kind: str, name: str, version: str, out: str) -> int:
    """Check one archive, and print the report. Returns the exit code."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20, 64 << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
    known = cast(ArtifactKind, kind)
    report = check_archive(Path(path), known, name=name, version=version, out=Path(out))
    sys.stdout.write(json.dumps(asdict(report)))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
