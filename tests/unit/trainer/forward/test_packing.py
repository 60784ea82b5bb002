"""Packing: order, masks, positions, and which token predicts which."""

from itertools import chain

import torch
from hypothesis import given
from hypothesis import strategies as st

from schemas.sampling import Sequence as Row
from tests.unit.trainer.support import loss_mask
from trainer.forward.packing import Example, MicroBatch, build_trees, pack


def example(sample: int, context: tuple[int, ...], reply: tuple[int, ...]) -> Example:
    mask = loss_mask(len(context), len(reply))
    logprobs = tuple(-float(t) if m else 0.0 for t, m in zip(context + reply, mask, strict=True))
    return Example(sample, Row(tokens=context + reply, loss_mask=mask, logprobs=logprobs))


def packed(
    examples: list[Example], *, tokens: int = 10_000, share: bool = True, splits: bool = True
) -> list[MicroBatch]:
    return list(pack(examples, micro_batch_tokens=tokens, share=share, splits=splits))


def test_a_shared_prompt_is_packed_once() -> None:
    (micro,) = packed([example(0, (1, 2, 3), (4, 5)), example(1, (1, 2, 3), (6,))])
    assert micro.tokens_N.tolist() == [1, 2, 3, 4, 5, 6]
    assert micro.positions_N.tolist() == [0, 1, 2, 3, 4, 3]
    assert micro.predictor_M.tolist() == [2, 3, 2]
    assert micro.target_M.tolist() == [4, 5, 6]
    assert micro.behaviour_M.tolist() == [-4.0, -5.0, -6.0]
    assert micro.sample_M.tolist() == [0, 0, 1]
    context, replies = micro.blocks
    assert context.query_B_T.tolist() == context.key_B_U.tolist() == [[0, 1, 2]]
    assert replies.query_B_T.tolist() == [[3, 4], [5, 0]]
    assert replies.key_B_U.tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 5, 0]]
    assert replies.visible_B_T_U[0].tolist() == [[True] * 4 + [False], [True] * 5]
    assert replies.visible_B_T_U[1, 0].tolist() == [True] * 4 + [False]
    assert context.visible_B_T_U[0].tolist() == [
        [True, False, False],
        [True, True, False],
        [True, True, True],
    ]
    assert micro.place_N.tolist() == [0, 1, 2, 3, 4, 5]


def test_the_last_response_token_trains_and_the_last_prompt_token_does_not() -> None:
    (micro,) = packed([example(0, (1, 2), (3, 4))])
    assert micro.target_M.tolist() == [3, 4]
    assert micro.predictor_M.tolist() == [1, 2]


def test_every_part_of_a_divided_tree_counts_the_context_that_it_repeats() -> None:
    samples = [example(n, (1, 2, 3, 4), (5 + n, 6, 7)) for n in range(5)]
    assert [micro.num_tokens for micro in packed(samples, tokens=10)] == [10, 10, 7]


def test_rows_without_actions_are_left_out() -> None:
    empty = example(0, (1, 2, 3), ())
    only_first = Example(1, Row(tokens=(7,), loss_mask=(1,), logprobs=(-1.0,)))
    assert packed([empty, only_first]) == []
    (micro,) = packed([empty, example(2, (1, 2), (3,))])
    assert micro.sample_M.tolist() == [2]


def test_tool_tokens_between_actions_are_context() -> None:
    row = Row(tokens=(1, 2, 3, 4, 5), loss_mask=(0, 1, 0, 0, 1), logprobs=(0, -2, 0, 0, -5))
    (micro,) = packed([Example(0, row)])
    assert micro.target_M.tolist() == [2, 5]
    assert micro.predictor_M.tolist() == [0, 3]


def test_padding_is_seen_by_none_and_sees_something() -> None:
    (micro,) = packed([example(0, (1, 2), (3,)), example(1, (9,), (8,))])
    (block,) = micro.blocks
    assert block.query_B_T.tolist() == [[0, 1, 2], [3, 4, 0]]
    assert micro.place_N.tolist() == [0, 1, 2, 3, 4]
    assert block.visible_B_T_U[1, 2].any()
    assert not block.visible_B_T_U[1, :2, 2].any()


def test_a_row_longer_than_the_micro_batch_stands_alone() -> None:
    rows = [example(i, (i + 1,), tuple(range(2, 2 + n))) for i, n in enumerate((3, 50, 3))]
    assert [m.num_tokens for m in packed(rows, tokens=20)] == [4, 51, 4]


def test_only_neighbours_with_the_same_context_share() -> None:
    rows = [example(0, (1, 2), (3,)), example(1, (1, 2), (4,)), example(2, (1,), (2, 5))]
    trees = build_trees(rows, share=True)
    grown = [(t.branches[-1].depth, len(t.examples)) for t in trees]
    assert grown == [(2, 2), (0, 1)]
    assert [len(t.examples) for t in build_trees(rows, share=False)] == [1, 1, 1]


def test_a_group_larger_than_the_micro_batch_is_divided_between_samples() -> None:
    prompt = tuple(range(10))
    rows = [example(i, prompt, tuple(range(i, 1000 + i))) for i in range(16)]
    assert [m.num_tokens for m in packed(rows, tokens=2048)] == [2010] * 8
    assert [m.num_tokens for m in packed(rows, tokens=1015)] == [1010] * 16
    (whole,) = packed(rows, tokens=2048, splits=False)
    assert whole.num_tokens == 16_010, "twin: what rules 1 did"


