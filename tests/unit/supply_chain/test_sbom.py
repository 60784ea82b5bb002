"""The check of a bill of materials."""

import json
from pathlib import Path

import pytest

from tests.supply_chain import sbom


def bill(*components: tuple[str, str, bool]) -> str:
    hashes = [{"alg": "SHA-256", "content": "00"}]
    return json.dumps(
        {
            "components": [
                {
                    "name": name,
                    "version": version,
                    "externalReferences": [{"hashes": hashes if is_hashed else []}],
                }
                for name, version, is_hashed in components
            ]
        }
    )


def test_names_are_compared_as_packages_are_named() -> None:
    pins = sbom.pins_of("typing_extensions==4.16.0 \\\n    --hash=sha256:00\n")
    assert pins == sbom.components_of(bill(("typing-extensions", "4.16.0", True)))


def test_a_package_without_a_hash_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "locks").mkdir()
    for image in sbom.IMAGES:
        (tmp_path / "locks" / f"{image}.txt").write_text("six==1.17.0 \\\n")
        (tmp_path / f"sbom-{image}.json").write_text(bill(("six", "1.17.0", image == "control")))
    monkeypatch.setattr(sbom, "ROOT", tmp_path)
    assert sbom.main([str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "sbom-control.json: 1 packages" in said.out
    assert "sbom-worker.json lacks six 1.17.0" in said.err
