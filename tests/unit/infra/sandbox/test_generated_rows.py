"""Tasks are generated in the sandbox, by the packages that score them, and a generator that fails says
why."""

import json
import shutil
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra.ports.packages import ResolvedPackages
from infra.sandbox import generated_rows
from infra.sandbox.environments.environments import (
    PackageEnvironments,
    _read_versions,
    _write_versions,
)
from infra.sandbox.generated_rows import generate_rows
from infra.sandbox.levels.probe import choose_level
from infra.settings.packages import PackageSettings
from schemas.errors import Refused
from schemas.toml.generated_tasks import PACKAGE, parse_generated
from tests.kit.package_index import serve_index
from tests.kit.reasoning_package import FILES

LEAKY = """
import socket, pathlib
class Leaky(Sums):
    def __getitem__(self, i):
        try:
            socket.create_connection(("127.0.0.1", 9), timeout=1)
        except OSError as error:
            raise RuntimeError(f"{error.strerror}, {pathlib.Path('/root').exists()}")
DATASETS["leaky"] = (Leaky, SumsConfig)
"""


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PackageEnvironments]:
    root = Path(tempfile.mkdtemp(prefix="headrace-test-"))
    root.chmod(0o755)
    with serve_index(tmp_path_factory.mktemp("index")) as index:
        name, _, version = PACKAGE.partition("==")
        files = FILES | {"reasoning_gym/factory.py": FILES["reasoning_gym/factory.py"] + LEAKY}
        index.add_wheel(name, version, files=files, requires=["pycosat==0.6.6", "zss>=1.2"])
        index.add_wheel("python-dateutil", "2.9.0")
        settings = PackageSettings(directory=root / "environments", index=index.url)
        made = PackageEnvironments(choose_level("bwrap"), settings)
        yield made
        made.close()
    shutil.rmtree(root)


async def generate(query: str, environments: PackageEnvironments) -> bytes:
    return await generate_rows(parse_generated(f"reasoning-gym:{query}"), environments)


async def test_rows_are_generated_with_packages_that_have_no_wheel_left_out(
    environments: PackageEnvironments,
) -> None:
    content = await generate("sums?size=6&word=Sum", environments)
    rows = [json.loads(line) for line in content.splitlines()]
    assert len({row["user_prompt"] for row in rows}) == 6
    assert all(row["metadata"]["package"] == PACKAGE for row in rows)
    assert content == await generate("sums?size=6&word=Sum", environments)


async def test_rows_are_generated_again_without_the_index(
    environments: PackageEnvironments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their packages are installed. If the file with their versions is damaged, the index is asked."""
    content = await generate("sums?size=6", environments)

    async def unreachable(declared: object) -> None:
        raise AssertionError("the index is asked")

    with monkeypatch.context() as patched:
        patched.setattr(environments, "resolve", unreachable)
        assert await generate("sums?size=6", environments) == content
    for kept in environments._directory.glob("*.versions"):
        kept.write_text(kept.read_text()[:50])
    assert await generate("sums?size=6", environments) == content
    assert all(_read_versions(kept) for kept in environments._directory.glob("*.versions"))


def test_two_submits_that_keep_the_same_versions_at_once_both_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have written before one of them moves its file to its place."""
    both = threading.Barrier(2)
    write_text = Path.write_text

    def write_beside_another(path: Path, text: str) -> int:
        size = write_text(path, text)
        both.wait(10)
        return size

    monkeypatch.setattr(Path, "write_text", write_beside_another)
    resolved = ResolvedPackages(pins="", python="3.11", platform="linux-x86_64", count=0)
    kept = tmp_path / "some.versions"
    with ThreadPoolExecutor(2) as submits:
        for written in [submits.submit(_write_versions, kept, resolved) for _ in range(2)]:
            written.result()
    assert _read_versions(kept) == resolved
    assert list(tmp_path.iterdir()) == [kept]


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("sum", "the tasks of sum cannot be generated: .*did you mean sums?"),
        ("failing", "failed at its question 0: ZeroDivisionError"),
        ("solved", "needs the package pycosat, which has no wheel"),
        ("leaky", "(Network is unreachable|Connection refused).*, False; choose"),
    ],
)
async def test_the_reason_is_said(query: str, said: str, environments: PackageEnvironments) -> None:
    with pytest.raises(Refused, match=said):
        await generate(query, environments)


async def test_a_generator_that_does_not_end_is_ended(
    environments: PackageEnvironments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generated_rows, "WITHIN_S", 2.0)
    with pytest.raises(Refused, match="the tasks of endless took longer than 2 s; ask it for less"):
        await generate("endless", environments)
