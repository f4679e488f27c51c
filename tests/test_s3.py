"""Checkpoints on S3: moto's server speaks the real protocol, and answers one request in ten with 503."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.request import Request, urlopen

import pytest
from loops import Audience, verified_steps
from werkzeug.serving import make_server

from grpo_core.config import EvalConfig, GRPOConfig, PipelineConfig, SFTConfig
from grpo_core.errors import CheckpointConflict
from grpo_core.evaluation import evaluate
from grpo_core.grpo import train_grpo
from grpo_core.lease import Lease
from grpo_core.progress import Silent, StopNow
from grpo_core.sft import train_sft

pytestmark = pytest.mark.slow

SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


class Flaky:
    """A WSGI application that answers a share of the requests with 503 instead."""

    def __init__(self, application: Any):
        self._application = application
        self._chances = random.Random(0)
        self.share = 0.0
        self.requests = self.refused = 0

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        self.requests += 1
        if self._chances.random() < self.share:
            self.refused += 1
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response("503 Slow Down", [("Content-Type", "application/xml")])
            return [SLOW_DOWN]
        return self._application(environ, start_response)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Flaky]:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from s3fs import S3FileSystem

    flaky = Flaky(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, flaky, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    urlopen(Request(f"{address}/moto-api/reset", method="POST")).close()  # its memory is the process's
    for name, value in {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    S3FileSystem.clear_instance_cache()
    S3FileSystem().mkdir("lab")
    try:
        yield flaky
    finally:
        S3FileSystem.clear_instance_cache()
        server.shutdown()
        thread.join()


def test_training_goes_on_while_one_request_in_ten_fails(
    s3: Flaky, sft: Callable[..., SFTConfig], grpo: Callable[..., GRPOConfig]
) -> None:
    expected = train_grpo(grpo(init_checkpoint_dir=train_sft(sft(), Silent()).checkpoint_dir), Silent())
    s3.share = 0.1
    warm = train_sft(sft(checkpoint_dir="s3://lab/sft", checkpoint_every=1), Silent())
    rl = grpo(checkpoint_dir="s3://lab/rl", init_checkpoint_dir="s3://lab/sft", checkpoint_every=1, keep_last=2)
    result = train_grpo(rl, Silent())
    s3.share = 0.0
    assert s3.refused > 0.05 * s3.requests > 5
    assert warm.status == result.status == "completed"
    assert result.digest == expected.digest
    assert verified_steps("s3://lab/sft") == [0, 1, 2, 3]
    assert verified_steps("s3://lab/rl") == [0, 4, 5]


def test_evaluation_goes_on_behind_its_finished_batches(s3: Flaky, common: dict[str, Any], tmp_path: Any) -> None:
    from s3fs import S3FileSystem

    config = EvalConfig.parse({**common, "num_tasks": 40})  # three batches
    whole = evaluate(config, str(tmp_path), Silent())
    s3.share = 0.1
    first, second, third = Audience(stop_after=1), Audience(stop_after=1), Audience()
    for audience in (first, second):
        with pytest.raises(StopNow):
            evaluate(config, "s3://lab/eval", audience)
    result = evaluate(config, "s3://lab/eval", third)
    s3.share = 0.0
    assert (first.batches, second.batches, third.batches) == ([1], [2], [3])
    assert result.per_task == whole.per_task
    assert S3FileSystem().find("lab") == ["lab/eval/evaluation.json"]


def test_second_writer_is_refused_on_s3_too(s3: Flaky) -> None:
    with Lease("s3://lab/run"), pytest.MonkeyPatch.context() as listing:
        listing.setattr("s3fs.S3FileSystem._ls_from_cache", lambda *_: [])  # listed before the first writer came
        with pytest.raises(CheckpointConflict, match="writes to"), Lease("s3://lab/run"):
            pass
    with Lease("s3://lab/run"):
        pass


def test_pipeline_on_s3(
    s3: Flaky, prefect_harness: None, common: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows.pipeline import pipeline

    monkeypatch.setenv("LAB_HOME", str(tmp_path / "lab"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    s3.share = 0.1
    config = {
        **common,
        "checkpoint_dir": "s3://lab/pipeline",
        "sft": {"examples": 8, "examples_per_step": 4, "eval_examples": 2, "lora_rank": 4, "lr": 1e-2},
        "rl": {"prompts": 8, "prompts_per_step": 2, "group_size": 4, "lr": 1e-2, "checkpoint_every": 1},
        "eval": {"num_tasks": 4},
    }
    document = pipeline(PipelineConfig.parse(config))
    s3.share = 0.0
    assert document["status"] == "completed"
    assert document["report"]["markdown"].startswith("s3://lab/pipeline/")
    assert verified_steps("s3://lab/pipeline/sft") == [0, 2]
    assert verified_steps("s3://lab/pipeline/rl") == [0, 2, 3, 4]
    assert s3.refused > 5
