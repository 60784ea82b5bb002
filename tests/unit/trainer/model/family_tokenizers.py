"""Tokenizers of bytes that have the special tokens of a model family, and its name."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trainer.model.chat_template import Chat
from trainer.model.family_renderer import record_name

SPECIAL = {
    "Qwen/Qwen3-4B": (
        *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"),
        *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    ),
    "meta-llama/Llama-3.2-1B-Instruct": (
        *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
        *("<|eot_id|>", "<|eom_id|>", "<|python_tag|>", "<|finetune_right_pad_id|>"),
    ),
}
ENDS = {"Qwen/Qwen3-4B": "<|im_end|>", "meta-llama/Llama-3.2-1B-Instruct": "<|eot_id|>"}


def family_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a family. Its chat template is one that cannot be used."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    framing = {"<think>", "</think>", "<tool_call>", "</tool_call>"}
    backend.add_tokens(
        [AddedToken(t, special=t not in framing, normalized=False) for t in SPECIAL[name]]
    )
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in SPECIAL[name] if t not in framing]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=ENDS[name])
    record_name(made, name)
    made.chat_template = "{{ raise_exception('the renderer writes this conversation') }}"
    return made


def family_chat(name: str) -> Chat:
    """Return the chat of a family."""
    tokenizer = family_tokenizer(name)
    return Chat(tokenizer, frozenset(tokenizer.encode(ENDS[name])))
