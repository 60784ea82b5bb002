import schemas  # noqa: F401 - refuses an old Python before a library fails on it
