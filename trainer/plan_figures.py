"""The plan of a run as figures, each with a name that ends in its unit and a line that says what it follows from.

Names and values are what `--json` prints; the lines are for people. Nothing is calculated here but sums and quotients
of what `plan.py` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from trainer.algorithm_config import AlgorithmConfig, Filter
from trainer.plan import HOUR_S, Planned, retained_bytes
from trainer.plan_memory import disk_bytes, host_bytes, trained_count
from trainer.plan_work import PEAK_TFLOPS, episodes_of_step, forward_flops, in_flight, step_flops


class Figure(NamedTuple):
    """One value."""

    name: str
    """Dotted, with its unit last."""
    value: float
    """The value."""
    follows: str
    """What it follows from."""


@dataclass(frozen=True, kw_only=True)
class LogBytes:
    """What the log takes, as the codec's own records measure."""

    sample: Mapping[str, int]
    """Topic -> bytes of one sample."""
    step: int
    """Bytes in `decisions` of one step."""


def episode_figures(plan: Planned) -> Iterator[Figure]:
    """Yield what an episode and a step are."""
    algorithm, assumed, episode = plan.run.algorithm, plan.assumed, plan.episode
    samples = algorithm.groups * algorithm.samples
    wanted = episodes_of_step(algorithm, assumed)
    kept = "filter = off" if algorithm.filter is Filter.OFF else f"/ kept_share {assumed.kept_share:g}"
    whose = "plan.turns" if assumed.turns is not None else "the whole horizon"
    yield Figure("episode.turns", episode.turns, f"{whose}, at most {plan.horizon}, and tasks.max_sampled_tokens")
    yield Figure("episode.sampled_tokens", episode.sampled, f"turns x turn_tokens {assumed.turn_tokens:g}")
    yield Figure(
        "episode.tokens",
        episode.all,
        f"and a prompt of {assumed.prompt_tokens:g}, turns x observation_tokens {assumed.observation_tokens:g}",
    )
    yield Figure("step.episodes", wanted, f"{algorithm.groups} groups x {algorithm.samples} samples {kept}")
    yield Figure("step.sampled_tokens", wanted * episode.sampled, "of all of them, those of dropped groups too")
    yield Figure("step.trained_sequence_tokens", samples * episode.all, f"of the {samples} samples that are trained on")
    yield Figure(
        "step.in_flight_episodes",
        in_flight(algorithm),
        f"(max_lag {algorithm.max_lag} + 1) x {samples}: what credit allows",
    )


def trainer_figures(plan: Planned) -> Iterator[Figure]:
    """Yield the trainer's memory."""
    algorithm, gpus, memory = plan.run.algorithm, plan.assumed.trainer_gpus, plan.trainer
    count = parameters(plan.shape.count) + (f" / {gpus} GPUs" if gpus > 1 else "")
    copy = " and 2 B for autocast's copy" if algorithm.precision == "bfloat16" else ""
    tokens = max(algorithm.micro_tokens, round(plan.longest.all))
    again = algorithm.activation_checkpointing
    trained = trained_count(plan.shape, algorithm)
    whose = f", of {parameters(trained)} in adapters alone" if algorithm.lora else ""
    yield Figure("trainer.weights_bytes", memory.weights, f"4 B{copy} x {count}")
    yield Figure("trainer.gradients_bytes", memory.gradients, f"4 B each{whose}")
    yield Figure("trainer.optimizer_bytes", memory.optimizer, "AdamW: two momenta of 4 B each")
    yield Figure(
        "trainer.reference_bytes",
        memory.reference,
        _second_model(algorithm),
    )
    yield Figure(
        "trainer.activations_bytes",
        memory.activations,
        f"{plan.shape.layers} layers x {tokens} tokens of a pass, activation_checkpointing = {str(again).lower()}",
    )
    yield Figure(
        "trainer.activations_otherwise_bytes",
        memory.other_activations,
        f"the same with activation_checkpointing = {str(not again).lower()}; not in the sum",
    )
    yield Figure("trainer.logits_bytes", memory.logits, f"{tokens} tokens x vocabulary of {plan.shape.vocabulary}")
    yield Figure("trainer.total_bytes", memory.total, f"on each GPU, of {plan.assumed.gpu_memory_gb:g} GB")
    yield Figure(
        "trainer.host_bytes", host_bytes(plan.shape, trained), "the machine's memory while a checkpoint is written"
    )
    checkpoints = plan.run.checkpoints
    yield Figure(
        "trainer.disk_bytes",
        disk_bytes(plan.shape, trained, checkpoints.keep, checkpoints.keep_versions),
        f"{checkpoints.keep} checkpoints of 12 B per trained parameter, {checkpoints.keep_versions} versions of 4 B",
    )


