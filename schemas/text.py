"""Text of errors as a database, a terminal and JSON all take it: user code may raise anything."""


def plain(text: str) -> str:
    """`text` without what has no place in it: a NUL, other control characters and lone surrogates become
    `?`; line breaks and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def describe_error(error: BaseException) -> str:
    """The class and the message of an error, plain. An error that cannot even be shown is its class."""
    try:
        text = str(error)
    except Exception:
        text = "(it cannot say what it is)"
    return f"{type(error).__name__}: {plain(text)}"
