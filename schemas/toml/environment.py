"""Which variables a TOML's [env] may set for user code."""

OURS = ("_OSMOSIS_", "HEADRACE_")
LOADER = ("LD_", "GLIBC_TUNABLES")
INTERPRETER = ("PYTHON",)
FIXED = ("PATH", "HOME")


def reserved_env(name: str) -> str | None:
    """Why `name` may not be set, or None."""
    if name.startswith(OURS):
        return "is reserved; choose a name with another beginning"
    if name.startswith(LOADER):
        return "may not be set: the dynamic linker would obey it before any limit holds"
    if name.startswith(INTERPRETER):
        return "may not be set: it changes how Python starts; do it in the rollout's code"
    if name in FIXED:
        return "may not be set: it is the same for all rollouts; use a variable of your own"
    return None