def parameters(count: int) -> str:
    """Return a number of parameters for a person: three digits and a unit."""
    for size, unit in ((10**9, " billion"), (10**6, " million"), (10**3, " thousand")):
        if count >= size:
            return f"{count / size:.3g}{unit} parameters"
    return f"{count} parameters"


def _second_model(algorithm: AlgorithmConfig) -> str:
    if not algorithm.kl:
        return "kl = 0: none"
    if algorithm.lora is not None:
        return f"kl = {algorithm.kl:g}: the model without its adapters, which is there anyway"
    return f"kl = {algorithm.kl:g}: a second model, 4 B each"


def engine_figures(plan: Planned) -> Iterator[Figure]:
    """Yield the engine's memory and speed."""
    assumed, memory, shape = plan.assumed, plan.engine, plan.shape
    over = f", over {assumed.engine_parallel} GPUs" if assumed.engine_parallel > 1 else ""
    yield Figure("engine.weights_bytes", memory.weights, f"{assumed.engine_bytes} B x parameters{over}")
    yield Figure(
        "engine.kv_token_bytes",
        memory.kv_token,
        f"2 x {shape.layers} layers x {shape.key_width} wide keys x {assumed.engine_bytes} B",
    )
    yield Figure(
        "engine.kv_sequence_bytes", memory.kv_sequence, f"x {plan.longest.all:.0f} tokens of the longest episode"
    )
    yield Figure(
        "engine.sequences",
        memory.sequences,
        f"that fit into {assumed.engine_memory_share:.0%} of {assumed.gpu_memory_gb:g} GB{over} beside the weights",
    )
    yield Figure("engine.kv_full_bytes", memory.kv_full, "KV cache of so many sequences")
    yield Figure(
        "engine.at_once_sequences", plan.at_once, f"in flight / {plan.copies} copies of the engine, as far as they fit"
    )
    how = (
        "as given by engine_tokens_per_s"
        if assumed.engine_tokens_per_s is not None
        else f"bandwidth {assumed.gpu_bandwidth_gb_s:g} GB/s x engine_efficiency {assumed.engine_efficiency:g}"
    )
    yield Figure(
        "engine.tokens_per_s", plan.engine_rate(plan.episode), f"of all {assumed.engine_gpus} engine GPUs: {how}"
    )


def time_figures(plan: Planned) -> Iterator[Figure]:
    """Yield the seconds of a step at the last horizon."""
    algorithm, assumed, episode = plan.run.algorithm, plan.assumed, plan.episode
    time = plan.time(plan.horizon)
    tokens = algorithm.groups * algorithm.samples * episode.all
    passes = step_flops(plan.shape, algorithm, tokens, episode.all) / tokens / forward_flops(plan.shape, episode.all)
    peak = assumed.gpu_tflops or PEAK_TFLOPS[algorithm.precision]
    yield Figure("step.engine_s", time.engine, "sampled tokens / tokens per second, and the reading of prompts")
    yield Figure(
        "step.episodes_s",
        time.episodes,
        f"episodes / in flight x one episode alone: {episode.turns:.3g} turns x environment_s "
        f"{assumed.environment_s:g}, and its tokens one by one",
    )
    yield Figure(
        "step.optimizer_s",
        time.optimizer,
        f"{passes:.0f} forward passes' worth over the trained sequences / ({peak:g} TFLOPS x mfu {assumed.mfu:g})",
    )
    yield Figure(
        "step.writing_s",
        time.writing,
        f"weights each step, a checkpoint every {plan.run.checkpoints.every}, at {assumed.disk_gb_s:g} GB/s",
    )
    how = "the longer of sampling and training" if time.overlap else "sampling, then training: max_lag = 0"
    yield Figure("step.whole_s", time.whole, how)
    yield Figure("step.per_hour", HOUR_S / time.whole, "3600 s / step")
    yield Figure(
        "step.trainer_idle_share", 1 - time.training / time.whole, "of the time; `trainer.idle_share` measures it"
    )
    yield Figure("step.engine_idle_share", 1 - time.engine / time.whole, "of the time")


def log_rates(plan: Planned, log: LogBytes) -> dict[str, float]:
    """Return topic -> bytes per hour at the last horizon."""
    per_hour = HOUR_S / plan.time(plan.horizon).whole
    samples = episodes_of_step(plan.run.algorithm, plan.assumed) * per_hour
    return {**{topic: size * samples for topic, size in log.sample.items()}, "decisions": log.step * per_hour}


