"""How answers read for people: tables and sentences made from the same documents that `--json` prints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from shlex import quote
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.table import Table

from grpo_core.files import read_json

if TYPE_CHECKING:
    from grpo_core.results import EvaluationResult, LiftResult


def previewed(document: dict[str, Any]) -> list[RenderableType]:
    """The verdict, what stands against a launch, and the counts."""
    lines: list[RenderableType] = ["launchable" if document["launchable"] else "not launchable"]
    for kind in ("blockers", "warnings"):
        for issue in document[kind]:
            place = f"{issue['field']}: " if issue["field"] else ""
            hint = f" ({issue['hint']})" if issue["hint"] else ""
            lines.append(f"{kind[:-1]} {issue['code']}: {place}{issue['message']}{hint}")
    if estimate := document["estimate"]:
        counts = (
            f"{estimate[name]} {name}"
            for name in ("steps", "prompts", "rollouts", "tokens")
            if estimate[name] is not None
        )
        lines += [f"at most: {', '.join(counts)}", estimate["basis"]]
    return lines


def training(document: dict[str, Any]) -> list[RenderableType]:
    """How a training run ended, and where its checkpoint is."""
    partial = " (partial)" if document.get("partial") else ""
    facts = _facts(
        status=_status(document),
        job=document["job_id"],
        steps=document.get("steps"),
        checkpoint=f"{document['checkpoint_dir']}{partial}" if "checkpoint_dir" in document else None,
        digest=document.get("digest"),
        **document.get("metrics", {}),
    )
    return [facts]


def evaluation(document: dict[str, Any]) -> list[RenderableType]:
    """The scores of one evaluation."""
    if document["status"] == "cancelled":
        return [f"stopped: {document['stop_reason']}; there is no result"]
    low, high = document["pass_rate_ci95"]
    partial = " (partial checkpoint)" if document.get("partial") else ""
    facts = _facts(
        policy=f"{document['policy']} of {document['family']}{partial}",
        problems=document["num_tasks"],
        pass_rate=f"{document['pass_rate']:.3f} (95 % interval {low:.3f} to {high:.3f})",
        mean_reward=f"{document['mean_reward']:.3f} (std {document['std_reward']:.3f})",
        **{f"rewards/{part}": value for part, value in document["parts"].items()},
        truncated=document["truncated"],
        failed=document["failed"],
        items=document["url"],
    )
    return [facts]


def lift(
    evaluations: Mapping[str, EvaluationResult], result: LiftResult, rl_lift: LiftResult | None = None
) -> list[RenderableType]:
    """The lift table, with its verdict in a sentence below."""
    from grpo_core.report.lift_report import LiftReport, render_table

    return [render_table(LiftReport(evaluations, result, rl_lift))]


def pipeline(document: dict[str, Any]) -> list[RenderableType]:
    """The lift table and where everything is kept."""
    shown: list[RenderableType] = []
    if document["status"] == "completed":
        from grpo_core.results import EvaluationResult, LiftResult

        evaluations = {
            name: EvaluationResult.model_validate(read_json(each["url"]))
            for name, each in document["evaluations"].items()
        }
        shown += lift(
            evaluations, LiftResult.model_validate(document["lift"]), LiftResult.model_validate(document["rl_lift"])
        )
    stopped = next((stage for kind in ("rl", "sft") if (stage := document[kind]) and stage["partial"]), None)
    return [
        *shown,
        _facts(
            status=_status(document),
            job=document["job_id"],
            checkpoints=document["checkpoint_dir"],
            partial=f"{stopped['checkpoint_dir']} after step {stopped['steps']}" if stopped else None,
            **_stores(document),
        ),
    ]


def jobs(documents: list[dict[str, Any]]) -> list[RenderableType]:
    """One line a job."""
    table = Table("job", "status", "started", "checkpoints")
    for each in documents:
        table.add_row(each["job_id"], each["status"], each["started_at"] or "", each["checkpoint_dir"] or "")
    return [table]


def job(document: dict[str, Any]) -> list[RenderableType]:
    """What is known of one job."""
    error = document["error"]
    partial = " (partial)" if document["partial"] else ""
    return [
        _facts(
            job=document["job_id"],
            status=_status(document),
            started=document["started_at"],
            ended=document["ended_at"],
            checkpoints=f"{document['checkpoint_dir']}{partial}" if document["checkpoint_dir"] else None,
            error=f"{error['message']}{' (' + error['hint'] + ')' if error['hint'] else ''}" if error else None,
        )
    ]


def environments(documents: list[dict[str, Any]]) -> list[RenderableType]:
    """Names, descriptions and options."""
    table = Table("environment", "what it asks", "options")
    for each in documents:
        options = ", ".join(f"{name}={schema.get('default', '')}" for name, schema in each["options"].items())
        table.add_row(each["name"], each["description"], options)
    return [table]


def _status(document: dict[str, Any]) -> str:
    """The status, with the reason of a stop where it says more than the status itself."""
    reason = document.get("stop_reason")
    return document["status"] if reason in (None, document["status"]) else f"{document['status']}: {reason}"


def _stores(document: dict[str, Any]) -> dict[str, Any]:
    from tasks.tracking import tracking_uri

    run = document["mlflow_run_id"]
    opening = f"{run} (mlflow ui --backend-store-uri {quote(tracking_uri())})" if run else None
    prefect_home = quote(os.path.expanduser(os.environ.get("PREFECT_HOME", "~/.prefect")))
    opening_prefect = f"PREFECT_HOME={prefect_home} PREFECT_SERVER_ANALYTICS_ENABLED=false prefect server start"
    return {
        **{f"report {kind}": url for kind, url in document["report"].items()},
        "mlflow run": opening,
        "prefect": opening_prefect,
    }


def _facts(**facts: Any) -> str:
    """One fact a line. No table: it would cut the paths that people copy."""
    shown = {name: value for name, value in facts.items() if value is not None}
    width = max(map(len, shown)) + 2
    return "\n".join(
        f"{name:<{width}}{f'{value:.4g}' if isinstance(value, float) else value}" for name, value in shown.items()
    )
