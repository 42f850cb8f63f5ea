"""A version of a made-up run as int8: `python tests/integration/int8_side.py PACKAGES DIRECTORY`.

PACKAGES is a folder that holds torchao. Prints one JSON object last: sizes, and how far int8 is from the version.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

SHAPE = {"hidden": 128, "layers": 3, "heads": 4, "intermediate": 512, "context": 128}


def main(packages, directory):
    sys.path.append(packages)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from schemas.decisions import TrainerStarted, VersionPublished
    from trainer.export import export
    from trainer.history import History
    from trainer.models import Shape, create_wordlevel_model
    from trainer.weights import load_model, weight_bytes, weights_digest

    torch.set_num_threads(1)
    model, target = Path(directory, "model"), Path(directory, "out")
    create_wordlevel_model(model, seed=0, words=[f"w{number}" for number in range(100)], shape=Shape(**SHAPE))
    weights = weight_bytes(load_model(model))
    history = History(
        started={0: TrainerStarted(run="r", config={"model": str(model), "directory": directory}, start=0, step=0)},
        versions=[VersionPublished(run="r", epoch=0, step=0, version=0, digest=weights_digest(weights))],
    )
    found = export(history, "last", target, int8=True)

    whole, small = (AutoModelForCausalLM.from_pretrained(folder, local_files_only=True) for folder in (model, target))
    ids = AutoTokenizer.from_pretrained(target, local_files_only=True)("w1 w2 w3 w4", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        expected, got = (each(ids).logits.log_softmax(-1) for each in (whole, small))
    said = small.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    layers = [m.weight for m in small.modules() if isinstance(m, torch.nn.Linear)]
    print(  # noqa: T201 - read by the test
        json.dumps(
            {
                "whole_bytes": len(weights),
                "weight_bytes": found.weight_bytes,
                "files": sorted(path.name for path in target.iterdir()),
                "left": sorted(path.name for path in Path(directory).iterdir()),
                "kl": float((expected.exp() * (expected - got)).sum(-1).max()),
                "spread": float(expected.std()),
                "int8_layers": sum(type(weight.data).__name__ == "Int8Tensor" for weight in layers),
                "new_tokens": said.shape[1] - ids.shape[1],
                "card": (target / "README.md").read_text(),
                "digest": found.digest == weights_digest(weights),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
