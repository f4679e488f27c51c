"""Measure this project's GRPO beside TRL's, alternating their steps: `run.py [headline] [sweep] [target] [--quick]`.

Both systems are processes of their own; while one computes, the other waits for a line. Figures are kept as soon as
a row is measured. `--quick` tries the harness on tiny sizes and writes to a temporary folder.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import tomllib
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

from limit import peak_gflops, step_operations
from report import Report
from system import HERE, System, WorkerDied, machine, memory_gib
from transformers import AutoConfig
from workload import Workload

from grpo_core.config import PipelineConfig
from grpo_core.models import weights_source
from grpo_core.progress import Silent
from grpo_core.sft import train_sft

HEADLINE = Workload()
SWEEP = [(length, group) for length in (100, 250, 1000, 2000) for group in (4, 8, 16)]
LONG_STEP_S = 60
"""A step of TRL that takes longer is counted at once: a warm-up would change it by little and cost as much."""

TRL_PER_DEVICE = 4
"""Completions in one of TRL's passes, the fastest tried; the headline is measured at 8 instead, see RESULTS.md."""

HEADLINE_PER_DEVICE = 8
TRL_GIB_PER_TOKEN = 2.2 / 1024
"""What TRL keeps for the backward pass of a token, measured at 4 and 8 rows of 270 tokens."""

TARGET_PASS_RATE = 0.9
TARGET_STEPS = 60
TARGET_EVAL_EVERY = 5
TARGET_EVAL_PROBLEMS = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", help="headline, sweep, target; all by default")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, nothing kept")
    arguments = parser.parse_args()
    sections = {"headline": headline, "sweep": sweep, "target": target}
    chosen = arguments.sections or list(sections)
    if unknown := set(chosen) - set(sections):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(sections)}")
    folder = HERE
    if arguments.quick:
        folder = Path(tempfile.mkdtemp(prefix="grpo-bench-quick-"))
        shutil.copy(HERE / "RESULTS.md", folder)
        print(f"results go to {folder}")
    report = Report(folder)
    for name in chosen:
        sections[name](report, arguments.quick)


# --- headline ----------------------------------------------------------------------------------------------


def headline(report: Report, quick: bool) -> None:
    """One configuration in full: both systems, and the least a step has to compute."""
    work = Workload(2, 4, 64, 4, steps=3) if quick else HEADLINE
    gflops = peak_gflops()
    row = compare(work, *((1, 1) if quick else (5, 3)), per_device=HEADLINE_PER_DEVICE)
    lab, trl = row["lab"], row["trl"]
    operations = step_operations(AutoConfig.from_pretrained(weights_source("smollm2-135m", None)), work)
    counted = operations["linear"] + operations["lm_head"]
    limit_s = counted / gflops
    figures = {
        "samples_per_second_ratio_to_trl": ratio(row, "samples_per_s"),
        "peak_memory_ratio_to_trl": ratio(row, "peak_memory_gib"),
        "step_time_over_limit": lab["seconds"] / limit_s,
        "step_time_over_limit_with_attention": lab["seconds"] * gflops / (counted + operations["attention"]),
        "step_time_over_limit_linear_only": lab["seconds"] * gflops / operations["linear"],
        "limit_s": limit_s,
        "peak_gflops": gflops,
        "operations_gflop": operations,
        **row,
        "machine": machine(),
    }
    report.keep("headline", figures)
    names = {
        "seconds": "seconds per step (median)",
        "rollout": "– rollout",
        "reference": "– reference",
        "train": "– train",
        "other": "– other",
        "samples_per_s": "samples/s",
        "tokens_per_s": "tokens/s",
        "peak_memory_gib": "peak memory (GiB)",
    }
    rows = [[label, f"{lab[key]:.2f}", f"{trl[key]:.2f}"] for key, label in names.items()]
    rows += [
        ["samples/s, times TRL's", f"{figures['samples_per_second_ratio_to_trl']:.1f}", "1"],
        ["peak memory, times TRL's", f"{figures['peak_memory_ratio_to_trl']:.2f}", "1"],
        ["step time over the limit", f"{figures['step_time_over_limit']:.2f}", f"{trl['seconds'] / limit_s:.1f}"],
    ]
    publish(report, "headline", ["", "this project", "TRL"], rows)
    print(f"limit: {counted:.0f} GFLOP ({operations}) at {gflops:.0f} GFLOP/s are {limit_s:.2f} s")


