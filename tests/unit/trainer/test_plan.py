"""Each figure against a calculation by hand, on a model small enough for one."""

import json
import re

import pytest

from infra.errors import ConfigError
from schemas.transcript import check
from trainer.algorithm_config import AlgorithmConfig, Lora
from trainer.config import PLAN, CurriculumConfig, make_config, read_run
from trainer.model_shape import ModelShape, shape_of
from trainer.plan import Planned, retained_bytes
from trainer.plan_config import PlanConfig, make_plan_config
from trainer.plan_figures import LogBytes, bottleneck, log_rates, notes, parameters, problems, sections
from trainer.plan_memory import disk_bytes, engine_memory, host_bytes, trained_count, trainer_memory
from trainer.plan_work import (
    Limits,
    decode_rate,
    episode_tokens,
    episodes_of_step,
    forward_flops,
    in_flight,
    step_flops,
)
from trainer.record_sizes import EpisodeSize, make_transcript, sample_bytes, step_bytes

SHAPE = ModelShape(layers=2, hidden=8, heads=4, kv_heads=2, intermediate=16, vocabulary=100)
"""Queries are 4 x 2 = 8 wide, keys 2 x 2 = 4."""

ALGORITHM = AlgorithmConfig(groups=2, samples=4, max_lag=1, epochs=2, horizon=10, micro_tokens=400)

ASSUMED = PlanConfig(
    turns=5,
    prompt_tokens=50,
    turn_tokens=20,
    observation_tokens=10,
    kept_share=0.5,
    environment_s=2.0,
    gpu_memory_gb=1e-4,  # 100,000 bytes
    gpu_tflops=1e-5,  # 10 million operations per second
    gpu_bandwidth_gb_s=1e-3,  # a million bytes per second
    mfu=0.5,
    engine_efficiency=0.5,
    engine_memory_share=0.5,
    disk_gb_s=1e-5,  # 10,000 bytes per second
    price_per_gpu_hour=3.0,
)

LIMITS = Limits(turn=100, episode=1000)
QWEN25_7B = {"layers": 28, "hidden": 3584, "heads": 28, "kv_heads": 4, "intermediate": 18944, "vocabulary": 152064}
QWEN3_4B = {
    "layers": 36,
    "hidden": 2560,
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "intermediate": 9728,
    "vocabulary": 151936,
    "tied": True,
}


def planned(algorithm=ALGORITHM, assumed=ASSUMED, **changes):
    values = {"run": "r", "model": "m", "directory": "d", "stop": {"max_steps": 100}, **changes}
    run = make_config(values).model_copy(update={"algorithm": algorithm})
    return Planned(run=run, shape=SHAPE, assumed=assumed, limits=LIMITS)


def assuming(**changes):
    return ASSUMED.model_copy(update=changes)


# ---- the model


def test_parameters_follow_from_the_shape():
    """2 x 8 x (8 + 4) and 3 x 8 x 16 for a block, 16 for its norms; 8 for the last; 2 x 100 x 8 for the embeddings."""
    assert SHAPE.count == 2 * (192 + 384 + 16) + 8 + 1600 == 2792
    assert SHAPE.model_copy(update={"tied": True}).count == 2792 - 800


@pytest.mark.parametrize(
    ("shape", "published"),
    [(QWEN25_7B, 7_615_616_512), (QWEN3_4B, 4_022_468_096)],
)
def test_the_count_is_that_of_published_models(shape, published):
    """What is left out, biases and norms of queries and keys, is less than a ten-thousandth."""
    assert ModelShape(**shape).count == pytest.approx(published, rel=1e-4)


def test_a_count_that_is_given_wins():
    """Some models have parts that the shape does not tell."""
    assert ModelShape(**QWEN3_4B, parameters=5).count == 5


CONFIG = {
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize("config", [CONFIG, {"text_config": CONFIG, "vision_config": {"hidden_size": 1}}])
def test_the_shape_is_read_from_the_models_own_file(tmp_path, config):
    """It counts before [plan.model]; of a model that also sees its language part counts."""
    (tmp_path / "config.json").write_text(json.dumps(config))

    shape, origin = shape_of(tmp_path, {"layers": 99})

    assert shape == SHAPE.model_copy(update={"context": 512, "tied": False})
    assert origin == str(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("{", "cannot read the model's shape"),
        ("[]", "no JSON object"),
        ("{}", "layers.*hidden.*heads"),
        (json.dumps({**CONFIG, "hidden_size": "wide"}), "hidden"),
        (json.dumps({**CONFIG, "num_key_value_heads": 3}), "do not share 3 heads"),
        (json.dumps({**CONFIG, "hidden_size": 9}), "give head_dim"),
        (json.dumps({**CONFIG, "num_experts": 8}), "mixture of experts"),
    ],
)
def test_a_model_file_that_says_no_shape_is_named(tmp_path, text, names):
    """With what is wrong in it."""
    (tmp_path / "config.json").write_text(text)

    with pytest.raises(ConfigError, match=names):
        shape_of(tmp_path, None)


