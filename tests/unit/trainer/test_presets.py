import tomllib

import pytest

from infra.errors import ConfigError
from trainer import presets
from trainer.config import load_config

MINIMAL = 'run = "r"\nmodel = "m"\ndirectory = "d"\n'


def write(tmp_path, text):
    path = tmp_path / "RUN.toml"
    path.write_text(text)
    return path


def test_the_presets_are_those_that_the_docs_name():
    """A new one is one more file."""
    assert ["dapo-7b", "debug", "long-horizon", "lora-1gpu"] == presets.names()


def test_a_file_begins_from_the_preset_that_it_names(tmp_path):
    """Three lines and a preset are a whole run."""
    config = load_config(write(tmp_path, 'preset = "dapo-7b"\n' + MINIMAL))

    assert (config.algorithm.groups, config.algorithm.lr, config.algorithm.overlong.cache_tokens) == (32, 1e-6, 2048)


def test_what_the_file_says_wins_key_by_key(tmp_path):
    """The rest of a section stays; a list is taken whole."""
    text = 'preset = "long-horizon"\n' + MINIMAL + "[algorithm]\nlr = 2e-6\n[curriculum]\nhorizons = [5, 8]\n"

    config = load_config(write(tmp_path, text))

    assert (config.algorithm.lr, config.algorithm.max_lag) == (2e-6, 4)
    assert (config.curriculum.horizons, config.curriculum.every) == ((5, 8), 100)


def test_an_override_wins_over_both(tmp_path):
    """Also where it names another preset."""
    path = write(tmp_path, 'preset = "dapo-7b"\n' + MINIMAL + "[algorithm]\nlr = 2e-6\n")

    assert load_config(path, ["algorithm.lr=3e-6"]).algorithm.lr == 3e-6
    assert load_config(path, ["preset=debug"]).algorithm.groups == 4


def test_a_preset_that_is_given_by_hand_takes_the_place_of_the_files(tmp_path):
    """`--preset` is for trying."""
    path = write(tmp_path, 'preset = "dapo-7b"\n' + MINIMAL)

    assert load_config(path, preset="debug").algorithm.groups == 4


@pytest.mark.parametrize("name", ["dapo-8b", "../debug", "", 7, ["debug"]])
def test_an_unknown_name_is_answered_by_the_known_ones(name):
    """With what each is for, and no file outside the folder is read."""
    with pytest.raises(ConfigError, match=r"there is no preset.*dapo-7b.*debug.*long-horizon"):
        presets.read(name)


def test_an_empty_name_in_a_file_is_refused(tmp_path):
    """It is not taken for no preset."""
    with pytest.raises(ConfigError, match="there is no preset"):
        load_config(write(tmp_path, 'preset = ""\n' + MINIMAL))


@pytest.mark.parametrize("name", presets.names())
def test_every_value_of_a_preset_says_why(name):
    """By a comment beside it."""
    lines = (presets.FOLDER / f"{name}.toml").read_text(encoding="utf-8").splitlines()
    values = [line for line in lines if "=" in line.partition("#")[0]]

    bare = [line for line in values if "#" not in line]

    assert lines[0].startswith("# ")
    assert bare == []


@pytest.mark.parametrize("name", presets.names())
def test_a_preset_knows_neither_model_nor_task(name):
    """Those are the run's."""
    values = tomllib.loads((presets.FOLDER / f"{name}.toml").read_text(encoding="utf-8"))

    assert values.keys() <= {"algorithm", "curriculum", "guards", "stop", "checkpoints", "plan", "tasks"}
    assert not values.get("tasks", {}).keys() & {"jsonl", "family", "payload"}
