"""Stop strings are found as if everything were decoded after each token, at the cost of the tokens
alone."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.property_examples import examples
from tests.kit.tokenizers import Kind, tokenizer_of
from trainer.sampler import stop_strings
from trainer.sampler.stop_strings import StopStrings

KINDS: tuple[Kind, ...] = ("legacy", "always", "first", "unigram", "bytes")
SPOKEN = "the answer is 4 .\n\nünï 好好吃 🙂🙂 </s> It is nine ?"
STOPS = (
    "er is",
    "\n\n",
    "好",
    "好吃",
    "🙂",
    " ",
    "It",
    "ü",
    "four ",
    "answer is 4 .",
    "\N{EURO SIGN}",
)


class Decoder:
    """Decodes, and counts the tokens that it has decoded."""

    def __init__(self, kind: Kind) -> None:
        self.tokenizer = tokenizer_of(kind)
        self.count = 0

    def __call__(self, ids: Sequence[int]) -> str:
        self.count += len(ids)
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


def everything(decode: Decoder, stops: Sequence[str], ids: Sequence[int]) -> str | None:
    """The reference for comparison: the whole answer decoded."""
    text = decode(ids)
    found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    return text[: min(found)] if found else None


def streamed(kind: Kind, stops: Sequence[str], ids: Sequence[int]) -> None:
    """Check after each token, up to the first stop."""
    decode = Decoder(kind)
    watched = StopStrings(stops, decode)
    for n in range(1, len(ids) + 1):
        said = watched.cut(ids[:n])
        assert said == everything(decode, stops, ids[:n]), (n, ids[:n])
        if said is not None:
            break


TOKENS = st.lists(st.integers(0, 299), min_size=1, max_size=120)
"""Any tokens: characters that never end, bytes that are none, special tokens in between."""


@examples(150)
@given(kind=st.sampled_from(KINDS), ids=TOKENS, data=st.data())
def test_any_tokens_stop_where_decoding_everything_stops(
    kind: Kind, ids: list[int], data: st.DataObject
) -> None:
    text = str(tokenizer_of(kind).decode(ids, skip_special_tokens=True))
    at = data.draw(st.integers(0, max(0, len(text) - 1)))
    spelled = text[at : at + data.draw(st.integers(1, 5))] or "x"
    stops = data.draw(st.lists(st.sampled_from((*STOPS, spelled)), min_size=1, max_size=3))
    streamed(kind, stops, ids)


@examples(80)
@given(
    kind=st.sampled_from(KINDS),
    texts=st.lists(st.sampled_from([SPOKEN, "好", "é", "🙂", " is", "\n", "4 ", "a"]), max_size=12),
    stop=st.sampled_from(STOPS),
    wrong=st.none() | st.tuples(st.integers(0, 200), st.integers(3, 258)),
)
def test_spoken_text_stops_where_decoding_everything_stops(
    kind: Kind, texts: list[str], stop: str, wrong: tuple[int, int] | None
) -> None:
    """`wrong` is one byte or piece inserted somewhere, as a model may sample it."""
    ids = list(tokenizer_of(kind).encode("".join(texts), add_special_tokens=False))
    if wrong is not None:
        ids.insert(wrong[0], wrong[1])
    streamed(kind, [stop], ids)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_without_a_character_can_stop_too(kind: Kind) -> None:
    ids = list(tokenizer_of(kind).encode("好 is 好", add_special_tokens=False))
    streamed(kind, ["\N{REPLACEMENT CHARACTER}"], ids)


LONG = 4096


def cost(kind: Kind, ids: Sequence[int]) -> float:
    """Decoded tokens per token of an answer that never stops."""
    decode = Decoder(kind)
    watched = StopStrings(("never said", "\0\0"), decode)
    for n in range(1, len(ids) + 1):
        assert watched.cut(ids[:n]) is None
    return decode.count / len(ids)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["the answer is 4 . ", "好好吃🙂"])
def test_a_long_answer_costs_its_tokens_and_not_their_square(kind: Kind, text: str) -> None:
    ids = list(tokenizer_of(kind).encode(text * LONG, add_special_tokens=False))[:LONG]
    assert cost(kind, ids) < 4 * stop_strings.KEPT_PENDING


@pytest.mark.parametrize("kind", ["legacy", "bytes"])
def test_bytes_that_never_make_a_character_cost_a_constant_each(kind: Kind) -> None:
    tokenizer = tokenizer_of(kind)
    byte = tokenizer.convert_tokens_to_ids("<0xFF>" if kind == "legacy" else "ÿ")
    assert isinstance(byte, int)
    assert byte
    assert cost(kind, [byte] * LONG) < stop_strings.MOST_PENDING + stop_strings.KEPT_PENDING


def test_noise_costs_a_constant_each() -> None:
    draw = random.Random(0)
    for kind in KINDS:
        assert cost(kind, [draw.randrange(300) for _ in range(LONG)]) < 40


def test_twin_decoding_everything_costs_the_square() -> None:
    decode = Decoder("bytes")
    ids = [70] * LONG
    for n in range(1, LONG + 1, 64):
        everything(decode, ("never",), ids[:n])
    assert 64 * decode.count / LONG > LONG / 3