# --- sweep -------------------------------------------------------------------------------------------------


def sweep(report: Report, quick: bool) -> None:
    """Prompt length x group size, two prompts a step."""
    cases = [(64, 4), (96, 4)] if quick else SWEEP
    kept: list[dict[str, Any]] = []
    for length, group in cases:
        work = Workload(2, group, length, 4 if quick else HEADLINE.new_tokens, steps=5)
        kept.append({"prompt_tokens": length, "group_size": group, **compare(work, 3, 1)})
        report.keep("sweep", {"rows": kept, "machine": machine()})
        publish(report, "sweep", SWEEP_HEADER, [sweep_row(row) for row in kept])


SWEEP_HEADER = ["prompt", "group", "s/step", "TRL s/step", "times faster", "GiB", "TRL GiB", "TRL rows a pass", "note"]


def sweep_row(row: dict[str, Any]) -> list[str]:
    lab, trl = row["lab"], row["trl"]
    start = [str(row["prompt_tokens"]), str(row["group_size"]), f"{lab['seconds']:.2f}"]
    if trl is None:
        return [*start, "–", "–", f"{lab['peak_memory_gib']:.1f}", "–", "–", row["note"]]
    return [
        *start,
        f"{trl['seconds']:.1f}",
        f"{ratio(row, 'samples_per_s'):.1f}",
        f"{lab['peak_memory_gib']:.1f}",
        f"{trl['peak_memory_gib']:.1f}",
        str(row["trl_per_device"]),
        row["note"],
    ]


# --- target ------------------------------------------------------------------------------------------------


def target(report: Report, quick: bool) -> None:
    """Both from one SFT checkpoint to the same pass rate on niah; clocks stand still during evaluations."""
    values = tomllib.loads((HERE.parent / "deployments/configs/smollm2-niah.toml").read_text())
    pipeline = PipelineConfig.parse(values).resolved()
    most = TARGET_EVAL_EVERY if quick else TARGET_STEPS
    with tempfile.TemporaryDirectory(prefix="grpo-bench-sft-") as folder:
        train_sft(pipeline.sft_stage(folder), Silent())
        config = pipeline.rl_stage(folder, None).model_dump(mode="json") | {
            "prompts": most * pipeline.rl.prompts_per_step,
            "eval_every": TARGET_EVAL_EVERY,
            "eval_prompts": 8 if quick else TARGET_EVAL_PROBLEMS,
        }
        spec = {"config": config, "exact_length": False, "per_device": TRL_PER_DEVICE}
        with System("lab", spec) as lab, System("trl", spec) as trl:
            for _ in range(most):
                for system in (lab, trl):
                    if not reached(system):
                        system.step()
                        report.keep("target", {each.name: progress(each, config) for each in (lab, trl)})
                if reached(lab) and reached(trl):
                    break
            outcome = {each.name: progress(each, config) for each in (lab, trl)}
    report.keep("target", {**outcome, "machine": machine()})
    names = {
        "seconds": "seconds of training",
        "steps": "steps",
        "prompts": "prompts",
        "pass_rate": "pass rate at the end",
    }
    rows = [[label, *(f"{outcome[name][key]:.3g}" for name in ("lab", "trl"))] for key, label in names.items()]
    curves = (", ".join(f"{100 * rate:.0f}" for _, rate in outcome[name]["curve"]) for name in ("lab", "trl"))
    rows.append([f"pass rate in % every {TARGET_EVAL_EVERY} steps", *curves])
    publish(report, "target", ["", "this project", "TRL"], rows)


def reached(system: System) -> bool:
    """Whether its newest evaluation passes the target."""
    return bool(system.answers) and system.answers[-1].get("pass_rate", 0.0) >= TARGET_PASS_RATE


