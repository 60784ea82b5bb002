"""The program inside a confined process: hosts one role of one entry point.

`launch.py` sets the limits and then starts this program as
`python -I user_code_host.py ROLE FD_IN FD_OUT ENTRYPOINT`. Messages are JSON with a length prefix, and
`infra/sandbox/host_messages.py` says which ones the parent accepts. Attempts run concurrently in one
event loop. When an attempt blocks the loop, a thread tells the parent which attempt it is, so that the
parent can end only that attempt.
"""

import asyncio
import contextvars
import ctypes
import json
import math
import os
import struct
import sys
import threading
import types
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from headrace import attempt_output, relay
from headrace.attempt_output import AttemptOutput
from headrace.error_location import last_place, locate_error, own_stack, tree_of, workspace_path
from headrace.grading import GraderContext, Sample, place_of_reward
from headrace.legacy import provide_alias
from headrace.servers.hosting import host_server
from headrace.servers.recognition import served_kind
from headrace.tools.loop import DEFAULT_TURNS
from headrace.user_code import discovery
from headrace.user_code.conversation import conversation
from headrace.user_code.import_paths import InvalidShared, import_paths
from headrace.user_code.questions import MOST_RUBRICS, add_questions, described_rubrics, rubrics_of
from headrace.workflow import WorkflowContext

Json = dict[str, Any]
"""A message. Its keys are known to the sender and the receiver, which are both ours."""

PR_SET_DUMPABLE = 4
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGE_BYTES, KEPT_BYTES = 4 << 20, 16 << 20
"""Larger objects get memory of their own, and as much free memory is kept."""

MOST_REWARDS = 128
LONGEST_NAME = 100
LONGEST_PATH = 200
BEAT_S = 0.25
SLOW_IMPORT_S = 20.0

current: contextvars.ContextVar[str | None] = contextvars.ContextVar("current", default=None)


def hide() -> None:
    """Prevent other processes of this user from tracing this one and from reading its memory, because
    they may belong to another rollout. An exec would undo this, so `launch.py` cannot do it."""
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def keep_freed_memory() -> None:
    """Keep the memory of small objects for the next ones. Otherwise each read of a socket or a pipe maps
    and unmaps a buffer of 256 KiB, which is most of what an attempt costs at level `gvisor`."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # not every C library has it
        mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


class Channel:
    """Sends messages to the parent, one at a time, from any thread. Answers of attempts that end in the
    same turn of the event loop share one write, because on a kernel of its own (level `gvisor`) a system
    call costs about as much as the rest of what the SDK does for an attempt."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._posted: deque[bytes] = deque()

    def send(self, message: Json) -> None:
        """Send a message now, after those that are posted."""
        self.flush(_encode(message))

    def post(self, message: Json) -> None:
        """Send a message at the end of this turn of the running loop, together with others. Only the
        loop's own thread may post."""
        if not self._posted:
            asyncio.get_running_loop().call_soon(self.flush)
        self._posted.append(_encode(message))

    def flush(self, last: bytes = b"") -> None:
        """Send the messages that are posted, and `last`."""
        with self._lock:
            parts = [self._posted.popleft() for _ in range(len(self._posted))]
            view = memoryview(b"".join((*parts, last)))
            while view:
                view = view[os.write(self._descriptor, view) :]


def _encode(message: Json) -> bytes:
    data = json.dumps(message, ensure_ascii=False).encode(errors="replace")
    return struct.pack(">I", len(data)) + data


class Watch:
    """Tells the parent which call blocks the event loop when the loop makes no progress. It rests while
    no call runs, because many idle processes are kept warm."""

    def __init__(self, loop: asyncio.AbstractEventLoop, channel: Channel, entry: Path) -> None:
        self._loop = loop
        self._channel = channel
        self._turned = True
        self._busy = threading.Event()
        self._entry = entry
        self._thread = threading.get_ident()
        self._owners: dict[int, tuple[str | None, AttemptOutput | None]] = {}
        loop.set_task_factory(self._task)  # type: ignore[arg-type]  # generic over the coroutine
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def _task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any
    ) -> "asyncio.Task[Any]":
        task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, **options)
        self._owners[id(task)] = (current.get(), attempt_output.running.get())
        task.add_done_callback(lambda done: self._owners.pop(id(done), None))
        return task

    def _run(self) -> None:
        beat = threading.Event()
        while self._busy.wait() and not beat.wait(BEAT_S):
            if not self._turned:
                self._channel.flush()  # the loop is stuck, and cannot do it
                task = asyncio.current_task(self._loop)
                holder, output = self._owners.get(id(task), (None, None))
                place = own_stack(self._thread, self._entry) if output is not None else None
                left = output.document(place=place) if output is not None and place else None
                self._channel.send({"stuck": holder, **({"output": left} if left else {})})
            self._turned = False
            self._loop.call_soon_threadsafe(self._turn)

    def _turn(self) -> None:
        self._turned = True

    def watch(self, running: "set[asyncio.Task[None]]") -> None:
        """Watch while there are running calls."""
        if running:
            self._busy.set()
        else:
            self._busy.clear()


