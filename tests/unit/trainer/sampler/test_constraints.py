"""Constrained answers: they follow their grammar, and the learner computes the logprobs that they were
drawn with."""

import asyncio
import json
from typing import Any

import pytest
import torch

from schemas.errors import CorruptData, UserCodeError
from schemas.models.constraints import AppliedGrammar, Constraint
from schemas.sampling import SampleRequest, ToolSpec, Turn, sequences_of
from tests.unit.trainer.support import request
from trainer.engine import Engine
from trainer.forward.packing import Example, pack
from trainer.model.lora_names import Scaling
from trainer.objective.batch import with_masks
from trainer.policy import Policy

COLOR = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green"]}, "number": {"type": "integer"}},
    "required": ["color", "number"],
    "additionalProperties": False,
}
FORMAT = Constraint(json_schema=json.dumps(COLOR))
ADD = ToolSpec(name="add", parameters=json.dumps(COLOR))
WEIGH = ToolSpec(name="weigh", parameters='{"type": "object", "additionalProperties": false}')


def constrained(constraint: Constraint = FORMAT, **changes: Any) -> SampleRequest:
    tools = changes.pop("tools", ())
    asked = request(**{"max_new_tokens": 64, **changes})
    return asked.model_copy(update={"constraint": constraint, "tools": tools})


async def policy_of(engine: Engine, asked: SampleRequest) -> Policy:
    loaded = await engine.learner._cache.load_model(asked.model)
    trained = dict(await engine.learner._cache.load_tensors(asked.policy))
    return Policy(loaded, trained, Scaling(asked.lora_alpha, asked.lora_scaling))


