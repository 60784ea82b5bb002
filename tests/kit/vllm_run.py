"""A short GRPO run that samples through vLLM servers, real or fake."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from producers.core.history.verification import Verification, Verifications
from producers.core.lookup import Lookup
from schemas.events import Event, GroupGenerated, GroupsRequested, StepSettled
from schemas.sampling import SampleBatch
from tests.kit.forced_answers import FILES, forced_run
from tests.kit.in_memory import in_memory
from tests.kit.platform import ROWS, make_workspace, run_config

STEPS = 2
SEED = 7
TALK = """
from headrace import AgentWorkflow, Grader


class Talk(AgentWorkflow):
    async def run(self, ctx):
        first = await ctx.chat(ctx.prompt)
        again = [*ctx.prompt, first, {"role": "user", "content": "again"}]
        return [*again, await ctx.chat(again)]


class Digits(Grader):
    async def grade(self, ctx):
        for name, sample in ctx.samples.items():
            ctx.set_sample_reward(name, sum(c in "aeiou" for c in sample.text) - len(sample.text) / 9)
"""


@dataclass(frozen=True)
class Trained:
    """The result of a run: its events, its groups' samples, and the result of its verification."""

    events: list[Event]
    samples: list[SampleBatch]
    verification: Verification


async def train_run(
    folder: Path, *, model: str | Path, vllm: tuple[str, ...], **advanced: object
) -> Trained:
    """Two turns per sample through the gateway, on `scratch:<model>` initialised from SEED, or on the
    model of a directory."""
    config = run_config(
        experiment={"model_path": str(model) if isinstance(model, Path) else f"scratch:{model}"},
        training={"max_response_length": 16, "max_answer_length": 8},
        advanced={"max_steps": STEPS, "seed": SEED, "deterministic": False, **advanced},
    )
    if "tuning" in advanced:
        config["training"]["lr"] = 1e-3
    return await _train(folder, {"rollouts/say/main.py": TALK}, config, vllm=vllm)


async def train_forced_run(
    folder: Path, *, model: Path, vllm: tuple[str, ...], steps: int = STEPS, **advanced: object
) -> Trained:
    """A forced format and a forced call per sample, on the model of a directory."""
    config = forced_run(max_steps=steps, seed=SEED, deterministic=False, **advanced)
    config["experiment"]["model_path"] = str(model)
    config["training"] |= {"n_samples_per_prompt": 8, "lr": 1e-3}
    return await _train(folder, FILES, config, vllm=vllm)


async def _train(
    folder: Path,
    files: dict[str, str],
    config: dict[str, dict[str, Any]],
    *,
    vllm: tuple[str, ...],
) -> Trained:
    workspace = make_workspace(folder / "workspace", files)
    rows = folder / "rows.jsonl"
    rows.write_text(ROWS)
    async with in_memory(folder / "home", vllm=vllm) as started, asyncio.timeout(720):
        await started.workspaces.add(str(workspace), "w")
        await started.upload("numbers", rows)
        run = await started.run_to_end(config, workspace="w")
        asked = Verifications(started.log, Lookup(started.log, started.names))
        found = await asked.request(run, cause=uuid4())
        while found.status == "running":
            await asyncio.sleep(0.02)
            found = await asked.find_verification(found.id)
        events = [recorded.event for recorded in started.world.events]
        parts = [part for e in events if isinstance(e, GroupGenerated) for part in e.parts]
        texts = [await started.artifacts.get_artifact(part) for part in parts]
        samples = [SampleBatch.model_validate_json(text) for text in texts]
        return Trained(events, samples, found)


def check(found: Trained, *, mismatch: float, num_rows: int = 1, num_versions: int = STEPS) -> None:
    """The run learned from what was sampled with so many versions, in so many training rows per sample,
    and is rebuilt from its log."""
    steps = [e for e in found.events if isinstance(e, StepSettled) and e.step]
    assert len(steps) == STEPS
    for step in steps:
        assert step.metrics["train/sampler_mismatch"] <= mismatch, step.metrics
        assert step.metrics["train/grad_norm"] > 0
    versions = [e.template.policy for e in found.events if isinstance(e, GroupsRequested)]
    assert len({policy.weights.sha256 for policy in versions if policy.weights}) == num_versions
    samples = [sample for batch in found.samples for sample in batch.samples]
    assert all(sample.num_turns == 2 and len(sample.sequences) == num_rows for sample in samples)
    assert found.verification.status == "verified", found.verification
    assert found.verification.steps == STEPS


def check_forced(found: Trained, *, mismatch: float) -> None:
    """Both answers of each sample were drawn under masks over vLLM's vocabulary. The second offers tools
    in its prompt, so it is a row of its own."""
    check(found, mismatch=mismatch, num_rows=2)
    for sample in [sample for batch in found.samples for sample in batch.samples]:
        spans = [span for row in sample.sequences for span in row.constrained]
        assert [span.grammar.vocabulary for span in spans] == ["vllm", "vllm"]
