"""The other side of B1: TRL's GRPOTrainer with its own `generate`, as its users write it.

`bench/b1_trl.py` runs this in a process of its own. Prints one line of JSON. Everything optional is left
out: there is no logging, saving, gradient checkpointing, dropout or reference model. The reward is the
one that the platform's grader returns.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """Wall and CPU seconds at the end of each step."""

    def __init__(self) -> None:
        self.process = psutil.Process()
        self.marks: list[tuple[float, float]] = []

    def mark(self) -> None:
        used = self.process.cpu_times()
        self.marks.append((time.perf_counter(), used.user + used.system))

    def on_step_end(self, *_: object, **__: object) -> None:
        self.mark()


class Parts:
    """Seconds spent within some methods."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def watch(self, owner: object, method: str, name: str) -> None:
        inner = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds.setdefault(name, []).append(time.perf_counter() - start)

        setattr(owner, method, timed)


def main(model: Path, *, prompts: list[str], samples: int, tokens: int, steps: int) -> None:
    lengths: list[int] = []

    def digits(completions: list[list[dict[str, str]]], **given: Any) -> list[float]:
        lengths.extend(len(ids) for ids in given["completion_ids"])
        return [sum(c.isdigit() for c in answer[0]["content"]) / 8 for answer in completions]

    rows = [{"prompt": [{"role": "user", "content": text}]} for text in prompts]
    with tempfile.TemporaryDirectory() as directory:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(model),
            reward_funcs=digits,
            train_dataset=Dataset.from_list(rows),
            peft_config=LoraConfig(
                r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear"
            ),
            args=GRPOConfig(
                output_dir=directory,
                use_cpu=True,
                bf16=False,
                max_steps=steps,
                per_device_train_batch_size=samples * 4,
                gradient_accumulation_steps=1,
                num_generations=samples,
                max_completion_length=tokens,
                temperature=1.0,
                learning_rate=1e-4,
                lr_scheduler_type="constant",
                adam_beta1=0.9,
                adam_beta2=0.95,
                weight_decay=0.0,
                max_grad_norm=1.0,
                beta=0.0,
                loss_type="grpo",
                gradient_checkpointing=False,
                logging_strategy="no",
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                dataloader_pin_memory=False,
                seed=1,
            ),
        )
        clock, parts = Clock(), Parts()
        trainer.add_callback(clock)
        parts.watch(trainer, "_generate", "generate")
        parts.watch(trainer, "_calculate_rewards", "grade")
        parts.watch(trainer, "_compute_loss", "forward and loss")
        parts.watch(trainer.accelerator, "backward", "backward")
        trainer.train()
    walls = [b[0] - a[0] for a, b in zip(clock.marks, clock.marks[1:], strict=False)]
    cpu = clock.marks[-1][1] - clock.marks[0][1]
    print(
        json.dumps(
            {
                "seconds": walls,
                "cpu": cpu / len(walls),
                "pss_mib": psutil.Process().memory_full_info().pss / 2**20,
                "length": statistics.mean(lengths),
                "parts": {k: statistics.median(v[1:]) for k, v in parts.seconds.items()},
            }
        )
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=json.loads, required=True)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10)
    given = vars(parser.parse_args())
    main(given.pop("model"), **given)
