"""Helpers that the trainer's tests share: jobs, requests, artifacts in memory."""

from dataclasses import replace
from hashlib import sha256
from typing import Any, Literal

import torch

from schemas.artifact_refs import ArtifactRef
from schemas.config import RunConfig
from schemas.learner import LearnerJob, LearnerState
from schemas.sampling import DrawKey, Message, ModelRef, PolicyRef, SampleRequest, SamplingParams
from trainer.merkle_tree import merkle_root
from trainer.policy import parse

TINY = ModelRef(kind="scratch", name="qwen3-tiny", seed=3)


def loss_mask(prompt: int, response: int) -> tuple[Literal[0, 1], ...]:
    """0 for each token of a prompt, 1 for each token of the response."""
    learned: list[Literal[0, 1]] = [0] * prompt
    learned += [1] * response
    return tuple(learned)


class Shelf:
    """Artifacts in memory, with a count of how often each was fetched."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.num_fetched = 0

    def put(self, data: bytes) -> ArtifactRef:
        digest = sha256(data).hexdigest()
        self.content[digest] = data
        return ArtifactRef(uri=f"memory:{digest}", sha256=digest, size=len(data))

    def fetch(self, ref: ArtifactRef) -> bytes:
        self.num_fetched += 1
        return self.content[ref.sha256]

    def policy(self, state: LearnerState) -> PolicyRef:
        return PolicyRef(version=state.step, weights=self.put(weights_of(state)))


def weights_of(state: LearnerState) -> bytes:
    """The bytes of the weights of a version that was exported."""
    assert state.weights is not None
    return state.weights


def with_state(version: LearnerState, state: bytes) -> LearnerState:
    """The version with another optimizer state, and with the hash of it."""
    root = merkle_root(parse(state, device=torch.device("cpu")))
    return replace(version, state=state, state_sha256=root)


def job(
    model: ModelRef = TINY, *, run: str = "run", total_steps: int = 8, **advanced: Any
) -> LearnerJob:
    """A job on the tiny model; `advanced` overrides that section."""
    config = RunConfig.model_validate(
        {
            "experiment": {
                "rollout": "r",
                "entrypoint": "main.py",
                "model_path": "scratch:qwen3-tiny",
                "dataset": "d",
            },
            "training": {"lr": 1e-2, "max_response_length": 8},
            "advanced": {"lora_rank": 4, "lora_alpha": 8.0, **advanced},
        }
    )
    return LearnerJob(run, config, model, total_steps)


def request(
    text: str = "hello",
    *,
    sample: int = 0,
    slot: int = 0,
    policy: PolicyRef | None = None,
    model: ModelRef = TINY,
    **params: Any,
) -> SampleRequest:
    """A request for one completion; `params` are SamplingParams."""
    fields = {"max_new_tokens": 8, **params}
    return SampleRequest(
        model=model,
        policy=policy or PolicyRef(version=0),
        lora_alpha=8.0,
        params=SamplingParams.model_validate(fields),
        key=DrawKey(purpose="train", step=1, slot=slot, replacement=0, sample=sample),
        messages=(Message(role="user", content=text),),
    )
