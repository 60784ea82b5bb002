"""As root, with a wheel in a directory that only root may enter, the server's programs run from a
copy."""

import subprocess
from pathlib import Path

import pytest

from infra.operations.local import embedded_postgres as embedded


def test_programs_of_a_private_wheel_are_copied_with_their_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "_open_to_all", lambda _: False)
    monkeypatch.setattr(embedded, "SYSTEM_ROOT", tmp_path)
    place = embedded.Place(tmp_path / "data", tmp_path / "s", user="headrace")
    found = embedded._binaries(place)
    assert found.is_relative_to(tmp_path)
    for program in ("initdb", "postgres", "pg_dump"):
        done = subprocess.run(
            [str(found / program), "--version"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert (found / program).stat().st_mode & 0o005 == 0o005
    assert embedded._binaries(place) == found
    assert len(list(tmp_path.iterdir())) == 1, "no scratch directory is left"