async def serve(
    role: str, incoming: int, channel: Channel, entrypoint: Path, *, loaded: threading.Event
) -> None:
    """Answer calls until the parent closes the pipe. Only a workflow has a way to the gateway."""
    port = relay.start(relay.gateway_socket()) if role == "workflow" else 0
    if port and os.environ.get(relay.NETWORK):
        relay.use_as_proxy(port)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 30)
    await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(incoming, "rb")
    )
    module = discovery.load(entrypoint)
    workflow = role == "workflow"
    call = await workflow_call(module, port=port) if workflow else grader_call(module, entrypoint)
    loaded.set()
    channel.send({"ready": True})
    # Not before: the import of the package mcp blocks the loop, and the parent expects `ready` first.
    watch = Watch(loop, channel, entrypoint)
    running: set[asyncio.Task[None]] = set()

    def end(task: "asyncio.Task[None]") -> None:
        running.discard(task)
        watch.watch(running)

    while True:
        try:
            size = struct.unpack(">I", await reader.readexactly(4))[0]
            message: Json = json.loads(await reader.readexactly(size))
        except asyncio.IncompleteReadError:
            return
        current.set(str(message["id"]))
        attempt_output.running.set(AttemptOutput(entrypoint))
        task = loop.create_task(answer(call, message, channel, entrypoint))
        running.add(task)
        watch.watch(running)
        task.add_done_callback(end)


async def answer(
    call: Callable[[Json], Awaitable[Json]], message: Json, channel: Channel, entry: Path
) -> None:
    """Run one call under its deadline, and send the result with what user code left behind. An error of
    user code is a result too."""
    deadline: float = message["deadline_s"]
    output = attempt_output.running.get() or AttemptOutput(entry)
    limit = asyncio.timeout(deadline)
    try:
        async with limit:
            result = await call(message)
    except BaseException as error:  # user code raises whatever it likes, SystemExit too
        if limit.expired() and isinstance(error, TimeoutError):
            place = last_place(error, entry)
            where = f"; it was at {place}" if place else ""
            result = {"category": "timeout", "error": f"not finished after {deadline:g} s{where}"}
        else:
            result = {"category": "raised", "error": locate_error(error, entry)}
        output.fail(error, entry)
    left = output.document()
    channel.post({"id": message["id"], **result, **({"output": left} if left else {})})


async def workflow_call(
    module: types.ModuleType, *, port: int
) -> Callable[[Json], Awaitable[Json]]:
    """Return the function that answers a call of the workflow role: one attempt per call. The relay to
    the gateway listens on `port`. The MCP servers of the workflow are started before."""
    workflow = discovery.workflow_of(module)
    if workflow is None:
        raise discovery.EntryPointError(
            "this file has no AgentWorkflow; write a subclass of headrace.AgentWorkflow"
        )
    tools = await discovery.open_tools(module, workflow)
    who = discovery.named_place(workflow, "run", Path(module.__file__ or "?"))

    async def call(message: Json) -> Json:
        attempt = workflow()
        context = WorkflowContext(
            prompt=message["prompt"],
            metadata=message["metadata"],
            base_url=f"http://127.0.0.1:{port}{message['base_path']}",
            api_key=str(message["api_key"]),
            socket=relay.gateway_socket(),
            tools=tools.bind(attempt),
            max_turns=message.get("max_turns") or DEFAULT_TURNS,
        )
        try:
            returned = await attempt.run(context)
            messages = conversation(returned, who=who)
            turn_agents, agent_rewards = context.agent_rewards.end()
            said: dict[str, Mapping[Any, object]] = {
                "turn_rewards": context.turn_rewards.end(),
                "turn_agents": turn_agents,
                "agent_rewards": agent_rewards,
            }
            pairs = {key: [list(pair) for pair in of.items()] for key, of in said.items() if of}
            return {"messages": messages, **pairs}
        finally:
            context.turn_rewards.end()
            context.agent_rewards.end()
            context.discard(into=attempt_output.running.get())

    return call