def test_a_model_of_which_nothing_is_known_is_asked_for(tmp_path):
    """The error names the section and its keys."""
    with pytest.raises(ConfigError, match=r"no .*config\.json.*\[plan\.model\].*layers, hidden"):
        shape_of(tmp_path, None)


# ---- one episode, one step


def test_an_episode_is_its_prompt_and_its_turns():
    """5 x 20 sampled, 50 + 5 x 10 read."""
    mean = episode_tokens(ASSUMED, LIMITS, 10)

    assert (mean.turns, mean.sampled, mean.read, mean.all) == (5, 100, 100, 200)


def test_the_longest_episode_has_the_whole_horizon():
    """10 x 20 sampled, 50 + 10 x 10 read; without `turns` the mean one, too."""
    longest = episode_tokens(ASSUMED, LIMITS, 10, longest=True)

    assert (longest.sampled, longest.read) == (200, 150)
    assert episode_tokens(assuming(turns=None), LIMITS, 10) == longest


def test_an_episode_ends_with_its_horizon_or_its_budget_of_tokens():
    """Whichever is first: 60 tokens are 3 turns of 20."""
    assert episode_tokens(ASSUMED, LIMITS, 4).turns == 4
    assert episode_tokens(ASSUMED, Limits(turn=100, episode=60), 10).turns == 3


def test_dropped_groups_are_sampled_too():
    """2 groups x 4 samples, of which a half is kept; with the filter off, all."""
    assert episodes_of_step(ALGORITHM, ASSUMED) == 16
    assert episodes_of_step(AlgorithmConfig(groups=2, samples=4, filter="off"), ASSUMED) == 8


def test_credit_allows_a_batch_more_than_the_lag():
    """(1 + 1) x 8."""
    assert in_flight(ALGORITHM) == 16


# ---- work


def test_a_forward_pass_is_two_operations_per_parameter_and_the_attention():
    """2 x 2792 + 4 x 2 layers x 8 x 200."""
    assert forward_flops(SHAPE, 200) == 5584 + 12_800


@pytest.mark.parametrize(
    ("changes", "passes"),
    [
        ({}, 1 + 2 * 3),
        ({"kl": 0.1}, 2 + 2 * 3),
        ({"activation_checkpointing": True}, 1 + 2 * 4),
        ({"epochs": 1}, 1 + 3),
    ],
)
def test_a_step_is_so_many_forward_passes(changes, passes):
    """Old log-probs once, the reference once, and three for each epoch, four where activations are made again."""
    algorithm = ALGORITHM.model_copy(update=changes)

    assert step_flops(SHAPE, algorithm, 1600, 200) == 1600 * 18_384 * passes


# ---- memory


def test_the_trainers_memory():
    """A pass has 400 tokens; the block keeps 4 x 8 + 2 x 8 + 2 x 4 + 4 x 16 = 120 numbers of 4 bytes for each."""
    longest = episode_tokens(ASSUMED, LIMITS, 10, longest=True)
    memory = trainer_memory(SHAPE, ALGORITHM, longest, 1)

    assert (memory.weights, memory.gradients, memory.optimizer) == (11_168, 11_168, 22_336)
    assert memory.reference == 0
    assert memory.activations == 2 * 120 * 4 * 400
    assert memory.other_activations == 2 * 8 * 4 * 400 + 120 * 4 * 400
    # 200 of 350 tokens of an episode are sampled.
    assert memory.logits == pytest.approx(100 * (2 * 4 * 400 + 3 * 4 * 400 * 200 / 350))
    assert memory.total == pytest.approx(44_672 + 384_000 + memory.logits)


