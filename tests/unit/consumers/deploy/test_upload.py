"""The upload of a checkpoint by the publish consumer, to a hub with the hub's real client: the uploaded
adapter loads with PEFT and has the same bits."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from consumers.deploy.publish import perform
from infra.blobs.hub.uploads import HubUploads
from infra.identity.secrets.memory import MemorySecrets
from infra.ports.secrets import SecretOwner
from schemas.deployments import HubUpload
from schemas.effects import UploadCheckpoint
from schemas.errors import NotFound, Refused
from schemas.events import CheckpointSaved
from schemas.sampling import ModelRef
from schemas.secrets.secret_value import SecretValue
from tests.kit.fakes import Bench, bench
from tests.kit.model_hub import TOKEN, Hub, model_hub
from tests.kit.specs import checkpoint_spec, ref
from tests.unit.trainer.support import Shelf, job
from tests.unit.trainer.test_policy import trained, write
from trainer.engine import Engine

pytestmark = [pytest.mark.torch, pytest.mark.processes]

WEIGHTS = "adapter_model.safetensors"
UPLOAD = HubUpload(
    upload="p1",
    run="r1",
    run_name="calm-otter",
    step=3,
    repository="org/sums",
    form="adapter",
    private=True,
    card="---\nlibrary_name: peft\n---\n# sums\n",
    secret="HF_TOKEN",
    submitter="ann",
)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with model_hub() as running:
        yield running
        assert running.problems == []


async def adapter() -> dict[str, bytes]:
    """The files of a LoRA checkpoint on a base without a public name."""
    engine = Engine(fetch=Shelf().fetch, threads=1)
    files = await trained(engine, job(ModelRef(kind="scratch", name="qwen3-tiny"), algorithm="sft"))
    await engine.aclose()
    return files


async def saved_in(place: Bench, files: Mapping[str, bytes]) -> None:
    """Record a checkpoint that has these files."""
    refs = {
        name: await place.ports.artifacts.put_artifact(data, run="r1", blob=True)
        for name, data in files.items()
    }
    spec = checkpoint_spec(3)
    weights = refs.pop(WEIGHTS)
    state = spec.state.model_copy(update={"weights": weights, "weights_sha256": weights.sha256})
    spec = spec.model_copy(update={"files": refs, "state": state})
    await place.record(CheckpointSaved(spec=spec, manifest=ref("m"), reward=0.5))


async def ports_of(place: Bench, hub: Hub) -> Any:
    secrets = MemorySecrets()
    owner = SecretOwner("personal", "ann")
    await secrets.put_secret(owner, "HF_TOKEN", SecretValue(TOKEN), by="ann")
    return replace(place.ports, secrets=secrets, hub=HubUploads(hub.url))


def read_back(hub: Hub, directory: Path) -> Path:
    """Write the repository's files as somebody who downloads it has them."""
    return write(hub.repositories["org/sums"].files, directory)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
async def test_an_uploaded_adapter_loads_with_peft_to_the_same_bits(
    hub: Hub, tmp_path: Path
) -> None:
    place, files = bench(tmp_path / "home"), await adapter()
    await saved_in(place, files)
    ports = await ports_of(place, hub)
    done = await perform(UploadCheckpoint(upload=UPLOAD), ports)
    assert [commit["id"] for commit in hub.commits_of("org/sums")] == [done.revision]
    uploaded = hub.repositories["org/sums"].files
    assert {name: uploaded[name] for name in files} == files
    there = read_back(hub, tmp_path / "there")
    base = transformers.AutoModelForCausalLM.from_pretrained(there / "base")
    model = peft.PeftModel.from_pretrained(base, there)
    trained_here = load_file(write(files, tmp_path / "here") / WEIGHTS)
    loaded = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    assert loaded.keys() == trained_here.keys()
    assert all(torch.equal(loaded[name], value) for name, value in trained_here.items())
    assert not list((tmp_path / "home" / "hub").iterdir())

    again = await perform(UploadCheckpoint(upload=UPLOAD), ports)
    assert again == done, "its worker died before it reported"
    assert len(hub.commits_of("org/sums")) == 1


async def test_a_merged_model_is_a_plain_model(hub: Hub, tmp_path: Path) -> None:
    place = bench(tmp_path / "home")
    await saved_in(place, await adapter())
    upload = UPLOAD.model_copy(update={"form": "merged"})
    await perform(UploadCheckpoint(upload=upload), await ports_of(place, hub))
    there = read_back(hub, tmp_path / "there")
    assert not (there / "adapter_config.json").exists()
    assert transformers.AutoModelForCausalLM.from_pretrained(there) is not None
    assert (there / "README.md").read_text() == UPLOAD.card


async def test_a_secret_or_a_checkpoint_that_is_gone_is_refused(hub: Hub, tmp_path: Path) -> None:
    place = bench(tmp_path / "home")
    ports = await ports_of(place, hub)
    with pytest.raises(NotFound, match="does not exist any more"):
        await perform(UploadCheckpoint(upload=UPLOAD), ports)
    nobody = UPLOAD.model_copy(update={"submitter": "bob"})
    with pytest.raises(Refused, match="secret HF_TOKEN is not set"):
        await perform(UploadCheckpoint(upload=nobody), ports)
    assert hub.requests == []
