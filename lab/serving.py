"""The process that runs submitted jobs: ``python -m lab.serving``. It needs a Prefect server, `PREFECT_API_URL`.

It serves one deployment per flow and starts a process per job, so many at a time. Beside that it looks after jobs
whose process was killed: of this machine's it is known at once that they are gone, whoever started them; another
machine is taken to be gone when its heartbeats stay away.
"""

from __future__ import annotations

import argparse
import logging
import os
import threading
import time
from datetime import timedelta

from grpo_core.errors import ConfigError
from lab import home
from lab.embedded import load_flow
from lab.jobs import DEPLOYMENT, KINDS, find_crashed
from tasks.places import JOB_TAG
from tasks.tracking import deliver_left_behind

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 30.0
SILENT_S = 600.0
"""A machine's job is given up when it was silent for so long: over three heartbeats, which come every 180 s."""

WATCH = "grpo-lab: jobs without a heartbeat have crashed"


def serve(limit: int = 1) -> None:
    """Run submitted jobs until a signal ends it, `limit` at a time; those that wait are run when it is back.

    Raises:
        ConfigError: there is no Prefect server to serve.
    """
    home.prepare()
    if not os.environ.get("PREFECT_API_URL"):
        raise ConfigError("PREFECT_API_URL is not set: an embedded API cannot be served", hint="prefect server start")
    from prefect import serve as serve_deployments
    from prefect.types.entrypoint import EntrypointType

    deployments = []
    for kind, name in KINDS.values():
        tags, entrypoint_type = [JOB_TAG, kind], EntrypointType.MODULE_PATH
        deployments.append(load_flow(name).to_deployment(DEPLOYMENT, tags=tags, entrypoint_type=entrypoint_type))
    _give_up_silent_machines()
    threading.Thread(target=_look_after_jobs, daemon=True).start()
    # The limit is the runner's: a deployment's own crashes healthy runs when the server was restarted.
    serve_deployments(*deployments, limit=limit, pause_on_shutdown=False, print_starting_message=False)


def _look_after_jobs() -> None:
    while True:
        try:
            for job_id in find_crashed():
                logger.warning("%s has crashed: its process is gone", job_id)
            deliver_left_behind()
        except Exception as error:  # an API that is away for a while
            logger.warning("jobs cannot be looked after: %s", error)
        time.sleep(LOOK_EVERY_S)


def _give_up_silent_machines() -> None:
    """Have the Prefect server make jobs Crashed whose heartbeats stay away; only jobs of deployments send them."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.objects import StateType
    from prefect.events.actions import ChangeFlowRunState
    from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
    from prefect.events.schemas.events import ResourceSpecification

    ended = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed")}
    watch = AutomationCore(
        name=WATCH,
        trigger=EventTrigger(
            posture=Posture.Proactive,
            match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
            match_related=ResourceSpecification(
                {"prefect.resource.role": ["tag"], "prefect.resource.id": [f"prefect.tag.{JOB_TAG}"]}
            ),
            for_each={"prefect.resource.id"},
            after={"prefect.flow-run.heartbeat"},
            expect={"prefect.flow-run.heartbeat", *ended},
            threshold=1,
            within=timedelta(seconds=SILENT_S),
        ),
        actions=[
            ChangeFlowRunState(
                name=None, state=StateType.CRASHED, message="no heartbeat: its machine is gone", force=False
            )
        ],
    )
    with get_client(sync_client=True) as client:
        if known := client.read_automations_by_name(WATCH):
            client.update_automation(known[0].id, watch)
        else:
            client.create_automation(watch)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=1, help="jobs that run at a time")
    serve(parser.parse_args().limit)
