"""Known bugs of the facts by which architectures differ."""

from tests.known_bugs.known_bug import KnownBug
from tests.unit.trainer.sampler.test_general_batch import gpt2
from trainer.sampler.decode_batch import DecodeBatch

HERE = "tests/unit/trainer/forward/test_architectures.py"
GENERAL = "tests/unit/trainer/sampler/test_general_batch.py"
LOGITS = f"{HERE}::test_logits_and_gradients_of_all_weights_are_those_of_transformers"
CACHE = f"{HERE}::test_a_cache_decodes_what_the_whole_text_says"
DECODER = "trainer.forward.decoder"

KNOWN_BUGS = (
    KnownBug(
        bug="Gemma's norms multiply by their weight, and not by 1 + the weight",
        seen="linkedin/Liger-Kernel#74",
        code=f"{DECODER}:Decoder._norm",
        old="1 + wide",
        new="wide",
        test=LOGITS,
        given={"name": "gemma3"},
    ),
    KnownBug(
        bug="Gemma's activation is the exact gelu, and not the one by tanh",
        seen="vllm-project/vllm#3411",
        code="trainer.forward.ops:apply_gelu_gate",
        old='"tanh"',
        new='"none"',
        test=LOGITS,
        given={"name": "gemma3"},
    ),
    KnownBug(
        bug="layers with a window have the rotary embedding of the other layers",
        seen="vllm-project/vllm#29111",
        code=f"{DECODER}:_layer_kinds",
        old="ropes[kind if",
        new='ropes["full_attention" if',
        test=LOGITS,
        given={"name": "gemma3"},
    ),
    KnownBug(
        bug="layers without a rotary embedding get one",
        seen="pytorch/executorch#22043",
        code=f"{DECODER}:_layer_kinds",
        old="rope if has_rope else None",
        new="rope",
        test=LOGITS,
        given={"name": "smollm3"},
    ),
    KnownBug(
        bug="the pairs of a head that is turned in part are those of a whole one",
        seen="turboderp-org/exllamav2#741",
        code=f"{DECODER}:Decoder._halves",
        old="self.rotary_dim == self.head_dim",
        new="self.rotary_dim <= self.head_dim",
        test=LOGITS,
        given={"name": "phi3"},
    ),
    KnownBug(
        bug="GLM turns the halves of a head, and not neighbours",
        seen="ROCm/ATOM#1502",
        code=f"{DECODER}:Decoder._halves",
        old="if self.architecture.rotates_neighbours",
        new="if False",
        test=LOGITS,
        given={"name": "glm4"},
    ),
    KnownBug(
        bug="a window of the sampler is one token too large",
        seen="sgl-project/sglang#26147",
        code="trainer.sampler.decode_batch:hidden_places",
        old="places_C <= positions_R",
        new="places_C < positions_R",
        test=CACHE,
        given={"name": "mistral-window", "kind": DecodeBatch},
    ),
    KnownBug(
        bug="a window of the learner is one token too large",
        seen="huggingface/transformers#39408",
        code="trainer.forward.packing:_within",
        old="key_at_B_U[:, None, :] > at",
        new="key_at_B_U[:, None, :] >= at",
        test=f"{HERE}::test_packed_logprobs_and_adapter_gradients_are_those_of_peft",
        given={"name": "phi3-window"},
    ),
    KnownBug(
        bug="rows with padding on the left have the positions of rows without",
        seen="unslothai/unsloth#3699",
        code="trainer.forward.transformers_pass:Fallback.extend_rows",
        old="(valid_R_U.cumsum(-1) - 1).clamp_(min=0)",
        new="torch.ones_like(valid_R_U).cumsum(-1) - 1",
        test=f"{GENERAL}::test_a_model_whose_rows_depend_on_others_samples_them_alone",
        given={"config": gpt2, "expected": True},
    ),
    KnownBug(
        bug="logits in chunks are those of the head, without the bound or scale after it",
        seen="huggingface/trl#5691",
        code="trainer.forward.transformers_pass:Fallback._returns_head_output",
        old="return torch.equal(logits.float(), put.float())",
        new="return True",
        test=f"{GENERAL}::test_scaled_logits_are_not_taken_from_the_head",
        given={"name": "granite", "is_plain": False},
    ),
)
