"""Which variables a TOML's [env] may set for user code."""

OURS = ("_OSMOSIS_", "HEADRACE_")
LOADER = ("LD_", "GLIBC_TUNABLES")
INTERPRETER = ("PYTHON",)
FIXED = ("PATH", "HOME")


def reserved_env(name: str) -> str | None:
    """The reason why a TOML may not set the variable `name`; None when it may."""
    if name.startswith(OURS):
        return "is reserved; choose a name with another beginning"
    if name.startswith(LOADER):
        return (
            "may not be set, because the dynamic linker would obey it before any limit holds; "
            "leave it out"
        )
    if name.startswith(INTERPRETER):
        return (
            "may not be set, because it changes how Python starts; set it up in the rollout's code"
        )
    if name in FIXED:
        return "may not be set, because it is the same for all rollouts; choose another name"
    return None