def log_figures(plan: Planned, log: LogBytes) -> Iterator[Figure]:
    """Yield the bytes of the log."""
    rates = log_rates(plan, log)
    for topic, size in log.sample.items():
        yield Figure(
            f"log.{topic}_sample_bytes", size, "one sample's record, as the codec packs it, key and headers too"
        )
    yield Figure("log.decisions_step_bytes", log.step, "one step's records, dropped groups too")
    yield Figure("log.hour_bytes", sum(rates.values()), "all of it x episodes, and x steps, per hour")
    yield Figure("log.trajectories_hour_bytes", rates["trajectories"], "of these, what the trainer reads")
    yield Figure(
        "log.retained_bytes",
        retained_bytes(rates, plan.hours),
        "at this rate until the run's end, as long as each topic keeps it; times bus.replication",
    )


def run_figures(plan: Planned) -> Iterator[Figure]:
    """Yield the whole run."""
    assumed = plan.assumed
    gpus = assumed.trainer_gpus + assumed.engine_gpus
    yield Figure("run.steps", plan.run.stop.max_steps, "stop.max_steps; a run may end earlier")
    yield Figure("run.hours", plan.hours, "steps x step, phase by phase")
    yield Figure("run.gpu_hours", plan.gpu_hours, f"x {gpus} GPUs, waiting or not")
    if assumed.price_per_gpu_hour is not None:
        cost = plan.gpu_hours * assumed.price_per_gpu_hour
        yield Figure("run.cost", cost, f"x price_per_gpu_hour {assumed.price_per_gpu_hour:g}")


def sections(plan: Planned, log: LogBytes) -> dict[str, list[Figure]]:
    """Return all figures by what they are about."""
    return {
        "one episode, one step": list(episode_figures(plan)),
        "trainer": list(trainer_figures(plan)),
        "engine, each copy": list(engine_figures(plan)),
        "time of a step": list(time_figures(plan)),
        "log": list(log_figures(plan, log)),
        "the run": list(run_figures(plan)),
    }


def bottleneck(plan: Planned) -> str:
    """Return where the time of a step goes, and what would change that."""
    time = plan.time(plan.horizon)
    match time.bottleneck:
        case "trainer":
            slowest = "writing weights" if time.writing > time.optimizer else "the optimizer"
            return (
                f"training ({time.training:.3g} s, most of it {slowest}) takes longer than sampling "
                f"({time.sampling:.3g} s): more trainer GPUs, fewer epochs, rarer checkpoints"
            )
        case "engine":
            return (
                f"sampling ({time.engine:.3g} s of the engines' work) takes longer than training "
                f"({time.training:.3g} s): more engine GPUs, a shorter horizon, groups that are more often kept"
            )
        case "environment":
            return (
                f"sampling ({time.episodes:.3g} s) waits for episodes and not for the engines ({time.engine:.3g} s): a "
                "larger max_lag plays more of them at once; or a faster environment"
            )


def problems(plan: Planned) -> list[str]:
    """Return what cannot work as planned."""
    found, assumed = [], plan.assumed
    memory = assumed.gpu_memory_gb * 1e9
    if plan.trainer.total > memory:
        found.append(
            f"the trainer needs {plan.trainer.total / 1e9:.0f} GB on each GPU of {assumed.gpu_memory_gb:g} GB: fewer "
            "micro_tokens, activation_checkpointing, kl = 0, or more trainer_gpus"
        )
    if not plan.engine.sequences:
        found.append(
            f"the engine's {assumed.engine_parallel} GPU(s) of {assumed.gpu_memory_gb:g} GB do not hold the weights "
            "and one episode: more engine_parallel, or a shorter horizon"
        )
    context = plan.shape.context
    if context is not None and plan.longest.all > context:
        found.append(
            f"the longest episode has {plan.longest.all:.0f} tokens, and the model's context {context}: such episodes "
            "end as truncated"
        )
    return found


def notes(plan: Planned) -> list[str]:
    """Return what should be known beside the figures."""
    found = []
    if plan.assumed.trainer_gpus > 1:
        found.append(
            "more devices are planned as ZeRO stage 3, which shares weights, gradients and optimizer: `torchrun` with "
            "Rollmill's trainer, or a trainer of yours that reads `trajectories`"
        )
    waiting = in_flight(plan.run.algorithm) / plan.copies - plan.at_once
    if waiting >= 1 and plan.engine.sequences:
        found.append(f"each copy of the engine holds {plan.at_once:.0f} episodes, {waiting:.0f} more wait in its queue")
    overlong = plan.run.algorithm.overlong
    begins = overlong.max_tokens - overlong.cache_tokens if overlong is not None else 0
    if overlong is not None and plan.longest.sampled <= begins:
        found.append(
            f"algorithm.overlong begins at {begins} sampled tokens, and turns of {plan.assumed.turn_tokens:g} tokens "
            f"do not lead there: {plan.longest.sampled:.0f} at the horizon"
        )
    return found