def test_the_trainers_memory_in_bfloat16_with_a_reference_on_two_gpus():
    """Weights stay in float32, beside a copy of 2 bytes; the states are shared out, a pass is not."""
    changes = {"precision": "bfloat16", "kl": 1e-4, "activation_checkpointing": True, "micro_tokens": 10}
    longest = episode_tokens(ASSUMED, LIMITS, 10, longest=True)
    memory = trainer_memory(SHAPE, ALGORITHM.model_copy(update=changes), longest, 2)

    assert (memory.weights, memory.gradients, memory.reference) == (6 * 1396, 4 * 1396, 4 * 1396)
    # The longest episode, 350 tokens, is a pass of its own.
    assert memory.activations == 2 * 8 * 2 * 350 + 120 * 2 * 350
    assert memory.logits == 100 * (2 * 2 * 350 + 3 * 4 * 200)


def test_what_checkpoints_take():
    """20 bytes per parameter in the machine while one is written; 12 on the disk for each, 4 for a version."""
    assert host_bytes(SHAPE, 2792) == 20 * 2792
    assert disk_bytes(SHAPE, 2792, 2, 4) == 2792 * (2 * 12 + 4 * 4)


def test_what_adapters_take():
    """Rank 3: of seven matrices both sides, 16 + 12 + 12 + 16 + 3 x 24 = 128, in two layers; no second model for KL."""
    lora = ALGORITHM.model_copy(update={"lora": Lora(rank=3), "kl": 0.1})
    some = ALGORITHM.model_copy(update={"lora": Lora(rank=3, targets=("q_proj", "mlp.up_proj"))})
    memory = trainer_memory(SHAPE, lora, episode_tokens(ASSUMED, LIMITS, 10, longest=True), 1)

    assert (trained_count(SHAPE, lora), trained_count(SHAPE, some)) == (768, 240)
    assert (memory.weights, memory.gradients, memory.optimizer) == (4 * (2792 + 768), 4 * 768, 8 * 768)
    assert memory.reference == 0
    # A version is merged, so that it has the size of the model; a checkpoint holds adapters alone.
    assert host_bytes(SHAPE, 768) == 8 * 2792
    assert disk_bytes(SHAPE, 768, 2, 4) == 768 * 2 * 12 + 2792 * 4 * 4


def test_the_engines_memory():
    """2 x 2 layers x 4 x 2 bytes per token; 350 tokens; half of 100,000 bytes, less 5,584 of weights, holds 3."""
    memory = engine_memory(SHAPE, ASSUMED, episode_tokens(ASSUMED, LIMITS, 10, longest=True))

    assert (memory.weights, memory.kv_token, memory.kv_sequence) == (5584, 32, 11_200)
    assert (memory.sequences, memory.kv_full) == (3, 33_600)


def test_the_kv_cache_is_that_of_the_vllm_paper():
    """OPT-13B: 2 x 40 layers x 5120 x 2 bytes, the paper's 800 KB per token."""
    opt = ModelShape(layers=40, hidden=5120, heads=40, intermediate=20_480, vocabulary=50_272)
    memory = engine_memory(opt, PlanConfig(), episode_tokens(PlanConfig(), LIMITS, 10))

    assert memory.kv_token == 800 * 1024


def test_an_engine_that_is_too_small_holds_nothing():
    """And never less than nothing."""
    assert engine_memory(SHAPE, assuming(gpu_memory_gb=1e-6), episode_tokens(ASSUMED, LIMITS, 10)).sequences == 0


# ---- time


def test_decoding_is_bound_by_what_each_step_reads():
    """3 sequences x a million bytes x 0.5 / 15,184."""
    assert decode_rate(ASSUMED, 15_184, 11_984, 3) == pytest.approx(3 * 500_000 / 15_184)


def test_with_many_sequences_operations_bound_it():
    """10 million x 0.5 / 11,984 tokens, however many read together."""
    assert decode_rate(ASSUMED, 15_184, 11_984, 1000) == pytest.approx(5e6 / 11_984)


def test_the_seconds_of_a_step():
    """Each of its four parts by hand, at 5 turns."""
    time = planned().time(10)

    # 3 sequences fit; each step of the engine reads 5,584 + 3 x 32 x 100 bytes.
    sampling, reading = 100 * 15_184 / 1_500_000, 100 * 11_984 / 5e6
    assert time.engine == pytest.approx(16 * (sampling + reading))
    # 16 may be under way, so each is played once: 5 turns x 2 s, and 100 tokens at 500,000 / (5,584 + 3,200) a second.
    assert time.episodes == pytest.approx(10 + 100 * 8784 / 500_000)
    assert time.optimizer == pytest.approx(8 * 200 * 18_384 * 7 / 5e6)
    # 4 bytes of weights and 12 of a checkpoint per parameter.
    assert time.writing == pytest.approx(16 * 2792 / 10_000)


