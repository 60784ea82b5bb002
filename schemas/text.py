"""Text of errors in a form that a database, a terminal and JSON all accept, because user code may
raise anything."""


def plain(text: str) -> str:
    """`text` without characters that have no place in it. A NUL, other control characters and lone
    surrogates become `?`. Line breaks and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def describe_error(error: BaseException) -> str:
    """The class and the message of an error, as plain text. An error whose message cannot be read is
    described by its class."""
    try:
        text = str(error)
    except Exception:
        text = "(it cannot say what it is)"
    return f"{type(error).__name__}: {plain(text)}"
