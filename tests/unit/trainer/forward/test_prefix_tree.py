"""Rows that share what they begin with: where they leave one another, what a pass computes, and that
nothing but the number of tokens changes."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from schemas.sampling import Message, SampleRequest, ToolSpec, Turn, sequences_of
from schemas.sampling import Sequence as Row
from tests.kit.property_examples import examples
from tests.unit.trainer.batches import policy64
from tests.unit.trainer.forward.test_packing import example, packed
from tests.unit.trainer.model.family_tokenizers import family_chat, family_tokenizer
from tests.unit.trainer.support import request
from trainer.forward.ops import Forward
from trainer.forward.packing import Example, MicroBatch, group_into_trees, pack
from trainer.forward.prefix_tree import LEAST_SHARED, Branch, PrefixTree
from trainer.policy import Policy

LONG = tuple(range(20, 20 + LEAST_SHARED))


def branches_of(*rows: tuple[int, ...], num_context: int = 2) -> list[Branch]:
    tree, found = PrefixTree(), []
    for row in rows:
        found.append(tree.find(row, num_context=num_context))
        tree.add(row, found[-1], num_context=num_context)
    return found


def test_a_row_leaves_where_the_tokens_begin_to_differ() -> None:
    first, second = (1, 2, *LONG, 3, 4), (1, 2, *LONG, 5)
    assert branches_of(first, second) == [Branch(0, 0), Branch(0, 2 + LEAST_SHARED)]


def test_rows_that_share_little_more_than_their_context_leave_at_its_end() -> None:
    first, second, other = (1, 2, *LONG[:-1], 3), (1, 2, *LONG[:-1], 4), (1, 3, 5)
    assert branches_of(first, second, other) == [Branch(0, 0), Branch(0, 2), Branch(0, 0)]


def test_a_row_leaves_the_row_whose_own_tokens_end_there() -> None:
    """The third row shares most with the second, up to a place on the first."""
    first, second = (1, 2, *LONG, 3, 4), (1, 2, *LONG, *LONG)
    third = (1, 2, *LONG, 20, 9)
    assert branches_of(first, second, third)[1:] == [Branch(0, 18), Branch(0, 18)]
    fourth = (1, 2, *LONG, *LONG, 7)
    assert branches_of(first, second, fourth)[2] == Branch(1, 2 + 2 * LEAST_SHARED)


def test_the_tokens_behind_a_place_see_the_path_to_it() -> None:
    """Two turns and another sample: the second row leaves the first before its reasoning."""
    prompt, told = (1, 2, *LONG), tuple(range(60, 76))
    rows = [
        example(0, prompt, (30, 31)),
        example(0, (*prompt, *told), (40, 41)),
        example(0, (*prompt, *told, *LONG, 8), (50,)),
    ]
    (micro,) = packed(rows)
    segments = [(s.start, s.end, s.context) for s in micro.segments]
    assert segments == [
        (0, 18, ()),
        (18, 20, (range(18),)),
        (20, 36, (range(18),)),
        (36, 38, (range(18), range(20, 36))),
        (38, 56, (range(18), range(20, 36))),
    ]
    assert micro.positions_N[18:].tolist() == [18, 19, *range(18, 36), *range(34, 52)]
    assert micro.predictor_M.tolist() == [17, 18, 35, 36, 54]
    assert micro.row_M.tolist() == [0, 0, 1, 1, 2]
    assert micro.last_R.tolist() == [19, 37, 55]


def test_a_row_that_another_contains_has_no_tokens_of_its_own() -> None:
    """It trains what it trains, with its own logprobs."""
    long = example(0, (1,), (*LONG, 5, 6))
    short = example(1, (1,), LONG)
    (micro,) = packed([long, short])
    assert micro.num_tokens == LEAST_SHARED + 3
    assert micro.last_R.tolist() == [LEAST_SHARED + 2, LEAST_SHARED]
    assert micro.target_M.tolist() == [*LONG, 5, 6, *LONG]
    assert micro.predictor_M.tolist() == [*range(LEAST_SHARED + 2), *range(LEAST_SHARED)]


def test_a_group_ends_where_a_sample_begins_with_another_context() -> None:
    """Groups of one prompt each are trees of their own, although their prompts begin alike."""
    system = tuple(range(20, 60))
    rows = [example(n, (*system, n // 2), (5, n)) for n in range(6)]
    trees = list(group_into_trees(rows, most=10_000, share=True, prefixes=True))
    assert [[e.sample for e in tree.examples] for tree in trees] == [[0, 1], [2, 3], [4, 5]]


def test_agents_of_all_samples_share_their_prompts() -> None:
    """Each sample has a row of a solver and one of a critic, whose prompts have nothing in common."""
    prompts = tuple(tuple(range(start, start + 20)) for start in (10, 60))
    rows = [example(n, prompt, (5, n)) for n in range(3) for prompt in prompts]
    (tree,) = group_into_trees(rows, most=10_000, share=True, prefixes=True)
    assert tree.num_tokens == 2 * 20 + 6 * 2
    apart = [replace(row, sample=0) for row in rows[:2]]
    assert len(list(group_into_trees(apart, most=10_000, share=True, prefixes=True))) == 2


def test_a_tree_larger_than_the_limit_is_cut_and_each_part_repeats_what_it_shares() -> None:
    rows = turns(6)
    (whole,) = packed(rows)
    parts = packed(rows, tokens=400)
    assert len(parts) > 1
    assert max(part.num_tokens for part in parts) <= 400
    assert sum(part.num_tokens for part in parts) > whole.num_tokens
    assert [p for part in parts for p in part.target_M.tolist()] == whole.target_M.tolist()


def turns(number: int) -> list[Example]:
    """The rows of one sample whose template drops the reasoning of earlier turns."""
    history: tuple[int, ...] = tuple(range(10, 90))
    rows = []
    for turn in range(number):
        prompt = (*history, 3, *range(20 + turn, 40 + turn), 4)
        rows.append(example(0, prompt, (*(9 + (turn + 3 * n) % 80 for n in range(60)), 6)))
        history = (*prompt, *range(50 + turn, 60 + turn), 6)
    return rows


@st.composite
def tries(draw: st.DrawFn) -> list[Example]:
    """Rows that leave any place of any row before them, with masks of their own."""
    tokens = st.lists(st.integers(7, 12), min_size=1, max_size=30)
    rows: list[tuple[int, ...]] = []
    found = []
    for n in range(draw(st.integers(1, 7))):
        before = draw(st.sampled_from([(), *rows]))
        own = tuple(draw(tokens))
        rows.append((*before[: draw(st.integers(0, len(before)))], *own))
        if len(rows[-1]) < 2:
            rows[-1] = (*rows[-1], 7)
        mask = [
            0,
            *draw(
                st.lists(st.integers(0, 1), min_size=len(rows[-1]) - 1, max_size=len(rows[-1]) - 1)
            ),
        ]
        first = draw(st.integers(1, len(mask) - 1))
        mask = [0] * first + [1] + mask[first + 1 :]
        row = Row.model_validate(
            {
                "tokens": rows[-1],
                "loss_mask": mask,
                "logprobs": [-0.1 * n - 0.01 * t if m else 0.0 for t, m in enumerate(mask)],
            }
        )
        found.append(Example(draw(st.integers(0, 1)) + n // 4, row))
    return found


@examples(100)
@given(rows=tries(), tokens=st.integers(1, 200), prefixes=st.booleans())
def test_each_action_is_predicted_after_the_tokens_of_its_row(
    rows: list[Example], tokens: int, prefixes: bool
) -> None:
    micros = list(pack(rows, micro_batch_tokens=tokens, share=True, prefixes=prefixes))
    seen = []
    for micro in micros:
        assert micro.num_tokens <= tokens or micro.num_rows == 1
        for number, at in enumerate(micro.predictor_M):
            path = keys_of(micro, int(at))
            assert micro.positions_N[path].tolist() == list(range(len(path)))
            where = (len(path), float(micro.behaviour_M[number]), int(micro.sample_M[number]))
            seen.append((*micro.tokens_N[path].tolist(), int(micro.target_M[number]), where))
        lasts = [micro.tokens_N[keys_of(micro, int(at))].tolist() for at in micro.last_R]
        assert len(lasts) == micro.num_rows
    expected = [
        (*row.sequence.tokens[: t + 1], (t, row.sequence.logprobs[t], row.sample))
        for row in rows
        for t in range(1, len(row.sequence.tokens))
        if row.sequence.loss_mask[t]
    ]
    assert seen == expected


def keys_of(micro: MicroBatch, at: int) -> list[int]:
    """The places of N that the token there sees, itself included."""
    (segment,) = (s for s in micro.segments if s.start <= at < s.end)
    return [
        token for part in segment.keys for token in part if token < segment.start or token <= at
    ]


@given(prompts=st.lists(st.integers(1, 3), min_size=1, max_size=4), data=st.data())
def test_rows_that_share_no_more_than_contexts_are_packed_as_before(
    prompts: list[int], data: st.DataObject
) -> None:
    """So runs of such rows keep their bits."""
    rows = []
    for sample, prompt in enumerate(prompts * 2):
        reply = data.draw(st.lists(st.integers(7, 12), min_size=1, max_size=LEAST_SHARED - 1))
        rows.append(example(sample, (prompt,) * (3 * prompt), tuple(reply)))
    rows.sort(key=lambda row: row.sequence.tokens[0])
    tokens = data.draw(st.integers(1, 120))
    both = [
        list(pack(rows, micro_batch_tokens=tokens, share=True, prefixes=prefixes))
        for prefixes in (True, False)
    ]
    assert len(both[0]) == len(both[1])
    for one, other in zip(*both, strict=True):
        assert one.segments == other.segments
        for name in ("tokens_N", "positions_N", "predictor_M", "target_M", "last_R", "place_N"):
            assert torch.equal(getattr(one, name), getattr(other, name))


@cache
def policy_in(way: str) -> Policy:
    return replace(policy64(), forward=Forward(allows_native=way == "C"))


def hidden_and_gradients(
    policy: Policy, micros: Sequence[MicroBatch]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The logprobs and entropies of all actions, and the gradient of a random sum of both."""
    for tensor in policy.tensors.values():
        tensor.grad = None
    found = []
    for micro in micros:
        both = policy.logprobs(micro, temperature=0.8, trains_entropy=True)
        found.append(torch.stack(both))
    values = torch.cat(found, dim=1)
    generator = torch.Generator().manual_seed(2)
    (values * torch.randn(values.shape, generator=generator).double()).sum().backward()
    return values.detach(), {n: t.grad for n, t in policy.tensors.items() if t.grad is not None}


