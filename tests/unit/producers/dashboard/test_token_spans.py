"""The colours of tokens: whole characters, few spans, and exactly the text of the tokens."""

import pytest

from producers.dashboard.token_spans import (
    ColourSpan,
    advantage_shade,
    legend,
    logprob_shade,
    stretches,
)
from schemas.sampling import SampleRecord, Sequence

VOCABULARY = {
    0: b"Hi",
    1: b" you",
    2: "ü".encode()[:1],
    3: "ü".encode()[1:],
    4: b"<b>&",
    5: b"<|end|>",
}


def record(*tokens: tuple[int, int, float]) -> SampleRecord:
    """A sample of tokens, each with its id, whether it is sampled, and its logprob."""
    ids, mask, logprobs = zip(*tokens, strict=True)
    return SampleRecord(
        index=0, sequences=(Sequence(tokens=ids, loss_mask=mask, logprobs=logprobs),)
    )


def test_neighbours_of_one_colour_are_one_span() -> None:
    one = record((0, 0, 0), (0, 1, -9), (1, 1, -8), (4, 1, -0.001), (5, 1, -0.3))
    found = stretches(one, VOCABULARY, colour="logprob")
    assert found is not None
    assert found[0].spans == (
        ColourSpan("Hi you", "p7"),
        ColourSpan("<b>&", ""),
        ColourSpan("<|end|>", "p3"),
    )


def test_a_character_of_two_tokens_is_whole_and_a_broken_one_is_replaced() -> None:
    whole = stretches(record((2, 1, -9), (3, 1, 0)), VOCABULARY, colour="logprob")
    assert whole is not None
    assert whole[0].spans == (ColourSpan("ü", ""),)
    broken = stretches(record((0, 1, 0), (2, 1, 0)), VOCABULARY, colour="logprob")
    assert broken is not None
    assert "".join(span.text for span in broken[0].spans) == "Hi\N{REPLACEMENT CHARACTER}"


def test_the_prompt_is_left_out_and_what_was_given_later_is_not_trained() -> None:
    one = record((0, 0, 0), (1, 1, -1), (0, 0, 0), (4, 1, -1))
    found = stretches(one, VOCABULARY, colour="trained")
    assert found is not None
    assert [(part.is_sampled, part.spans) for part in found] == [
        (True, (ColourSpan(" you", "trained"),)),
        (False, (ColourSpan("Hi", ""),)),
        (True, (ColourSpan("<b>&", "trained"),)),
    ]


def test_a_long_stretch_is_cut_and_counts_what_is_left() -> None:
    alternating = [(0, 1, -9.0 * (place % 2)) for place in range(1000)]
    found = stretches(record(*alternating), VOCABULARY, colour="logprob", most=300)
    assert found is not None
    markup = sum(len(span.text) + 25 * bool(span.colour) for span in found[0].spans)
    assert markup < 330
    assert found[0].left == 1000 - len(found[0].spans)


def test_a_token_of_another_vocabulary_is_told() -> None:
    assert stretches(record((0, 0, 0), (99, 1, -1)), VOCABULARY, colour="trained") is None


@pytest.mark.parametrize("colour", ["logprob", "advantage", "trained"])
def test_the_legend_has_every_class(colour: str) -> None:
    told = {name for name, _ in legend(colour)}
    match colour:
        case "logprob":
            used = {logprob_shade(-(2.0 ** (n / 4 - 10))) for n in range(60)}
        case "advantage":
            used = {advantage_shade(part / 50) for part in range(-50, 51)}
        case _:
            used = {"", "trained"}
    assert used == told
