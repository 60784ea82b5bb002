"""The other side of B11: TRL's GRPOTrainer on the demo's task, or on that of another example, with the
settings of our run file.

`bench/b11_learning.py` and `bench/b11_smollm.py` run this in a process of its own. `questions` are the
rows in the order in which they are trained on. Without `--reward` the demo's grader pays. Prints one
line of JSON: the held-out reward by step (greedy, unless the settings say otherwise), and the wall and
CPU seconds from the begin of training to its end.
"""

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def paid(text: str, truth: str) -> float:
    """The reward of the demo's grader: 1 if the text after the last `=` is the true sum."""
    _, equals, said = text.rpartition("=")
    return float(bool(equals) and said == truth)


Row = dict[str, Any]
Reward = Callable[[str, Row], float]


def reward_of(named: str | None) -> Reward:
    """The reward of an answer to a row: the demo's, or that of a reward function (FILE:FUNCTION)."""
    if named is None:
        return lambda text, row: paid(text, row["ground_truth"])
    path, _, function = named.rpartition(":")
    spec = importlib.util.spec_from_file_location("rollout", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    pays = getattr(module, function)
    return lambda text, row: pays(text, row["ground_truth"], row.get("metadata"))


def reward_function(reward: Reward) -> Callable[..., list[float]]:
    """A reward as TRL calls it. Each row travels as JSON."""

    def right(completions: list[list[dict[str, str]]], **given: Any) -> list[float]:
        rows = map(json.loads, given["row"])
        return [reward(c[0]["content"], row) for c, row in zip(completions, rows, strict=True)]

    return right


def chat_messages(row: Row) -> list[dict[str, str]]:
    return [{"role": "user", "content": row["user_prompt"]}]


class Measure(TrainerCallback):  # type: ignore[misc]  # it has no types
    """The held-out reward before the first step, every so many, and after the last; the seconds."""

    def __init__(
        self, tokenizer: Any, rows: list[Row], reward: Reward, *, every: int, settings: Any
    ):
        self.tokenizer, self.rows, self.pays, self.every = tokenizer, rows, reward, every
        advanced = settings["advanced"]
        self.tokens = settings["training"]["max_response_length"]
        self.samples = advanced.get("validation_samples", 1)
        self.temperature = advanced.get("validation_temperature", 0.0)
        self.held_out: list[tuple[int, float]] = []
        self.wall_s = self.cpu_s = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._began = time.perf_counter(), time.process_time()
        self.held_out.append((0, self.reward(given["model"])))

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            self.held_out.append((state.global_step, self.reward(given["model"])))

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.wall_s = time.perf_counter() - self._began[0]
        self.cpu_s = time.process_time() - self._began[1]

    @torch.no_grad()
    def reward(self, model: Any) -> float:
        """The mean reward of the answers, all questions at once."""
        was_training = model.training
        model.eval()
        prompts = self.tokenizer.apply_chat_template(
            [chat_messages(row) for row in self.rows],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        drawn = {"do_sample": True, "temperature": self.temperature, "top_k": 0, "top_p": 1.0}
        drawn |= {"num_return_sequences": self.samples}
        how = drawn if self.temperature else {"do_sample": False}
        answers = model.generate(**prompts, **how, max_new_tokens=self.tokens)
        model.train(was_training)
        said = self.tokenizer.batch_decode(
            answers[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True
        )
        each = len(said) // len(self.rows)
        pay = [self.pays(text, self.rows[number // each]) for number, text in enumerate(said)]
        return sum(pay) / len(pay)


def rows_of(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def main(
    model: Path,
    questions: Path,
    held_out: Path,
    *,
    every: int,
    settings: Any,
    reward: Reward,
    passed: int | None,
) -> None:
    training, advanced = settings["training"], settings["advanced"]
    rows = [{"prompt": chat_messages(r), "row": json.dumps(r)} for r in rows_of(questions)]
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    samples, tokens = training["n_samples_per_prompt"], training["max_response_length"]
    each = samples * training["rollout_batch_size"]
    passes = max(1, each // passed) if passed else 1
    with tempfile.TemporaryDirectory() as directory:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            processing_class=tokenizer,
            reward_funcs=reward_function(reward),
            train_dataset=Dataset.from_list(rows),
            peft_config=LoraConfig(
                r=advanced["lora_rank"],
                lora_alpha=advanced["lora_alpha"],
                lora_dropout=0.0,
                target_modules=advanced["lora_targets"],
            ),
            args=GRPOConfig(
                output_dir=directory,
                use_cpu=True,
                bf16=False,
                max_steps=advanced["max_steps"],
                per_device_train_batch_size=each // passes,
                gradient_accumulation_steps=passes,
                num_generations=samples,
                max_completion_length=tokens,
                temperature=settings["sampling"]["rollout_temperature"],
                shuffle_dataset=False,
                learning_rate=training["lr"],
                lr_scheduler_type=advanced["lr_schedule"],
                warmup_steps=advanced["warmup_steps"],
                adam_beta1=advanced["adam_beta1"],
                adam_beta2=advanced["adam_beta2"],
                weight_decay=0.0,
                max_grad_norm=advanced["grad_clip"],
                beta=advanced["kl_coef"],
                epsilon=0.2,
                scale_rewards="group",
                loss_type="grpo",
                gradient_checkpointing=False,
                logging_strategy="no",
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                dataloader_pin_memory=False,
                seed=advanced["seed"],
            ),
        )
        measure = Measure(tokenizer, rows_of(held_out), reward, every=every, settings=settings)
        trainer.add_callback(measure)
        trainer.train()
    found = {"held_out": measure.held_out, "wall_s": measure.wall_s, "cpu_s": measure.cpu_s}
    print(json.dumps(found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("questions", type=Path)
    parser.add_argument("held_out", type=Path)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--settings", type=json.loads, required=True)
    parser.add_argument("--reward", metavar="FILE:FUNCTION")
    parser.add_argument(
        "--rows-per-pass",
        dest="passed",
        type=int,
        help="rows of a pass of the learner; a step's gradients add up over passes",
    )
    parser.add_argument("--packages", help="a directory with packages that the reward needs")
    given = vars(parser.parse_args())
    if (packages := given.pop("packages")) is not None:
        sys.path.append(packages)  # behind ours, which stay the ones that are used
    given["reward"] = reward_of(given["reward"])
    main(given.pop("model"), given.pop("questions"), given.pop("held_out"), **given)