@pytest.mark.parametrize("way", ["C", "blocks", "segments"])
@examples(8)
@given(rows=tries())
def test_logprobs_and_gradients_are_those_of_single_rows(way: str, rows: list[Example]) -> None:
    policy = policy_in(way)
    shared = list(pack(rows, micro_batch_tokens=10_000, share=True, pads=way != "segments"))
    single = list(pack(rows, micro_batch_tokens=1, share=False))
    assert len(single) == len(rows)
    values, gradients = hidden_and_gradients(policy, shared)
    expected, others = hidden_and_gradients(policy, single)
    torch.testing.assert_close(values, expected, atol=1e-11, rtol=1e-11)
    assert gradients.keys() == others.keys() != set()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, others[name], atol=1e-9, rtol=1e-11)


def test_twin_positions_that_begin_again_at_a_place_give_other_logprobs() -> None:
    policy, (micro,) = policy_in("blocks"), packed(turns(2))
    starts = [n - s.start for s in micro.segments for n in range(s.start, s.end)]
    wrong = replace(micro, positions_N=torch.tensor(starts))
    with torch.no_grad():
        right, other = (policy.logprobs(m, temperature=1.0)[0] for m in (micro, wrong))
    assert (right - other).abs().max() > 1e-3


TOOLS = (
    ToolSpec(
        name="look_up",
        description="Looks a name up in the list of stations, and returns the line that it is on.",
        parameters='{"type": "object", "properties": {"name": {"type": "string"}}}',
    ),
)


