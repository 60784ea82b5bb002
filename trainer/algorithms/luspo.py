"""LUSPO: length-unbiased sequence policy optimization (arXiv 2602.05261).

    loss = - (1 / (S L)) sum_i len_i min(s_i A_i, clip(s_i, 1 - low, 1 + high) A_i)
           s_i as in GSPO, L = max_response_length

It is GSPO without the division by the length of each answer: that division makes the tokens of a long
answer count less than those of a short one. The paper, TRL and Liger do not divide by L. We do, so that
the size of the loss does not depend on how long answers may be; the direction is the same.
"""

from trainer.algorithms.gspo import loss
from trainer.grpo import advantages
from trainer.objective.hyperparameters import Hyperparameters
from trainer.objective.objective import Objective, by_group

OBJECTIVE = Objective(
    estimate=by_group(advantages),
    loss=loss,
    defaults=Hyperparameters(clip_low=3e-4, clip_high=4e-4, aggregation="constant"),
)
