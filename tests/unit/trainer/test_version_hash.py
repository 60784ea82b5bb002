"""The hash of a version: that of its tensors since rules 7, and that of two files before. Either way the
numbers are the same, and a version is loaded only if it has the hash of the log."""

from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from schemas.errors import CorruptData
from schemas.learner import LearnerState
from tests.unit.trainer.support import Shelf, job, weights_of
from tests.unit.trainer.test_learner import play
from trainer.engine import Engine
from trainer.merkle_tree import merkle_root
from trainer.policy import export

KINDS: Mapping[str, Mapping[str, Any]] = {
    "lora": {},
    "full": {"tuning": "full"},
    "critic": {"algorithm": "ppo"},
    "muon": {"optimizer": "muon"},
    "entropy": {"entropy_target": 2.0, "entropy_coef": 0.02},
}


def file_hash(content: bytes | None) -> str:
    assert content is not None
    return sha256(content).hexdigest()


def with_part(state: LearnerState, part: str, content: bytes) -> LearnerState:
    """The version with other bytes under the same hashes."""
    return replace(state, weights=content) if part == "weights" else replace(state, state=content)


async def two_steps(engine: Engine, rules: int, kind: str, **exports: bool) -> list[LearnerState]:
    asked = replace(job(**KINDS[kind]), rules=rules, run=f"{rules}{exports}")
    states = [(await engine.learner.initialize(asked)).state]
    for step in (1, 2):
        result = await engine.learner.step(asked, play(step), **{"export_state": True, **exports})
        states.append(result.state)
    return states


@pytest.mark.parametrize("kind", KINDS)
async def test_the_hash_is_of_tensors_and_was_of_files(engine: Engine, kind: str) -> None:
    new, old = [await two_steps(engine, rules, kind) for rules in (7, 6)]
    for now, before in zip(new, old, strict=True):
        assert (now.weights, now.state) == (before.weights, before.state)
        files = (file_hash(now.weights), file_hash(now.state))
        assert (before.weights_sha256, before.state_sha256) == files
        for state in (now, before):
            assert (state.weights_file_sha256, state.state_file_sha256) == files
        roots = (merkle_root(load(weights_of(now))), merkle_root(load(now.state or b"")))
        assert (now.weights_sha256, now.state_sha256) == roots
    assert len({state.weights_sha256 for state in new}) == 3


@pytest.mark.parametrize("rules", [6, 7])
async def test_a_version_that_nothing_needs_has_the_same_hash_and_no_bytes(
    engine: Engine, rules: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under rules 7 it is not serialised either."""
    stored = await two_steps(engine, rules, "lora")
    made: list[int] = []

    def counted(tensors: Mapping[str, torch.Tensor]) -> bytes:
        made.append(len(tensors))
        return export(dict(tensors))

    monkeypatch.setattr("trainer.learner.export", counted)
    loose = await two_steps(engine, rules, "lora", export_state=False, export_weights=False)
    assert len(made) == (2 if rules == 7 else 6), "version 0 is stored"
    for one, other in zip(stored[1:], loose[1:], strict=True):
        assert (one.weights_sha256, one.state_sha256) == (other.weights_sha256, other.state_sha256)
        bytes_and_files = (other.weights, other.state, other.weights_file_sha256)
        assert (*bytes_and_files, other.state_file_sha256) == (None,) * 4


@pytest.mark.parametrize("part", ["weights", "state"])
async def test_bytes_that_are_not_those_of_the_log_are_not_loaded(
    engine: Engine, shelf: Shelf, part: str
) -> None:
    """One bit of one tensor, in a file whose own hash is right. Twin: the same bytes without it."""
    asked, state = job(), (await two_steps(engine, 7, "lora"))[1]
    tensors = load(getattr(state, part))
    last = tensors[max(tensors)].reshape(-1).view(torch.uint8)
    last[-1] ^= 1
    damaged = save(tensors, metadata={"format": "pt"})
    other = Engine(fetch=shelf.fetch, threads=1)
    with pytest.raises(
        CorruptData, match=r"hash of the .* of version 1 is .*, and the log .* backup"
    ):
        await other.learner.load(asked, with_part(state, part, damaged))
    assert not other.learner.holds(asked, 1, state.weights_sha256, state.state_sha256)
    last[-1] ^= 1
    await other.learner.load(asked, with_part(state, part, save(tensors)))
    assert other.learner.holds(asked, 1, state.weights_sha256, state.state_sha256)
    await other.aclose()


async def test_a_version_without_weights_cannot_be_loaded(engine: Engine) -> None:
    state = (await two_steps(engine, 7, "lora"))[1]
    with pytest.raises(CorruptData, match="version 1 of run has no weights"):
        await engine.learner.load(job(), replace(state, weights=None))
