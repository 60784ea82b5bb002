"""The names of the sandbox levels, and what each of them promises. Imports nothing heavy."""

TRUSTED = "process-trusted"
PROMISES = {
    "bwrap": "user code sees only its own files and processes, and has no network",
    "gvisor": "as bwrap, and its system calls reach a kernel of its own",
    TRUSTED: "user code has limits, but sees this machine's files and network: trust its author",
}
STRONGER = {
    "bwrap": "for code of strangers: HEADRACE_SANDBOX=gvisor",
    TRUSTED: "remove HEADRACE_SANDBOX, which then is bwrap (apt-get install bubblewrap)",
}
"""How to get a stronger level than this one."""

ONE_WORKSPACE = (
    "HEADRACE_SANDBOX is process-trusted, which keeps no workspace apart from another, and others than "
    "you may use this installation, so it may have one workspace; set HEADRACE_SANDBOX to bwrap or "
    "gvisor"
)
OTHER_LEVEL = (
    "it runs user code at level process-trusted, and HEADRACE_SANDBOX of this process names another "
    "level; set both to the same one (bwrap, if there are several workspaces)"
)

REFUSES_PUSHES = (
    "a push started this run, so its code may be anybody's, and HEADRACE_SANDBOX is process-trusted; "
    "remove HEADRACE_SANDBOX, so that bubblewrap confines user code"
)
