"""The program that installs the packages of rollouts."""

from pathlib import Path

import pytest
import uv

from infra.sandbox.environments.uv_process import find_uv
from schemas.errors import InvalidConfig


def test_a_uv_package_without_its_program_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_uv_bin() -> str:
        raise FileNotFoundError("could not find the uv binary")

    monkeypatch.setattr(uv, "find_uv_bin", find_uv_bin)
    with pytest.raises(InvalidConfig, match="installed by uv, which is missing"):
        find_uv(tmp_path)