def learner_logprobs(
    policy: Policy, turn: Turn, *, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = with_masks([Example(0, row) for row in sequences_of((turn,))], policy)
    (micro,) = pack(rows, micro_batch_tokens=512, share=policy.shares_prompts)
    return policy.logprobs(micro, temperature=temperature)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_an_answer_follows_its_schema_at_the_learners_logprobs(
    engine: Engine, deterministic: bool, temperature: float
) -> None:
    asked = constrained(deterministic=deterministic, temperature=temperature)
    turn = await engine.sampler.sample(asked)
    found = json.loads(turn.text)
    assert found["color"] in ("red", "green")
    assert isinstance(found["number"], int)
    assert turn.finish_reason == "stop"
    logprobs_M, entropies_M = learner_logprobs(
        await policy_of(engine, asked), turn, temperature=temperature
    )
    torch.testing.assert_close(
        logprobs_M.double(), torch.tensor(turn.logprobs).double(), atol=2e-5, rtol=0
    )
    forced = [number for number, logprob in enumerate(turn.logprobs) if logprob == 0]
    assert len(forced) > 10
    assert all(float(logprobs_M[n]) == 0 and float(entropies_M[n]) == 0 for n in forced)


async def test_a_forced_call_is_read_as_a_call(engine: Engine) -> None:
    both = Constraint(calls=("add", "weigh"))
    turns = [
        await engine.sampler.sample(constrained(both, tools=(ADD, WEIGH), sample=sample))
        for sample in range(8)
    ]
    calls = [turn.message.tool_calls for turn in turns]
    assert all(len(one) == 1 for one in calls)
    assert {one.name for (one,) in calls} == {"add", "weigh"}
    assert all(one.arguments == "{}" for (one,) in calls if one.name == "weigh")
    named = constrained(Constraint(calls=("weigh",)), tools=(ADD, WEIGH))
    (call,) = (await engine.sampler.sample(named)).message.tool_calls
    assert (call.name, call.arguments) == ("weigh", "{}")


async def test_with_a_schema_and_calls_an_answer_is_one_of_the_two(engine: Engine) -> None:
    either = Constraint(json_schema=FORMAT.json_schema, calls=("add",))
    turns = [
        await engine.sampler.sample(
            constrained(either, tools=(ADD,), sample=sample, max_new_tokens=200)
        )
        for sample in range(12)
    ]
    shapes = {bool(turn.message.tool_calls) for turn in turns}
    assert shapes == {True, False}
    for turn in turns:
        (call,) = turn.message.tool_calls or (None,)
        text = turn.text if call is None else call.arguments
        assert sorted(json.loads(text)) == ["color", "number"]


async def test_a_greedy_answer_is_the_likeliest_allowed_token_each_time(engine: Engine) -> None:
    asked = constrained(temperature=0.0, deterministic=True)
    turn = await engine.sampler.sample(asked)
    assert await engine.sampler.sample(asked) == turn
    assert json.loads(turn.text)["color"] in ("red", "green")


async def test_an_answer_that_was_cut_off_trains_with_its_masks(engine: Engine) -> None:
    asked = constrained(max_new_tokens=7)
    turn = await engine.sampler.sample(asked)
    assert (turn.finish_reason, turn.text) == ("length", '{"color')
    logprobs_M, _ = learner_logprobs(await policy_of(engine, asked), turn)
    assert logprobs_M.tolist() == [0.0] * 7


async def test_a_constraint_changes_no_bit_of_answers_without_one(engine: Engine) -> None:
    """Of rows that decode together with constrained ones, in fixed batches and in C."""
    for deterministic in (True, False):
        plain = [
            request(sample=n, deterministic=deterministic, max_new_tokens=20) for n in range(3)
        ]
        forced = [constrained(sample=n, deterministic=deterministic) for n in range(3)]
        alone = [await engine.sampler.sample(one) for one in plain]
        found = await asyncio.gather(*map(engine.sampler.sample, (*forced, *plain)))
        assert list(found[3:]) == alone
        assert [one.grammar for one in alone] == [None] * 3
        if deterministic:
            assert list(found[:3]) == [await engine.sampler.sample(one) for one in forced]


async def test_a_row_records_the_grammar_of_each_answer(engine: Engine) -> None:
    asked = constrained()
    first = await engine.sampler.sample(asked)
    again = (*asked.messages, first.message, *asked.messages)
    second = await engine.sampler.sample(
        asked.model_copy(
            update={
                "messages": again,
                "history": (first,),
                "history_messages": asked.messages,
                "constraint": None,
            }
        )
    )
    (row,) = sequences_of((first, second))
    (span,) = row.constrained
    assert (span.start, span.end) == (
        len(first.prompt_ids),
        len(first.prompt_ids) + len(first.completion_ids),
    )
    assert span.grammar == first.grammar
    (example,) = with_masks([Example(0, row)], await policy_of(engine, asked))
    assert sorted(example.masks) == list(range(span.start, span.end))


async def test_equal_masks_of_a_batch_are_kept_once(engine: Engine) -> None:
    turns = [await engine.sampler.sample(constrained(sample=n)) for n in range(3)]
    rows = [Example(n, row) for n, turn in enumerate(turns) for row in sequences_of((turn,))]
    found = with_masks(rows, await policy_of(engine, constrained()))
    masks = [mask for example in found for mask in example.masks.values()]
    assert len({id(mask) for mask in masks}) == len(set(masks)) < len(masks) / 2


async def test_masks_that_differ_from_those_of_the_sampler_are_refused(engine: Engine) -> None:
    """Twin: with the recorded hash they are accepted. Another version of llguidance, or another
    vocabulary, would train with another distribution."""
    asked = constrained()
    turn = await engine.sampler.sample(asked)
    policy = await policy_of(engine, asked)
    learner_logprobs(policy, turn)
    assert turn.grammar is not None
    other = AppliedGrammar(text=turn.grammar.text, masks_sha256="0" * 64)
    with pytest.raises(CorruptData, match="same version of llguidance"):
        learner_logprobs(policy, turn.model_copy(update={"grammar": other}))
    ids = (*turn.completion_ids[:-1], 50)
    with pytest.raises(CorruptData, match="does not allow token 50"):
        learner_logprobs(policy, turn.model_copy(update={"completion_ids": ids}))


async def test_a_constrained_row_without_masks_is_never_packed(engine: Engine) -> None:
    turn = await engine.sampler.sample(constrained())
    rows = [Example(0, row) for row in sequences_of((turn,))]
    with pytest.raises(ValueError, match="with_masks"):
        list(pack(rows, micro_batch_tokens=512, share=True))


async def test_the_likeliest_tokens_are_those_that_are_allowed(engine: Engine) -> None:
    turn = await engine.sampler.sample(
        constrained().model_copy(update={"likeliest": 5, "pieces": True})
    )
    assert turn.likeliest is not None
    assert [len(one) for one in turn.likeliest[:3]] == [1, 1, 1]
    assert turn.likeliest[0][0].piece == (ord("{"),)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"enum": []}, "Unsatisfiable schema: anyOf is empty; simplify"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "minimum .5. is greater"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "incompatible types"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "string", "pattern": "("}, "cannot be followed"),
        ({"const": "\u4f60"}, "no token of the model's vocabulary|cannot be followed"),
        ({"enum": [f"{n:040}" for n in range(30_000)]}, "at most 327680 are allowed"),
        (
            {
                "$defs": {
                    "node": {
                        "type": "object",
                        "properties": {"next": {"$ref": "#/$defs/node"}},
                        "required": ["next"],
                        "additionalProperties": False,
                    }
                },
                "$ref": "#/$defs/node",
            },
            "cannot be followed",
        ),
    ],
    ids=[
        *("no value", "no number", "no type", "keyword", "regex", "alphabet", "a megabyte"),
        "endless",
    ],
)
async def test_a_schema_that_cannot_be_followed_is_refused(
    engine: Engine, schema: dict[str, object], why: str
) -> None:
    with pytest.raises(UserCodeError, match=why):
        await engine.sampler.sample(constrained(Constraint(json_schema=json.dumps(schema))))


async def test_a_recursive_schema_is_followed(engine: Engine) -> None:
    tree = {
        "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}},
        "$ref": "#/$defs/tree",
    }
    asked = constrained(Constraint(json_schema=json.dumps(tree)), max_new_tokens=400)
    turn = await engine.sampler.sample(asked)
    assert isinstance(json.loads(turn.text), list)
