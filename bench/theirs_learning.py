"""The other side of B11: TRL's GRPOTrainer on the demo's task, with the settings of our run file.

`bench/b11_learning.py` runs this in a process of its own. `questions` are the rows in the order in which
they are trained on. Prints one line of JSON: the held-out reward (greedy) by step, and the wall and CPU
seconds from the begin of training to its end.
"""

import argparse
import json
import tempfile
import time
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


def right(completions: list[list[dict[str, str]]], **given: Any) -> list[float]:
    truths = given["truth"]
    return [paid(c[0]["content"], truth) for c, truth in zip(completions, truths, strict=True)]


def chat_messages(row: dict[str, str]) -> list[dict[str, str]]:
    return [{"role": "user", "content": row["user_prompt"]}]


class Measure(TrainerCallback):  # type: ignore[misc]  # it has no types
    """The held-out reward before the first step, every so many, and after the last; the seconds."""

    def __init__(self, tokenizer: Any, rows: list[dict[str, str]], *, every: int, tokens: int):
        self.tokenizer, self.rows, self.every, self.tokens = tokenizer, rows, every, tokens
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
        """The mean reward of greedy answers, all questions at once."""
        was_training = model.training
        model.eval()
        prompts = self.tokenizer.apply_chat_template(
            [chat_messages(row) for row in self.rows],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        answers = model.generate(**prompts, do_sample=False, max_new_tokens=self.tokens)
        model.train(was_training)
        said = self.tokenizer.batch_decode(
            answers[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True
        )
        pay = [paid(text, row["ground_truth"]) for text, row in zip(said, self.rows, strict=True)]
        return sum(pay) / len(pay)


def rows_of(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def main(model: Path, questions: Path, held_out: Path, *, every: int, settings: Any) -> None:
    training, advanced = settings["training"], settings["advanced"]
    rows = [{"prompt": chat_messages(r), "truth": r["ground_truth"]} for r in rows_of(questions)]
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    samples, tokens = training["n_samples_per_prompt"], training["max_response_length"]
    with tempfile.TemporaryDirectory() as directory:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            processing_class=tokenizer,
            reward_funcs=right,
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
                per_device_train_batch_size=samples * training["rollout_batch_size"],
                gradient_accumulation_steps=1,
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
        measure = Measure(tokenizer, rows_of(held_out), every=every, tokens=tokens)
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
    given = vars(parser.parse_args())
    main(given.pop("model"), given.pop("questions"), given.pop("held_out"), **given)