def test_sampling_and_training_overlap_unless_the_run_is_synchronous():
    """The longer one, or both."""
    time = planned().time(10)
    assert time.whole == pytest.approx(max(time.sampling, time.training))

    alone = planned(ALGORITHM.model_copy(update={"max_lag": 0})).time(10)
    assert alone.whole == pytest.approx(alone.sampling + alone.training)


def test_a_measured_engine_is_believed():
    """16 episodes of 100 tokens at 2 x 40 tokens per second; its prompts are in the measurement."""
    time = planned(assumed=assuming(engine_tokens_per_s=40.0, engine_gpus=2)).time(10)

    assert time.engine == pytest.approx(16 * 100 / 80)


@pytest.mark.parametrize(
    ("changes", "expected", "advice"),
    [
        ({}, "trainer", "the optimizer.*trainer GPUs"),
        ({"disk_gb_s": 1e-7}, "trainer", "writing weights"),
        ({"mfu": 1.0, "gpu_tflops": 1e-3, "engine_tokens_per_s": 1.0}, "engine", "engine GPUs"),
        ({"mfu": 1.0, "gpu_tflops": 1e-3, "environment_s": 99.0}, "environment", "max_lag"),
    ],
)
def test_the_bottleneck_is_what_the_step_waits_for(changes, expected, advice):
    """And what would change it is said beside it."""
    plan = planned(assumed=assuming(**changes))

    assert plan.time(10).bottleneck == expected
    assert re.search(advice, bottleneck(plan))


def test_a_run_is_added_up_phase_by_phase():
    """A third of the steps at each horizon; GPUs are paid for while they wait, too."""
    grows = {"curriculum": {"horizons": [2, 4, 8], "every": 30}, "stop": {"max_steps": 90}}
    plan = planned(assumed=assuming(turns=None, trainer_gpus=2), **grows)

    assert [(phase.steps, phase.horizon) for phase in plan.phases] == [(30, 2), (30, 4), (30, 8)]
    assert plan.hours == pytest.approx(sum(30 * plan.time(horizon).whole for horizon in (2, 4, 8)) / 3600)
    assert plan.gpu_hours == pytest.approx(3 * plan.hours)
    figures = {figure.name: figure.value for figure in sections(plan, LOG)["the run"]}
    assert figures["run.cost"] == pytest.approx(3 * plan.gpu_hours)


def test_memory_is_planned_for_the_longest_horizon_of_all():
    """A curriculum may also shrink it."""
    shrinks = CurriculumConfig(horizons=(10, 2), every=5)
    plan = planned()

    assert (
        Planned(
            run=plan.run.model_copy(update={"curriculum": shrinks}), shape=SHAPE, assumed=ASSUMED, limits=LIMITS
        ).longest.turns
        == 10
    )


# ---- the log

LOG = LogBytes(sample={"tasks": 100, "trajectories": 1000}, step=50)


def test_the_logs_rate_follows_from_episodes_and_steps_per_hour():
    """16 episodes and one decision per step."""
    plan = planned()
    steps = 3600 / plan.time(10).whole

    assert log_rates(plan, LOG) == pytest.approx(
        {"tasks": 1600 * steps, "trajectories": 16_000 * steps, "decisions": 50 * steps}
    )


def test_a_topic_keeps_what_its_retention_says():
    """Of 100 days `trajectories` keeps 90, `tasks` 7, `events` one."""
    assert retained_bytes({"trajectories": 1.0, "tasks": 1.0, "events": 1.0}, 2400.0) == (90 + 7 + 1) * 24
    assert retained_bytes({"trajectories": 1.0, "tasks": 1.0, "events": 1.0}, 10.0) == 30


SIZE = EpisodeSize(turns=5, prompt=50, sampled=20, observed=10, vocabulary=100, payload=1000)


def test_a_made_up_transcript_is_a_valid_one():
    """And has the tokens that it should have."""
    made = make_transcript(SIZE)

    check(made)
    assert (len(made.mask), made.sampled_count) == (200, 100)


