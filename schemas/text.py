"""Text of errors in a form that a database, a terminal and JSON all accept, because user code may
raise anything, names of models in lists, and the bytes of text that the symbols of a vocabulary
represent.

A tokenizer.json writes each token as a symbol. In byte-level vocabularies (GPT-2 and most later ones)
each character of a symbol is one byte. In SentencePiece's, a symbol is text in which a mark stands for
the space, and some symbols name one byte.
"""

SPACE = "▁"
"""The symbol of a space in SentencePiece's vocabularies."""


def plain(text: str) -> str:
    """`text` without characters that have no place in it. A NUL, other control characters and lone
    surrogates become `?`. Line breaks and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def well_formed(text: str) -> str:
    """`text` with `?` in place of lone surrogates, which JSON can write as escapes and UTF-8 cannot
    hold."""
    return text.encode(errors="replace").decode()


def model_name(model: str) -> str:
    """The name of a model in a list: of a path only the last part, the file or the directory."""
    return model.rstrip("/").rpartition("/")[2] if model.startswith("/") else model


def describe_error(error: BaseException) -> str:
    """The class and the message of an error, as plain text. An error whose message cannot be read is
    described by its class."""
    try:
        text = str(error)
    except Exception:  # user code's own `__str__` raises whatever it likes
        text = "(it cannot say what it is)"
    return f"{type(error).__name__}: {plain(text)}"


def bytes_of_symbol(symbol: str, *, is_byte_level: bool) -> tuple[int, ...]:
    """The bytes of the token that a vocabulary writes as `symbol`."""
    if is_byte_level and all(character in BYTES for character in symbol):
        return tuple(BYTES[character] for character in symbol)
    if len(symbol) == 6 and symbol.startswith("<0x") and symbol.endswith(">"):
        return (int(symbol[3:5], 16),)
    return tuple(symbol.replace(SPACE, " ").encode(errors="replace"))


def _byte_symbols() -> dict[str, int]:
    """GPT-2's table: printable bytes are their own symbols, the others have symbols from 256 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {
        **{chr(byte): byte for byte in plain},
        **{chr(256 + number): byte for number, byte in enumerate(others)},
    }


BYTES = _byte_symbols()
"""Symbol -> byte, in a byte-level vocabulary."""
