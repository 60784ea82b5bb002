"""The loss of a teacher on a server, which says how likely each sampled token is, and nothing else.

    r_t = pi(t) / mu(t)                                     mu: the policy that sampled
    D_t = r_t stopgrad(log pi(t) - log T(t))

D_t is an estimate of the reverse KL divergence KL(pi || T) at action t, from the one token that was
sampled there. Its mean over samples of mu is that KL, and the mean of its gradient is the gradient of
that KL, because r_t corrects for the policy that sampled. So in expectation the step is that of
`trainer/distillation/divergence.py` with beta = 1, with more variance. It is the policy gradient whose
advantage is log T(t) - log pi(t) (Thinking Machines, On-Policy Distillation, 2025).

We decided:
- The gradient flows through r_t alone. Through log pi(t) - log T(t) it would be that of log pi(t), whose
  mean is 0 whatever the teacher says (verl's k1 as a supervised loss).
- Nothing is clipped, as in the objective importance_sampling. log r_t is clamped to +-20 before exp.
- The log-probabilities of the teacher are those that the group's artifact holds. They are 64-bit
  numbers, computed at a temperature of 1, which is the run's.

Shape suffix: M actions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from schemas.errors import CorruptData, Refused
from schemas.learner import GradedGroup
from schemas.models.teacher import LONGEST_TEXT
from schemas.sampling import Sequence as TokenSequence
from trainer.distillation.divergence import Comparison
from trainer.model.base import Base
from trainer.objective.kl import MAX_LOG_RATIO

REPLACED = "\ufffd"
"""Takes the place of bytes that are not a whole character. Such a text says little about its token."""


@dataclass(frozen=True, slots=True)
class RecordedTeacher:
    """A teacher whose log-probabilities are recorded with the samples. `name` is how the run's config
    names it."""

    name: str

    def read(self, row: TokenSequence) -> TokenSequence:
        """The row as the teacher read it, with its log-probabilities in the place of the sampler's.
        Raises CorruptData when they were not recorded."""
        if len(row.teacher_logprobs) != len(row.tokens):
            raise CorruptData(
                f"a sample of this batch has {len(row.teacher_logprobs)} log-probabilities of "
                f"advanced.teacher {self.name!r} for {len(row.tokens)} tokens"
            )
        return row.model_copy(update={"logprobs": row.teacher_logprobs})

    def check_vocabulary(self, groups: Sequence[GradedGroup], student: Base) -> None:
        """Raises Refused if the teacher has another text than the student for a token that it read."""
        for token, theirs in (item for group in groups for item in group.teacher_tokens.items()):
            ours = str(student.tokenizer.decode([token]))[:LONGEST_TEXT]
            # Decoders differ in the space that a token begins with.
            if REPLACED in ours + theirs or ours.strip(" ") == theirs.strip(" "):
                continue
            raise Refused(
                f"advanced.teacher {self.name!r} has another vocabulary than the model of the run: "
                f"token {token} is {theirs!r} for the teacher and {ours!r} for the run. Serve a model "
                "with the same tokenizer, or train on its answers with algorithm = 'sft'"
            )


def compare_sampled(
    student_M: torch.Tensor,
    behaviour_M: torch.Tensor,
    teacher_M: torch.Tensor,
    entropy_M: torch.Tensor,
) -> Comparison:
    """Compare student and teacher by the log-probabilities (M) of the sampled tokens. `student_M` has a
    gradient, and `behaviour_M` are those of the policy that sampled."""
    log_ratio_M = student_M - behaviour_M.to(student_M)
    ratio_M = log_ratio_M.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    student_M, teacher_M = student_M.detach(), teacher_M.to(student_M)
    return Comparison(ratio_M * (student_M - teacher_M), student_M, teacher_M, entropy_M)