def grader_call(module: types.ModuleType, entry: Path) -> Callable[[Json], Awaitable[Json]]:
    """Return the function that answers a call of the grader role: one group per call."""
    grader = discovery.grader_of(module)
    functions, rubrics = discovery.rewards_of(module), rubrics_of(module)

    async def call(message: Json) -> Json:
        samples = {str(sample["name"]): Sample(**sample) for sample in message["samples"]}
        weights: list[Json] = message["rewards"]
        of_samples = tuple(samples.values())
        if weights or not message.get("grader", True):
            grades = [await weighted_reward(s, message, functions, entry) for s in of_samples]
            asked = await add_questions(grades, of_samples, message, rubrics=rubrics, entry=entry)
            return {"grades": asked}
        if grader is None:
            raise discovery.EntryPointError(
                "this file has no Grader; write a subclass of headrace.Grader"
            )
        context = GraderContext(
            label=message["label"],
            metadata=message["metadata"],
            samples=samples,
        )
        await grader().grade(context)
        who = discovery.named_place(grader, "grade", entry)
        grades = [_set_reward(s, context, who=who, entry=entry) for s in of_samples]
        asked = await add_questions(grades, of_samples, message, rubrics=rubrics, entry=entry)
        return {"grades": asked}

    return call


async def weighted_reward(
    sample: Sample, message: Json, functions: dict[str, Callable[..., object]], entry: Path
) -> Json:
    """Return the weighted sum of the reward functions for one sample. A function that raises, or that
    returns something other than a finite number, fails this sample only."""
    parts: dict[str, Any] = {}
    for weight in message["rewards"]:
        name = str(weight["name"])
        try:
            value = functions[name](sample.text, message["label"], extra_info=message["metadata"])
            parts[name] = await value if asyncio.iscoroutine(value) else value
        except Exception as error:  # user code raises whatever it likes
            attempt_output.fail_running(error, entry)
            return {**without_reward(sample, locate_error(error, entry)), "raised": True}
    read = {name: read_reward(value, f"@reward {name}") for name, value in parts.items()}
    if problems := [wrong for _, wrong in read.values() if wrong]:
        return without_reward(sample, problems[0])
    numbers = {name: number for name, (number, _) in read.items() if number is not None}
    weighed = [float(str(w["weight"])) * numbers[str(w["name"])] for w in message["rewards"]]
    return grader_reward(sample, _sum_of(weighed), numbers, who="the sum of the reward functions")


def _sum_of(numbers: list[float]) -> float:
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):  # it is too large, or the sum of two infinities
        return math.nan


def without_reward(sample: Sample, why: str) -> Json:
    """Return the grade of a sample without a reward, with the reason `why`."""
    return {"index": sample.index, "reward": None, "parts": {}, "error": why}


def _set_reward(sample: Sample, context: GraderContext, *, who: str, entry: Path) -> Json:
    value = context.rewards.get(sample.name)
    if value is None:
        return without_reward(
            sample,
            f"{who} set no reward for this sample; call ctx.set_sample_reward(name, value) for each "
            "name in ctx.samples",
        )
    if place := place_of_reward(context, sample.name):
        file, line = Path(place[0]), place[1]
        if file.is_relative_to(tree_of(entry)):
            who = f"{who.partition(' (')[0]} ({workspace_path(file, entry)[:LONGEST_PATH]}:{line})"
    return grader_reward(sample, value, {}, who=who, is_set=True)


def grader_reward(
    sample: Sample,
    value: Any,
    parts: dict[str, float],
    *,
    who: str = "the grader",
    is_set: bool = False,
) -> Json:
    """Return the grade of one sample with the reward that `who` returned, or set if `is_set`."""
    reward, wrong = read_reward(value, who, is_set=is_set)
    return {"index": sample.index, "reward": reward, "parts": parts, "error": wrong}


