"""The command line: one list of options, clean standard output, exit codes that say what happened."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from rich.console import Console

from grpo_core.compute import preview as planning
from grpo_core.config import Config, EvalConfig, GRPOConfig, PipelineConfig, SFTConfig
from grpo_core.errors import ConfigError, NotFoundError
from grpo_core.progress import Notice, StepEvent
from lab import __version__, cli, embedded
from lab.options import chosen, flags_of, merged, read_file
from lab.progress import TerminalProgress
from tasks.places import located

CONFIGS = sorted((Path(__file__).parents[1] / "deployments" / "configs").iterdir())


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LAB_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Config]]:
    """Jobs that would have been started, instead of starting them."""
    jobs: list[tuple[str, Config]] = []

    def run(flow: str, config: Config, verbose: bool = False) -> dict[str, Any]:
        jobs.append((flow, config))
        return {"job_id": "job-1", "status": "completed", "checkpoint_dir": "/there"}

    monkeypatch.setattr(embedded, "run", run)
    return jobs


def lab(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of one command in this process."""
    code = cli.main(arguments)
    out, err = capfd.readouterr()
    return code, out, err


def flag_names(flags: type, prefix: str = "") -> set[str]:
    """Dotted names of the config fields that a flags class offers."""
    names = set()
    for name, hint in get_type_hints(flags).items():
        kind = get_args(hint)[0]
        names |= (
            flag_names(kind, f"{prefix}{name}.") if is_dataclass(kind) and isinstance(kind, type) else {prefix + name}
        )
    return names


def field_names(config: type[Config], prefix: str = "") -> set[str]:
    names = set()
    for name, info in config.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Config):
            names |= field_names(info.annotation, f"{prefix}{name}.")
        else:
            names.add(prefix + name)
    return names


@pytest.mark.parametrize("config", [SFTConfig, GRPOConfig, EvalConfig, PipelineConfig])
def test_every_field_has_a_flag(config: type[Config]) -> None:
    niah = {"env", "min_blocks", "max_blocks", "num_keys", "num_digits"}  # together they are environment_options
    assert flag_names(flags_of(config)) | niah == (field_names(config) - {"environment_options"}) | niah


def test_flags_become_the_config(capfd: pytest.CaptureFixture[str], started: list[tuple[str, Config]]) -> None:
    arguments = (
        "--prompts 8 --lr 1e-3 --gradient-checkpointing --num-keys 2 --env min_blocks=2 --max-duration-hours 0.5"
    )
    code, _, _ = lab(capfd, "train", "rl", "-f", "smollm2-135m", "--policy", "peft-lora", *arguments.split())
    assert code == 0
    ((flow, config),) = started
    assert flow == "train_rl" and isinstance(config, GRPOConfig)
    assert (config.prompts, config.lr, config.gradient_checkpointing, config.compute.max_duration_hours) == (
        8,
        1e-3,
        True,
        0.5,
    )
    assert config.environment_options == {"min_blocks": 2, "max_blocks": 4, "num_keys": 2, "num_digits": 4}


