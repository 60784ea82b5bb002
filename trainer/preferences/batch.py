"""A batch of preferences as training rows, and how whole pairs are packed into micro-batches.

An answer is a row of its own: the prompt, which is context, and the answer with the token that ends its
turn, which is learned. The ids are those of supervised learning (`trainer/model/loss_turns.py`). The
answers of a row are neighbours, so their prompt is packed once. A loss compares the answers of a pair,
so a pair is never divided between micro-batches; one that is larger than `micro_batch_tokens` is a pass
of its own.

A row longer than the run's max_sequence_length is cut at its end. An answer of which nothing is left is
not learned. Neither is its pair, nor a pair whose answers differ only beyond the limit. A reward model
does not learn a pair of which an answer is cut.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from schemas.errors import Refused
from schemas.learner import Conversation, Preference
from trainer.algorithms import sft
from trainer.forward.packing import Example, MicroBatch, group_into_trees, pack
from trainer.model.chat_template import Chat
from trainer.objective.batch import with_masks
from trainer.objective.sequences import Rows
from trainer.policy import Policy
from trainer.preferences.objective import PreferenceObjective


@dataclass(frozen=True, slots=True)
class PreferenceUnit:
    """The answers of a dataset row or group that are learned together: a pair (the chosen one first), or
    for KTO all that the row has. `examples` are the rows of each answer, with `Example.sample` as its
    number, and `is_chosen` has an entry for each answer. `margin` is by how much the rewards of a pair
    should differ."""

    examples: tuple[Example, ...]
    is_chosen: tuple[bool, ...]
    margin: float = 0.0


@dataclass(frozen=True, slots=True)
class PreferenceBatch:
    """The units of a batch. `mismatched` are prompts with the answers of other rows, if the objective
    has a baseline. `num_losses` is the number of pairs or answers that the loss is averaged over.
    `num_cut` answers were longer than the limit, and `num_lost` of `num_rows` rows are not learned."""

    units: tuple[PreferenceUnit, ...]
    mismatched: tuple[PreferenceUnit, ...]
    num_losses: int
    num_rows: int
    num_cut: int
    num_lost: int

    def with_masks(self, policy: Policy) -> "PreferenceBatch":
        """The batch with the token masks of answers that were sampled under a grammar."""
        units = tuple(
            replace(unit, examples=with_masks(unit.examples, policy)) for unit in self.units
        )
        return replace(self, units=units)

    def metrics(self) -> dict[str, float]:
        """The metrics of the batch, by key: how many tokens are learned, and what was cut or lost."""
        learned = [example for unit in self.units for example in unit.examples]
        return {
            "train/learned_tokens": float(sum(example.num_actions for example in learned)),
            "train/truncated_ratio": self.num_cut / max(1, self.num_rows),
            "train/unlearned_ratio": self.num_lost / max(1, self.num_rows),
        }


@dataclass(frozen=True, slots=True, eq=False)
class PreferenceMicroBatch:
    """Whole units in one pass. `answers` says which answer each action belongs to, and `is_chosen` has
    an entry for each answer. `firsts` has the places of the chosen answers of pairs; the rejected one
    follows each. `margins` are those of the units."""

    packed: MicroBatch
    answers: Rows
    is_chosen: tuple[bool, ...]
    firsts: tuple[int, ...]
    margins: tuple[float, ...]


def encode(
    preferences: Sequence[Preference],
    objective: PreferenceObjective,
    *,
    chat: Chat,
    max_tokens: int,
) -> PreferenceBatch:
    """Preferences as training rows of at most `max_tokens` tokens. Raises Refused for a row without the
    answers that the objective compares."""
    units, lost, cut = [], 0, 0
    for one in preferences:
        answers = _answers_of(one, objective)
        rows = _rows(chat, one, [text for text, _ in answers], max_tokens=max_tokens)
        cut += rows.num_cut > 0
        kept = [
            (example, is_chosen)
            for example, (_, is_chosen) in zip(rows.examples, answers, strict=True)
            if example.num_actions
        ]
        has_no_end = objective.has_head and rows.num_cut > 0
        if not kept or has_no_end or (objective.is_paired and not _can_compare(rows.examples)):
            lost += 1
            continue
        margin = one.margin or 0.0
        units.append(PreferenceUnit(tuple(e for e, _ in kept), tuple(c for _, c in kept), margin))
    num_answers = sum(len(unit.examples) for unit in units)
    return PreferenceBatch(
        tuple(units),
        _answer_other_prompts(chat, preferences, max_tokens=max_tokens)
        if objective.has_baseline
        else (),
        num_losses=len(units) if objective.is_paired else num_answers,
        num_rows=len(preferences),
        num_cut=cut,
        num_lost=lost,
    )


def _answers_of(one: Preference, objective: PreferenceObjective) -> list[tuple[str, bool]]:
    """The answers of a row, the chosen one first, each with whether it is chosen."""
    found = [
        (text, c) for text, c in ((one.chosen, True), (one.rejected, False)) if text is not None
    ]
    if len(found) < (2 if objective.is_paired else 1):
        missing = "chosen" if one.chosen is None else "rejected"
        raise Refused(
            f"row {one.row} has no {missing} answer; upload a dataset with the columns prompt, chosen "
            "and rejected, or for kto with prompt, completion and label"
        )
    return found


def _can_compare(examples: Sequence[Example]) -> bool:
    """Whether both answers of a pair have learned tokens, and differ within the limit."""
    chosen, rejected = examples
    differ = chosen.sequence.tokens != rejected.sequence.tokens
    return differ and all(example.num_actions for example in examples)


def _answer_other_prompts(
    chat: Chat, preferences: Sequence[Preference], *, max_tokens: int
) -> tuple[PreferenceUnit, ...]:
    """Each prompt with the answers of the row before it; that of the first row with those of the
    last. Empty where there is one row, which has no other."""
    if len(preferences) < 2:
        return ()
    units = []
    for i, one in enumerate(preferences):
        other = preferences[i - 1]
        texts = [text for text in (other.chosen, other.rejected) if text is not None]
        kept = [e for e in _rows(chat, one, texts, max_tokens=max_tokens).examples if e.num_actions]
        if kept:
            units.append(PreferenceUnit(tuple(kept), (False,) * len(kept)))
    return tuple(units)


def _rows(
    chat: Chat, one: Preference, texts: Sequence[str], *, max_tokens: int
) -> sft.Demonstrations:
    """The row's prompt with each of these answers, one training row each."""
    talk = [
        Conversation(one.row, (*one.prompt, ("assistant", text)), tools=one.tools) for text in texts
    ]
    return sft.demonstrations(chat, talk, max_tokens=max_tokens, learned="last")


