"""The program inside the process that renders chat templates; `trainer/model/template_process.py` starts
it.

A template comes with a model, so it can be hostile. Jinja's sandbox keeps it away from the machine, but
does not prevent endless loops or filling memory. So each request has a limit of CPU time, the process
has a limit of address space, and the output has a limit of length. The renderer is Transformers' own.
Torch is not loaded.
"""

import json
import resource
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO, cast

Json = dict[str, Any]


def main(room_bytes: int, cpu_s: int, most_chars: int) -> None:
    """Answer requests until there are no more."""
    from transformers.utils.chat_template_utils import render_jinja_template

    incoming, outgoing = sys.stdin.buffer, sys.stdout.buffer
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + room_bytes, used + room_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    send(outgoing, {"ready": True})
    while (request := receive(incoming)) is not None:
        spent = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(spent.ru_utime + spent.ru_stime) + 1 + cpu_s
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        try:
            rendered = render_jinja_template(
                conversations=[request["messages"]],
                chat_template=request["template"],
                add_generation_prompt=request["reply_next"],
                **request["names"],
            )
            [text], _ = cast("tuple[list[str], object]", rendered)
            answer: Json = {"text": text} if len(text) <= most_chars else {"over": "length"}
        except MemoryError:
            answer = {"over": "memory"}
        except Exception as error:  # a template raises whatever it likes
            answer = {"error": f"{error}"[:2000] or type(error).__name__}
        send(outgoing, answer)
        del answer


def receive(stream: BinaryIO) -> Json | None:
    """The next message; None at the end."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    message: Json = json.loads(stream.read(struct.unpack(">I", head)[0]))
    return message


def send(stream: BinaryIO, message: Json) -> None:
    """Write a message."""
    data = json.dumps(message).encode()
    stream.write(struct.pack(">I", len(data)) + data)
    stream.flush()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
