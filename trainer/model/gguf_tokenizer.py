"""The tokenizer of a GGUF file, as the files of a model directory would hold it.

A GGUF file names how its tokenizer splits a text, and says no more about it. Each name is known here
with all that belongs to it, so that a text has the ids that the published tokenizer gives it.
"""

from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from schemas.models.gguf_model import CONTROL, USER_DEFINED, GgufModel

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The words of Llama 3 and Qwen2, with how many digits are one word."""


@dataclass(frozen=True, slots=True)
class _Split:
    """How a text is split. `composes`: it is normalized to NFC first. `whole_words`: a word that is a
    token is not merged from its parts."""

    steps: tuple[pre_tokenizers.PreTokenizer, ...]
    composes: bool = False
    whole_words: bool = False


def _by_words(digits: str) -> tuple[pre_tokenizers.PreTokenizer, ...]:
    return (
        pre_tokenizers.Split(Regex(WORDS % digits), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    )


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
SPLITS = {
    "gpt-2": _Split((BYTES,)),
    "llama-bpe": _Split(_by_words("{1,3}"), whole_words=True),
    "qwen2": _Split(_by_words(""), composes=True),
    "smollm": _Split((pre_tokenizers.Digits(individual_digits=True), BYTES)),
}


def gguf_tokenizer(model: GgufModel) -> PreTrainedTokenizerFast:
    """Build the tokenizer of a model. It adds no token of its own to a text."""
    read, split = model.tokenizer, SPLITS[model.tokenizer.split]
    vocabulary = {token: number for number, token in enumerate(read.tokens)}
    made = Tokenizer(models.BPE(vocabulary, [*read.merges], ignore_merges=split.whole_words))
    if split.composes:
        made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence([*split.steps])
    made.decoder = decoders.ByteLevel()
    kinds = tuple(zip(read.tokens, read.kinds, strict=True))
    made.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, kind in kinds if kind == CONTROL]
    )
    made.add_tokens(
        [
            AddedToken(t, special=False, normalized=False)
            for t, kind in kinds
            if kind == USER_DEFINED
        ]
    )
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        chat_template=read.chat_template,
        model_max_length=model.shape.context,
        clean_up_tokenization_spaces=False,
        **{names[role]: read.tokens[number] for role, number in read.special.items()},
    )