def test_a_group_that_fits_is_never_divided() -> None:
    rows = [example(i // 4, (i // 4, 7, 8), (1, 2, 3)) for i in range(12)]
    divided, whole = (packed(rows, tokens=31, splits=splits) for splits in (True, False))
    assert [m.num_tokens for m in divided] == [30, 15]
    for one, other in zip(divided, whole, strict=True):
        assert torch.equal(one.tokens_N, other.tokens_N)
        assert one.segments == other.segments


def test_padding_that_is_computed_counts() -> None:
    rows = [example(i, (i,), tuple(range(n))) for i, n in enumerate((99, 9, 9, 9, 9))]
    sizes = [m.blocks[0].query_B_T.numel() for m in packed(rows, tokens=200, share=False)]
    assert sizes == [200, 30]
    (together,) = packed(rows, tokens=200, share=False, splits=False)
    assert together.blocks[0].query_B_T.numel() == 500, "twin: what rules 1 did"


ROWS = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.integers(0, 90), min_size=1, max_size=9)),
    min_size=1,
    max_size=12,
)


@given(rows=ROWS, tokens=st.integers(1, 64), share=st.booleans())
def test_every_action_trains_once_in_order_whatever_the_plan(
    rows: list[tuple[int, list[int]]], tokens: int, share: bool
) -> None:
    examples = [example(i, (prompt, 5), tuple(reply)) for i, (prompt, reply) in enumerate(rows)]
    micros = packed(examples, tokens=tokens, share=share)
    targets = [t for m in micros for t in m.target_M.tolist()]
    assert targets == [t for _, reply in rows for t in reply]
    samples = [s for m in micros for s in m.sample_M.tolist()]
    assert samples == [i for i, (_, reply) in enumerate(rows) for _ in reply]
    for micro in micros:
        before = micro.tokens_N[micro.predictor_M]
        assert len(before) == len(micro.target_M)
        outputs = torch.cat([micro.tokens_N[block.query_B_T].flatten() for block in micro.blocks])
        assert torch.equal(micro.tokens_N, outputs[micro.place_N])
        for block in micro.blocks:
            assert block.visible_B_T_U.any(-1).all()
        computed = len(micro.tokens_N) if share else micro.blocks[0].query_B_T.numel()
        assert computed <= tokens or micro.num_rows == 1, "a pass is bounded, or one sample"


def unread(
    examples: list[Example], *, tokens: int = 10_000, share: bool = True
) -> list[MicroBatch]:
    return list(pack(examples, micro_batch_tokens=tokens, share=share, drops_unread=True))


def test_the_last_token_of_an_answer_is_a_target_only() -> None:
    (micro,) = unread([example(0, (1, 2, 3), (4, 5)), example(1, (1, 2, 3), (6,))])
    assert micro.tokens_N.tolist() == [1, 2, 3, 4]
    assert micro.positions_N.tolist() == [0, 1, 2, 3]
    assert micro.predictor_M.tolist() == [2, 3, 2]
    assert micro.target_M.tolist() == [4, 5, 6]
    assert [(s.start, s.end) for s in micro.segments] == [(0, 3), (3, 4)]
    assert micro.num_rows == 2
    assert micro.last_R.tolist() == []


def test_tokens_behind_the_last_action_are_left_out() -> None:
    mask = loss_mask(2, 1) + loss_mask(2, 1) + loss_mask(2, 0)
    row = Row(tokens=tuple(range(8)), loss_mask=mask, logprobs=tuple(-1.0 * m for m in mask))
    (micro,) = unread([Example(0, row), Example(1, row)])
    assert micro.tokens_N.tolist() == [0, 1, 2, 3, 4, 2, 3, 4]
    assert micro.predictor_M.tolist() == [1, 4, 1, 7]


def test_rows_that_share_nothing_with_others_are_shortened_too() -> None:
    (micro,) = unread([example(0, (1, 2), (3, 4)), example(1, (5, 6), (7, 8, 9))])
    assert micro.tokens_N.tolist() == [1, 2, 3, 5, 6, 7, 8]


def test_unshared_rows_and_a_pack_that_keeps_all_are_not_shortened() -> None:
    rows = [example(0, (1, 2), (3, 4)), example(1, (1, 2), (5,))]
    for micro in (*unread(rows, share=False), *packed(rows, share=False)):
        assert micro.num_tokens == 7
    (whole,) = packed(rows)
    assert (whole.num_tokens, whole.last_R.tolist()) == (5, [3, 4])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(1, 5)), max_size=9))
def test_a_shortened_pack_predicts_the_same(rows: list[tuple[int, int, int]]) -> None:
    """Each action is predicted from the same tokens at the same positions."""
    examples = [
        example(n, tuple(range(10 * c, 10 * c + size)), tuple(range(50, 50 + reply)))
        for n, (c, size, reply) in enumerate(sorted(rows))
    ]

    def seen(micro: MicroBatch) -> list[tuple[object, ...]]:
        def path(at: int) -> list[tuple[int, int]]:
            (own,) = (s for s in micro.segments if s.start <= at < s.end)
            places = [*chain.from_iterable(own.context), *range(own.start, at + 1)]
            return [(int(micro.tokens_N[n]), int(micro.positions_N[n])) for n in places]

        pairs = zip(micro.predictor_M.tolist(), micro.target_M.tolist(), strict=True)
        return [(path(at), target) for at, target in pairs]

    short, whole = unread(examples, tokens=40), packed(examples, tokens=40)
    assert [seen(micro) for micro in short] == [seen(micro) for micro in whole]
    for less, more in zip(short, whole, strict=True):
        assert less.num_tokens < more.num_tokens
        assert [s.start for s in less.segments] == [0, *(s.end for s in less.segments)][:-1]
        assert torch.equal(less.row_M, more.row_M)
