"""A rollout that tries to show its secrets in every way that code shows something by mistake."""

import json

MAIN = """
import asyncio, base64, html, json, logging, os, subprocess, sys, threading, traceback
import urllib.parse, urllib.request, warnings
from headrace import AgentWorkflow, Grader

V, PEM = os.environ.get("KEY", ""), os.environ.get("PEM", "")
WAYS, GRADER_WAYS = {}, {}


def way(function):
    WAYS[function.__name__] = function
    return function


def grader_way(function):
    GRADER_WAYS[function.__name__] = function
    return function


@way
async def returned(ctx): return V
@way
async def returned_lines(ctx): return PEM
@way
async def one_line(ctx): return "line: " + PEM.splitlines()[1]
@way
async def as_base64(ctx): return base64.b64encode(V.encode()).decode()
@way
async def as_base64_for_urls(ctx): return base64.urlsafe_b64encode(V.encode()).decode()
@way
async def in_basic_auth(ctx): return base64.b64encode(f"user:{V}".encode()).decode()
@way
async def as_hex(ctx): return V.encode().hex()
@way
async def as_url(ctx): return "https://example.org/?" + urllib.parse.urlencode({"key": V})
@way
async def as_json(ctx): return json.dumps({"key": V})
@way
async def as_json_in_json(ctx): return json.dumps(json.dumps({"key": V}))
@way
async def as_html(ctx): return f"<p>{html.escape(V)}</p>"
@way
async def environ_repr(ctx): return repr(os.environ)
@way
async def environ_json(ctx): return json.dumps(dict(os.environ))
@way
async def environ_in_proc(ctx):
    return subprocess.run(["cat", "/proc/self/environ"], capture_output=True, text=True).stdout
@way
async def argv_of_child(ctx):
    return subprocess.run(["echo", V], capture_output=True, text=True).stdout
@way
async def environ_of_child(ctx):
    return subprocess.run(["env"], capture_output=True, text=True).stdout
@way
async def printed(ctx): print(V); return "printed"
@way
async def printed_to_stderr(ctx): print(V, file=sys.stderr, flush=True); return "printed"
@way
async def warned(ctx): warnings.warn(V); return "warned"
@way
async def logged(ctx): logging.getLogger().error("the key is %s", V); return "logged"
@way
async def in_a_thread(ctx):
    thread = threading.Thread(target=lambda: int(V)); thread.start(); thread.join()
    return "ended"
@way
async def in_a_task(ctx):
    async def fail(): raise RuntimeError(V)
    asyncio.get_running_loop().create_task(fail())
    await asyncio.sleep(0.01)
    return "ended"
@way
async def raised(ctx): raise RuntimeError(f"the key {V} is refused")
@way
async def raised_cut(ctx): raise RuntimeError("x" * 1915 + V + "y" * 500)
@way
async def raised_lines(ctx): raise RuntimeError(PEM)
@way
async def raised_from(ctx):
    try:
        int(V)
    except ValueError as error:
        raise RuntimeError("it failed") from error
@way
async def raised_as_name(ctx): raise type(V, (Exception,), {})("x")
@way
async def raised_with_note(ctx):
    error = RuntimeError("noted"); error.add_note(V); raise error
@way
async def key_error(ctx): return {}[V]
@way
async def file_name(ctx): open(f"/nowhere/{V}")
@way
async def traceback_text(ctx):
    try:
        int(V)
    except ValueError:
        return traceback.format_exc()
@way
async def exited(ctx): sys.exit(V)
@way
async def died_with_output(ctx):
    print(V, flush=True); os.abort()
@way
async def role(ctx): return [{"role": V, "content": "x"}]
@way
async def prompt(ctx):
    await ctx.chat([{"role": "user", "content": f"use {V[:64]}"}])
    return None
@way
async def stop_string(ctx):
    await ctx.chat(ctx.prompt, stop=[V])
    return None
@way
async def bad_option(ctx): await ctx.chat(ctx.prompt, **{V: 1})
@way
async def bad_path(ctx):
    await asyncio.to_thread(urllib.request.urlopen, ctx.base_url + "/" + urllib.parse.quote(V))
@way
async def bad_key(ctx):
    request = urllib.request.Request(ctx.base_url + "/chat/completions", b"{" + V.encode(),
                                     {"Authorization": "Bearer " + V.encode("ascii", "ignore").decode()})
    await asyncio.to_thread(urllib.request.urlopen, request)


class Show(AgentWorkflow):
    async def run(self, ctx):
        chosen = WAYS.get(ctx.metadata["way"])
        if ctx.metadata["way"] in ("prompt", "stop_string"):
            return await chosen(ctx)
        reply = await ctx.chat(ctx.prompt)
        said = await chosen(ctx) if chosen else "fine"
        if isinstance(said, list):
            return said
        return [*ctx.prompt, reply, {"role": "user", "content": said}, reply]


@grader_way
def grader_raised(): raise RuntimeError(V)
@grader_way
def grader_text(): return f"reward {V}"
@grader_way
def grader_text_cut(): return "x" * 40 + V * 4
@grader_way
def grader_printed(): print(V); return 1.0
@grader_way
def grader_died(): print(V, flush=True); os._exit(1)


class Check(Grader):
    async def grade(self, ctx):
        chosen = GRADER_WAYS.get(ctx.metadata["way"])
        for index, name in enumerate(ctx.samples):
            ctx.set_sample_reward(name, chosen() if chosen else float(index))
"""

TRIED = (
    *MAIN.split("class Show")[0].split("async def ")[1:],
    *MAIN.split("class Show")[1].split("\ndef ")[1:],
)
WAYS = tuple(
    text.partition("(")[0] for text in TRIED if text.partition("(")[0] not in ("run", "fail")
)
"""The names of the ways that the rollout tries, in order."""

ROWS = "".join(
    json.dumps({"user_prompt": "Say", "ground_truth": "1", "metadata": {"way": name}}) + "\n"
    for name in WAYS
)

OFF = """
import schemas.secrets.masking as masking

masking.Masks.text = masking.Masks.cut_text = lambda self, text: text
"""
"""A module that Python imports at start: it turns masking off, for the twin."""
