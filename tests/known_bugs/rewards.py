"""Known bugs between rewards and advantages."""

from math import nan

from tests.known_bugs.known_bug import KnownBug

GRPO = "trainer.grpo:advantages"
PREPARE = "trainer.grpo:prepare_batch"
UNIT = "tests/unit/trainer"
CURRICULUM = "tests/unit/consumers/run/test_curriculum.py"
HERE = "tests/known_bugs/test_by_hand.py"
AGENTS = f"{UNIT}/objective/test_agents.py"

KNOWN_BUGS = (
    KnownBug(
        bug="GDPO takes its last mean and deviation over tokens, so long answers count more",
        seen="verl-project/verl#6497",
        code="trainer.algorithms.gdpo:estimate",
        old="advantage_S = advantages(sums)",
        new="""places = before.sample_E.tolist()
    of_tokens = advantages([sums[place] for place in places])
    advantage_S = [of_tokens[places.index(n)] for n in range(len(sums))]""",
        test=f"{HERE}::test_gdpo_weighs_samples_equally_however_long_they_are",
    ),
    KnownBug(
        bug="rewards of later turns, with their baselines, are summed up at a turn",
        seen="verl-project/verl#7244",
        code="trainer.objective.turns:spread_turns",
        old="zip(sample.turns, of_turn, strict=False)",
        new="zip(sample.turns, [sum(of_turn[n:]) for n in range(len(of_turn))], strict=False)",
        test=f"{UNIT}/objective/test_turns.py::"
        "test_the_reward_of_a_turn_is_not_that_of_turns_before_it",
    ),
    KnownBug(
        bug="the agents of a sample are compared with each other",
        seen="PrimeIntellect-ai/prime-rl#3108",
        code="trainer.objective.agents:with_agents",
        old="teams.setdefault((group, agent), len(teams))",
        new="teams.setdefault((group, None), len(teams))",
        test=f"{AGENTS}::test_an_agent_is_compared_with_itself_in_the_samples_where_it_acted",
    ),
    KnownBug(
        bug="an agent is alone in its group, so that its reward is its advantage, or nothing",
        seen="rllm-org/rllm#605",
        code="trainer.objective.agents:with_agents",
        old="teams.setdefault((group, agent), len(teams))",
        new="len(group_S)",
        test=f"{AGENTS}::test_an_agent_is_compared_with_itself_in_the_samples_where_it_acted",
    ),
    KnownBug(
        bug="a filter of equal rewards drops groups whose parts differ",
        seen="NovaSky-AI/SkyRL#2104",
        code="consumers.run.settle:_num_distinct",
        old="zip(*(group.parts.values() or [group.rewards]), strict=True)",
        new="zip(group.rewards)",
        test="tests/unit/consumers/run/test_run_filter.py::"
        "test_gdpo_gets_the_parts_of_rewards_and_compares_them",
    ),
    KnownBug(
        bug="a filter leaves a batch smaller although more groups were sampled",
        seen="areal-project/AReaL#453",
        code="consumers.run.settle:batch_of",
        old="for group in groups if",
        new="for group in groups[:most] if",
        test=f"{CURRICULUM}::test_a_batch_has_the_first_groups_that_differ_whatever_was_graded_first",
        given={
            "results": ((None, None), (1.0, 1.0), (0.0, 1.0), (None, 1.0)),
            "slots": [1, 2],
            "reverse": False,
        },
    ),
    KnownBug(
        bug="the pools of rows are forgotten",
        seen="PrimeIntellect-ai/prime-rl#839",
        code="consumers.run.curriculum:close_step",
        old="pools=pools.as_of(step)",
        new="pools={}",
        test=f"{CURRICULUM}::test_solved_and_unsolved_rows_go_to_pools_and_are_not_requested_again",
    ),
    KnownBug(
        bug="a run does not say that all its rows are too easy or too hard",
        seen="invergent-ai/surogate#73",
        code="consumers.run.requests:_warn_of_pools",
        old="if decided.num_normal >= wanted or",
        new="if decided.num_normal >= 0 or",
        test=f"{CURRICULUM}::test_a_run_whose_rows_are_all_solved_or_none_goes_on_and_says_so_once",
        given={"reward": 0.0, "category": "none", "says": "set advanced.curriculum.pass_reward"},
    ),
    KnownBug(
        bug="the deviation of a group has ddof 0",
        seen="NVIDIA/TorchFort#38",
        code=GRPO,
        old="(len(known) - 1)",
        new="len(known)",
        test=f"{UNIT}/test_grpo.py::test_advantages_are_whitened_with_the_sample_deviation",
    ),
    KnownBug(
        bug="GRPO does not divide by the group's deviation",
        seen="huggingface/open-r1#67",
        code=GRPO,
        old="(r - mean) / (std + EPS)",
        new="(r - mean)",
        test=f"{UNIT}/test_grpo.py::test_advantages_are_whitened_with_the_sample_deviation",
    ),
    KnownBug(
        bug="a sample that nobody could grade enters the baseline with reward 0",
        seen="huggingface/trl#5902",
        code=GRPO,
        old="known = [r for r in rewards if r is not None and math.isfinite(r)]",
        new="known = [r if r is not None and math.isfinite(r) else 0.0 for r in rewards]",
        test=f"{UNIT}/test_grpo.py::test_a_missing_reward_stays_out_of_the_baseline",
        given={"missing": None},
    ),
    KnownBug(
        bug="one reward that is NaN makes its whole group NaN",
        seen="modelscope/ms-swift#8123",
        code=GRPO,
        old="for r in rewards if r is not None and math.isfinite(r)]",
        new="for r in rewards if r is not None]",
        test=f"{UNIT}/test_grpo.py::test_a_missing_reward_stays_out_of_the_baseline",
        given={"missing": nan},
    ),
    KnownBug(
        bug="mean and deviation are the batch's instead of the group's",
        seen="XU-YIJIE/grpo-flat#2",
        code=PREPARE,
        old="group_S=[n for n,",
        new="group_S=[0 for n,",
        test=f"{HERE}::test_a_group_is_its_own_baseline",
    ),
    KnownBug(
        bug="samples of several prompts are interleaved and grouped as if they were not",
        seen="StarsfieldAI/R1-V#67",
        code=PREPARE,
        old="group_S=[n for n, group in enumerate(groups) for _ in group.samples]",
        new="group_S=[i % len(groups) for i in range(len(reward_S))]",
        test=f"{HERE}::test_a_group_is_its_own_baseline",
    ),
    KnownBug(
        bug="advantages are normalised twice, by group and then over the batch",
        seen="axon-rl/gem#113",
        code=PREPARE,
        old='"advantage": advantage_E,',
        new='"advantage": advantage_E / advantage_E.std(),',
        test=f"{HERE}::test_a_group_is_its_own_baseline",
    ),
    KnownBug(
        bug="the overlong penalty begins at the limit instead of a buffer before it",
        seen="NovaSky-AI/SkyRL#755",
        code="trainer.objective.overlong:length_penalty",
        old="length - (longest - buffer)",
        new="length - longest",
        test=f"{UNIT}/objective/test_overlong.py::test_it_grows_within_the_buffer_and_no_further",
        given={"length": 8, "expected": -0.5},
    ),
    KnownBug(
        bug="the overlong penalty is configured and never applied",
        seen="verl-project/verl#4268",
        code="trainer.objective.overlong:with_length_penalty",
        old="if not hyperparameters.overlong_buffer:",
        new="if hyperparameters:",
        test=f"{UNIT}/objective/test_overlong.py::test_rewards_are_shaped_by_sample_and_none_stays_none",
    ),
    KnownBug(
        bug="GAE takes the value of what stands behind the last action",
        seen="alibaba/ROLL#447",
        code="trainer.objective.returns:next_values",
        old="next_E.masked_fill(is_last(sample_E), 0.0)",
        new="next_E",
        test=f"{HERE}::test_after_the_last_action_comes_nothing",
    ),
    KnownBug(
        bug="the reward is paid one position beside the last action",
        seen="EleutherAI/gpt-neox#1285",
        code="trainer.objective.returns:reward_at_last_action",
        old="is_last(sample_E)",
        new="is_last(sample_E).roll(-1)",
        test=f"{HERE}::test_the_reward_is_paid_at_the_last_action",
    ),
    KnownBug(
        bug="an earlier action does not see the reward of a later turn",
        seen="verl-project/verl#6376",
        code="trainer.objective.returns:discounted_sums",
        old="table_S_T[:, t] += factor",
        new="table_S_T[:, t] += 0 * factor",
        test=f"{HERE}::test_every_action_sees_the_reward_at_the_end",
    ),
)
