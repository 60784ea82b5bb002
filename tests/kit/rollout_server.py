"""Programs that serve rollouts by the Osmosis protocol. They are written from its wire facts, with the
standard library only."""

SERVER = r'''
import asyncio, json, os, sys, time, urllib.request

GENERATION = int(os.environ.get("GENERATION", "3"))
PORT = int(os.environ.get("_OSMOSIS_ROLLOUT_PORT", "8000"))
LIMIT = json.loads(os.environ.get("LIMIT", "null"))
PATHS = {
    1: ["/rollout", "/health"],
    2: ["/rollout", "/health", "/rollout/{rollout_id}/status", "/rollout/cancel"],
    3: ["/rollout", "/health", "/rollout/{rollout_id}/result", "/rollout/cancel"],
}[GENERATION]
rollouts, tasks, most = {}, {}, [0]


def post(url, body, key, **headers):
    headers = {"authorization": "Bearer " + key, "content-type": "application/json", **headers}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))


async def work(request):
    """The workflow: it asks the policy what the prompt says. The grader compares it with the label."""
    what = request["initial_messages"][-1]["content"]
    if what == "raise":
        raise ValueError("as asked")
    if what == "sleep":
        await asyncio.sleep(3600)
    if what == "block":
        time.sleep(3600)
    if what == "exit":
        print("going down", flush=True)
        os._exit(3)
    if what == "wait":
        await asyncio.sleep(0.3)
    key = request.get("llm_api_key") or request.get("controller_api_key")
    body = {"model": "osmosis-rollout", "messages": request["initial_messages"], "stream": False}
    url = request["chat_completions_url"] + "/chat/completions"
    answer = await asyncio.to_thread(post, url, body, key)
    text = answer["choices"][0]["message"]["content"]
    if what == "who":
        text = " ".join([os.getcwd(), os.environ["_OSMOSIS_ROLLOUT_NAME"], os.environ["ROLLOUT_PORT"]])
        root = os.environ["_OSMOSIS_ROLLOUT_ARTIFACT_ROOT"]
        place = os.path.join(root, request["rollout_id"], "artifacts")
        os.makedirs(place)
        with open(os.path.join(place, "seen"), "w") as file:
            file.write(text)
    if what == "no reward":
        return {"messages": [], "reward": None}
    if what == "removed":
        return {"messages": [], "reward": 1.0, "remove_sample": True}
    more = float((request["metadata"] or {}).get("more", 0))
    return {"messages": [{"role": "assistant", "content": [{"text": text}]}],
            "reward": float(request["label"] in text) + more}


def graded(rollout, sample):
    if GENERATION == 2:
        return {"sample": {"id": "main", **sample}}
    return {"samples": {"main": sample, "helper": {**sample, "reward": 0.0}}}


async def run(request):
    rollout = request["rollout_id"]
    entry = rollouts[rollout]
    entry["status"] = "running"
    most[0] = max(most[0], sum(e["status"] == "running" for e in rollouts.values()))
    print("most", most[0], flush=True)
    try:
        entry.update(status="success", sample=await work(request))
    except asyncio.CancelledError:
        entry.update(status="cancelled", err_message="cancelled")
    except Exception as error:
        entry.update(status="failure", err_category="agent_error", err_message=str(error))
    entry["changed"].set()
    if GENERATION == 3:
        return
    report = {k: entry[k] for k in ("status", "err_category", "err_message") if k in entry}
    key = request["controller_api_key"]
    for _ in range(2):  # a report may come twice
        await asyncio.to_thread(
            post, request["completion_callback_url"], {"rollout_id": rollout, **report}, key)
    if "sample" in entry:
        report = {**report, **graded(rollout, entry["sample"])}
    await asyncio.to_thread(
        post, request["grader_callback_url"], {"rollout_id": rollout, **report}, key)


async def answer(method, path, headers, body):
    if path == "/openapi.json":
        return 200, {"paths": dict.fromkeys(PATHS, {})}
    if path == "/health":
        return 200, {"status": "ok", "concurrency": {"max_concurrent": LIMIT}}
    if path == "/rollout/cancel":
        found = {each: "cancelled_running" if tasks[each].cancel() else "not_found"
                 for each in body["ids"] if each in tasks}
        print("cancelled", *found, flush=True)
        return 200, {"dispositions": found}
    if path == "/rollout":
        rollout = body["rollout_id"]
        if rollout in rollouts:
            return 409, {"detail": "rollout_id is already registered"}
        rollouts[rollout] = {"status": "queued", "changed": asyncio.Event()}
        tasks[rollout] = asyncio.ensure_future(run(body))
        return (200, {}) if GENERATION == 1 else (202, {
            "rollout_id": rollout, "status": "queued", "polling_lease_token": "token-" + rollout,
            "result_wait_timeout_sec": 0.5, "polling_lease_timeout_sec": 5})
    rollout = path.split("/")[2]
    entry = rollouts.get(rollout)
    if entry is None:
        return 404, {"detail": "unknown rollout_id"}
    if headers.get("x-osmosis-rollout-lease") != "token-" + rollout:
        return 403, {"detail": "invalid polling lease"}
    try:
        await asyncio.wait_for(entry["changed"].wait(), 0.5)
    except TimeoutError:
        pass
    return 200, {"rollout_id": rollout, **{k: v for k, v in entry.items() if k != "changed"}}


async def serve(reader, writer):
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    method, path, _ = head[0].split(" ")
    headers = {n.strip().lower(): v.strip() for n, _, v in (h.partition(":") for h in head[1:])}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    status, said = await answer(method, path, headers, json.loads(body) if body else None)
    data = json.dumps(said).encode()
    writer.write(f"HTTP/1.1 {status} OK\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
    await writer.drain()
    writer.close()


async def main():
    server = await asyncio.start_server(serve, "0.0.0.0", PORT)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
'''
"""A server of the GENERATION in its environment. Its workflow does what the prompt says."""

WRONG_PORT = """
import os, socket, time
os.environ.get("_OSMOSIS_ROLLOUT_PORT")
listener = socket.create_server(("127.0.0.1", 0))
time.sleep(60)
"""
"""A program that listens on another port than it should."""

ENDS = """
import os, sys
os.environ.get("_OSMOSIS_ROLLOUT_PORT")
sys.exit("no module named strands")
"""
"""A program that ends before it serves."""