async def test_a_samples_bytes_are_measured_on_its_records():
    """200 tokens: 9 bytes each, uncompressed below 16 KiB, and what stands around them; the payload is in each."""
    small = await sample_bytes(SIZE)
    more = await sample_bytes(EpisodeSize(turns=5, prompt=50, sampled=20, observed=10, vocabulary=100, payload=3000))

    assert small.keys() == {"tasks", "episodes", "rollouts", "trajectories", "events"}
    assert 1800 < small["trajectories"] - small["tasks"] < 5000
    assert more["trajectories"] - small["trajectories"] == pytest.approx(2000, abs=20)


async def test_a_long_episode_costs_four_to_six_bytes_per_token():
    """Ids and log-probs after zstd; observations have no log-probs. A value that no record holds is a blob."""
    size = EpisodeSize(turns=100, prompt=500, sampled=1500, observed=1000, vocabulary=151_936, payload=1000)

    assert 4 < (await sample_bytes(size))["rollouts"] / 250_500 < 6


async def test_a_steps_decisions_are_measured_too():
    """A member names its record by 64 hex digits, which do not compress to less than 32 bytes."""
    one = await step_bytes(32, 8, dropped=0, buffered=0)
    more = await step_bytes(32, 8, dropped=32, buffered=32)

    assert 32 * 8 * 32 < one < more


# ---- what cannot be


def test_a_turn_cannot_be_longer_than_the_policy_may_say():
    """Two keys that contradict each other are both named."""
    with pytest.raises(ConfigError, match=r"plan.turn_tokens = 200 exceeds tasks.max_tokens = 100"):
        planned(assumed=assuming(turn_tokens=200))


def test_engine_gpus_hold_whole_copies():
    """Three GPUs do not hold copies that need two each."""
    with pytest.raises(ConfigError, match="no multiple"):
        planned(assumed=assuming(engine_gpus=3, engine_parallel=2))


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"gpus": 3}, "gpus"),
        ({"mfu": 40}, "mfu"),
        ({"kept_share": 0}, "kept_share"),
        ({"turn_tokens": "many"}, "turn_tokens"),
        ({"engine_bytes": 3}, "engine_bytes"),
        (7, r"\[plan\]"),
    ],
)
def test_an_assumption_that_cannot_be_is_named(values, names):
    """Also a misspelt one: it is not silently the default."""
    with pytest.raises(ConfigError, match=names):
        make_plan_config(values, "RUN.toml")


def test_what_does_not_fit_is_a_problem_with_a_remedy():
    """Trainer, engine and context are looked at."""
    found = problems(
        Planned(
            run=planned().run,
            shape=SHAPE.model_copy(update={"context": 300}),
            assumed=assuming(gpu_memory_gb=1e-6),
            limits=LIMITS,
        )
    )

    assert [line.split()[1] for line in found] == ["trainer", "engine's", "longest"]
    assert ["micro_tokens" in found[0], "engine_parallel" in found[1], "350 tokens" in found[2]] == [True] * 3
    assert problems(planned(assumed=assuming(gpu_memory_gb=80.0))) == []


def test_what_the_reader_may_overlook_is_noted():
    """A trainer of several GPUs, episodes that queue at the engine, a punishment that nothing reaches."""
    overlong = {"overlong": {"max_tokens": 400, "cache_tokens": 100}}
    algorithm = AlgorithmConfig.model_validate({**ALGORITHM.model_dump(), **overlong})

    found = notes(planned(algorithm, assuming(trainer_gpus=2)))

    assert len(found) == 3
    assert "13 more wait" in found[1]
    assert "begins at 300 sampled tokens" in found[2]


def test_every_assumption_has_a_sentence():
    """They are the documentation of [plan] and [plan.model]."""
    for model in (PlanConfig, ModelShape, CurriculumConfig):
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name}"


def test_the_plans_section_is_no_part_of_a_runs_configuration(tmp_path):
    """It is read apart, and recorded nowhere."""
    path = tmp_path / "RUN.toml"
    path.write_text('run = "r"\nmodel = "m"\ndirectory = "d"\n[plan]\nmfu = 0.4\n')

    values = read_run(path)

    assert make_plan_config(values.pop(PLAN), str(path)).mfu == 0.4
    assert PLAN not in make_config(values).model_dump()


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (7_615_616_512, "7.62 billion parameters"),
        (134_515_008, "135 million parameters"),
        (99_072, "99.1 thousand parameters"),
        (700, "700 parameters"),
    ],
)
def test_a_models_size_has_the_unit_that_fits_it(count, said):
    """A debug model is no small part of a billion."""
    assert parameters(count) == said
