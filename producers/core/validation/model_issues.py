"""Checks that the model has what a config needs: enough positions for its lengths, and the characters of
its datasets."""

from collections.abc import Iterator

from infra.settings.vllm import Tuning
from producers.core.models.model_facts import ModelFacts
from schemas.algorithms import is_offline, samples_nothing
from schemas.config import EvalConfig, RunConfig
from schemas.errors import Issue
from schemas.events import DatasetRegistered
from schemas.limits import longest_answer

QUOTED_CHARACTERS = 8


def length_issues(config: RunConfig | EvalConfig, context: int | None) -> Iterator[Issue]:
    """Issues with lengths in the file that are longer than the model's context. A length that the file
    does not name is limited to the context. Nothing is checked if the context is not known (None)."""
    if context is None:
        return
    if isinstance(config, RunConfig) and is_offline(config.advanced):
        longest = config.advanced.max_sequence_length
        if "max_sequence_length" in config.advanced.model_fields_set and longest > context:
            yield Issue("advanced.max_sequence_length", _too_long(longest, context))
            return
    section = "training" if isinstance(config, RunConfig) else "advanced"
    values = config.training if isinstance(config, RunConfig) else config.advanced
    prompt, answer = values.max_prompt_length, longest_answer(values)
    named = values.model_fields_set
    key = "max_response_length" if values.max_answer_length is None else "max_answer_length"
    is_prompt_too_long = "max_prompt_length" in named and prompt >= context
    is_answer_too_long = key in named and answer >= context
    if is_prompt_too_long:
        yield Issue(f"{section}.max_prompt_length", _too_long(prompt, context, room=1))
    if is_answer_too_long:
        yield Issue(f"{section}.{key}", _too_long(answer, context, room=1))
    are_both_named = {"max_prompt_length", key} <= named
    is_one_too_long = is_prompt_too_long or is_answer_too_long
    if are_both_named and not is_one_too_long and prompt + answer > context:
        yield Issue(
            f"{section}.{key}",
            f"must be at most {context - prompt} with a max_prompt_length of {prompt}, got {answer}: "
            f"the model has {context} positions",
        )


def _too_long(length: int, context: int, *, room: int = 0) -> str:
    return f"must be at most {context - room}, got {length}: the model has {context} positions"


def unknown_characters(facts: ModelFacts, *datasets: DatasetRegistered | None) -> Iterator[str]:
    """A warning for each dataset with characters that a character vocabulary does not have."""
    if facts.characters is None:
        return
    for dataset in (d for d in datasets if d is not None):
        yield from missing_symbols(facts.characters, dataset.dataset.name, dataset.characters)


def missing_symbols(vocabulary: str, dataset: str, characters: str) -> Iterator[str]:
    """A warning if a dataset (its name) has characters that a vocabulary does not have."""
    missing = [c for c in characters if c not in vocabulary]
    if missing:
        quoted = " ".join(map(repr, missing[:QUOTED_CHARACTERS]))
        more = ", ..." if len(missing) > QUOTED_CHARACTERS else ""
        yield (
            f"the model's vocabulary has no symbol for {len(missing)} characters of "
            f"{dataset} and reads them as <|unk|>: {quoted}{more}; choose another "
            "shape (`headrace models`) or a model with its own tokenizer"
        )


def vllm_issues(config: RunConfig, *, tuning: Tuning) -> Iterator[Issue]:
    """Issues with versions that the vLLM servers do not sample. `tuning` names those that they do."""
    may_sample = not samples_nothing(config.advanced) or config.experiment.rollout
    if config.advanced.tuning == "full" and tuning == "lora" and may_sample:
        yield Issue(
            "advanced.tuning",
            "is 'full', and the vLLM servers of this platform take adapters only; start Headrace with "
            "HEADRACE_VLLM_TUNING=full (and vLLM servers of your own with VLLM_SERVER_DEV_MODE=1) or "
            "with HEADRACE_SAMPLER=torch, or set 'lora'",
        )
    if config.advanced.lora_variant == "dora":
        yield Issue(
            "advanced.lora_variant",
            "is 'dora', which vLLM does not serve, and HEADRACE_SAMPLER names vLLM; leave it out, or "
            "set HEADRACE_SAMPLER=torch",
        )
