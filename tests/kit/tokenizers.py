"""Small tokenizers like published ones, trained here, and chat templates for them."""

import json
from functools import cache
from pathlib import Path
from typing import Any, Literal

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from schemas.sampling import ModelRef
from trainer.model.base import Base

Kind = Literal["legacy", "always", "first", "unigram", "bytes"]
PREFIXED: tuple[Kind, ...] = ("legacy", "always", "first", "unigram")
"""The kinds that put a space before a text, in this order: Llama 2 and Mistral 7B v0.1, the same without
legacy, one with a prefix only at the very beginning, and a unigram model."""

SPECIAL = ("<unk>", "<s>", "</s>")
CORPUS = [
    "[INST] What is 2 + 2 ? [/INST] It is 4 , of course .",
    "the answer is seven ; the other answer is nine .",
    "<|user|> hello there , how are you ? <|assistant|> I am well .",
    "one two three four five six seven eight nine ten\n\nA new line .",
    *(f"{n} plus {n} is {2 * n}" for n in range(40)),
]
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<s>[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + ' </s>' }}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ '<s>' }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ m.content + '</s>' }}{% endif %}{% endfor %}"
)
LINES = (
    "{% for m in messages %}{{ m.role + ':\\n' + m.content + '</s>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
)
TEMPLATES = {
    "llama 2": LLAMA2,
    "mistral": MISTRAL,
    "lines": LINES,
    "plain": LINES.replace("</s>", ""),
}


def readable_model(base: Base, folder: Path) -> ModelRef:
    """The model in a directory, with a decoder that llguidance can read by itself. It decodes alike."""
    base.tokenizer.backend_tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse()]
    )
    base.model.save_pretrained(folder)
    base.tokenizer.save_pretrained(folder)
    return ModelRef(kind="directory", name=str(folder))


@cache
def tokenizer_of(kind: Kind) -> PreTrainedTokenizerFast:
    """A tokenizer that encodes text that it was not trained on as bytes."""
    special = [AddedToken(text, special=True, normalized=False) for text in SPECIAL]
    made = _bytes() if kind == "bytes" else _pieces(kind)
    made.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def _pieces(kind: Kind) -> Tokenizer:
    """A tokenizer that is trained word by word, as the published ones are, so no piece contains a space
    inside."""
    unigram = kind == "unigram"
    made = Tokenizer(models.Unigram() if unigram else models.BPE())
    made.pre_tokenizer = pre_tokenizers.Metaspace(split=True)
    trainer = trainers.UnigramTrainer if unigram else trainers.BpeTrainer
    made.train_from_iterator(CORPUS, trainer(vocab_size=300, show_progress=False))
    made = Tokenizer(_with_bytes(json.loads(made.to_str())["model"]))
    if kind == "legacy":
        spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        made.normalizer = normalizers.Sequence(spaces)
    else:
        scheme = "first" if kind == "first" else "always"
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    strip = decoders.Strip(" ", 1, 0)
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    return made


def _with_bytes(trained: dict[str, Any]) -> models.Model:
    """The trained model, which falls back to bytes where it knows no piece."""
    more = (*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)))
    if trained["type"] == "Unigram":
        pieces = [(text, score) for text, score in trained["vocab"] if text not in more]
        scored = [*((text, 0.0) for text in more), *pieces]
        return models.Unigram(scored, unk_id=0, byte_fallback=True)
    vocabulary = {text: n for n, text in enumerate((*more, *trained["vocab"]))}
    merges = [(left, right) for left, right in trained["merges"]]
    return models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)


def _bytes() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    return made
