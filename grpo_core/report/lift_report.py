"""The lift report: two or three evaluations and their lifts as a sentence, JSON, Markdown and a terminal table.

All numbers come from `lift.py` and the evaluations; nothing is computed here. Whatever a model, a
dataset or an environment wrote is untrusted: it loses its control characters and is shown as inline
code, which neither Markdown nor HTML interprets.
"""

from __future__ import annotations

import json
import platform
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from grpo_core.files import write_json, write_text
from grpo_core.results import EvaluationResult, Interval, LiftResult

if TYPE_CHECKING:
    from rich.table import Table

# Keys of `LiftReport.evaluations`, in the order of the columns.
COLUMNS = {"base": "base", "baseline": "baseline", "warm_start": "warm start", "policy": "policy"}
_NOUNS = {"base": "the base model", "baseline": "the baseline", "warm_start": "the warm start"}
_EXAMPLES = 5
_LINE = 160


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the libraries that decide what a model answers."""
    versions = {"python": platform.python_version()}
    for package in ("torch", "transformers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions


@dataclass(frozen=True)
class LiftReport:
    """Everything one report shows.

    Attributes:
        evaluations: ``base``, ``warm_start`` and ``policy`` for a pipeline; ``baseline`` and ``policy`` for two
            evaluations compared on their own. With ``per_task``: the examples come from there.
        lift: from base (or baseline) to policy.
        rl_lift: from warm start to policy, None when two evaluations are compared on their own.
        context: plain facts such as job id, family, config, steps, durations.
    """

    evaluations: Mapping[str, EvaluationResult]
    lift: LiftResult
    rl_lift: LiftResult | None = None
    context: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=installed_versions)

    @property
    def columns(self) -> list[str]:
        """Keys of the evaluations in the order shown."""
        return [name for name in COLUMNS if name in self.evaluations]

    @property
    def headings(self) -> list[str]:
        """Title of every column; the first one names the rows."""
        partial = {name: " (partial checkpoint)" if self.evaluations[name].partial else "" for name in self.columns}
        return ["", *(f"{COLUMNS[name]}{partial[name]}" for name in self.columns)]

    @property
    def comparisons(self) -> list[tuple[str, LiftResult]]:
        """The lifts, each under the key of the evaluation that it starts from."""
        first = (self.columns[0], self.lift)
        return [first] if self.rl_lift is None else [first, ("warm_start", self.rl_lift)]

    def summary(self) -> str:
        """The verdict in one line, and what RL itself gave or spoiled."""
        sentence = _verdict_sentence(self.lift, _NOUNS[self.columns[0]])
        return f"{sentence} {_rl_sentence(self.rl_lift)}" if self.rl_lift else sentence

    def to_dict(self) -> dict[str, Any]:
        """The JSON document: evaluations without ``per_task``, lifts, and a handful of examples."""
        return {
            "summary": self.summary(),
            "lift": self.lift.document(),
            "rl_lift": self.rl_lift.document() if self.rl_lift else None,
            "evaluations": {
                name: {key: value for key, value in self.evaluations[name].document().items() if key != "per_task"}
                for name in self.columns
            },
            "examples": {
                f"{start}_to_policy": {"fixed": _examples(self, lift.fixed), "broken": _examples(self, lift.broken)}
                for start, lift in self.comparisons
            },
            "context": dict(self.context),
            "versions": dict(self.versions),
        }

    def to_markdown(self) -> str:
        """The report as GitHub-flavoured Markdown; its first line is `summary()`."""
        blocks = [self.summary(), _markdown_table([self.headings, *_score_rows(self)])]
        for start, lift in self.comparisons:
            blocks += _lift_section(start, lift)
        for start, lift in self.comparisons:
            blocks += _example_section(self, f"Fixed ({_arrow(start)})", lift.fixed)
            blocks += _example_section(self, f"Broken ({_arrow(start)})", lift.broken)
        blocks += _failure_section(self)
        blocks += _settings_section(self)
        return "\n\n".join(blocks) + "\n"


def write_lift_report(
    output_dir: str,
    evaluations: Mapping[str, EvaluationResult],
    lift: LiftResult,
    rl_lift: LiftResult | None = None,
    context: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """Write ``lift.json`` and ``lift.md`` into a folder, each complete or not at all.

    Args:
        output_dir: path or fsspec URL; made when it does not exist.

    Returns:
        ``{"json": url, "markdown": url}``.
    """
    report = LiftReport(evaluations, lift, rl_lift, context or {})
    folder = output_dir.rstrip("/")
    return {
        "json": write_json(f"{folder}/lift.json", report.to_dict()),
        "markdown": write_text(f"{folder}/lift.md", report.to_markdown()),
    }


def render_table(report: LiftReport) -> Table:
    """The scores and lifts as a table for a terminal, the summary as its caption."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Lift report", caption=Text(report.summary()))
    for heading in report.headings:
        table.add_column(heading)
    for row in _score_rows(report):
        table.add_row(*map(Text, row))  # Text, because a part's name could hold rich's markup
    table.add_section()
    for start, lift in report.comparisons:
        numbers = lift.lift
        cell = f"{lift.verdict}: {_points(numbers.pass_rate)}, {_points_interval(numbers.ci95)}, {_p(numbers.p_value)}"
        blanks = [""] * (len(report.columns) - 1)
        table.add_row(f"pass-rate lift, {_arrow(start)}", *blanks, cell)
    return table


