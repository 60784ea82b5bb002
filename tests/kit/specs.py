"""Small complete values for tests of consumers: a run, its dataset, its groups, its versions."""

import hashlib
from typing import Any

from schemas.artifact_refs import ArtifactRef
from schemas.config import RunConfig
from schemas.ids import GroupKey, Purpose
from schemas.sampling import ModelRef, PolicyRef, SamplingParams
from schemas.specs import (
    CheckpointSpec,
    DatasetRef,
    Entrypoint,
    GroupSpec,
    GroupTemplate,
    RolloutRef,
    SampleEntry,
    Slot,
    StateRef,
    TrainSpec,
)

MODEL = ModelRef(kind="scratch", name="qwen3-tiny")


def ref(text: str, *, size: int | None = None) -> ArtifactRef:
    """A reference to an artifact that holds `text`."""
    data = text.encode()
    sha256 = hashlib.sha256(data).hexdigest()
    return ArtifactRef(uri=f"row:{sha256}", sha256=sha256, size=len(data) if size is None else size)


DATASET = DatasetRef(dataset="d1", name="sums", content=ref("rows"), num_rows=8)


def config(**sections: dict[str, Any]) -> RunConfig:
    """A run's config: GRPO unless the sections say otherwise."""
    experiment = {
        "rollout": "say",
        "entrypoint": "main.py",
        "model_path": "scratch:qwen3-tiny",
        "dataset": "sums",
    }
    return RunConfig.model_validate({"experiment": experiment, **sections})


def train_spec(*, dataset: DatasetRef = DATASET, **sections: dict[str, Any]) -> TrainSpec:
    return TrainSpec(
        run="r1", config=config(**sections), model=MODEL, total_steps=9, dataset=dataset
    )


def rollout_ref(*, workflow: str | None = None) -> RolloutRef:
    return RolloutRef(
        snapshot=ref("tree"),
        commit="c" * 40,
        entrypoint=Entrypoint(rollout="say"),
        workflow=workflow,
        grader="Count",
    )


def template(
    *,
    workflow: str | None = None,
    num_samples: int = 2,
    user_code: bool = True,
    dataset: DatasetRef = DATASET,
) -> GroupTemplate:
    return GroupTemplate(
        dataset=dataset,
        model=MODEL,
        policy=PolicyRef(version=0, weights=ref("w0")),
        params=SamplingParams(seed=7),
        num_samples=num_samples,
        rollout=rollout_ref(workflow=workflow) if user_code else None,
        run="r1",
    )


def group_spec(of: GroupTemplate, *, slot: int = 0, row: int = 3) -> GroupSpec:
    key = GroupKey("r1", Purpose.TRAIN, 1, slot)
    return GroupSpec(group=str(key), row=row, template=of)


def slots(*rows: int) -> tuple[Slot, ...]:
    return tuple(Slot(slot=slot, row=row) for slot, row in enumerate(rows))


def entry(index: int, **changes: Any) -> SampleEntry:
    return SampleEntry.model_validate({"index": index, "prompt_tokens": 2, **changes})


def version(step: int, *, durable: bool = True, size: int | None = None) -> StateRef:
    """A policy version; without `durable`, only its hashes and weights."""
    weights, state = ref(f"w{step}", size=size), ref(f"s{step}", size=size)
    return StateRef(
        step=step,
        weights_sha256=weights.sha256,
        state_sha256=state.sha256,
        weights=weights,
        state=state if durable else None,
    )


def checkpoint_spec(step: int, *, state: StateRef | None = None) -> CheckpointSpec:
    return CheckpointSpec(
        run="r1",
        step=step,
        model=MODEL,
        tuning="lora",
        state=state or version(step),
        batch=None,
        plan=(12, 8),
        versions={"torch": "2"},
        seed=7,
        parent=None,
        files={"adapter_config.json": ref("{}")},
    )
