"""The templates of `headrace rollout init`: what each of them is, and the files that it makes.

The entry points are in examples/templates of a source checkout, and inside of this package in a wheel.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import producers
from producers.cli.errors import Failure

NAME = re.compile(r"^[a-z0-9][a-z0-9_-]{0,62}$")
FACTORS = range(2, 10)


@dataclass(frozen=True, slots=True)
class Template:
    """A kind of rollout: one line about it, and the packages that it needs. `is_environment` means that
    each row holds a task of the environment."""

    about: str
    packages: tuple[str, ...] = ()
    is_environment: bool = False


TEMPLATES = {
    "single": Template("one question, one answer"),
    "multi-turn": Template("two turns: an answer, and a check of it"),
    "tools": Template("a function that the model may call, in the built-in loop"),
    "openai-agents": Template("an agent of the OpenAI Agents SDK", ("openai-agents>=0.3",)),
    "strands": Template("an agent of the Strands SDK", ("strands-agents[openai]>=1.10",)),
    "verifiers": Template(
        "a taskset of the package verifiers", ("verifiers>=0.4,<0.5",), is_environment=True
    ),
}
ALIASES = {"single-turn": "single"}

PROJECT = """[project]
name = "{name}"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = [{packages}]
"""

CONFIG = """# Trains {name} on data/{name}.jsonl. Try the rollout first:
#   headrace rollout test {name}
# Then upload the data, commit the files, and submit:
#   headrace dataset upload data/{name}.jsonl --name {name}
#   headrace train submit configs/training/{name}.toml --watch

[experiment]
rollout = "{name}"
entrypoint = "main.py"
model_path = "scratch:qwen3-4m"  # random weights, for a first try; then e.g. "Qwen/Qwen3-0.6B"
dataset = "{name}"

[training]
lr = 1e-5
total_epochs = 1
n_samples_per_prompt = 4
rollout_batch_size = 8
max_prompt_length = 1536
max_response_length = 1024  # of all turns together
max_answer_length = 256
agent_workflow_timeout_s = 120
grader_timeout_s = 60

[advanced]
algorithm = "grpo"
tuning = "lora"
"""

README = """# {name}

{about}. `main.py` holds the code, and `pyproject.toml` the packages that it needs.

```text
headrace rollout validate {name}
headrace rollout test {name} --rows 2
headrace rollout test {name} --provider-model openai/gpt-5-mini
```

The model, the limits and the algorithm are in `configs/training/{name}.toml`, and the rows in
`data/{name}.jsonl`.
"""


def template_named(name: str) -> Template:
    """The template of this name. Raises Failure."""
    found = TEMPLATES.get(ALIASES.get(name, name))
    if found is None:
        raise Failure(
            "NOT_FOUND", f"there is no template {name!r}; there are: {', '.join(TEMPLATES)}"
        )
    return found


def make_rollout(workspace: Path, name: str, template: str) -> list[Path]:
    """Write the files of a new rollout into a workspace, and return their paths. Raises Failure when the
    name is not allowed, or a file exists already."""
    if not NAME.fullmatch(name):
        raise Failure(
            "VALIDATION",
            f"{name!r} cannot name a rollout; use lower case letters, digits, '_' and '-', at most 63",
        )
    kind = template_named(template)
    filled = {
        "name": name,
        "about": kind.about[0].upper() + kind.about[1:],
        "packages": ", ".join(f'"{package}"' for package in kind.packages),
    }
    files = {
        workspace / "rollouts" / name / "main.py": _main(ALIASES.get(template, template)),
        workspace / "rollouts" / name / "pyproject.toml": PROJECT.format(**filled),
        workspace / "rollouts" / name / "README.md": README.format(**filled),
        workspace / "configs" / "training" / f"{name}.toml": CONFIG.format(**filled),
        workspace / "data" / f"{name}.jsonl": _rows(is_environment=kind.is_environment),
    }
    taken = [path for path in files if path.exists()]
    if taken:
        listed = ", ".join(str(path.relative_to(workspace)) for path in taken)
        raise Failure("CONFLICT", f"{listed} exists already; choose another name, or remove it")
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return list(files)


def _main(template: str) -> str:
    root = Path(producers.__file__).parent
    for place in (root / "scaffold" / "templates", root.parent / "examples" / "templates"):
        path = place / template / "main.py"
        if path.is_file():
            return path.read_text(encoding="utf-8")
    raise Failure(
        "NOT_FOUND", "this installation does not contain the templates; install Headrace again"
    )


def _rows(*, is_environment: bool) -> str:
    """A small dataset: products of two digits."""
    lines = []
    for a in FACTORS:
        for b in FACTORS:
            question = f"{a} * {b}?" if is_environment else f"What is {a} * {b}?"
            row: dict[str, object] = {"user_prompt": question, "ground_truth": str(a * b)}
            if is_environment:
                task = {"prompt": question, "answer": a * b}
                row["metadata"] = {"task": json.dumps(task)}
            lines.append(json.dumps(row))
    return "\n".join(lines) + "\n"