def test_six_turns_with_dropped_reasoning_take_a_third_of_the_tokens() -> None:
    """With the chat of Qwen 3, which drops the reasoning before the last message of the user."""
    chat, encode = family_chat("Qwen/Qwen3-4B"), family_tokenizer("Qwen/Qwen3-4B").encode
    messages, made = [Message(role="system", content="You plan trips. Think first.")], []
    for turn in range(6):
        messages.append(Message(role="user", content=f"And from stop {turn}?"))
        asked: SampleRequest = request().model_copy(
            update={"messages": tuple(messages), "tools": TOOLS}
        )
        reasoning = f"I have to find the stop after number {turn}."
        said = f"<think>\n{reasoning}\n</think>\n\nTake line {turn}.<|im_end|>"
        ids = tuple(encode(said))
        prompt = tuple(chat.prompt_ids(asked))
        logprobs = (-1.0,) * len(ids)
        made.append(
            Turn(
                prompt_ids=prompt,
                completion_ids=ids,
                logprobs=logprobs,
                text=said,
                finish_reason="stop",
            )
        )
        messages.append(
            Message(role="assistant", content=f"Take line {turn}.", reasoning=reasoning)
        )
    rows = [Example(0, row) for row in sequences_of(tuple(made))]
    assert len(rows) == 6
    before, after = (
        [m.num_tokens for m in pack(rows, micro_batch_tokens=10_000, share=True, prefixes=prefixes)]
        for prefixes in (False, True)
    )
    assert sum(before) >= 3 * sum(after)
