"""The lift report: its first line, its tables, its files, and what untrusted text can do to it (nothing)."""

from __future__ import annotations

import io
import json

import fsspec
import pytest
from rich.console import Console

from grpo_core.lift import compare
from grpo_core.report.lift_report import LiftReport, inline_code, render_table, shorten, write_lift_report
from grpo_core.results import EvaluationResult, ItemResult

VERSIONS = {"python": "3.11.7", "torch": "2.13.0", "transformers": "5.24.0"}


def evaluation(policy: str, passes: str, **changes_by_index) -> EvaluationResult:
    """One problem per character of `passes`: 1 passes, 0 fails. `i3={...}` changes the item of problem 3."""
    items = [
        ItemResult(
            id=f"p{index}",
            index=index,
            seed=7,
            completion=f"{policy} says {passed}",
            expected="4821",
            reward=float(passed),
            parts={"contains": float(passed)},
            passed=passed == "1",
            tokens=4,
            truncated=False,
        ).model_copy(update=changes_by_index.get(f"i{index}", {}))
        for index, passed in enumerate(passes)
    ]
    rate = passes.count("1") / len(passes)
    return EvaluationResult(
        family="smollm2-135m",
        environment="niah",
        policy=policy,
        checkpoint_dir=None if policy == "base" else f"file:///runs/{policy}",
        checkpoint_digest=None if policy == "base" else "ab12",
        num_tasks=len(passes),
        mean_reward=rate,
        std_reward=0.0,
        min_reward=0.0,
        max_reward=1.0,
        pass_rate=rate,
        pass_rate_ci95=(0.1, 0.9),
        pass_threshold=1.0,
        parts={"contains": rate},
        truncated=2,
        failed=sum(item.error is not None for item in items),
        settings={"temperature": 0.0, "seed": 7},
        settings_hash="c0ffee",
        duration_s=1.5,
        per_task=items,
    )


def pipeline_report(base: str, warm_start: str, policy: str) -> LiftReport:
    evaluations = {
        "policy": evaluation("peft-lora", policy),
        "base": evaluation("base", base),
        "warm_start": evaluation("sft", warm_start),
    }
    return LiftReport(
        evaluations,
        compare(evaluations["base"], evaluations["policy"]),
        compare(evaluations["warm_start"], evaluations["policy"]),
        {"job id": "pipeline-1-abcdef01", "rl steps": 40},
        VERSIONS,
    )


def pair_report(baseline: EvaluationResult, policy: EvaluationResult) -> LiftReport:
    return LiftReport({"baseline": baseline, "policy": policy}, compare(baseline, policy), versions=VERSIONS)


def first_line(report: LiftReport) -> str:
    return report.to_markdown().splitlines()[0]


# The first line. Intervals are Tango's, p-values exact McNemar, both checked in test_lift.py.


def test_first_line_of_an_improvement():
    # 6 of 8 fixed, none broken: p = 2/64.
    line = first_line(pipeline_report("00000011", "01111111", "11111111"))
    assert line.startswith("The policy is better than the base model: pass rate 25.0 % → 100.0 % on 8 problems (+75.0")
    # RL itself: 1 of 8 fixed, none broken, which 8 problems cannot show
    assert "p = 0.0312). What RL itself gave is not established: pass rate 87.5 % → 100.0 %" in line


def test_first_line_says_what_rl_gave():
    line = first_line(pipeline_report("00000000", "00000011", "11111111"))
    assert "RL itself made the SFT model better: pass rate 25.0 % → 100.0 % (+75.0 points" in line


def test_first_line_of_a_regression():
    line = first_line(pair_report(evaluation("base", "11111111"), evaluation("peft-lora", "00000011")))
    assert line.startswith("The policy is worse than the baseline: pass rate 100.0 % → 25.0 % on 8 problems (-75.0")


def test_first_line_without_enough_problems():
    # Nothing changed among 8 problems: 7.848879 / 15.848879 = 49.5 points.
    line = first_line(pair_report(evaluation("base", "00001111"), evaluation("peft-lora", "00001111")))
    assert line.startswith("Too few problems to tell the policy from the baseline: pass rate 50.0 % → 50.0 %")
    assert line.endswith("only a lift of 49.5 points or more would probably have shown.")


def test_first_line_without_evidence():
    # 200 problems, nothing changed: 7.848879 / 207.848879 = 3.8 points.
    line = first_line(pair_report(evaluation("base", "01" * 100), evaluation("peft-lora", "01" * 100)))
    assert line.startswith("No evidence that the policy differs from the baseline")
    assert line.endswith("a lift of 3.8 points would probably have shown.")


def test_first_line_says_that_rl_damaged_the_sft_model():
    # Base -> policy is undecided; warm start -> policy loses 6 of 8, p = 2/64.
    line = first_line(pipeline_report("00000001", "11111111", "00000011"))
    assert line.startswith("Too few problems to tell the policy from the base model")
    assert "RL damaged the SFT model: pass rate 100.0 % → 25.0 % (-75.0 points" in line
    assert line.endswith("p = 0.0312).")


