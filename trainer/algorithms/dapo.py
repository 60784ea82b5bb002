"""DAPO: decoupled clip and dynamic sampling policy optimization (arXiv 2503.14476).

    loss = - (1 / sum_i len_i) sum_i sum_t min(r_t A_i, clip(r_t, 1 - 0.2, 1 + 0.28) A_i)

A_i is GRPO's. The upper clip is wider than the lower one, so that the probability of unlikely tokens can
grow. The mean is over all actions of the step, so that an answer counts in proportion to its length.
There is no KL. Two parts of the paper are elsewhere. A group whose rewards are all equal is dropped, and
another row is requested in its place (`consumers/run/rules.py`). The penalty for overlong answers is
part of the reward (`trainer/objective/overlong.py`), and is off until the run sets overlong_buffer.
"""

from trainer.grpo import advantages, loss
from trainer.objective.hyperparameters import Hyperparameters
from trainer.objective.objective import Objective, by_group

OBJECTIVE = Objective(
    estimate=by_group(advantages),
    loss=loss,
    defaults=Hyperparameters(clip_low=0.2, clip_high=0.28, aggregation="token_mean"),
)