def read_reward(
    value: object, who: str, *, is_set: bool = False
) -> tuple[float, None] | tuple[None, str]:
    """Return the number of `value`, which `who` returned, or set if `is_set`. If that is not a reward,
    return the reason instead. It is converted once, because a class of user code may convert itself to
    another number each time, or raise."""
    did, cure = ("set the reward to", "set") if is_set else ("returned", "return")
    if value is None:
        return None, f"{who} returned no reward for this sample; return one for every sample"
    if not isinstance(value, (int, float)):
        kind = type(value).__name__
        return None, f"{who} {did} {kind} {_excerpt(value)!r}; {cure} a number as the reward"
    try:
        number = float(value)
    except Exception:  # it is too large, or `__float__` of user code raises whatever it likes
        number = math.nan
    if math.isfinite(number):
        return number, None
    return None, f"{who} {did} {_excerpt(value)}; {cure} a finite number as the reward"


def _excerpt(value: object) -> str:
    try:
        return str(value)[:80]
    except Exception:  # a number of thousands of digits, or a `__str__` of user code
        return "a value that cannot be shown"


def discover(entrypoint: Path) -> Json:
    """Answer the discover role: return which workflow, grader and reward functions the entry point
    has. A rollout server is recognised by its text and is not run."""
    try:
        if served_kind(discovery.parse(entrypoint), entrypoint) is not None:
            return {"kind": "server"}
        module = discovery.load(entrypoint)
        workflow, grader = discovery.workflow_of(module), discovery.grader_of(module)
        tools = discovery.tools_of(module, workflow).names if workflow else ()
        servers = discovery.servers_of(module, workflow) if workflow else []
    except discovery.EntryPointError as error:
        return {"error": str(error)[:2000]}
    rewards, rubrics = sorted(discovery.rewards_of(module)), described_rubrics(module)
    classes = [found.__name__ if found else None for found in (workflow, grader)]
    if any(len(name or "") > LONGEST_NAME for name in (*classes, *rewards, *rubrics_of(module))):
        return {
            "error": f"a class or reward function has a name of over {LONGEST_NAME} characters"
            "; shorten it"
        }
    if len(rewards) > MOST_REWARDS:
        return {"error": f"there are {len(rewards)} reward functions; keep at most {MOST_REWARDS}"}
    if len(rubrics) > MOST_RUBRICS:
        return {"error": f"there are {len(rubrics)} rubrics; keep at most {MOST_RUBRICS}"}
    found = {"workflow": classes[0], "grader": classes[1], "rewards": rewards}
    addresses = [address for one in servers if (address := one.remote_address)]
    names = [one.name for one in servers]
    found |= {"tools": list(tools), "mcp": names, "mcp_addresses": addresses}
    return {**found, "rubrics": rubrics}


def _tell_slow_import(entry: Path, loaded: threading.Event) -> None:
    """Write the line that is still running to the process's output when an import takes long. The parent
    shows the end of that output if the entry point never loads."""
    thread = threading.get_ident()

    def run() -> None:
        if not loaded.wait(SLOW_IMPORT_S) and (place := own_stack(thread, entry)):
            os.write(2, f"after {SLOW_IMPORT_S:g} s it still loads. {place}\n".encode())

    threading.Thread(target=run, name="slow-import", daemon=True).start()


def main() -> None:
    role, incoming, outgoing, entrypoint = sys.argv[1:5]
    hide()
    keep_freed_memory()
    attempt_output.capture()
    channel = Channel(int(outgoing))
    path = Path(entrypoint)
    try:
        sys.path[:0] = import_paths(path)
    except InvalidShared as error:
        said = "error" if role == "discover" else "unusable"
        channel.send({said: str(error)[:2000]})
        os._exit(0)
    provide_alias()
    loaded = threading.Event()
    _tell_slow_import(path, loaded)
    if role == "discover":
        channel.send(discover(path))
        os._exit(0)
    try:
        if role == "server":
            asyncio.run(host_server(int(incoming), channel.send, path))
            os._exit(0)
        asyncio.run(serve(role, int(incoming), channel, path, loaded=loaded))
    except discovery.EntryPointError as error:
        channel.send({"unusable": str(error)[:2000]})


if __name__ == "__main__":
    main()
