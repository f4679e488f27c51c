"""The command line, `lab`. Every option of a job comes from its config; nothing heavy loads before a job starts."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter

from grpo_core.compute.preview import JobConfig, admit, preview, refused
from grpo_core.config import EvalConfig, GRPOConfig, PipelineConfig, SFTConfig
from grpo_core.environments.registry import environment_class, environment_names
from grpo_core.errors import ConfigError, LabError
from grpo_core.files import read_json
from lab import __version__, home, output, texts
from lab.jobs import KINDS
from lab.options import chosen, flags_of, merged, read_file
from lab.output import Answer
from tasks.places import located

BLOCKED = 3
STOPPED = 130
INTERNAL = 1

# Commands that the documentation names and this version lacks.
NOT_BUILT = ("register", "score", "internalize", "offers", "jobs logs", "up", "down", "train d2l")

JsonFlag = Annotated[bool, Parameter(negative=())]

app = App(
    name="lab",
    help="Train LoRA adapters with SFT and GRPO, and measure what they gained.",
    version=__version__,
    version_flags="--version",
    suppress_keyboard_interrupt=False,
)
train = App(name="train", help="Train one stage.")
evaluate = App(name="eval", help="Evaluate a policy.")
run_pipeline = App(name="pipeline", help="All stages and the lift report.")
jobs = App(name="jobs", help="What was started, and how to stop it.")
for group in (run_pipeline, train, evaluate, jobs):
    app.command(group)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and print its answer.

    Returns:
        0 done, 1 failed, 2 wrong usage or configuration, 3 blocked, 4 not found, 130 cancelled or stopped by a ceiling.
    """
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in tokens
    try:
        _refuse_not_built(tokens)
        answer = app(tokens, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        answer = output.refusal(ConfigError(" ".join(str(error).split()), hint="see --help", code="USAGE"))
    except LabError as error:
        answer = output.refusal(error)
    except KeyboardInterrupt:
        answer = Answer(
            {"error": _described("CANCELLED", "interrupted; a job that had begun keeps what it saved")},
            exit_code=STOPPED,
        )
    except Exception as error:
        traceback.print_exc()
        answer = Answer({"error": _described("INTERNAL", f"{type(error).__name__}: {error}")}, exit_code=INTERNAL)
    if not isinstance(answer, Answer):  # --help and --version have printed already
        return 0
    output.write(answer, as_json)
    return answer.exit_code


def _refuse_not_built(tokens: Sequence[str]) -> None:
    words = [token for token in tokens if not token.startswith("-")]
    for name in NOT_BUILT:
        if words[: len(name.split())] == name.split():
            raise ConfigError(f"`lab {name}` is not built in this version", hint="see lab --help", code="NOT_BUILT")


def _described(code: str, message: str) -> dict[str, str | None]:
    return {"code": code, "message": message, "hint": None, "field": None}


@dataclass(frozen=True)
class JobOptions:
    """What every job command takes beside its config.

    Attributes:
        config: TOML, YAML or JSON file with the job's fields; flags override it.
        endpoint: Lab server to submit to; not possible in this version, so that naming one is refused.
        preview: Validate and count only; start nothing.
        json: Print one JSON document on standard output.
        verbose: Show Prefect's log.
    """

    config: Path | None = None
    endpoint: Annotated[str | None, Parameter(env_var="LAB_ENDPOINT")] = None
    preview: bool = False
    json: bool = False
    verbose: bool = False


def _job_command(config_class: type[JobConfig], shown: Callable[[dict[str, Any]], list[Any]]) -> Callable[..., Answer]:
    """A command with one flag per field of `config_class`, which runs its flow."""
    _, flow = KINDS[config_class]

    def command(*, flags: Any = None, options: Any = None) -> Answer:
        options = options or JobOptions()
        request: dict[str, Any] = {}
        try:
            _refuse_endpoint(options)
            request = merged(
                read_file(options.config) if options.config else {}, chosen(flags, config_class) if flags else {}
            )
            config = located(config_class.parse(request))
        except LabError as error:
            if options.preview:
                return _previewed(refused(request, error).document())
            raise
        if options.preview:
            return _previewed(preview(config).document())
        admit(config)
        with output.stdout_kept_clean():
            from lab import embedded  # Prefect

            document = _with_items(embedded.run(flow, config, verbose=options.verbose))
        return Answer(document, partial(shown, document), STOPPED if document["status"] == "cancelled" else 0)

    command.__doc__ = config_class.__doc__
    command.__annotations__ = {
        "flags": Annotated[flags_of(config_class) | None, Parameter(name="*")],
        "options": Annotated[JobOptions | None, Parameter(name="*", negative=())],
        "return": Answer,
    }
    return command


def _refuse_endpoint(options: JobOptions) -> None:
    """A job that was meant for another machine must not run on this one."""
    if options.endpoint:
        raise ConfigError(
            f"{options.endpoint!r}: submitting to an endpoint is not possible in this version",
            field="endpoint",
            hint="leave out --endpoint and unset LAB_ENDPOINT to run here",
        )


def _with_items(document: dict[str, Any]) -> dict[str, Any]:
    """A flow returns an evaluation without its items; the file that it names has them."""
    return {**read_json(document["url"]), **document} if "url" in document else document


def _previewed(document: dict[str, Any]) -> Answer:
    return Answer(document, partial(texts.previewed, document), 0 if document["launchable"] else BLOCKED)


run_pipeline.command(_job_command(PipelineConfig, texts.pipeline), name="run")
train.command(_job_command(SFTConfig, texts.training), name="sft")
train.command(_job_command(GRPOConfig, texts.training), name="rl")
evaluate.command(_job_command(EvalConfig, texts.evaluation), name="rl")


@app.command
def lift(baseline: str, policy: str, /, *, json: JsonFlag = False) -> Answer:
    """Compare two evaluations of the same problems.

    Args:
        baseline: Evaluation document, or the folder or job id that holds one.
        policy: The same, of the policy.
        json: Print one JSON document on standard output.
    """
    from grpo_core.lift import compare  # scipy
    from lab.evaluations import read_evaluation

    sides = {"baseline": read_evaluation(baseline), "policy": read_evaluation(policy)}
    result = compare(sides["baseline"], sides["policy"])
    return Answer(result.document(), partial(texts.lift, sides, result))


@jobs.command(name="list")
def list_jobs(*, limit: int = 50, json: JsonFlag = False) -> Answer:
    """List jobs, the newest first.

    Args:
        limit: So many at most.
        json: Print one JSON document on standard output.
    """
    with _prefect():
        from lab.jobs import list_jobs as listed

        found = listed(limit)
    return Answer({"jobs": found}, partial(texts.jobs, found))


@jobs.command
def get(job_id: str, /, *, json: JsonFlag = False) -> Answer:
    """Show one job with its config and its result.

    Args:
        job_id: The job's id, or the UUID of its flow run.
        json: Print one JSON document on standard output.
    """
    with _prefect():
        from lab.jobs import get_job

        found = get_job(job_id)
    return Answer(found, partial(texts.job, found))


@jobs.command
def cancel(job_id: str, /, *, force: JsonFlag = False, json: JsonFlag = False) -> Answer:
    """Ask a job to stop. It saves what is finished first; a training job can be resumed.

    Args:
        job_id: The job's id, or the UUID of its flow run.
        force: Let Prefect cancel it, which kills the process when it has not ended after 30 s.
        json: Print one JSON document on standard output.
    """
    with _prefect():
        from lab.jobs import cancel_job

        found = cancel_job(job_id, force)
    return Answer(found, partial(texts.job, found))


@contextmanager
def _prefect() -> Iterator[None]:
    """Prefect pointed at the lab's home, with whatever it prints kept off standard output."""
    home.prepare()
    with output.stdout_kept_clean():
        yield


@app.command
def environments(*, json: JsonFlag = False) -> Answer:
    """List the installed environments and their options.

    Args:
        json: Print one JSON document on standard output.
    """
    classes = [environment_class(name) for name in environment_names()]
    documents = [
        {
            "name": each.name,
            "description": each.description,
            "options": each.Options.model_json_schema()["properties"] if each.Options.model_fields else {},
            "parts": list(each.part_names),
            "pass_threshold": each.pass_threshold,
            "max_new_tokens": each.max_new_tokens,
        }
        for each in classes
    ]
    return Answer({"environments": documents}, partial(texts.environments, documents))


if __name__ == "__main__":
    sys.exit(main())