def progress(system: System, config: dict[str, Any]) -> dict[str, Any]:
    """Where a system stands: time without evaluations, and the pass rate after so many steps."""
    answers = system.answers
    curve = [(0, system.ready["pass_rate"])]
    curve += [(number, each["pass_rate"]) for number, each in enumerate(answers, 1) if "pass_rate" in each]
    return {
        "seconds": sum(each["seconds"] for each in answers),
        "steps": len(answers),
        "prompts": len(answers) * config["prompts_per_step"],
        "pass_rate": curve[-1][1],
        "reached": reached(system),
        "curve": curve,
    }


# --- what the sections share -------------------------------------------------------------------------------


def compare(work: Workload, lab_steps: int, trl_steps: int, per_device: int = TRL_PER_DEVICE) -> dict[str, Any]:
    """So many counted steps of each, alternating. ``trl`` is None where TRL has not enough memory at any batch."""
    note = ""
    room_gib = 0.75 * memory_gib() - 2  # the model, and what generation keeps
    while per_device > 1 and per_device * (work.prompt_tokens + work.new_tokens) * TRL_GIB_PER_TOKEN > room_gib:
        per_device //= 2
        note = "rows a pass lowered for TRL's memory"
    while True:
        spec = {"config": work.config(), "exact_length": True, "per_device": per_device}
        with System("lab", spec) as lab:
            try:
                with System("trl", spec) as trl:
                    alternate(work, lab, trl, lab_steps, trl_steps)
            except WorkerDied as death:
                if not str(death).startswith("trl"):
                    raise
                if per_device == 1:
                    return {"lab": counted(lab, work, lab_steps), "trl": None, "note": "TRL runs out of memory"}
                per_device //= 2
                note = f"TRL died at {2 * per_device} rows a pass"
                continue
        return {
            "lab": counted(lab, work, lab_steps),
            "trl": counted(trl, work, trl_steps),
            "trl_per_device": per_device,
            "note": note,
        }


def alternate(work: Workload, lab: System, trl: System, lab_steps: int, trl_steps: int) -> None:
    """A warm-up step of each, then the counted ones in turn; a long warm-up of TRL is one of the counted ones.

    Raises:
        WorkerDied: a worker ended.
        RuntimeError: a step did not compute what was asked, or trained nothing.
    """
    lab.step()
    if trl.step()["seconds"] > LONG_STEP_S:
        trl_steps -= 1
    for lab_turn, trl_turn in zip_longest(range(lab_steps), range(trl_steps)):
        if lab_turn is not None:
            check(lab.step(), work, "lab")
        if trl_turn is not None:
            trl.step()
    for answer in trl.answers:
        check(answer, work, "trl")


def check(answer: dict[str, Any], work: Workload, name: str) -> None:
    """Refuse a step of another size, and one whose rewards or gradient are zero."""
    if answer["tokens"] != work.tokens or not (answer["reward_std"] > 0 and answer["grad_norm"] > 0):
        raise RuntimeError(f"{name}: expected {work.tokens} tokens and a gradient, got {answer}")


def counted(system: System, work: Workload, steps: int) -> dict[str, Any]:
    """Medians of the newest `steps` answers, rates, and the peak memory of the whole run."""
    answers = system.answers[-steps:]
    names = ("seconds", "rollout", "reference", "train", "other")
    middle = {name: median(answer[name] for answer in answers) for name in names}
    return {
        **middle,
        "samples_per_s": work.rows / middle["seconds"],
        "tokens_per_s": work.tokens / middle["seconds"],
        "peak_memory_gib": system.answers[-1]["peak_memory_gib"],
        "steps": answers,
    }


def ratio(row: dict[str, Any], name: str) -> float:
    """This project's figure over TRL's."""
    return row["lab"][name] / row["trl"][name]


def publish(report: Report, section: str, header: list[str], rows: list[list[str]]) -> None:
    report.show(section, header, rows)
    report.print(section, header, rows)


if __name__ == "__main__":
    main()
