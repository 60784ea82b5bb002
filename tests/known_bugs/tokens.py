"""Known bugs about tokens: which are context, which are actions, and which see which."""

from tests.known_bugs.known_bug import KnownBug

ADD = "trainer.forward.packing:_Packing.add"
SEGMENT = "trainer.forward.packing:_Packing._segment"
UNIT = "tests/unit/trainer"
HERE = "tests/known_bugs/test_by_hand.py"
PACKING = f"{UNIT}/forward/test_packing.py"
LAST = f"{PACKING}::test_the_last_response_token_trains_and_the_last_prompt_token_does_not"

KNOWN_BUGS = (
    KnownBug(
        bug="masks and predictions are off by one",
        seen="verl-project/verl#3287",
        code=ADD,
        old="before = t - 1",
        new="before = t",
        test=LAST,
    ),
    KnownBug(
        bug="the first token of an answer is not trained",
        seen="OpenRLHF/OpenRLHF#973",
        code=ADD,
        old="if example.sequence.loss_mask[t]:",
        new="if example.sequence.loss_mask[t] and example.sequence.loss_mask[t - 1]:",
        test=LAST,
    ),
    KnownBug(
        bug="the end token is taken for padding and not trained",
        seen="huggingface/trl#4970",
        code=ADD,
        old="range(1, len(tokens))",
        new="range(1, len(tokens) - 1)",
        test=LAST,
    ),
    KnownBug(
        bug="what a tool answered is trained like an action",
        seen="PeterGriffinJin/Search-R1#21",
        code=ADD,
        old="if example.sequence.loss_mask[t]:",
        new="if any(example.sequence.loss_mask[: t + 1]):",
        test=f"{UNIT}/forward/test_packing.py::test_tool_tokens_between_actions_are_context",
    ),
    KnownBug(
        bug="positions run on through a packed row",
        seen="hiyouga/LlamaFactory#7318",
        code=SEGMENT,
        old="range(position, position + len(tokens))",
        new="range(len(self.positions), len(self.positions) + len(tokens))",
        test=f"{UNIT}/forward/test_packing.py::test_a_shared_prompt_is_packed_once",
    ),
    KnownBug(
        bug="a packed sequence sees its neighbours",
        seen="axolotl-ai-cloud/axolotl#1375",
        code=SEGMENT,
        old="Segment(start, end, context)",
        new="Segment(start, end, context and (range(start),))",
        test=f"{UNIT}/forward/test_packing.py::test_a_shared_prompt_is_packed_once",
    ),
    KnownBug(
        bug="in a tree of several levels a token sees the root and its own segment alone",
        seen="verl-project/verl#6689",
        code=SEGMENT,
        old="Segment(start, end, context)",
        new="Segment(start, end, context[:1])",
        test=f"{UNIT}/forward/test_prefix_tree.py::"
        "test_the_tokens_behind_a_place_see_the_path_to_it",
    ),
    KnownBug(
        bug="the mask between packed sequences is made and not used",
        seen="huggingface/transformers#46634",
        code="trainer.forward.packing:_attend_block",
        old="masked_fill(~block.visible_B_T_U,",
        new="masked_fill(~block.visible_B_T_U & False,",
        test=f"{UNIT}/test_grpo.py::test_sharing_a_prompt_changes_neither_loss_nor_gradient",
        given={"native": False},
    ),
    KnownBug(
        bug="sampled text is tokenised again for the next turn",
        seen="huggingface/trl#5224",
        code="trainer.model.chat_template:Chat.prompt_ids",
        old="self._continuation(request) if request.history else None",
        new="None",
        test=f"{UNIT}/model/test_chat_template.py::test_sampled_ids_are_kept_where_text_would_be_tokenised_otherwise",
    ),
    KnownBug(
        bug="what the template puts after a reply is missing from the next prompt",
        seen="verl-project/verl#3720",
        code="trainer.model.chat_template:Chat._continue",
        old="*last.completion_ids, *suffix]",
        new="*last.completion_ids, *suffix[1:]]",
        test=f"{UNIT}/model/test_chat_template.py::test_a_continuation_is_prompt_plus_sampled_plus_suffix",
        given={"ended": True},
    ),
    KnownBug(
        bug="SFT trains the prompt too",
        seen="nvidia-cosmos/cosmos-rl#132",
        code="trainer.model.loss_turns:training_rows",
        old="[(context, 0)]",
        new="[(context, 1)]",
        test=f"{HERE}::test_in_sft_the_prompt_is_context",
    ),
    KnownBug(
        bug="SFT leaves out the token that ends the turn",
        seen="snowflakedb/ArcticTraining#339",
        code="trainer.model.chat_template:Chat.with_end_token",
        old="[*ids] if is_ended",
        new="[*ids[:-1]] if is_ended",
        test=f"{UNIT}/model/test_loss_turns.py::test_an_answer_ends_with_the_token_that_ends_the_turn",
    ),
)
