"""How the losses of single actions become the loss of a step: one weight per action.

    token_mean     1 / (all actions)                 every action counts the same
    sequence_mean  1 / (S len_i)                     every sample counts the same
    constant       1 / (S max_response_length)       a sum, over a constant

S counts the samples that have actions, and len_i the actions of sample i over all its rows. The
weights are global over the optimizer update, which is the step or one of its mini-batches. So they do
not depend on the micro-batches. A sample
without actions does not count. A sample whose reward is missing does, because it is part of the batch
with advantage 0. Actions of a masked sample (`mask_truncated`, `mask_failed`) have weight 0. They do not
count as actions, and their sample counts in S, as in TRL. Its reward counts in baselines.
"""

from collections.abc import Callable, Collection, Iterable, Sequence

from schemas.config import LossAggregation
from schemas.learner import GradedGroup
from trainer.forward.packing import Example
from trainer.objective.hyperparameters import Hyperparameters


def masked_samples(groups: Sequence[GradedGroup], hyperparameters: Hyperparameters) -> set[int]:
    """The numbers of the samples that are left out of the loss: those that were cut off, and those that
    failed, if the run asks for it."""
    samples = enumerate(sample for group in groups for sample in group.samples)
    return {
        number
        for number, sample in samples
        if (hyperparameters.mask_truncated and sample.truncated)
        or (hyperparameters.mask_failed and sample.failure is not None)
    }


def token_weights(
    examples: Iterable[Example],
    hyperparameters: Hyperparameters,
    *,
    masked: Collection[int] = (),
) -> dict[int, float]:
    """Sample number -> w_t, the weight of each of its actions. Samples without actions have no entry.
    Those of `masked` samples are 0. `examples` are the rows of one optimizer update. The weights of all
    its actions sum to 1, except with `constant` or masked samples."""
    lengths: dict[int, int] = {}
    for example in examples:
        lengths[example.sample] = lengths.get(example.sample, 0) + example.num_actions
    lengths = {sample: length for sample, length in lengths.items() if length}
    seen = {sample: length for sample, length in lengths.items() if sample not in masked}
    weight_of: dict[LossAggregation, Callable[[int], float]] = {
        "sequence_mean": lambda length: 1 / (len(lengths) * length),
        "token_mean": lambda length: 1 / sum(seen.values()),
        "constant": lambda length: 1 / (len(lengths) * hyperparameters.max_response_length),
    }
    weigh = weight_of[hyperparameters.aggregation]
    return {sample: weigh(n) if sample in seen else 0.0 for sample, n in lengths.items()}
