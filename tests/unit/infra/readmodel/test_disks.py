"""Disks are shown once each, also before a directory exists."""

import shutil
from pathlib import Path

from infra.readmodel.disks import disks


def test_directories_of_one_disk_are_one_row(tmp_path: Path) -> None:
    missing = tmp_path / "not" / "there"
    (found,) = disks([tmp_path, missing])
    assert found["directories"] == [str(tmp_path), str(missing)]
    assert 0 <= found["free"] <= found["total"] == shutil.disk_usage(tmp_path).total


def test_another_disk_is_another_row(tmp_path: Path) -> None:
    others = [one for one in (Path("/proc"), Path("/sys")) if one.exists()]
    assert len(disks([tmp_path, *others])) == 1 + len(others)
