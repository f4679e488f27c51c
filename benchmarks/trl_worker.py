"""One run of TRL's GRPOTrainer, a step per command: the same GRPOConfig as the lab's, in TRL's words. See `link.py`."""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from link import Link, peak_memory_gib
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig as TRLConfig
from trl import GRPOTrainer
from workload import check_length

from grpo_core.chat import document_and_question
from grpo_core.checkpoints import policy_folder
from grpo_core.config import GRPOConfig
from grpo_core.environments.base import Score
from grpo_core.environments.registry import make_environment
from grpo_core.evaluation import validate
from grpo_core.models import load_base_model, resolve_device, resolve_dtype, weights_source
from grpo_core.policies.peft_lora import PeftLoraPolicy
from grpo_core.progress import Silent


class Stepper(TrainerCallback):
    """Waits for a command before each step, and answers once its metrics are logged."""

    def __init__(self, link: Link, validated: Any, eval_every: int):
        self._link = link
        self._validated = validated
        self._eval_every = eval_every
        self._tokens = 0.0
        self._seconds = 0.0
        self._started = 0.0
        self.times: dict[str, float] = defaultdict(float)

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._link.wait()
        self.times.clear()
        self._started = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._seconds = time.monotonic() - self._started

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **others: Any) -> None:
        if "grad_norm" not in logs:
            return  # the summary at the end
        rollout, reference, seconds = self.times["rollout"], self.times["reference"], self._seconds
        answer = {
            "seconds": seconds,
            "rollout": rollout,
            "reference": reference,
            "train": self.times["step"] - rollout - reference,
            "other": seconds - self.times["step"],
            "tokens": state.num_input_tokens_seen - self._tokens,
            "reward_std": logs["reward_std"],
            "grad_norm": logs["grad_norm"],
            "peak_memory_gib": peak_memory_gib(),
        }
        self._tokens = state.num_input_tokens_seen
        if self._eval_every and state.global_step % self._eval_every == 0:
            answer["pass_rate"] = self._validated()
        self._link.answer(**answer)

    def time_methods(self, trainer: GRPOTrainer) -> None:
        """Measure TRL's own methods from outside; scoring is part of its `train`, as it is of no method of these."""

        def timed(name: str, entry: str, counts: Any = lambda: True) -> None:
            method = getattr(trainer, name)

            def wrapper(*arguments: Any, **named: Any) -> Any:
                started = time.monotonic()
                result = method(*arguments, **named)
                if counts():
                    self.times[entry] += time.monotonic() - started
                return result

            setattr(trainer, name, wrapper)

        timed("_generate", "rollout")
        # the policy's own pass has gradients, the reference's has none
        timed("_get_per_token_logps_and_entropies", "reference", lambda: not torch.is_grad_enabled())
        timed("training_step", "step")


def settings(config: GRPOConfig, spec: dict[str, Any], folder: str) -> TRLConfig:
    """The lab's config in TRL's words, with what was found fastest for TRL on a CPU (RESULTS.md)."""
    rows = config.prompts_per_step * config.group_size
    exact = {"min_new_tokens": config.max_new_tokens} if spec["exact_length"] else None
    return TRLConfig(
        output_dir=folder,
        per_device_train_batch_size=spec["per_device"],
        gradient_accumulation_steps=rows // spec["per_device"],
        num_generations=config.group_size,
        max_completion_length=config.max_new_tokens,
        generation_kwargs=exact,
        temperature=config.temperature,
        beta=config.kl_beta,
        loss_type=config.loss,
        epsilon=config.clip_low,
        epsilon_high=config.clip_high,
        learning_rate=config.lr,
        lr_scheduler_type="constant",
        max_grad_norm=config.max_grad_norm,
        weight_decay=config.weight_decay,
        max_steps=config.prompts // config.prompts_per_step,
        seed=config.seed,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        bf16=True,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def main() -> None:
    link = Link()
    spec = link.spec
    config = GRPOConfig.parse(spec["config"]).resolved()
    source = weights_source(config.family, None)
    tokenizer = AutoTokenizer.from_pretrained(source)
    environment = make_environment(config.environment, config.environment_options)
    problems = environment.problems(config.seed, "train", config.prompts, "rl")
    prompts = [document_and_question(problem) for problem in problems]
    if spec["exact_length"]:
        for prompt in prompts:
            check_length(tokenizer, prompt, spec["config"])
    watched = environment.problems(config.seed, "validation", config.eval_prompts)

    def reward(completions: list[Any], place: list[int], **others: Any) -> list[float]:
        scores = [
            environment.checked_score(problems[n], completion[0]["content"])
            for n, completion in zip(place, completions, strict=True)
        ]
        assert all(isinstance(score, Score) for score in scores), scores
        return [score.reward for score in scores]

    model = AutoModelForCausalLM.from_pretrained(source, dtype=resolve_dtype("auto", resolve_device("cpu")))
    lora = config.family_spec.lora
    if config.init_checkpoint_dir:
        with policy_folder(config.init_checkpoint_dir) as adapter:
            model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    else:
        targets = list(lora.target_modules)
        model = get_peft_model(
            model, LoraConfig(r=config.lora_rank, lora_alpha=lora.alpha, target_modules=targets, task_type="CAUSAL_LM")
        )

    evaluated: list[PeftLoraPolicy] = []

    def pass_rate() -> float:
        """TRL's adapter in the lab's own evaluation, on the lab's copy of the model."""
        with tempfile.TemporaryDirectory() as saved:
            model.save_pretrained(saved)
            if not evaluated:
                base = load_base_model(config.family, device="cpu")
                evaluated.append(PeftLoraPolicy.load(base, Path(saved)))
            evaluated[0].restore(Path(saved))
        figures = validate(evaluated[0], environment, watched, config.max_new_tokens, Silent())
        return figures["eval/pass_rate"]

    with tempfile.TemporaryDirectory(prefix="grpo-bench-") as folder:
        stepper = Stepper(link, pass_rate, config.eval_every)
        trainer = GRPOTrainer(
            model,
            reward,
            settings(config, spec, folder),
            train_dataset=Dataset.from_list([{"prompt": prompt, "place": n} for n, prompt in enumerate(prompts)]),
            processing_class=tokenizer,
            callbacks=[stepper],
        )
        stepper.time_methods(trainer)
        link.answer(**({"pass_rate": pass_rate()} if config.eval_every else {"ready": True}))
        trainer.train()


if __name__ == "__main__":
    main()
