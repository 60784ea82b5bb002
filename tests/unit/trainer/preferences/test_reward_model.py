"""A reward model: what it gives is what Transformers and PEFT give, and its head is trained and kept."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from schemas.errors import Refused
from schemas.learner import StepBatch, StepResult
from tests.unit.trainer.preferences.test_step import PAIRS
from tests.unit.trainer.support import TINY, job, weights_of
from tests.unit.trainer.test_policy import CPU, write
from trainer.engine import Engine
from trainer.model.base import build_base, load_merged
from trainer.model.scalar_heads import SCORE_NAME
from trainer.policy import parse


async def trained(engine: Engine, **advanced: Any) -> tuple[StepResult, dict[str, bytes]]:
    """Version 0, and a checkpoint's files after three steps."""
    asked = job(algorithm="reward_model", total_steps=3, **advanced)
    first = await engine.learner.initialize(asked)
    last = first
    for step in range(1, 4):
        batch = StepBatch(step, preferences=PAIRS)
        last = await engine.learner.step(asked, batch, export_state=False)
    return first, {**first.files, first.weights_name: weights_of(last.state)}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's own
async def test_it_scores_in_plain_transformers_and_peft(engine: Engine, tmp_path: Path) -> None:
    """The loss that the learner measures is that of the scores there."""
    from peft import PeftModel

    _, files = await trained(engine)
    folder = write(files, tmp_path)
    base = AutoModelForSequenceClassification.from_pretrained(folder / "base", num_labels=1)
    plain: Any = PeftModel.from_pretrained(base, folder).eval()
    kept = parse(files["adapter_model.safetensors"], device=CPU)
    assert torch.equal(
        plain.base_model.model.score.modules_to_save.default.weight, kept[SCORE_NAME]
    )
    found = await engine.learner.evaluate(job(algorithm="reward_model"), 3, PAIRS)
    losses = []
    for row in PAIRS:
        scores = [score_of(plain, row.prompt, text) for text in (row.chosen, row.rejected)]
        losses.append(-torch.tensor(scores[0] - scores[1] - (row.margin or 0)).sigmoid().log())
    assert found["eval/validation/loss"] == pytest.approx(float(sum(losses) / 3), abs=1e-5)


def score_of(plain: Any, prompt: Any, text: str | None) -> float:
    tokenizer: Any = build_base(TINY, {}, device=CPU).tokenizer
    talk = [*prompt, ("assistant", text)]
    messages = [{"role": role, "content": content} for role, content in talk]
    ids = tokenizer.apply_chat_template(messages)["input_ids"]
    end = len(ids) - ids[::-1].index(6)
    with torch.no_grad():
        return float(plain(torch.tensor([ids[:end]])).logits[0, 0])


async def test_its_head_is_trained_beside_the_adapter(engine: Engine) -> None:
    first, files = await trained(engine)
    before = parse(weights_of(first.state), device=CPU)
    after = parse(files["adapter_model.safetensors"], device=CPU)
    assert SCORE_NAME in before
    assert SCORE_NAME in after
    assert before[SCORE_NAME].shape == (1, 32)
    assert all(not torch.equal(before[name], after[name]) for name in after)


async def test_muon_leaves_its_head_to_adamw(engine: Engine) -> None:
    first, _ = await trained(engine, optimizer="muon")
    assert first.state.state is not None
    state = parse(first.state.state, device=CPU)
    assert f"exp_avg.{SCORE_NAME}" in state
    assert sum(name.startswith("exp_avg.") for name in state) == 1


async def test_it_is_refused_where_a_model_that_writes_is_needed(
    engine: Engine, tmp_path: Path
) -> None:
    _, files = await trained(engine)
    folder = write(files, tmp_path)
    assert json.loads(files["adapter_config.json"])["modules_to_save"] == ["score"]
    with pytest.raises(Refused, match="is a reward model"):
        load_merged(folder, what="the checkpoint a@3")
