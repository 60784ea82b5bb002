"""Bugs of trainers that learn from preferences."""

from tests.known_bugs.known_bug import KnownBug
from tests.unit.trainer.preferences.test_step import PAIRS

UNIT = "tests/unit/trainer/preferences"
PACKING = f"{UNIT}/test_step.py::test_packing_and_micro_batches_change_nothing"
REWARD_MODEL = f"{UNIT}/test_reward_model.py"
BASELINE = f"{UNIT}/test_step.py::test_the_baseline_of_kto_is_a_mean_over_answers_to_other_prompts"

ONLINE = f"{UNIT}/test_online_dpo.py"

KNOWN_BUGS = (
    KnownBug(
        bug="online DPO prefers the first of two answers with equal rewards",
        seen="huggingface/trl#1839",
        code="trainer.preferences.online_dpo:pair_of",
        old="return None if is_flat or is_same else",
        new="return (0, 1) if is_flat else",
        test=f"{ONLINE}::test_the_pair_is_the_first_of_the_best_and_the_first_of_the_worst",
        given={"rewards": (0.5, 0.5, 0.5), "pair": None},
    ),
    KnownBug(
        bug="IPO compares sums of log-probabilities instead of means",
        seen="meta-pytorch/torchtune#1291",
        code="trainer.preferences.dpo:loss",
        old='("sigmoid_norm", "ipo")',
        new='("sigmoid_norm",)',
        test=f"{UNIT}/test_objectives.py::test_a_loss_is_that_of_its_formula",
        given={"name": "ipo"},
    ),
    KnownBug(
        bug="the loss of pairs is averaged per micro-batch",
        seen="modelscope/ms-swift#10144",
        code="trainer.preferences.step:micro_batch_loss",
        old="loss_U.sum() / batch.num_losses",
        new="loss_U.mean()",
        test=PACKING,
        given={"variant": "dpo", "rows": PAIRS},
    ),
    KnownBug(
        bug="the reference has the adapter on",
        seen="huggingface/trl#1871",
        code="trainer.preferences.step:reference_logprobs",
        old="reference=True",
        new="reference=False",
        test=f"{UNIT}/test_step.py::test_the_loss_of_dpo_is_that_of_four_single_passes",
    ),
    KnownBug(
        bug="KTO's baseline pairs a prompt with its own answer",
        seen="huggingface/trl#1911",
        code="trainer.preferences.batch:_answer_other_prompts",
        old="preferences[i - 1]",
        new="preferences[-1 - i]",
        test=BASELINE,
    ),
    KnownBug(
        bug="KTO's baseline is that of the last micro-batch",
        seen="PKU-Alignment/align-anything#215",
        code="trainer.preferences.step:measure_baseline",
        old="ratios += (",
        new="ratios = (",
        test=BASELINE,
    ),
    KnownBug(
        bug="a reward is read one token before the end of the answer",
        seen="EleutherAI/gpt-neox#1285",
        code="trainer.forward.packing:_Packing.add",
        old="self.lasts.append(place[-1])",
        new="self.lasts.append(place[-2])",
        test=f"{UNIT}/test_step.py::"
        "test_a_reward_is_the_heads_value_at_the_token_that_ends_the_turn",
    ),
    KnownBug(
        bug="the head of a reward model is not saved",
        seen="huggingface/trl#1379",
        code="trainer.learner:_export",
        old="export(trained)",
        new="export({n: t for n, t in trained.items() if 'score' not in n})",
        test=f"{REWARD_MODEL}::test_its_head_is_trained_beside_the_adapter",
    ),
    KnownBug(
        bug="a reward model scores answers without the token that ends its training rows",
        seen="huggingface/trl#5813",
        code="trainer.scorer:_score",
        old="        found.examples,\n",
        new="        [type(e)(0, e.sequence.model_copy(update={n: getattr(e.sequence, n)[:-1] for n in "
        "('tokens', 'loss_mask', 'logprobs')})) for e in found.examples],\n",
        test="tests/unit/trainer/test_scorer.py::test_a_score_is_that_of_training",
    ),
)
