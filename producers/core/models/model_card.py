"""The model card of an uploaded checkpoint: the README.md of its repository on a hub.

Every value may be a user's text. In the header it is a JSON string, which YAML reads as text, and in the
body it is in a block of code that it cannot end.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from producers.core.datasets.versions import name_of_version
from producers.core.lookup import Checkpoint
from producers.core.models.comparison import flat_settings
from schemas.deployments import MAX_CARD, HubForm, shown_base_name

CURVES = (
    ("rollout/raw_reward", "reward"),
    ("eval/validation/reward", "held-out reward"),
    ("train/loss", "loss"),
    ("train/kl", "KL"),
    ("train/entropy_loss", "entropy"),
    ("rollout/response_lengths", "response length"),
)
UNKNOWN = "not known; look it up before you use the model"
ROWS = 20
MOST_SETTINGS, LONGEST_SETTING = 120, 120
LEFT_OUT = ("env.", "secrets.", "experiment.model_path")
"""Settings that are not published: values of the environment, and paths of a server."""
ADDRESSES: Mapping[str, Any] = {
    "advanced": {
        "network": True,
        "rubrics": {"__all__": {"base_url", "api_key_secret"}},
        "teacher_base_url": True,
        "teacher_api_key_secret": True,
    }
}
"""Settings that name machines, which may be those of a private network. They are not published."""

Curve = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class CardFacts:
    """The facts that a card states besides the run itself. `licence` is that of the base model (None:
    not known). `held_out` is the held-out reward of the checkpoint. `commit` is that of the code."""

    repository: str
    form: HubForm
    private: bool
    curves: Mapping[str, Curve]
    licence: str | None
    held_out: float | None
    commit: str | None


def model_card(checkpoint: Checkpoint, facts: CardFacts) -> str:
    """The card as Markdown, with the header that hubs read."""
    parts = (
        _header(checkpoint, facts),
        _introduction(checkpoint, facts),
        _use(checkpoint, facts),
        _curves(facts.curves),
        _origin(checkpoint, facts),
        _settings(checkpoint),
    )
    return "\n".join(part for part in parts if part)[:MAX_CARD]


def _header(checkpoint: Checkpoint, facts: CardFacts) -> str:
    model, run = checkpoint.spec.model, checkpoint.run
    lines = ["---", f"library_name: {'peft' if facts.form == 'adapter' else 'transformers'}"]
    if model.kind == "hub":
        lines.append(f"base_model: {_quote(model.name)}")
        relation = "adapter" if facts.form == "adapter" else "finetune"
        lines.append(f"base_model_relation: {relation}")
    if facts.licence is not None:
        lines.append(f"license: {_quote(facts.licence)}")
    tags = ("headrace", "reinforcement-learning", run.config.advanced.algorithm)
    task = "text-classification" if checkpoint.is_reward_model else "text-generation"
    lines += [f"pipeline_tag: {task}", "tags:", *(f"- {_quote(tag)}" for tag in tags)]
    return "\n".join([*lines, "---", ""])


def _introduction(checkpoint: Checkpoint, facts: CardFacts) -> str:
    what = {
        "adapter": "The LoRA adapter",
        "merged": "The base model with the LoRA adapter added,",
        "model": "All weights",
    }[facts.form]
    reward = checkpoint.saved.reward
    rewards = [
        f"held-out reward {facts.held_out:.4g}" if facts.held_out is not None else "",
        f"training reward {reward:.4g}" if reward is not None and math.isfinite(reward) else "",
    ]
    told = ", ".join(text for text in rewards if text)
    return (
        f"# {facts.repository}\n\n"
        f"{what} of checkpoint {_code(checkpoint.ref)}, trained with Headrace by "
        f"{_code(checkpoint.run.config.advanced.algorithm)} on {_code(base_name(checkpoint))}"
        f"{' (' + told + ')' if told else ''}.\n\n"
        f"Licence of the base model: {_code(facts.licence or UNKNOWN)}.\n"
    )


def base_name(checkpoint: Checkpoint) -> str:
    """The name of the base model, without the path of a directory."""
    return shown_base_name(checkpoint.run.config.experiment.model_path)


def _use(checkpoint: Checkpoint, facts: CardFacts) -> str:
    repository = facts.repository
    lines = ["## Use", "", "```python", "from transformers import AutoModelForCausalLM"]
    if facts.form != "adapter":
        lines.append(f'model = AutoModelForCausalLM.from_pretrained("{repository}")')
    else:
        has_base = any(name.startswith("base/") for name in checkpoint.files())
        base = f'"{repository}", subfolder="base"' if has_base else _quote(base_name(checkpoint))
        kind = "AutoModelForCausalLM"
        if checkpoint.is_reward_model:
            kind, base = "AutoModelForSequenceClassification", f"{base}, num_labels=1"
        lines[3:] = [
            "from peft import PeftModel",
            f"from transformers import {kind}",
            f"base = {kind}.from_pretrained({base})",
            f'model = PeftModel.from_pretrained(base, "{repository}")',
        ]
    return "\n".join([*lines, "```", ""])


def _curves(curves: Mapping[str, Curve]) -> str:
    shown = [(key, title) for key, title in CURVES if curves.get(key)]
    if not shown:
        return ""
    by_step: dict[int, dict[str, float]] = {}
    for key, _ in shown:
        for step, value in curves[key]:
            by_step.setdefault(step, {})[key] = value
    steps = _thin(sorted(by_step))
    lines = [
        "## Curves",
        "",
        "| step | " + " | ".join(title for _, title in shown) + " |",
        "|---|" + "---|" * len(shown),
        *(
            f"| {step} | " + " | ".join(_cell(by_step[step].get(key)) for key, _ in shown) + " |"
            for step in steps
        ),
        "",
    ]
    return "\n".join(lines)


def _thin(steps: Sequence[int]) -> Sequence[int]:
    """At most ROWS steps, with the first and the last."""
    if len(steps) <= ROWS:
        return steps
    last = len(steps) - 1
    return [steps[round(i * last / (ROWS - 1))] for i in range(ROWS)]


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _origin(checkpoint: Checkpoint, facts: CardFacts) -> str:
    run, saved = checkpoint.run, checkpoint.saved
    dataset = name_of_version(run.dataset.name, run.dataset.version)
    rows = (
        ("run", run.run),
        ("checkpoint", checkpoint.ref),
        ("saved", checkpoint.at.isoformat(timespec="seconds")),
        ("dataset", f"{dataset} (sha256 {run.dataset.content.sha256})"),
        ("code commit", facts.commit or ""),
        ("manifest sha256", saved.manifest.sha256),
        ("weights sha256", saved.adapter_sha256),
    )
    lines = [f"| {key} | {_code(value)} |" for key, value in rows if value]
    table = ["| | |", "|---|---|", *lines]
    after = "`headrace.json` has the SHA-256 of every file."
    return "\n".join(["## Where it comes from", "", *table, "", after, ""])


def _settings(checkpoint: Checkpoint) -> str:
    config: Mapping[str, Any] = checkpoint.run.config.model_dump(
        mode="json", exclude_none=True, exclude_defaults=True, exclude=ADDRESSES
    )
    pairs = [(k, v) for k, v in flat_settings(config) if not k.startswith(LEFT_OUT)]
    lines = [f"{key} = {_one_line(value)}" for key, value in pairs[:MOST_SETTINGS]]
    return "\n".join(["## Settings", "", "```", *lines, "```", ""]) if lines else ""


def _quote(text: str) -> str:
    return json.dumps(text)


def _one_line(text: str) -> str:
    shown = "".join(c if c.isprintable() else " " for c in text).replace("`", "'")
    return shown if len(shown) <= LONGEST_SETTING else shown[: LONGEST_SETTING - 1] + "…"


def _code(text: str) -> str:
    """A text as inline code, which a hub shows as it is."""
    return f"`{_one_line(text).replace('|', '/')}`"
