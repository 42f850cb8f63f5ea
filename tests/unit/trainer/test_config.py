import pytest

from infra.errors import ConfigError
from trainer.algorithm_config import AlgorithmConfig, Estimator, Filter, Overlong
from trainer.config import CheckpointConfig, RunConfig, StopConfig, load_config

MINIMAL = 'run = "r"\nmodel = "m"\ndirectory = "d"\n'


def write(tmp_path, text):
    path = tmp_path / "RUN.toml"
    path.write_text(text)
    return path


def test_a_minimal_file_gives_the_documented_defaults(tmp_path):
    """Three values are enough; paths are relative to the file."""
    config = load_config(write(tmp_path, MINIMAL))

    assert (config.algorithm.groups, config.algorithm.clip_high, config.algorithm.max_lag) == (8, 0.28, 1)
    assert config.model == (tmp_path / "m").resolve()
    assert config.versions_directory == config.directory / "versions"


def test_overrides_win_over_the_file(tmp_path):
    """Numbers, words and nested tables can be set."""
    path = write(tmp_path, MINIMAL + "[algorithm]\nlr = 1e-4\n")

    config = load_config(path, ["algorithm.lr=0.5", "algorithm.filter=reward", "stop.success=0.9"])

    assert config.algorithm.lr == 0.5
    assert config.algorithm.filter is Filter.REWARD
    assert config.stop.success == 0.9


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("run = ", "not TOML"),
        ('run = "r"\nmodel = "m"', "directory"),
        (MINIMAL + "[algorithm]\ngroup = 3", "algorithm.group"),
        (MINIMAL + "[algorithm]\ngroups = 0", "algorithm.groups"),
        (MINIMAL + "[algorithm]\ngroups = 2\nminibatches = 3", "mini-batches"),
        (MINIMAL + "[algorithm]\nsamples = 4\nmin_siblings = 5", "min_siblings"),
        (MINIMAL + "[algorithm.overlong]\nmax_tokens = 5\ncache_tokens = 6", "cache_tokens"),
        (MINIMAL + "[algorithm]\ngamma = 1.1", "algorithm.gamma"),
        (MINIMAL + "[algorithm]\ngae_lambda = -0.1", "algorithm.gae_lambda"),
        (MINIMAL + '[algorithm]\ncredit = "episode"', "algorithm.credit"),
        ('run = "a/b"\nmodel = "m"\ndirectory = "d"', "run: 'a/b' is no name for a run"),
        ('run = ".."\nmodel = "m"\ndirectory = "d"', "run: '..' is no name for a run"),
        ('run = "r\\n"\nmodel = "m"\ndirectory = "d"', "run: 'r.n' is no name for a run|which holds what cannot be"),
        ('run = "r"\nmodel = "a\\u0000b"\ndirectory = "d"', "model is 'a.x00b', which holds what cannot be printed"),
        (MINIMAL + "[algorithm]\nhorizon = 0", "algorithm.horizon: Input should be greater than"),
        (MINIMAL + f"[algorithm]\nhorizon = {2**31}", "algorithm.horizon: Input should be less than"),
        (MINIMAL + "[algorithm]\ntemperature = nan", "algorithm.temperature: Input should be a finite number"),
        (MINIMAL + "[algorithm]\nlr = inf", "algorithm.lr: Input should be a finite number"),
        (f"seed = {2**63}\n" + MINIMAL, "seed: Input should be less than"),
        ("threads = 0\n" + MINIMAL, "threads: Input should be greater than"),
        (MINIMAL + "[algorithm]\nhorizn = 3", r"algorithm.horizn: .*did you mean `horizon`\? \[algorithm\] has "),
    ],
)
def test_a_value_that_cannot_work_is_named(tmp_path, text, names):
    """The error says which value."""
    with pytest.raises(ConfigError, match=names):
        load_config(write(tmp_path, text))


@pytest.mark.parametrize(
    ("name", "estimator", "by_model"),
    [
        ("grpo", Estimator.GRPO, False),
        ("rloo", Estimator.RLOO, False),
        ("reinforce++", Estimator.REINFORCE_PLUS_PLUS, False),
        ("gae", Estimator.GAE, True),
    ],
)
def test_estimators_are_called_by_their_papers_names(tmp_path, name, estimator, by_model):
    """Replay asks which of them it can make again."""
    config = load_config(write(tmp_path, MINIMAL), [f"algorithm.estimator={name}"])

    assert config.algorithm.estimator is estimator
    assert config.algorithm.estimator.needs_model is by_model


def test_a_missing_file_is_named(tmp_path):
    """Nothing is guessed."""
    with pytest.raises(ConfigError, match="nowhere"):
        load_config(tmp_path / "nowhere.toml")


def test_every_setting_has_a_sentence():
    """`--help` and the docs are made from them."""
    for model in (RunConfig, AlgorithmConfig, StopConfig, CheckpointConfig, Overlong):
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name}"


def test_an_override_that_cannot_work_is_blamed_and_not_the_file(tmp_path):
    """The file is as it was yesterday."""
    path = write(tmp_path, MINIMAL + "[algorithm]\ngroups = 0\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["algorithm.samples=0", "stop.max_step=3"])

    by_file, *by_options = str(caught.value).split("; ")
    assert by_file.startswith(f"{path}: algorithm.groups: Input should be greater than")
    assert any(one.startswith("--run-set algorithm.samples: Input should be") for one in by_options)
    assert any(
        one.startswith("--run-set stop.max_step: there is no such key, did you mean `max_steps`") for one in by_options
    )


def test_a_name_that_its_evaluations_could_not_be_named_after_is_refused(tmp_path):
    """When the run begins, and not hours later by the first evaluation."""
    text = f'run = "{"x" * 90}"\nmodel = "m"\ndirectory = "d"\n'
    assert load_config(write(tmp_path, text)).run == "x" * 90

    with pytest.raises(
        ConfigError, match="run is too long a name by 4 characters: its evaluations are runs named after"
    ):
        load_config(write(tmp_path, text + '[evaluation]\ntasks = { family = "toy", count = 1 }\n'))
