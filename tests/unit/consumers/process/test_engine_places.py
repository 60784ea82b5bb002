"""How many samples a worker's engine holds at once: as many as vLLM computes."""

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from consumers.process.ports import _open_engine
from infra.blobs.artifacts import ArtifactStore
from infra.blobs.memory import MemoryBlobs
from infra.settings.settings import Settings
from infra.spine.memory.event_log import MemoryLog, World
from infra.spine.runtime.hosting import capacity_of
from schemas.effects import Lane
from trainer.sampler.vllm.engine import VllmSampler

pytestmark = pytest.mark.torch


class OnlyArtifacts:
    """A backend of which only the artifacts are used."""

    artifacts = ArtifactStore(MemoryLog(World()), MemoryBlobs())


@pytest.mark.parametrize(
    ("sampler", "arguments", "places"),
    [
        ("vllm", "", 256),
        ("vllm", "--max-num-seqs 48", 48),
        ("vllm=http://a.example.com:1,http://b.example.com:1", "", 512),
    ],
)
async def test_the_places_to_generate_are_the_sequences_that_vllm_computes_at_once(
    tmp_path: Path, sampler: str, arguments: str, places: int
) -> None:
    settings = Settings.load(
        {
            "HEADRACE_HOME": str(tmp_path),
            "HEADRACE_SAMPLER": sampler,
            "HEADRACE_VLLM_MODEL": "qwen3-tiny",
            "HEADRACE_VLLM_ARGUMENTS": arguments,
        }
    )
    backend: Any = OnlyArtifacts()
    async with AsyncExitStack() as stack:
        opened = _open_engine(stack, backend, settings)
        assert isinstance(opened.sampler, VllmSampler)
        places_of = capacity_of(settings.capacity, generate=opened.concurrency)
    assert places_of[Lane.GENERATE] == places
