"""The same run on memory, on the embedded default, and on PostgreSQL, Kafka and an S3 store: nothing is
lost, and the bits are the same wherever it ran."""

import asyncio
from pathlib import Path

import pytest

from tests.kit.in_memory import in_memory
from tests.kit.ledger import check
from tests.kit.platform import ROWS, final_adapter, make_workspace, platform, run_config
from tests.kit.stacks import RealStack

pytestmark = [pytest.mark.processes, pytest.mark.torch, pytest.mark.postgres]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("stacks") / "workspace")


@pytest.fixture(scope="module")
def in_memory_adapter(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights that the run ends with where no component is involved at all."""
    home = tmp_path_factory.mktemp("memory")
    rows = home / "rows.jsonl"
    rows.write_text(ROWS)

    async def trained() -> str:
        async with in_memory(home / "home") as started, asyncio.timeout(360):
            await started.workspaces.add(str(workspace), "w")
            await started.upload("numbers", rows)
            await started.run_to_end(run_config(), workspace="w")
            return started.final_adapter()

    return asyncio.run(trained())


def on(environment: dict[str, str], home: Path, workspace: Path) -> str:
    """The weights that it ends with on a platform of these settings."""
    with platform(home, environment=environment) as started:
        made = started.post("/workspaces", {"url": str(workspace), "name": "w"})
        assert made.status_code == 201, made.text
        started.upload("numbers")
        run = started.submit(run_config(), workspace="w")
        info = started.wait(run, "finished")
        check(started.events(run), steps=4, groups=2, samples=4)
        return final_adapter(info)


def test_the_embedded_stack_ends_in_the_same_bits_as_memory(
    workspace: Path, in_memory_adapter: str, tmp_path: Path
) -> None:
    assert on({}, tmp_path / "home", workspace) == in_memory_adapter


@pytest.mark.kafka
@pytest.mark.s3
@pytest.mark.parametrize("workers", [pytest.param("one", marks=pytest.mark.kills), "each"])
def test_real_components_end_in_the_same_bits_as_memory(
    workspace: Path, in_memory_adapter: str, real_stack: RealStack, tmp_path: Path, workers: str
) -> None:
    environment = {**real_stack.fresh_settings(), "HEADRACE_WORKERS": workers}
    assert on(environment, tmp_path / "home", workspace) == in_memory_adapter