def micro_batches(
    policy: Policy, units: Sequence[PreferenceUnit], *, micro_batch_tokens: int
) -> Iterator[PreferenceMicroBatch]:
    """Units in order -> micro-batches of at most `micro_batch_tokens` tokens, or of a single larger
    unit. Where rows are not packed, all are as long as the longest, and padding counts."""
    chunk: list[PreferenceUnit] = []
    total = num_rows = longest = 0
    for unit in units:
        rows = num_rows + len(unit.examples)
        long = max(longest, *(len(example.sequence.tokens) for example in unit.examples))
        own = _num_packed(policy, unit)
        size = total + own if policy.shares_prompts else rows * long
        if chunk and size > micro_batch_tokens:
            yield _pack(policy, chunk)
            chunk, total, rows = [], 0, len(unit.examples)
            long = max(len(example.sequence.tokens) for example in unit.examples)
        chunk.append(unit)
        total, num_rows, longest = total + own, rows, long
    if chunk:
        yield _pack(policy, chunk)


def _num_packed(policy: Policy, unit: PreferenceUnit) -> int:
    """The tokens of a unit that shares what its answers begin with."""
    trees = group_into_trees(
        unit.examples, most=sys.maxsize, share=True, prefixes=policy.shares_prefixes
    )
    return sum(tree.num_tokens for tree in trees)


def _pack(policy: Policy, units: Sequence[PreferenceUnit]) -> PreferenceMicroBatch:
    examples = [example for unit in units for example in unit.examples]
    named = [(n, example.sample) for n, unit in enumerate(units) for example in unit.examples]
    number = {name: place for place, name in enumerate(dict.fromkeys(named))}
    (packed,) = pack(
        examples,
        micro_batch_tokens=sys.maxsize,
        share=policy.shares_prompts,
        prefixes=policy.shares_prefixes,
        device=policy.device,
    )
    firsts, place = [], 0
    for unit in units:
        if unit.is_chosen == (True, False):
            firsts.append(place)
        place += len(unit.is_chosen)
    answer_of_row = torch.tensor([number[name] for name in named], device=policy.device)
    return PreferenceMicroBatch(
        packed,
        Rows(answer_of_row[packed.row_M], len(number)),
        tuple(c for unit in units for c in unit.is_chosen),
        tuple(firsts),
        tuple(unit.margin for unit in units),
    )
