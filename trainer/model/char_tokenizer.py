"""The tokenizer of the `scratch:` shapes: one symbol per character, with a chat template.

It is an ordinary fast tokenizer: plain Transformers loads it from the files saved with the weights. A
character outside the vocabulary becomes `<|unk|>` and is never an error, because a prompt is data. A
turn is `<|role|>content<|end|>`, and the model ends its turn with `<|end|>`. A conversation with tools
begins with a turn of the system that names them with their parameters, such as `add(a, b)`. A call is
`<|tool|>name{arguments}` inside of the assistant's turn.
"""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from schemas.models.scratch import CHARACTERS, SPECIAL_TOKENS, ScratchShape

FIRST_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] "
    "+ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""The template in checkpoints of earlier versions, which knows no tools."""

CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|system|>' }}{% for tool in tools %}{{ tool['function']['name'] + '(' "
    "+ (tool['function']['parameters'].get('properties', {}) | join(', ')) + ')' }}"
    "{% if not loop.last %}{{ ' ' }}{% endif %}{% endfor %}{{ '<|end|>' }}{% endif %}"
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% for call in message.get('tool_calls') or [] %}{{ '<|tool|>' + call['function']['name'] "
    "+ call['function']['arguments'] }}{% endfor %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

OUR_TEMPLATES = frozenset({FIRST_CHAT_TEMPLATE, CHAT_TEMPLATE})


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
