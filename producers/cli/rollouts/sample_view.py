"""One sample of a run or an evaluation: printed turn by turn, with its files downloaded."""

import re
from pathlib import Path

from producers.cli.client import Client, path_segment
from producers.cli.display.conversation import show_messages, show_output, show_reward
from producers.cli.display.output import Document, one_line, print_json, print_table, say

UNUSUAL = re.compile(r"[^A-Za-z0-9._-]")


def show_sample(client: Client, path: str, *, files: Path | None, as_json: bool) -> None:
    """Print the sample at `path` of the API, and download its files to the directory `files`. Raises
    Failure when there is no such sample."""
    sample: Document = client.get(path)["sample"]
    saved = [] if files is None else download_files(client, path, sample, files)
    if as_json:
        print_json({"sample": sample, "saved": [str(file) for file in saved]})
        return
    place = f"step {sample.get('step')}, slot {sample.get('slot')}, row {sample.get('row')}"
    say(f"sample {sample.get('id')} ({place})")
    tools = ", ".join(str(tool.get("name")) for tool in sample.get("tools") or ())
    if tools:
        say(f"  tools: {tools}")
    spoken = sample.get("messages") or sample.get("prompt") or []
    show_messages(spoken)
    branches: list[list[Document]] = sample.get("branches") or []
    for number, branch in enumerate(branches, 1):
        if branch != spoken:
            say(f"  branch {number} of {len(branches)}:")
            show_messages(branch)
    failure = sample.get("failure")
    error = f"{failure.get('category')}: {failure.get('message')}" if failure else None
    show_reward(sample | {"error": error})
    if sample.get("label") is not None:
        say(f"  truth: {sample['label']}")
    show_output(sample.get("output") or {})
    show_output(sample.get("grader_output") or {}, of=" by the grader")
    for file in saved:
        say(f"saved {file}")


def show_search(
    client: Client, path: str, text: str, *, place: str | None, limit: int, as_json: bool
) -> None:
    """Print at most `limit` samples with a text, from a place on, and how to search on."""
    answer = client.get(path, {"text": text, "place": place, "limit": limit})
    if as_json:
        print_json(answer)
        return
    rows = [
        (
            hit.get("sample"),
            hit.get("reward"),
            hit["found"].get("where"),
            one_line(
                "".join(hit["found"].get(part, "") for part in ("before", "words", "after")),
                limit=200,
            ),
        )
        for hit in answer["samples"]
    ]
    searched, following = answer["searched"], answer["next_place"]
    title = f"{len(rows)} found in {searched['samples']} samples read"
    if searched["groups"]:
        title += f", steps {searched['newest_step']} to {searched['oldest_step']}"
    print_table(title, ("sample", "reward", "text", "excerpt"), rows)
    if following:
        say(f"Earlier samples are not searched yet; add --place {following} to search them.")


def download_files(client: Client, path: str, sample: Document, directory: Path) -> list[Path]:
    """Download the files of a sample, and return where they are. Their names come from user code, so
    only plain characters of them are used, and nothing is written outside of the directory."""
    output: Document = sample.get("output") or {}
    saved = []
    for name in output.get("files") or {}:
        parts = [UNUSUAL.sub("_", part).lstrip(".") or "_" for part in str(name).split("/")]
        target = directory.joinpath(*parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        quoted = "/".join(path_segment(part) for part in str(name).split("/"))
        client.download(f"{path}/files/{quoted}", target)
        saved.append(target)
    return saved
