"""Bugs of trainers that distil."""

from tests.known_bugs.known_bug import KnownBug

UNIT = "tests/unit/trainer/distillation/test_step.py"
SINGLE = f"{UNIT}::test_the_loss_is_that_of_single_passes"
RECORDED = "tests/unit/trainer/distillation/test_recorded.py"

KNOWN_BUGS = (
    KnownBug(
        bug="the mixture of the JSD has the weights of the other distribution",
        seen="huggingface/trl#3043",
        code="trainer.distillation.divergence:divergence",
        old="student_M_V + math.log1p(-beta), teacher_M_V + math.log(beta)",
        new="student_M_V + math.log(beta), teacher_M_V + math.log1p(-beta)",
        test=SINGLE,
        given={"beta": 0.3},
    ),
    KnownBug(
        bug="the JSD mixes log-probabilities instead of probabilities",
        seen="huggingface/trl#2202",
        code="trainer.distillation.divergence:divergence",
        old="torch.logaddexp(student_M_V + math.log1p(-beta), teacher_M_V + math.log(beta))",
        new="(1 - beta) * student_M_V + beta * teacher_M_V",
        test=SINGLE,
        given={"beta": 0.3},
    ),
    KnownBug(
        bug="the loss of distillation is averaged per micro-batch",
        seen="huggingface/trl#4719",
        code="trainer.distillation.step:micro_batch_loss",
        old="(weight_M * found.divergence_M).sum()",
        new="found.divergence_M.mean()",
        test=SINGLE,
        given={"beta": 1.0},
    ),
    KnownBug(
        bug="the teacher is read at another temperature than the student",
        seen="THUDM/slime#2085",
        code="trainer.distillation.divergence:compare",
        old="teacher_C.logprobs(temperature=temperature,",
        new="teacher_C.logprobs(temperature=1e-3,",
        test=SINGLE,
        given={"beta": 1.0},
    ),
    KnownBug(
        bug="near its ends the JSD vanishes, and beta = 1 teaches nothing",
        seen="verl-project/verl-recipe#151",
        code="trainer.distillation.divergence:divergence",
        old="if beta == 1.0:",
        new="beta = min(beta, 1 - 1e-6)\n    if beta == 1.0:",
        test=SINGLE,
        given={"beta": 1.0},
    ),
    KnownBug(
        bug="logprobs of a teacher's server are those of the token before",
        seen="areal-project/AReaL#1728",
        code="trainer.distillation.recorded:RecordedTeacher.read",
        old='{"logprobs": row.teacher_logprobs}',
        new='{"logprobs": (0.0, *row.teacher_logprobs[:-1])}',
        test=f"{RECORDED}::test_the_loss_is_that_of_single_passes",
    ),
    KnownBug(
        bug="logprobs of a teacher's server are collected, and never learned from",
        seen="NousResearch/atropos#456",
        code="trainer.distillation.recorded:RecordedTeacher.read",
        old='{"logprobs": row.teacher_logprobs}',
        new='{"logprobs": row.logprobs}',
        test=f"{RECORDED}::test_the_loss_is_that_of_single_passes",
    ),
    KnownBug(
        bug="the gradient flows through the student's part of the reward, too",
        seen="meta-pytorch/torchforge#527",
        code="trainer.distillation.recorded:compare_sampled",
        old="student_M, teacher_M = student_M.detach(), teacher_M.to(student_M)",
        new="student_M, teacher_M = student_M, teacher_M.to(student_M)",
        test=f"{RECORDED}::test_a_token_that_the_teacher_likes_more_becomes_likelier",
    ),
)