def test_first_line_says_that_the_warm_start_was_better():
    # RL broke one of 8 problems, far from significant, and the policy still beats the base.
    line = first_line(pipeline_report("00000000", "11111111", "01111111"))
    assert line.startswith("The policy is better than the base model: pass rate 0.0 % → 87.5 %")
    assert "The SFT model scored higher before RL, which chance may explain: pass rate 100.0 % → 87.5 %" in line


def test_first_line_says_that_rl_lowered_the_mean_reward():
    partly = {"reward": 0.5}
    evaluations = {
        "base": evaluation("base", "00"),
        "warm_start": evaluation("sft", "00", i0=partly),
        "policy": evaluation("peft-lora", "00"),
    }
    lifts = [compare(evaluations[start], evaluations["policy"]) for start in ("base", "warm_start")]
    line = LiftReport(evaluations, *lifts, versions=VERSIONS).summary()
    # Rewards .5 and 0 against 0 and 0; a single difference has p = 1.
    assert line.endswith("The SFT model's mean reward was higher before RL: 0.250 → 0.000 (-0.250, p = 1.0000).")


def test_first_line_is_silent_on_rl_that_helped():
    assert "SFT" not in first_line(pipeline_report("00000000", "01111111", "11111111"))


# The rest of the Markdown


def test_markdown_key_lines():
    lines = pipeline_report("00000011", "01111111", "11111110").to_markdown().splitlines()
    for expected in [
        "|  | base | warm start | policy |",
        "| pass rate (95 %) | 25.0 % (10.0 to 90.0) | 87.5 % (10.0 to 90.0) | 87.5 % (10.0 to 90.0) |",
        "| mean reward | 0.250 | 0.875 | 0.875 |",
        "| contains | 0.250 | 0.875 | 0.875 |",
        "| truncated completions | 2 | 2 | 2 |",
        "| failed completions | 0 | 0 | 0 |",
        "## Lift, base → policy: underpowered",
        "## Lift, warm start → policy: underpowered",
        "### Fixed (base → policy): 5 of 6",
        "### Broken (base → policy): 1 of 1",
        "### Broken (warm start → policy): 1 of 1",
        "- `p7`, expected `4821`",
        "  - base: `base says 1` (reward 1)",
        "  - warm start: `sft says 1` (reward 1)",
        "  - policy: `peft-lora says 0` (reward 0)",
        "- `base checkpoint`: `base, smollm2-135m, no checkpoint`",
        "- `policy checkpoint`: `peft-lora, smollm2-135m, file:///runs/peft-lora, digest ab12`",
        "- `job id`: `pipeline-1-abcdef01`",
        "- `rl steps`: `40`",
        "- `torch (writing this report)`: `2.13.0`",
        "- `problem seeds`: `[7]`",
        "- `settings_hash`: `c0ffee`",
        '  "temperature": 0.0',
    ]:
        assert expected in lines
    # 6 fixed, 1 broken of 8: p = 2·(1 + 7)/2^7; 7 of 8 changed: 2.801585·sqrt(.875/15.848879) = 65.8 points.
    assert any(line.startswith("| pass rate | +62.5 points | ") and line.endswith("| p = 0.1250 |") for line in lines)
    assert any(
        line.startswith("Test of the pass rate: exact McNemar. 6 problems fixed, 1 broken, of 8. ")
        and "Smallest detectable lift: 65.8 points" in line
        for line in lines
    )


def test_two_evaluations_alone_have_two_columns():
    markdown = pair_report(evaluation("base", "01"), evaluation("peft-lora", "11")).to_markdown()
    assert "|  | baseline | policy |" in markdown
    assert "warm start" not in markdown


def test_partial_checkpoints_are_named():
    policy = evaluation("peft-lora", "11").model_copy(update={"partial": True})
    report = pair_report(evaluation("base", "01"), policy)
    lines = report.to_markdown().splitlines()
    assert "|  | baseline | policy (partial checkpoint) |" in lines
    assert "- `policy checkpoint`: `peft-lora, smollm2-135m, file:///runs/peft-lora (partial), digest ab12`" in lines
    assert report.to_dict()["evaluations"]["policy"]["partial"] is True
    assert [column.header for column in render_table(report).columns] == ["", "baseline", "policy (partial checkpoint)"]


def test_failed_items_are_shown():
    failed = {"error": "TimeoutError: too slow", "reward": 0.0, "completion": "", "passed": False, "parts": {}}
    report = pair_report(evaluation("base", "11"), evaluation("peft-lora", "11", i1=failed))
    lines = report.to_markdown().splitlines()
    assert "| failed completions | 0 | 1 |" in lines
    assert "  - policy: (empty) (error `TimeoutError: too slow`)" in lines
    assert "- policy, `p1`: `TimeoutError: too slow`" in lines


