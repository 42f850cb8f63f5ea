"""What verl makes of a converted batch: `python tests/integration/verl_side.py FOLDER`, FOLDER holding verl.

Run by `test_verl.py` in a process of its own, so that what verl brings stays out of ours. Prints one JSON object last.
"""

from __future__ import annotations

import json
import sys
import warnings

import numpy as np


def main(folder):
    sys.path.append(folder)
    warnings.simplefilter("ignore")
    import torch
    from verl import DataProto
    from verl.trainer.ppo import core_algos

    from infra.convert.verl import verl_batch
    from tests.made_up_groups import made_up_groups

    batch = verl_batch(made_up_groups(count=6), pad_token_id=0)
    proto = batch.to_data_proto()
    rewards = proto.batch["token_level_scores"]
    given = {
        "token_level_rewards": rewards,
        "response_mask": proto.batch["response_mask"].float(),
        "index": proto.non_tensor_batch["uid"],
    }
    found = {
        "grpo": core_algos.compute_grpo_outcome_advantage(**given),
        "dr_grpo": core_algos.compute_grpo_outcome_advantage(**given, norm_adv_by_std_in_grpo=False),
        "rloo": core_algos.compute_rloo_outcome_advantage(**given),
    }
    mask = proto.batch["response_mask"].bool()
    assert all(bool((values[~mask] == 0).all()) for values, _ in found.values()), "an observation has an advantage"
    first = mask.float().argmax(dim=1)
    halves = proto.chunk(2) if len(proto) % 2 == 0 else proto[:-1].chunk(2)
    together = DataProto.concat(halves)
    same = {key: bool(torch.equal(together.batch[key], proto.batch[key][: len(together)])) for key in batch.tensors}
    print(  # noqa: T201 - read by the test
        json.dumps(
            {
                "rows": len(proto),
                "keys": sorted(proto.batch.keys()),
                "temperature": proto.meta_info["temperature"],
                "cut_and_joined": same,
                "prompts": [row[row != 0].tolist() for row in np.asarray(proto.batch["prompts"])],
                "advantages": {
                    name: values[torch.arange(len(proto)), first].tolist() for name, (values, _) in found.items()
                },
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
