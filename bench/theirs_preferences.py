"""The other side of B16: TRL's DPOTrainer with the settings of our run file.

`bench/b16_preferences.py` runs this in a process of its own. `train` has the pairs in the order in which
they are trained on. The prompts are rendered here with the model's chat template, and an answer is
learned with the token that ends its turn, as on our side. TRL's own rendering of an answer would add the
line break behind that token. Prints one line of JSON: the held-out accuracy and margin by step, the
tokens of all trained answers, and the wall and CPU seconds from the begin of training to its end.
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
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer


def rendered_rows(path: Path, tokenizer: Any) -> Dataset:
    """The pairs of a file, with their prompts as text. TRL adds the end token to the answers."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return Dataset.from_list(
        [
            {
                "prompt": tokenizer.apply_chat_template(
                    row["prompt"], add_generation_prompt=True, tokenize=False
                ),
                "chosen": row["chosen"][0]["content"],
                "rejected": row["rejected"][0]["content"],
            }
            for row in rows
        ]
    )


def arguments(settings: Any, directory: str) -> DPOConfig:
    """Our settings as TRL's."""
    training, advanced = settings["training"], settings["advanced"]
    return DPOConfig(
        output_dir=directory,
        use_cpu=True,
        bf16=False,
        max_steps=advanced["max_steps"],
        per_device_train_batch_size=advanced["batch_size"],
        per_device_eval_batch_size=advanced["batch_size"],
        gradient_accumulation_steps=1,
        train_sampling_strategy="sequential",
        max_length=advanced["max_sequence_length"],
        learning_rate=training["lr"],
        lr_scheduler_type="constant",
        warmup_steps=0,
        adam_beta1=advanced["adam_beta1"],
        adam_beta2=advanced["adam_beta2"],
        weight_decay=0.0,
        max_grad_norm=advanced["grad_clip"],
        beta=advanced["beta"],
        loss_type=["sigmoid"],
        gradient_checkpointing=False,
        eval_strategy="steps",
        eval_steps=settings["checkpoints"]["eval_interval"],
        eval_on_start=True,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=advanced["seed"],
    )


def main(model: Path, train: Path, held_out: Path, *, settings: Any) -> None:
    advanced = settings["advanced"]
    tokenizer = AutoTokenizer.from_pretrained(model)
    with tempfile.TemporaryDirectory() as directory:
        trainer = DPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            processing_class=tokenizer,
            train_dataset=rendered_rows(train, tokenizer),
            eval_dataset=rendered_rows(held_out, tokenizer),
            peft_config=LoraConfig(
                r=advanced["lora_rank"],
                lora_alpha=advanced["lora_alpha"],
                lora_dropout=0.0,
                target_modules=advanced["lora_targets"],
            ),
            args=arguments(settings, directory),
        )
        began, used = time.perf_counter(), time.process_time()
        trainer.train()
        times = {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - used}
    points = [entry for entry in trainer.state.log_history if "eval_rewards/margins" in entry]
    answers = [
        ids for name in ("chosen_ids", "rejected_ids") for ids in trainer.train_dataset[name]
    ]
    found = {
        "held_out": [(p["step"], p["eval_rewards/accuracies"]) for p in points],
        "margins": [(p["step"], p["eval_rewards/margins"]) for p in points],
        "tokens": sum(map(len, answers)),
        **times,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("train", type=Path)
    parser.add_argument("held_out", type=Path)
    parser.add_argument("--settings", type=json.loads, required=True)
    given = vars(parser.parse_args())
    main(given.pop("model"), given.pop("train"), given.pop("held_out"), **given)
