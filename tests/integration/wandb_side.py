"""Three trainers of one run write for Weights & Biases: `python tests/integration/wandb_side.py PACKAGES DIRECTORY`.

PACKAGES is a folder that holds wandb, DIRECTORY the run's. Prints what the files then hold, as one JSON object last:
id -> [(step, names)].
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

BLOCK = 32_768
FULL, LAST = 1, 4


def main(packages, directory):
    sys.path.append(packages)
    from trainer.config import make_config
    from trainer.wandb_writer import WandbWriter

    report = {"writers": ["wandb"], "project": "doors"}
    config = make_config({"run": "my-run", "model": directory, "directory": directory, "report": report})

    def trainer(after, branch, steps, evaluated=()):
        writer = WandbWriter(config, after, branch)
        for step in steps:
            writer.write("step", step, {"trainer/loss": step / 2}, step)
        for step in evaluated:
            writer.write("evaluation", step, {"trainer/eval_success_mean": step / 10}, step)
        writer.close()

    trainer(0, 0, (1, 2, 3), evaluated=(0, 2))
    trainer(1, 0, (2, 3, 4), evaluated=(2,))
    trainer(2, 1, (3, 4))
    print(json.dumps(read(directory)))  # noqa: T201 - read by the test


def read(directory):
    """Return what lies in the folders of a run."""
    from wandb.proto import wandb_internal_pb2

    found = {}
    for file in sorted(Path(directory, "wandb").glob("offline-run-*/run-*.wandb")):
        run = None
        for data in records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                run = found.setdefault(record.run.run_id, [])
            if record.WhichOneof("record_type") == "history":
                items = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }
                run.append([items["trainer/step"], sorted(name for name in items if name.startswith("trainer/"))])
    return found


def records(data):
    """Yield the records of a log in LevelDB's format, behind the seven bytes by which wandb knows its own."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in {FULL, LAST}:
            yield whole
            whole = b""


if __name__ == "__main__":
    main(*sys.argv[1:])
