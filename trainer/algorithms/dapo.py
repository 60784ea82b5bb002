"""DAPO: decoupled clip and dynamic sampling policy optimization (arXiv 2503.14476).

    loss = - (1 / sum_i len_i) sum_i sum_t min(r_t A_i, clip(r_t, 1 - 0.2, 1 + 0.28) A_i)

A_i is GRPO's. The upper clip is wider than the lower one, so that unlikely tokens can grow; the mean
is one over all actions of the step, so that long answers weigh what they are long; there is no KL.
Two parts stand elsewhere: a group whose rewards are all equal is dropped and another row asked for
in its place (`consumers/run/rules.py`), and the penalty of overlong answers is part of the reward
(`trainer/objective/overlong.py`; off until the run sets overlong_buffer).
"""

from trainer.grpo import advantages, loss
from trainer.objective.hyperparameters import Hyperparameters
from trainer.objective.objective import Objective, by_group

OBJECTIVE = Objective(
    estimate=by_group(advantages),
    loss=loss,
    defaults=Hyperparameters(clip_low=0.2, clip_high=0.28, aggregation="token_mean"),
)
