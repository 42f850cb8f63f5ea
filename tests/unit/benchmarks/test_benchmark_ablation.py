import re

import pytest
from click.testing import CliRunner

from benchmarks.ablation import ALL_ON, VARIANTS, Interval, command, page
from benchmarks.learning import Learnt, Run, run_toml
from trainer.algorithm_config import AlgorithmConfig, Filter, LossLevel
from trainer.config import make_config
from trainer.evaluation import Played, scores
from trainer.replay import ReplayReport


def solving(hunts):
    """Return the figures of a policy that solves so many of ten hunts."""
    return scores("r", [Played(task=str(hunt), success=float(hunt < hunts)) for hunt in range(10)])


def learnt(name, seed, solved, *, groups=80):
    """Return a run that solves so many of ten hunts, and solved two of them before."""
    return Learnt(
        run=Run(name=name, seed=seed),
        before=solving(2),
        after=solving(solved),
        curve=((1, 0.2), (2, solved / 10)),
        groups=groups,
        replayed=ReplayReport(run=name, steps=(), drops=0, other_drops=()),
        seconds=1.0,
    )


def cells(text, variant):
    """Return what the first line of a variant says."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {variant} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_variant_is_held_against_all_parts_on_seed_by_seed():
    """Seeds that differ much hide nothing as long as the variants of a seed differ alike."""
    found = {
        ALL_ON: [learnt("a", seed, solved) for seed, solved in enumerate([3, 6, 9])],
        "worse": [learnt("b", seed, solved) for seed, solved in enumerate([2, 5, 8])],
        "mixed": [learnt("c", seed, solved, groups=70) for seed, solved in enumerate([2, 7, 9])],
    }

    text = page(found, steps=2, episodes=10, taken="Taken here.")

    assert cells(text, "worse")[1:4] == ["0.50 ± 0.75", "-0.10 ± 0.00", "worse"]
    assert cells(text, "mixed")[3] == "no difference seen"
    assert cells(text, "mixed")[-1] == "70"
    assert "The warm start\nsolves 0.20 ± 0.00 of them." in text
    assert "| mixed | 0.20 | 0.70 | 0.90 |" in text
    assert "Taken here." in text


@pytest.mark.parametrize(
    ("values", "verdict"), [([0.1, 0.2, 0.3], "no difference seen"), ([0.1, 0.11, 0.12], "better"), ([-0.3], None)]
)
def test_an_interval_says_what_a_difference_amounts_to(values, verdict):
    """Student's, over seeds: 4.303 times the standard error for three; one seed says nothing."""
    found = Interval.of(values)

    assert found.verdict == (verdict or "no difference seen")
    if len(values) == 3:
        assert found.half == pytest.approx(4.303 * (values[1] - values[0]) / 3**0.5)


def test_each_variant_lacks_what_its_name_says(tmp_path):
    """And nothing else: the last one is GRPO as first published."""
    made = {
        v.name: make_config(run_toml(v.run(0, steps=3, episodes=1), tmp_path, tmp_path)).algorithm for v in VARIANTS
    }
    on = made[ALL_ON]

    assert (on.clip_high, on.level, on.filter) == (0.28, LossLevel.TOKEN, Filter.SUCCESS)
    off = {
        "clip-higher": {"clip_high": 0.2},
        "token-level loss": {"level": "sample"},
        "dynamic sampling": {"filter": "off"},
    }
    for name, changes in off.items():
        assert made[f"without {name}"] == on.model_copy(
            update=AlgorithmConfig(**changes).model_dump(include=set(changes))
        )
    every = {key: value for changes in off.values() for key, value in changes.items()}
    assert made["without all three"] == AlgorithmConfig.model_validate({**on.model_dump(), **every})


@pytest.mark.slow
def test_the_command_writes_the_page(tmp_path):
    """Two seeds and two steps: a few minutes, and the same page as the whole of it."""
    target = tmp_path / "page.md"
    small = ["--seeds", "2", "--steps", "2", "--episodes", "64", "--page", str(target)]

    done = CliRunner().invoke(command, small)

    assert done.exit_code == 0, done.output
    text = target.read_text()
    assert text in done.output
    for variant in VARIANTS:
        after = float(re.match(r"[\d.]+", cells(text, variant.name)[1])[0])
        assert 0 <= after <= 1
