"""One message of each type, two of those that come in kinds: what the golden bytes were made from.

Every field has a value that is not its default, so that the bytes show all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from schemas.claim import ClaimCheck
from schemas.control import (
    Backend,
    Breaker,
    Canary,
    Cancel,
    Credit,
    Cursor,
    FeederStarted,
    Outage,
    PolicyVersion,
    Quarantine,
    RunManifest,
)
from schemas.decisions import (
    Action,
    Alarm,
    Branch,
    DropReason,
    Evaluated,
    ForkedFrom,
    GroupDropped,
    Guard,
    Member,
    RowSuccess,
    RunEnded,
    SampleRef,
    StepDecided,
    TrainerStarted,
    VersionPublished,
)
from schemas.identity import group_id, payload_digest, task_seed
from schemas.message import Message
from schemas.messages import Budgets, Episode, Rollout, Shaping, Task, Trajectory
from schemas.outcome import Boundary, Cancelled, Completed, Expired, Failed, FailureKind, StopReason
from schemas.scores import Purpose, Scores
from schemas.telemetry import EventKind, MetricPoint, Metrics, StageEvent, StageEvents
from schemas.topics import Opaque
from schemas.transcript import Repetition, SampledSpan, Sampling, Transcript, Turn, pack_logprobs, pack_tokens

FOLDER = Path(__file__).parent / "v1"
"""Where the bytes are, one file per sample."""

OLDER_FOLDER = Path(__file__).parent / "older"
"""Where the bytes are that are no longer written."""

RUN, SOURCE, VISIT, ROW, RUN_SEED = "example", "doors.jsonl", 1, 7, 42
PAYLOAD = {"size": 5, "agent": [0, 0], "key": [3, 1], "door": [4, 4], "note": "ключ 🗝", "noise": 0.5}
GROUP = group_id(RUN, SOURCE, VISIT, ROW, PAYLOAD)
NOW_MS = 1_767_225_600_000
SAMPLING = Sampling(
    temperature=0.75,
    top_p=0.5,
    top_k=50,
    min_p=0.125,
    max_tokens=24,
    stop_sequences=((70_001, 5), (9,)),
    repetition=Repetition(max_pattern_size=32, min_pattern_size=3, min_count=5),
)

SHAPING = Shaping(weights={"format": 0.5, "repeated_actions": 0.125}, long_action=20, once_per_state=True)

TASK = Task(
    run=RUN,
    group=GROUP,
    sample=3,
    samples=8,
    attempt=1,
    source=SOURCE,
    visit=VISIT,
    row=ROW,
    payload=PAYLOAD,
    payload_digest=payload_digest(PAYLOAD),
    family="keydoor",
    seed=task_seed(RUN_SEED, SOURCE, VISIT, ROW),
    admission=19,
    start_by_ms=NOW_MS + 86_400_000,
    budgets=Budgets(init_s=60.0, run_s=900.0, eval_s=30.0),
    horizon=14,
    max_sampled_tokens=336,
    sampling=SAMPLING,
    min_version=5,
    weights_of=RUN,
    redrive_of="b4xq7zk2m5n3p6r2t7v3",
    phase=2,
    shaping=SHAPING,
)

TRANSCRIPT = Transcript(
    tokens=pack_tokens([1, 70_000, 9, 5, 6, 2, 8, 7, 2]),
    mask=bytes([0, 0, 0, 1, 1, 1, 0, 1, 1]),
    logprobs=pack_logprobs([0.0, 0.0, 0.0, -0.5, -1.25, -0.0625, 0.0, -2.0, -0.25]),
    spans=(
        SampledSpan(start=3, stop=6, version=5, sampling=SAMPLING, dtype="float32", logprobs_mode="processed_logprobs"),
        SampledSpan(start=7, stop=9, version=6, sampling=SAMPLING, dtype="float32", logprobs_mode="processed_logprobs"),
    ),
    turns=(
        Turn(
            start=0,
            sampled=3,
            stop=6,
            valid=True,
            action="go north",
            finish="stop",
            began_ms=NOW_MS,
            generated_ms=NOW_MS + 40,
            ended_ms=NOW_MS + 41,
        ),
        Turn(
            start=6,
            sampled=7,
            stop=9,
            valid=False,
            action="no action in the text",
            finish="length",
            began_ms=NOW_MS + 41,
            generated_ms=NOW_MS + 90,
            ended_ms=NOW_MS + 90,
        ),
    ),
    segments=(0, 6),
)

VERDICT = {"opened": False, "has_key": True, "steps": 1}
TOKENIZER_DIGEST = "sha256:9f2c"
REFS = (SampleRef(group=GROUP, sample=0, offset=118), SampleRef(group=GROUP, sample=3, offset=130))
MEMBERS = (
    Member(group=GROUP, sample=0, offset=118, content="a" * 64, reward=1.0),
    Member(group=GROUP, sample=3, offset=130, content="b" * 64, reward=-0.5),
)

SAMPLES: dict[str, Message] = {
    "rollmill.task": TASK,
    "rollmill.episode": Episode(
        task=TASK,
        host="unix:/tmp/envhost.sock",
        lease="l-17",
        messages=({"role": "system", "content": "Find the key."}, {"role": "user", "content": "key north"}),
        tools=({"type": "function", "function": {"name": "go", "parameters": {}}},),
        prompt_version="keydoor.1",
    ),
    "rollmill.rollout": Rollout(
        task=TASK,
        transcript=TRANSCRIPT,
        verdict=VERDICT,
        stop=StopReason.INVALID_ACTION,
        backend="local-0",
        worker="run-3",
        tokenizer_digest=TOKENIZER_DIGEST,
        gradings=2,
    ),
    "rollmill.trajectory": Trajectory(
        task=TASK,
        outcome=Completed(
            components={"door": 0.0, "format": -0.5},
            reward=-0.5,
            success=0.0,
            truncated=False,
            turn_rewards=(0.25, 0.0),
        ),
        transcript=TRANSCRIPT,
        verdict=VERDICT,
        stop=StopReason.INVALID_ACTION,
        backend="local-0",
        tokenizer_digest=TOKENIZER_DIGEST,
        stage="eval",
    ),
    "rollmill.trajectory.failed": Trajectory(
        task=TASK,
        outcome=Failed(kind=FailureKind.ENVIRONMENT_LOST, boundary=Boundary.ENVIRONMENT, cause="lease l-17 ran out"),
        stage="run",
    ),
    "rollmill.trajectory.cancelled": Trajectory(task=TASK, outcome=Cancelled(cause="by request"), stage="reaper"),
    "rollmill.trajectory.expired": Trajectory(task=TASK, outcome=Expired(cause="not started in time"), stage="init"),
    "rollmill.trainer_started": TrainerStarted(
        run=RUN,
        config={"batch_groups": 8, "lr": 0.0003},
        start=100,
        step=4,
        forked_from=ForkedFrom(run="before", epoch=3, step=60, weights="f" * 64),
    ),
    "rollmill.step": StepDecided(
        run=RUN,
        epoch=12,
        step=5,
        position=131,
        members=MEMBERS,
        digest="c" * 64,
        advantage_digest="d" * 64,
        buffered=(SampleRef(group="c5yr8al3n6p4q7s3u2w4", sample=1, offset=125),),
        missing=2,
        phase=2,
        rows=(RowSuccess(row=ROW, success=0.5),),
    ),
    "rollmill.group_dropped": GroupDropped(
        run=RUN,
        epoch=12,
        position=131,
        group=GROUP,
        reason=DropReason.NO_VARIANCE,
        members=REFS,
        row=RowSuccess(row=ROW, success=1.0),
    ),
    "rollmill.version": VersionPublished(run=RUN, epoch=12, step=5, version=6, digest="e" * 64),
    "rollmill.run_ended": RunEnded(run=RUN, epoch=12, position=140, step=5, reason="time limit", unused=REFS),
    "rollmill.branch": Branch(run=RUN, epoch=12, from_step=3, position=140, cause="success 0.25", lr_scale=0.5),
    "rollmill.alarm": Alarm(
        run=RUN,
        epoch=12,
        step=5,
        guard=Guard.ENTROPY,
        value=0.03125,
        bound=0.0625,
        steps=3,
        action=Action.SLOW,
        cause="entropy of 0.031 nats",
        lr_scale=0.5,
    ),
    "rollmill.evaluated": Evaluated(
        run=RUN,
        epoch=12,
        step=5,
        version=6,
        purpose=Purpose.EVALUATION,
        scores=Scores(
            run=f"{RUN}.eval.5.v6",
            tasks=64,
            samples=128,
            missing=3,
            mixed=1,
            incomplete=True,
            success=0.5,
            low=0.375,
            high=0.625,
            worst=0.48828125,
            best=0.51171875,
            reward=0.25,
            pass_at=(0.5, 0.75),
            varied=0.5,
            turns=1000,
            turns_to_success=6.5,
            valid=0.875,
            valid_low=0.8525390625,
            valid_high=0.89453125,
            pass_low=(0.375, 0.625),
            pass_high=(0.625, 0.875),
        ),
    ),
    "rollmill.run": RunManifest(
        run=RUN,
        seed=RUN_SEED,
        samples=8,
        budgets=TASK.budgets,
        horizon=14,
        max_sampled_tokens=336,
        sampling=SAMPLING,
        start_within_s=3600.0,
        paced=True,
        created_ms=NOW_MS,
        trajectories_start=100,
        extra={"code": "f" * 40},
    ),
    "rollmill.credit": Credit(
        run=RUN,
        epoch=12,
        admit_up_to=24,
        min_version=5,
        horizon=14,
        temperature=0.75,
        closed=True,
        phase=2,
        shaping=SHAPING,
        decided=130,
    ),
    "rollmill.cursor": Cursor(run=RUN, admitted=20, passed=31, taking=True),
    "rollmill.feeder_started": FeederStarted(run=RUN, feeder="feeder-71@node", source="keydoor"),
    "rollmill.policy_version": PolicyVersion(
        run=RUN,
        epoch=12,
        version=6,
        directory="versions/6",
        digest="e" * 64,
        canary=Canary(tokens=pack_tokens([5, 70_000, 9]), logprobs=pack_logprobs([-0.5, -12.25])),
    ),
    "rollmill.quarantine": Quarantine(
        run=RUN,
        epoch=12,
        version=6,
        address="http://127.0.0.1:8000",
        cause="0.9 nats from the trainer's",
        at_ms=NOW_MS,
    ),
    "rollmill.cancel": Cancel(target=f"{RUN}/{GROUP}/3", cause="by request"),
    "rollmill.backend": Backend(name="gpu-3", url="http://127.0.0.1:8000", weight=2.0, draining=True, run=RUN),
    "rollmill.breaker": Breaker(
        service="policy",
        address="http://127.0.0.1:8000",
        stage="run",
        worker="run-3",
        open=True,
        since_ms=NOW_MS - 42_000,
        open_ms=54_000,
        outages=(
            Outage(since_ms=NOW_MS - 90_000, until_ms=NOW_MS - 78_000),
            Outage(since_ms=NOW_MS - 42_000, until_ms=NOW_MS),
        ),
        cause="connection refused",
        at_ms=NOW_MS,
    ),
    "rollmill.stage_events": StageEvents(
        worker="run-3",
        events=(
            StageEvent(
                run=RUN,
                group=GROUP,
                sample=3,
                attempt=1,
                stage="run",
                kind=EventKind.RETRIED,
                at_ms=NOW_MS,
                took_ms=812,
                waited_ms=30,
                detail="environment: lease l-17 ran out",
            ),
        ),
    ),
    "rollmill.metrics": Metrics(
        run=RUN,
        service="trainer",
        points=(MetricPoint(name="trainer.success", value=0.5, at_ms=NOW_MS, step=5, labels={"source": SOURCE}),),
    ),
    "rollmill.opaque": Opaque(),
    "rollmill.claim_check": ClaimCheck(digest="d" * 64, size=1_234_567, encoding="zstd"),
}
"""File name -> message. The name is the wire type, with what tells the variants apart."""

BEFORE_TURN_REWARDS = Completed(components={"door": 0.0, "format": -0.5}, reward=-0.5, success=0.0, truncated=False)


BEFORE_PASS_INTERVALS = msgspec.structs.replace(SAMPLES["rollmill.evaluated"].scores, pass_low=(), pass_high=())


def before(name: str, **changes: Any) -> Message:
    """Return a sample as it is read from what was written before its newest fields were there."""
    sample = SAMPLES[name]
    older = {"task": OLDER_TASK, "transcript": OLDER_TRANSCRIPT, "sampling": OLDER_SAMPLING}
    plain = {field: value for field, value in older.items() if getattr(sample, field, None) is not None}
    return msgspec.structs.replace(sample, **{**plain, **changes})


OLDER_SAMPLING = msgspec.structs.replace(SAMPLING, stop_sequences=(), repetition=None)
OLDER_TRANSCRIPT = msgspec.structs.replace(
    TRANSCRIPT, spans=tuple(msgspec.structs.replace(span, sampling=OLDER_SAMPLING) for span in TRANSCRIPT.spans)
)
ENDLESS_TASK = msgspec.structs.replace(TASK, sampling=OLDER_SAMPLING)
UNNAMED_TASK = msgspec.structs.replace(ENDLESS_TASK, weights_of=None)
OLDER_TASK = msgspec.structs.replace(UNNAMED_TASK, phase=0, shaping=None)

OLDER: dict[str, Message] = {
    "rollmill.branch.1": before("rollmill.branch", cause="", lr_scale=1.0),
    "rollmill.rollout.1": before("rollmill.rollout", gradings=0),
    "rollmill.trajectory.1": before("rollmill.trajectory", outcome=BEFORE_TURN_REWARDS),
    # Before a span said whose weights sampled it.
    "rollmill.rollout.2": before("rollmill.rollout"),
    "rollmill.trajectory.2": before("rollmill.trajectory"),
    "rollmill.step.1": before("rollmill.step", missing=0, phase=None, rows=()),
    "rollmill.trainer_started.1": before("rollmill.trainer_started", forked_from=None),
    # Before groups were stamped with a phase and the weights of their reward, and rows chosen by what they achieved.
    "rollmill.task.1": OLDER_TASK,
    "rollmill.episode.1": before("rollmill.episode"),
    "rollmill.rollout.3": before("rollmill.rollout"),
    "rollmill.trajectory.3": before("rollmill.trajectory"),
    "rollmill.trajectory.failed.1": before("rollmill.trajectory.failed"),
    "rollmill.trajectory.cancelled.1": before("rollmill.trajectory.cancelled"),
    "rollmill.trajectory.expired.1": before("rollmill.trajectory.expired"),
    "rollmill.credit.1": before("rollmill.credit", phase=0, shaping=None, decided=-1),
    "rollmill.cursor.1": before("rollmill.cursor", passed=0, taking=False),
    "rollmill.step.2": before("rollmill.step", phase=None, rows=()),
    "rollmill.group_dropped.1": before("rollmill.group_dropped", row=None),
    "rollmill.evaluated.1": before("rollmill.evaluated", scores=BEFORE_PASS_INTERVALS),
    # Before a task said by whose weights it is to be sampled.
    "rollmill.task.2": UNNAMED_TASK,
    "rollmill.episode.2": before("rollmill.episode", task=UNNAMED_TASK),
    "rollmill.rollout.4": before("rollmill.rollout", task=UNNAMED_TASK),
    "rollmill.trajectory.4": before("rollmill.trajectory", task=UNNAMED_TASK),
    "rollmill.trajectory.failed.2": before("rollmill.trajectory.failed", task=UNNAMED_TASK),
    "rollmill.trajectory.cancelled.2": before("rollmill.trajectory.cancelled", task=UNNAMED_TASK),
    "rollmill.trajectory.expired.2": before("rollmill.trajectory.expired", task=UNNAMED_TASK),
    # Before sampling parameters had stop sequences and said what a loop is.
    "rollmill.task.3": ENDLESS_TASK,
    "rollmill.episode.3": before("rollmill.episode", task=ENDLESS_TASK),
    "rollmill.rollout.5": before("rollmill.rollout", task=ENDLESS_TASK),
    "rollmill.trajectory.5": before("rollmill.trajectory", task=ENDLESS_TASK),
    "rollmill.trajectory.failed.3": before("rollmill.trajectory.failed", task=ENDLESS_TASK),
    "rollmill.trajectory.cancelled.3": before("rollmill.trajectory.cancelled", task=ENDLESS_TASK),
    "rollmill.trajectory.expired.3": before("rollmill.trajectory.expired", task=ENDLESS_TASK),
    "rollmill.run.1": before("rollmill.run"),
    # Before a version came with a canary.
    "rollmill.policy_version.1": before("rollmill.policy_version", canary=None),
}
"""File name -> message that it means now: bytes of writers from before a field was added; logs still hold them."""


def golden_file(name: str) -> Path:
    """Return where the bytes of a sample are."""
    return FOLDER / f"{name}.msgpack"
