"""Text of errors in a form that a database, a terminal and JSON all accept, because user code may
raise anything."""


def plain(text: str) -> str:
    """`text` without characters that have no place in it. A NUL, other control characters and lone
    surrogates become `?`. Line breaks and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def well_formed(text: str) -> str:
    """`text` with `?` in place of lone surrogates, which JSON can write as escapes and UTF-8 cannot
    hold."""
    return text.encode(errors="replace").decode()


def describe_error(error: BaseException) -> str:
    """The class and the message of an error, as plain text. An error whose message cannot be read is
    described by its class."""
    try:
        text = str(error)
    except Exception:  # user code's own `__str__` raises whatever it likes
        text = "(it cannot say what it is)"
    return f"{type(error).__name__}: {plain(text)}"
