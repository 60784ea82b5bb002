"""`make audit`, with a pip-audit whose answers are given. The real one needs PyPI's advisories."""

import json
import sys
from pathlib import Path

import pytest

from tests.supply_chain import audit

VULNERABLE = {
    "name": "urllib3",
    "version": "1.24.1",
    "vulns": [{"id": "PYSEC-1", "fix_versions": ["1.24.3"]}, {"id": "PYSEC-2", "fix_versions": []}],
}


def program(directory: Path, *, canary: object, locks: object) -> Path:
    """A program that answers like pip-audit: `canary` for the vulnerable release, `locks` otherwise."""
    file = directory / "pip-audit"
    file.write_text(
        f"#!{sys.executable}\nimport sys\n"
        f"canary = any('vulnerable' in word for word in sys.argv)\n"
        f"print({json.dumps(canary)!r} if canary else {json.dumps(locks)!r})\n"
    )
    file.chmod(0o755)
    return file


def report(*dependencies: object) -> dict[str, object]:
    return {"dependencies": list(dependencies), "fixes": []}


def test_advisories_are_listed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(VULNERABLE)
    assert audit.main([str(program(tmp_path, canary=found, locks=found))]) == audit.FOUND
    said = capsys.readouterr().out
    assert said.count("urllib3 1.24.1: PYSEC-1 (fixed in 1.24.3)") == 1
    assert "PYSEC-2 (no fix is published)" in said
    assert "6 locks audited, 2 advisories" in said


def test_safe_packages_pass(tmp_path: Path) -> None:
    safe = report({"name": "six", "version": "1.17.0", "vulns": []})
    assert audit.main([str(program(tmp_path, canary=report(VULNERABLE), locks=safe))]) == 0


def test_an_audit_that_sees_no_advisory_anywhere_has_not_taken_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blind = report({"name": "urllib3", "skip_reason": "could not be audited"})
    assert audit.main([str(program(tmp_path, canary=blind, locks=blind))]) == audit.NOT_AUDITED
    assert "NOTHING was audited" in capsys.readouterr().err


def test_every_lock_is_audited() -> None:
    locks = {f"locks/{file.name}" for file in (audit.ROOT / "locks").glob("*.txt")}
    assert {"constraints.txt", *locks} == set(audit.LOCKS)