def test_flags_of_a_pipelines_sections_override_its_file(
    capfd: pytest.CaptureFixture[str], started: list[tuple[str, Config]], tmp_path: Path
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("family: smollm2-135m\nenvironment_options: {num_keys: 2}\nsft: {examples: 10, epochs: 3}\n")
    arguments = "--sft.examples 7 --eval.tasks 9 --max-blocks 3"
    code, _, _ = lab(capfd, "pipeline", "run", "--config", str(file), *arguments.split(), "--json")
    assert code == 0
    ((_, config),) = started
    assert isinstance(config, PipelineConfig)
    assert (config.sft.examples, config.sft.epochs, config.eval.num_tasks) == (7, 3, 9)
    assert config.environment_options == {"min_blocks": 1, "max_blocks": 3, "num_keys": 2, "num_digits": 4}


@pytest.mark.parametrize(("suffix", "text"), [(".toml", "seed = 3"), (".json", '{"seed": 3}'), (".yml", "seed: 3")])
def test_files_of_every_kind_are_read(tmp_path: Path, suffix: str, text: str) -> None:
    (tmp_path / f"job{suffix}").write_text(text)
    assert read_file(tmp_path / f"job{suffix}") == {"seed": 3}


@pytest.mark.parametrize(
    ("name", "text"), [("a.toml", "seed ="), ("a.yaml", "a: [1"), ("a.json", "[1]"), ("a.ini", "x")]
)
def test_a_faulty_file_is_named(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=name):
        read_file(tmp_path / name)
    with pytest.raises(NotFoundError, match="nothing"):
        read_file(tmp_path / "nothing.toml")


def test_an_environment_option_is_json_or_text() -> None:
    flags = flags_of(EvalConfig)(env=["a=1", "b=[true]", "c=plain words", "d=1=2"])
    assert chosen(flags, EvalConfig) == {"environment_options": {"a": 1, "b": [True], "c": "plain words", "d": "1=2"}}


def test_a_section_is_merged_and_a_value_replaced() -> None:
    assert merged({"a": {"x": 1, "y": 2}, "b": 1}, {"a": {"y": 3}, "c": 4}) == {"a": {"x": 1, "y": 3}, "b": 1, "c": 4}


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_every_shipped_config_loads(file: Path) -> None:
    assert planning.preview(PipelineConfig.parse(read_file(file))).launchable


EVAL = ("eval", "rl", "-f", "smollm2-135m")


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (("train", "rl", "--promptz", "3"), 2, {"code": "USAGE"}),
        (("train", "rl", "--prompts"), 2, {"code": "USAGE"}),
        (("trian",), 2, {"code": "USAGE"}),
        (("eval", "rl", "-f", "gpt-2"), 2, {"code": "UNKNOWN_FAMILY", "field": "family"}),
        ((*EVAL, "--tasks", "many"), 2, {"code": "CONFIG_INVALID", "field": "num_tasks"}),
        ((*EVAL, "--tasks", "0"), 2, {"code": "CONFIG_INVALID", "field": "num_tasks"}),
        ((*EVAL, "--env", "colour=red"), 2, {"code": "CONFIG_INVALID", "field": "environment_options.colour"}),
        ((*EVAL, "--environment", "chess"), 2, {"code": "UNKNOWN_ENVIRONMENT", "field": "environment"}),
        ((*EVAL, "--compute-offer", "h100"), 3, {"code": "OFFER_NOT_FOUND", "field": "compute.offer"}),
        ((*EVAL, "--endpoint", "http://lab"), 2, {"code": "CONFIG_INVALID", "field": "endpoint"}),
        (("register", "--name", "x"), 2, {"code": "NOT_BUILT"}),
        (("jobs", "logs", "x"), 2, {"code": "NOT_BUILT"}),
        (("train", "d2l", "-f", "smollm2-135m"), 2, {"code": "NOT_BUILT"}),
        ((*EVAL, "--policy", "peft-lora", "-c", "sft-1-00000000"), 4, {"code": "NOT_FOUND", "field": "checkpoint_dir"}),
        ((*EVAL, "--config", "nothing.toml"), 4, {"code": "NOT_FOUND", "field": "config"}),
        (("lift", "nothing.json", "nothing.json"), 4, {"code": "NOT_FOUND"}),
    ],
)
def test_a_refusal_is_one_document_or_one_line(
    capfd: pytest.CaptureFixture[str], started: list[Any], arguments: tuple[str, ...], code: int, error: dict[str, str]
) -> None:
    got, out, err = lab(capfd, *arguments, "--json")
    document = json.loads(out)["error"]
    assert (got, err) == (code, "")
    assert {key: document[key] for key in error} == error
    got, out, err = lab(capfd, *arguments)
    assert (got, out, err.count("\n")) == (code, "", 1)
    assert err.startswith("error: ") and document["message"] in err
    assert started == []


