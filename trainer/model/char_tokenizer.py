"""The tokenizer of the `scratch:` shapes: one symbol per character, with a chat template.

It is an ordinary fast tokenizer: plain Transformers loads it from the files saved with the weights. A
character outside the vocabulary becomes `<|unk|>` and is never an error, because a prompt is data. A
turn is `<|role|>content<|end|>`, and the model ends its turn with `<|end|>`.
"""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from schemas.scratch_models import CHARACTERS, SPECIAL_TOKENS, ScratchShape

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] "
    "+ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def character_tokenizer(shape: ScratchShape) -> PreTrainedTokenizerFast:
    """The tokenizer of a shape. The special tokens have the first ids, and the characters follow in
    order."""
    pad, unknown, *_, end = SPECIAL_TOKENS
    symbols = [*SPECIAL_TOKENS, *CHARACTERS[shape.vocabulary]]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=CHAT_TEMPLATE,
        unk_token=unknown,
        pad_token=pad,
        eos_token=end,
        model_max_length=shape.context,
        clean_up_tokenization_spaces=False,
    )
