"""The supervised loss: packed equals unpacked, no row sees another, and Transformers computes the
same."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from schemas.config import Advanced, LossTurns
from schemas.errors import TransientError
from schemas.learner import Conversation, StepBatch
from tests.unit.trainer.batches import policy64
from tests.unit.trainer.support import TINY, job
from trainer.algorithms import sft
from trainer.engine import Engine
from trainer.forward.packing import pack
from trainer.forward.transformers_pass import Fallback
from trainer.model.base import build_base
from trainer.model.chat_template import Chat
from trainer.policy import LoadedModel, Policy

TALK = (
    Conversation(0, (("user", "1?"), ("assistant", "one"), ("user", "2?"), ("assistant", "two"))),
    Conversation(1, (("user", "what is 3+4?"), ("assistant", "7"))),
    Conversation(2, (("user", "what is 3+4?"), ("assistant", "seven"))),
    Conversation(3, (("system", "be brief"), ("user", "ok?"), ("assistant", "yes indeed"))),
)
"""Two neighbours share their prompt, which is packed once."""
SFT = Advanced(algorithm="sft")


def chat_of(policy: Policy) -> Chat:
    base = policy.loaded.base
    return Chat(base.tokenizer, base.stop_ids)


def taken(
    policy: Policy, *, tokens: int, advanced: Advanced = SFT
) -> tuple[float, dict[str, torch.Tensor], int]:
    """Loss, gradients and number of micro-batches of one step."""
    for tensor in policy.tensors.values():
        tensor.grad = None
    batch = sft.demonstrations_of(TALK, chat_of(policy), advanced)
    metrics, plan = sft.accumulate_gradients(policy, batch, micro_batch_tokens=tokens)
    gradients = {n: t.grad.clone() for n, t in policy.tensors.items() if t.grad is not None}
    return metrics["train/loss"], gradients, len(plan)


def without_decoder(policy: Policy) -> Policy:
    """The same policy through Transformers' own forward pass."""
    loaded = LoadedModel(policy.loaded.base, None, Fallback(policy.loaded.base))
    return replace(policy, loaded=loaded)


def single(policy: Policy) -> Policy:
    """The same policy in fp32."""
    base = build_base(TINY, {}, device=torch.device("cpu"))
    tensors = {n: t.detach().float().requires_grad_() for n, t in policy.tensors.items()}
    loaded = LoadedModel(base, policy.loaded.decoder, Fallback(base))
    return Policy(loaded, tensors, policy.scaling)


@pytest.mark.parametrize(
    ("made", "near"), [(policy64, 1e-12), (lambda: single(policy64()), 1e-6)], ids=["64", "32"]
)
@pytest.mark.parametrize("turns", ["assistant", "last", "all"])
def test_packed_is_unpacked(made: Callable[[], Policy], near: float, turns: LossTurns) -> None:
    policy = made()
    advanced = Advanced(algorithm="sft", loss_turns=turns)
    loss, gradients, packed = taken(policy, tokens=4096, advanced=advanced)
    alone, others, unpacked = taken(policy, tokens=1, advanced=advanced)
    assert (packed, unpacked) == (1, len(TALK))
    assert alone == pytest.approx(loss, abs=near)
    assert gradients.keys() == others.keys() != set()
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, atol=near, rtol=0)


def test_the_loss_is_that_of_transformers() -> None:
    """Transformers runs one row after another, and its norms round to fp32 internally."""
    policy = policy64()
    loss, gradients, _ = taken(policy, tokens=4096)
    plain, others, _ = taken(without_decoder(policy), tokens=1)
    assert plain == pytest.approx(loss, abs=1e-7)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, atol=1e-6, rtol=0)


def test_no_conversation_sees_another() -> None:
    """Changing the words in one of two packed conversations leaves the logprobs of the other
    unchanged."""
    policy = policy64()
    chat = chat_of(policy)
    found = []
    for other in ("aaaa", "bcde"):
        talk = (
            Conversation(0, (("user", other), ("assistant", other))),
            Conversation(1, (("user", "what?"), ("assistant", "that"))),
            Conversation(2, (("user", other), ("assistant", other[::-1]))),
        )
        batch = sft.demonstrations(chat, talk, max_tokens=64, learned="all")
        (micro,) = pack(batch.examples, micro_batch_tokens=4096, share=True)
        logprobs_M, _ = policy.logprobs(micro, temperature=1.0)
        found.append([logprobs_M[micro.sample_M == sample] for sample in range(3)])
    (one, same, three), (first, again, third) = found
    assert torch.equal(same, again)
    assert not torch.equal(one, first)
    assert not torch.equal(three, third)


def test_learned_and_cut_tokens_are_counted() -> None:
    chat = chat_of(policy64())
    whole = sft.demonstrations(chat, TALK, max_tokens=64, learned="assistant")
    assert whole.num_actions == sum(map(len, ("one", "two", "7", "yes indeed", "seven"))) + 5
    assert whole.metrics()["train/truncated_ratio"] == 0.0
    # the context of the last has 16 tokens, the shortest conversation 17
    cut = sft.demonstrations(chat, TALK, max_tokens=16, learned="assistant")
    assert [len(e.sequence.tokens) for e in cut.examples] == [16, 16, 16, 16]
    assert (cut.num_cut, cut.num_lost) == (4, 1)
    assert cut.metrics()["train/truncated_ratio"] == 1.0
    assert cut.metrics()["train/unlearned_ratio"] == 0.25


async def test_the_held_out_loss_is_that_of_the_version_and_changes_nothing(
    engine: Engine,
) -> None:
    """A step's loss is that of the version before the step, so it can be compared with the held-out
    loss."""
    asked = job(algorithm="sft", micro_batch_tokens=32)
    zero = (await engine.learner.initialize(asked)).state
    measured = await engine.learner.evaluate(asked, 0, TALK)
    assert await engine.learner.evaluate(asked, 0, TALK) == measured
    assert engine.learner.holds(asked, 0, zero.weights_sha256, zero.state_sha256)
    batch = StepBatch(1, conversations=TALK)
    result = await engine.learner.step(asked, batch, export_state=True)
    assert measured["eval/validation/loss"] == pytest.approx(result.metrics["train/loss"], abs=1e-6)
    better = await engine.learner.evaluate(asked, 1, TALK)
    assert better["eval/validation/loss"] < measured["eval/validation/loss"]
    with pytest.raises(TransientError, match="version 2"):
        await engine.learner.evaluate(asked, 2, TALK)
    lost = await engine.learner.evaluate(
        job(algorithm="sft", max_sequence_length=8), 1, (Conversation(0, TALK[1].messages),)
    )
    assert lost == {}


@pytest.mark.parametrize("tuning", ["lora", "full"])
async def test_both_tunings_learn_the_conversations(engine: Engine, tuning: str) -> None:
    asked = job(algorithm="sft", tuning=tuning, total_steps=6)
    await engine.learner.initialize(asked)
    losses = []
    for step in range(1, 7):
        batch = StepBatch(step, conversations=TALK)
        result = await engine.learner.step(asked, batch, export_state=False)
        losses.append(result.metrics["train/loss"])
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.1
    assert result.metrics["train/learned_tokens"] > 0