@pytest.mark.parametrize(
    ("command", "flags"), [("train sft", "-f smollm2-135m"), ("pipeline run", "-f smollm2-135m"), ("eval rl", "")]
)
def test_a_job_for_an_endpoint_is_never_run_here(
    capfd: pytest.CaptureFixture[str],
    started: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    flags: str,
) -> None:
    monkeypatch.setenv("LAB_ENDPOINT", "http://lab.example")
    code, _, err = lab(capfd, *command.split(), *flags.split())
    assert (code, started) == (2, [])
    assert err.startswith("error: endpoint: 'http://lab.example': submitting to an endpoint is not possible")
    code, out, _ = lab(capfd, *command.split(), *flags.split(), "--preview", "--json")
    assert (code, json.loads(out)["blockers"][0]["field"]) == (3, "endpoint")


def test_no_command_that_is_not_built_is_offered(capfd: pytest.CaptureFixture[str]) -> None:
    offered = {" ".join((*prefix, name)) for prefix, app in [((), cli.app), (("train",), cli.train)] for name in app}
    assert offered & set(cli.NOT_BUILT) == set()
    assert {"train", "train rl", "lift"} <= offered


def test_a_users_own_files_are_found_from_the_current_directory(
    capfd: pytest.CaptureFixture[str],
    started: list[tuple[str, Config]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "examples.jsonl"
    file.write_text("{}\n")
    base = ("-f", "smollm2-135m")
    assert lab(capfd, "train", "sft", *base, "--dataset", file.name)[0] == 0
    assert lab(capfd, "pipeline", "run", *base, "--sft.dataset", file.name, "--json")[0] == 0
    assert lab(capfd, "train", "sft", *base, "--dataset", file.as_uri())[0] == 0
    (_, alone), (_, section), (_, by_url) = started
    assert isinstance(alone, SFTConfig) and isinstance(section, PipelineConfig) and isinstance(by_url, SFTConfig)
    assert (alone.dataset, section.sft.dataset, by_url.dataset) == (str(file), str(file), file.as_uri())
    assert located(SFTConfig.model_construct(model_dir="weights")).model_dir == str(tmp_path / "weights")


def test_a_device_that_is_not_there_is_refused_before_anything_starts(
    capfd: pytest.CaptureFixture[str], started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "_has_nvidia_driver", lambda: False)
    code, _, err = lab(capfd, *EVAL, "--device", "cuda")
    assert (code, started) == (2, [])
    assert err.startswith("error: device: 'cuda' needs an NVIDIA driver") and err.count("\n") == 1


def test_a_preview_starts_nothing_and_every_blocker_is_3(
    capfd: pytest.CaptureFixture[str], started: list[Any], home: Path
) -> None:
    code, out, _ = lab(capfd, *EVAL, "--preview", "--json")
    plan = json.loads(out)
    assert (code, plan["launchable"], plan["launched"], plan["estimate"]["rollouts"]) == (0, True, False, 200)
    for faulty in (("--tasks", "0"), ("--env", "nonsense"), ("--policy", "peft-lora", "-c", "nothing")):
        code, out, _ = lab(capfd, *EVAL, *faulty, "--preview", "--json")
        assert (code, json.loads(out)["launchable"]) == (3, False)
    code, out, _ = lab(capfd, *EVAL, "--tasks", "0", "--preview")
    assert (code, out.splitlines()[0]) == (3, "not launchable")
    assert (started, list(home.iterdir())) == ([], [])


@pytest.mark.parametrize(
    ("document", "code"), [({"status": "completed"}, 0), ({"status": "cancelled", "stop_reason": "time_ceiling"}, 130)]
)
def test_how_a_job_ended_is_the_exit_code(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, document: dict[str, Any], code: int
) -> None:
    def noisy(*_: Any, **__: Any) -> dict[str, Any]:
        print("a library talks")
        os.write(1, b"a child process talks\n")
        return {"job_id": "job-1", **document}

    monkeypatch.setattr(embedded, "run", noisy)
    got, out, err = lab(capfd, "train", "sft", "-f", "smollm2-135m", "--json")
    assert (got, json.loads(out)) == (code, {"job_id": "job-1", **document})
    assert "a library talks" in err and "a child process talks" in err


def test_an_evaluations_json_has_its_items(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "evaluation.json").write_text(json.dumps({**evaluation_document(8), "job_id": None}))
    summary = {"job_id": "eval-1", "status": "completed", "url": str(tmp_path / "evaluation.json")}
    monkeypatch.setattr(embedded, "run", lambda *_, **__: summary)
    code, out, _ = lab(capfd, *EVAL, "--json")
    document = json.loads(out)
    assert (code, document["job_id"], len(document["per_task"])) == (0, "eval-1", 8)
    code, out, _ = lab(capfd, *EVAL)
    assert code == 0 and "1.000" in out


def test_an_interrupt_before_a_job_runs_leaves_no_traceback(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded, "run", interrupted)
    assert lab(capfd, "train", "sft", "-f", "smollm2-135m") == (
        130,
        "",
        "error: interrupted; a job that had begun keeps what it saved\n",
    )


def test_progress_without_a_terminal_is_a_few_whole_lines() -> None:
    progress = TerminalProgress(Console(file=(out := io.StringIO()), width=20))
    for event in (
        StepEvent("rl", 1, 9, {"loss": 0.5, "reward": 0.25}),
        StepEvent("rl", 2, 9, {"loss": 0.5, "reward": 0.25}),  # too soon after the first
        StepEvent("rl", 2, 9, {"eval/reward": 0.75}),
        Notice("warning", "a message that is longer than the console is wide"),
        StepEvent("eval-base", 1, 2, {"problems": 16.0}),
        StepEvent("eval-base", 2, 2, {"problems": 20.0}),
    ):
        progress.emit(event)
    assert out.getvalue().splitlines() == [
        "rl 1/9 loss 0.5 reward 0.25",
        "rl 2/9 eval/reward 0.75",
        "warning: a message that is longer than the console is wide",
        "eval-base 1/2",
        "eval-base 2/2",
    ]


def test_environments_are_listed_with_their_options(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = lab(capfd, "environments", "--json")
    niah = {each["name"]: each for each in json.loads(out)["environments"]}["niah"]
    assert code == 0 and set(niah["options"]) == {"min_blocks", "max_blocks", "num_keys", "num_digits"}


def test_lift_compares_files_and_folders(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    # The baseline answers 2 of 8 problems, the policy all of them.
    for name, passing in (("base", 2), ("policy", 8)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "evaluation.json").write_text(json.dumps(evaluation_document(passing)))
    code, out, _ = lab(capfd, "lift", str(tmp_path / "base"), str(tmp_path / "policy" / "evaluation.json"), "--json")
    result = json.loads(out)
    assert (code, result["lift"]["pass_rate"], result["fixed"]) == (0, 0.75, ["p2", "p3", "p4", "p5", "p6", "p7"])
    code, out, _ = lab(capfd, "lift", str(tmp_path / "base"), str(tmp_path / "policy"))
    assert code == 0 and "25" in out and "Lift report" in out


def test_an_evaluation_without_items_cannot_be_compared(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    document = evaluation_document(2)
    del document["per_task"]
    (tmp_path / "evaluation.json").write_text(json.dumps(document))
    code, _, err = lab(capfd, "lift", str(tmp_path), str(tmp_path))
    assert code == 2 and "per_task" in err


def evaluation_document(passing: int) -> dict[str, Any]:
    def item(index: int) -> dict[str, Any]:
        right = index < passing
        scored = {"reward": float(right), "parts": {}, "passed": right, "tokens": 1, "truncated": False}
        return {"id": f"p{index}", "index": index, "seed": 0, "completion": "7", "expected": "7", **scored}

    share = passing / 8
    rewards = {"mean_reward": share, "std_reward": 0.4, "min_reward": 0.0, "max_reward": 1.0}
    passes = {"pass_rate": share, "pass_rate_ci95": [0.0, 1.0], "pass_threshold": 1.0}
    counts = {"num_tasks": 8, "truncated": 0, "failed": 0, "parts": {}, "duration_s": 1.0}
    settings = {"settings": {"seed": 0}, "settings_hash": "hash", "checkpoint_dir": None, "checkpoint_digest": None}
    names = {"family": "smollm2-135m", "environment": "niah", "policy": "base"}
    return {**names, **rewards, **passes, **counts, **settings, "per_task": [item(index) for index in range(8)]}


def test_the_command_answers_from_a_shell() -> None:
    done = subprocess.run([sys.executable, "-m", "lab.cli", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, __version__, "")


ENDINGS = {
    # As a terminal does: to every process of its group, the embedded API included.
    "ctrl-c": "os.killpg(0, signal.SIGINT)",
    "failed": 'raise TrainingFailed("the loss is nan", code="NON_FINITE")',
    "terminated": "os.kill(os.getpid(), signal.SIGTERM)",
}
LAB = """
import io, json, os, signal, sys
from contextlib import redirect_stdout
import grpo_core.sft
from grpo_core.errors import TrainingFailed
from grpo_core.results import TrainingResult
from lab.cli import main

endings = json.loads(sys.argv[1])

def train(config, monitor):
    print("training")
    exec(endings[name])
    while not (reason := monitor.stop_requested()):
        pass
    return TrainingResult(
        kind="sft", status="cancelled", stop_reason=reason, checkpoint_dir=config.checkpoint_dir, partial=True,
        steps=3, metrics={"loss": 1.0}, digest="d", initial_digest="i", duration_s=1.0,
    )

grpo_core.sft.train_sft = train
for name in endings:
    with redirect_stdout(io.StringIO()) as out:
        code = main(["train", "sft", "-f", "smollm2-135m", "--json"])
    print(json.dumps([code, json.loads(out.getvalue())]))
    print("====", file=sys.stderr)
sys.exit(code)
"""


@pytest.fixture(scope="module")
def real_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("real-home")


@pytest.fixture(scope="module")
def ended(real_home: Path) -> dict[str, tuple[int, dict[str, Any], str]]:
    """Exit code, document and standard error of jobs that end in different ways, in one real process."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    done = subprocess.run(
        [sys.executable, "-c", LAB, json.dumps(ENDINGS)],
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
        env={**outside, "LAB_HOME": str(real_home)},
    )
    assert done.returncode == 130, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    messages = done.stderr.split("====\n")
    return {
        name: (code, document, err) for name, (code, document), err in zip(ENDINGS, answers, messages[:-1], strict=True)
    }


@pytest.mark.parametrize("ending", ENDINGS)
def test_no_traceback_reaches_the_terminal(ended: dict[str, tuple[int, dict[str, Any], str]], ending: str) -> None:
    _, _, err = ended[ending]
    assert "training" in err  # what the job prints is there
    assert "Traceback" not in err


@pytest.mark.parametrize("ending", ["ctrl-c", "terminated"])
def test_a_signal_saves_says_so_and_exits_130(
    ended: dict[str, tuple[int, dict[str, Any], str]], real_home: Path, ending: str
) -> None:
    code, document, err = ended[ending]
    facts = [document[name] for name in ("status", "stop_reason", "partial", "steps")]
    assert (code, facts) == (130, ["cancelled", "cancelled", True, 3])
    assert document["checkpoint_dir"] == str(real_home / "artifacts" / document["job_id"])
    assert err.count("stopping: what is finished is saved first") == 1
    assert {"artifacts", "mlflow", "prefect"} <= {path.name for path in real_home.iterdir()}


def test_a_failure_on_purpose_is_one_error(ended: dict[str, tuple[int, dict[str, Any], str]]) -> None:
    code, document, _ = ended["failed"]
    assert (code, document["error"]["code"], document["error"]["message"]) == (1, "NON_FINITE", "the loss is nan")