def inline_code(text: str, limit: int = _LINE) -> str:
    """Untrusted text as one Markdown code span, safe against backticks, line breaks and control characters."""
    shown = shorten(text, limit)
    if not shown:
        return "(empty)"
    fence = "`" * (1 + max(map(len, re.findall("`+", shown)), default=0))
    pad = " " if "`" in (shown[0], shown[-1]) else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def shorten(text: str, limit: int = _LINE) -> str:
    """Untrusted text on one line: white space collapsed, control and bidirectional characters dropped."""
    visible = (char for char in text if char.isspace() or unicodedata.category(char)[0] != "C")
    line = " ".join("".join(visible).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _verdict_sentence(lift: LiftResult, baseline: str) -> str:
    numbers = (
        f"pass rate {_percent(lift.baseline.pass_rate)} → {_percent(lift.policy.pass_rate)} on {lift.num_tasks} "
        f"problems ({_points(lift.lift.pass_rate)}, 95 % interval {_points_interval(lift.lift.ci95)}, "
        f"{_p(lift.lift.p_value)})"
    )
    detectable = f"{100 * lift.smallest_detectable_lift:.1f} points"
    match lift.verdict:
        case "improved":
            return f"The policy is better than {baseline}: {numbers}."
        case "regressed":
            return f"The policy is worse than {baseline}: {numbers}."
        case "underpowered":
            return (
                f"Too few problems to tell the policy from {baseline}: {numbers}; "
                f"only a lift of {detectable} or more would probably have shown."
            )
        case "no_evidence":
            return (
                f"No evidence that the policy differs from {baseline}: {numbers}; "
                f"a lift of {detectable} would probably have shown."
            )


def _rl_sentence(rl_lift: LiftResult) -> str:
    """What became of the warm start that RL began from."""
    start, end, lift = rl_lift.baseline, rl_lift.policy, rl_lift.lift
    numbers = (
        f"pass rate {_percent(start.pass_rate)} → {_percent(end.pass_rate)} "
        f"({_points(lift.pass_rate)}, 95 % interval {_points_interval(lift.ci95)}, {_p(lift.p_value)})"
    )
    if rl_lift.verdict == "regressed":
        return f"RL damaged the SFT model: {numbers}."
    if lift.pass_rate < 0:
        return f"The SFT model scored higher before RL, which chance may explain: {numbers}."
    if lift.pass_rate == 0 and lift.mean_reward < 0:
        return (
            f"The SFT model's mean reward was higher before RL: {start.mean_reward:.3f} → {end.mean_reward:.3f} "
            f"({lift.mean_reward:+.3f}, {_p(lift.mean_reward_p_value)})."
        )
    if rl_lift.verdict == "improved":
        return f"RL itself made the SFT model better: {numbers}."
    return f"What RL itself gave is not established: {numbers}."


def _score_rows(report: LiftReport) -> list[list[str]]:
    """One row per measure, one cell per evaluation."""
    shown = [report.evaluations[name] for name in report.columns]
    names = sorted({name for evaluation in shown for name in evaluation.parts} - {"truncated"})  # counted below
    return [
        ["pass rate (95 %)", *(f"{_percent(e.pass_rate)} ({_percent_interval(e.pass_rate_ci95)})" for e in shown)],
        ["mean reward", *(f"{e.mean_reward:.3f}" for e in shown)],
        *([shorten(name, 40), *(f"{e.parts[name]:.3f}" if name in e.parts else "-" for e in shown)] for name in names),
        ["truncated completions", *(str(e.truncated) for e in shown)],
        ["failed completions", *(str(e.failed) for e in shown)],
    ]


def _lift_section(start: str, lift: LiftResult) -> list[str]:
    numbers = lift.lift
    rows = [
        ["", "lift", "95 % interval", "p"],
        ["pass rate", _points(numbers.pass_rate), _points_interval(numbers.ci95), _p(numbers.p_value)],
        [
            "mean reward",
            f"{numbers.mean_reward:+.3f}",
            _interval(numbers.mean_reward_ci95),
            _p(numbers.mean_reward_p_value),
        ],
        *([shorten(name, 40), f"{p.lift:+.3f}", _interval(p.ci95), _p(p.p_value)] for name, p in numbers.parts.items()),
    ]
    return [
        f"## Lift, {_arrow(start)}: {lift.verdict}",
        _markdown_table(rows),
        f"Test of the pass rate: {numbers.test}. {len(lift.fixed)} problems fixed, {len(lift.broken)} broken, of "
        f"{lift.num_tasks}. Smallest detectable lift: {100 * lift.smallest_detectable_lift:.1f} points (80 % power, "
        f"two-sided 0.05). The verdict is about the pass rate; the other p-values are not corrected for their number.",
    ]


def _examples(report: LiftReport, ids: Sequence[str]) -> list[dict[str, Any]]:
    """The first problems of `ids`, each with the first sample of every evaluation."""
    shown = ids[:_EXAMPLES]
    # In falling order of samples, so that the first one is written last and stays.
    first_samples = {
        name: {
            item.id: item
            for item in sorted(report.evaluations[name].per_task, key=lambda item: -item.sample)
            if item.id in shown
        }
        for name in report.columns
    }
    return [
        {
            "id": id,
            "expected": first_samples["policy"][id].expected,
            "answers": {
                name: {
                    "completion": items[id].completion,
                    "reward": items[id].reward,
                    "passed": items[id].passed,
                    "error": items[id].error,
                }
                for name, items in first_samples.items()
            },
        }
        for id in shown
    ]


def _example_section(report: LiftReport, title: str, ids: Sequence[str]) -> list[str]:
    if not ids:
        return []
    lines = []
    for example in _examples(report, ids):
        lines.append(f"- {inline_code(example['id'])}, expected {inline_code(example['expected'])}")
        for name, answer in example["answers"].items():
            outcome = f"error {inline_code(answer['error'])}" if answer["error"] else f"reward {answer['reward']:.3g}"
            lines.append(f"  - {COLUMNS[name]}: {inline_code(answer['completion'])} ({outcome})")
    return [f"### {title}: {min(len(ids), _EXAMPLES)} of {len(ids)}", "\n".join(lines)]


def _failure_section(report: LiftReport) -> list[str]:
    lines = []
    for name in report.columns:
        failed = [item for item in report.evaluations[name].per_task if item.error is not None]
        lines += [
            f"- {COLUMNS[name]}, {inline_code(item.id)}: {inline_code(item.error or '')}" for item in failed[:_EXAMPLES]
        ]
        if len(failed) > _EXAMPLES:
            lines.append(f"- {COLUMNS[name]}: {len(failed) - _EXAMPLES} more")
    return ["## Failed completions (each counts as reward 0)", "\n".join(lines)] if lines else []


def _settings_section(report: LiftReport) -> list[str]:
    facts: dict[str, Any] = {}
    for name in report.columns:
        facts[f"{COLUMNS[name]} checkpoint"] = _checkpoint(report.evaluations[name])
    facts |= {str(key): value for key, value in report.context.items()}
    facts |= {f"{package} (writing this report)": number for package, number in report.versions.items()}
    seeds = sorted({item.seed for evaluation in report.evaluations.values() for item in evaluation.per_task})
    facts |= {"problem seeds": seeds, "settings_hash": report.lift.settings_hash}
    facts["evaluation settings"] = report.evaluations["policy"].settings
    lines = [
        f"- {inline_code(key)}: {inline_code(_fact(value), limit=2_000)}"
        for key, value in facts.items()
        if not isinstance(value, dict)
    ]
    # JSON escapes control characters, and no line of it can be the bare fence that would end the block.
    documents = [
        f"{inline_code(key)}:\n\n```json\n{json.dumps(value, indent=2, sort_keys=True)}\n```"
        for key, value in facts.items()
        if isinstance(value, dict)
    ]
    return ["## Settings", "\n".join(lines), *documents]


def _checkpoint(evaluation: EvaluationResult) -> str:
    digest = f", digest {evaluation.checkpoint_digest}" if evaluation.checkpoint_digest else ""
    place = f"{evaluation.checkpoint_dir or 'no checkpoint'}{' (partial)' if evaluation.partial else ''}"
    return f"{evaluation.policy}, {evaluation.family}, {place}{digest}"


def _fact(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _arrow(start: str) -> str:
    return f"{COLUMNS[start]} → policy"


def _markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """A pipe table; punctuation that Markdown or HTML could read becomes a character reference."""
    header, *body = ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]
    return "\n".join([header, "|" + " --- |" * len(rows[0]), *body])


def _cell(text: str) -> str:
    # "< " opens no tag, and p-values are full of it
    return re.sub(r"<(?! )|[!#&*>\[\\\]`{|}~@/]", lambda match: f"&#{ord(match[0])};", text)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _percent_interval(interval: Interval) -> str:
    return f"{100 * interval[0]:.1f} to {100 * interval[1]:.1f}"


def _points(difference: float) -> str:
    return f"{100 * difference:+.1f} points"


def _points_interval(interval: Interval) -> str:
    return f"{100 * interval[0]:+.1f} to {100 * interval[1]:+.1f}"


def _interval(interval: Interval) -> str:
    return f"{interval[0]:+.3f} to {interval[1]:+.3f}"


def _p(value: float) -> str:
    return "p < 0.0001" if value < 1e-4 else f"p = {value:.4f}"