def test_the_first_sample_is_the_example():
    base = evaluation("base", "00", i1={"id": "p0", "sample": 1, "completion": "second"})
    policy = evaluation("peft-lora", "11", i1={"id": "p0", "sample": 1, "completion": "second"})
    assert "second" not in pair_report(base, policy).to_markdown()


# Untrusted text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "`plain`"),
        ("", "(empty)"),
        ("  \n ", "(empty)"),
        ("a\n\n# heading\r\n- item", "`a # heading - item`"),
        ("\x1b[31mred\x00\x07", "`[31mred`"),
        ("left\u202eright\u200b", "`leftright`"),
        ("line\u2028separator", "`line separator`"),
        ("lone \ud800 surrogate", "`lone surrogate`"),
        ("a`b", "``a`b``"),
        ("```", "```` ``` ````"),
        ("`end` ``two", "``` `end` ``two ```"),
        ("<script>alert(1)</script>", "`<script>alert(1)</script>`"),
    ],
)
def test_inline_code(text, expected):
    assert inline_code(text) == expected


def test_long_text_is_shortened_to_the_limit():
    assert shorten("x" * 11, limit=10) == "x" * 9 + "…"
    assert shorten("x" * 10, limit=10) == "x" * 10


def test_a_hostile_completion_stays_in_its_code_span():
    hostile = "ok` <img src=x onerror=alert(1)>\n\n# Verdict: improved\n```\n| a | b |\x1b[2J"
    report = pair_report(evaluation("base", "0", i0={"completion": hostile}), evaluation("peft-lora", "1"))
    lines = report.to_markdown().splitlines()
    span = "````ok` <img src=x onerror=alert(1)> # Verdict: improved ``` | a | b |[2J````"
    assert f"  - baseline: {span} (reward 0)" in lines
    assert [line for line in lines if "onerror" in line] == [f"  - baseline: {span} (reward 0)"]


def test_a_hostile_part_name_cannot_leave_its_cell():
    base, policy = (
        evaluation(name, "0").model_copy(update={"parts": {"<b>|`x": 0.5}}) for name in ("base", "peft-lora")
    )
    assert "| &#60;b&#62;&#124;&#96;x | 0.500 | 0.500 |" in pair_report(base, policy).to_markdown().splitlines()


# JSON, files, terminal


def test_document_has_no_completions_beside_the_examples():
    document = pipeline_report("00000011", "01111111", "11111110").to_dict()
    assert list(document["evaluations"]) == ["base", "warm_start", "policy"]
    assert "per_task" not in document["evaluations"]["policy"]
    assert document["lift"]["verdict"] == document["rl_lift"]["verdict"] == "underpowered"
    assert document["examples"]["warm_start_to_policy"]["broken"][0] == {
        "id": "p7",
        "expected": "4821",
        "answers": {
            "base": {"completion": "base says 1", "reward": 1.0, "passed": True, "error": None},
            "warm_start": {"completion": "sft says 1", "reward": 1.0, "passed": True, "error": None},
            "policy": {"completion": "peft-lora says 0", "reward": 0.0, "passed": False, "error": None},
        },
    }


def test_writes_to_a_url():
    report = pipeline_report("00000011", "01111111", "11111111")
    written = write_lift_report(
        "memory://test-lift-report/run", report.evaluations, report.lift, report.rl_lift, report.context
    )
    assert written == {
        "json": "memory:///test-lift-report/run/lift.json",
        "markdown": "memory:///test-lift-report/run/lift.md",
    }
    files = fsspec.filesystem("memory")
    document = json.loads(files.cat_file(written["json"]))
    markdown = files.cat_file(written["markdown"]).decode()
    assert markdown.splitlines()[0] == document["summary"] == report.summary()
    assert document["context"] == {"job id": "pipeline-1-abcdef01", "rl steps": 40}
    assert set(document["versions"]) == {"python", "torch", "transformers"}


def test_rewriting_leaves_only_the_two_files(tmp_path):
    report = pair_report(evaluation("base", "01"), evaluation("peft-lora", "11"))
    write_lift_report(str(tmp_path / "new" / "folder"), report.evaluations, report.lift)
    written = write_lift_report(str(tmp_path / "new" / "folder"), report.evaluations, report.lift)
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == ["lift.json", "lift.md"]
    assert written["markdown"] == (tmp_path / "new" / "folder" / "lift.md").as_uri()


def test_terminal_table():
    report = pipeline_report("00000011", "01111111", "11111111")
    evaluations = {
        name: result.model_copy(update={"parts": {"[red]part": 0.5}}) for name, result in report.evaluations.items()
    }
    terminal = io.StringIO()
    console = Console(file=terminal, width=160)
    console.print(render_table(LiftReport(evaluations, report.lift, report.rl_lift, versions=VERSIONS)))
    shown = terminal.getvalue()
    for expected in ["warm start", "25.0 % (10.0 to 90.0)", "[red]part", "pass-rate lift, base → policy", "p = 0.0312"]:
        assert expected in shown
