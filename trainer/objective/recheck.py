"""The witness of a step (`trainer/objective/attestation.py`), and its second pass over some samples
with the earlier version that made them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from schemas.learner import StepBatch
from trainer.forward.packing import Example, MicroBatch, pack
from trainer.objective.attestation import RECHECKED_TOKENS, Witness, default_bound
from trainer.objective.batch import examples_of, with_masks
from trainer.objective.hyperparameters import Hyperparameters
from trainer.policy import Policy


def witness_of(
    policy: Policy,
    batch: StepBatch,
    hyperparameters: Hyperparameters,
    *,
    sampled: dict[str, torch.Tensor] | None,
) -> Witness | None:
    """The witness of a step that starts from this policy, or None if it does not test its samples.
    `sampled` are the trained tensors of the version that made them, if it is an earlier one."""
    if not batch.attests:
        return None
    groups = batch.groups
    base = policy.loaded.base
    default = default_bound(base.model.device, base.model.dtype)
    vocabulary = int(base.model.config.get_text_config().vocab_size)
    scale = max(1.0, 1 / hyperparameters.temperature)
    if sampled is None:
        return Witness(groups, default, vocabulary, scale)
    earlier = replace(policy, tensors=sampled, critic=None)

    def recheck(
        chosen: Sequence[int],
    ) -> Iterator[tuple[MicroBatch, torch.Tensor, torch.Tensor]]:
        wanted = frozenset(chosen)
        examples = [row for row in examples_of(groups) if row.sample in wanted]
        return _logprobs_of(earlier, with_masks(examples, earlier), hyperparameters)

    return Witness(groups, default, vocabulary, scale, recheck, batch.step)


@torch.no_grad()
def _logprobs_of(
    policy: Policy, examples: Sequence[Example], hyperparameters: Hyperparameters
) -> Iterator[tuple[MicroBatch, torch.Tensor, torch.Tensor]]:
    micro_batches = pack(
        list(_beginnings(examples)),
        micro_batch_tokens=hyperparameters.micro_batch_tokens,
        splits=hyperparameters.splits_groups,
        share=policy.shares_prompts,
        prefixes=policy.shares_prefixes,
        drops_unread=hyperparameters.drops_unread,
        device=policy.device,
    )
    for micro in micro_batches:
        yield micro, *policy.logprobs(micro, temperature=hyperparameters.temperature)


def _beginnings(examples: Sequence[Example]) -> Iterator[Example]:
    """The rows of each sample up to its first RECHECKED_TOKENS actions."""
    left: dict[int, int] = {}
    for example in examples:
        room = left.get(example.sample, RECHECKED_TOKENS)
        places = [n for n, is_action in enumerate(example.sequence.loss_mask) if n and is_action]
        left[example.sample] = room - len(places)
        if room <= 0 or not places:
            continue
        end = places[min(room, len(places)) - 1] + 1
        row = example.sequence
        cut = row.model_copy(
            update={
                "tokens": row.tokens[:end],
                "loss_mask": row.loss_mask[:end],
                "logprobs": row.logprobs[:end],
            }
        )
        masks = {place: mask for place, mask in example.masks.items() if place < end}
        yield replace(example, sequence=cut, masks=masks)
