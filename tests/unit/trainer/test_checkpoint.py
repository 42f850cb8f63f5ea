import pytest

from trainer import checkpoint
from trainer.groups import AssemblerState
from trainer.state import TrainerState


def state(step, epoch=0, digest="d"):
    assembler = AssemblerState(low=3, position=9, steps=step, closed=("a", "b"), resolved=2, recent=(0.5, 1.0))
    return TrainerState(run="r", epoch=epoch, digest=digest, decisions=17, assembler=assembler)


def test_what_was_saved_is_found_again(tmp_path):
    """State, weights and optimizer, byte for byte."""
    checkpoint.save(tmp_path, state(1), b"weights", b"optimizer")

    found = checkpoint.latest(tmp_path)

    assert found.state == state(1)
    assert found.weights.read_bytes() == b"weights"
    assert found.optimizer() == b"optimizer"
    assert found.directory.name == "0-1"


def test_the_one_with_the_most_steps_wins_then_the_highest_epoch(tmp_path):
    """Numbers are compared as numbers."""
    for step, epoch in ((9, 40), (10, 5), (10, 31), (2, 99)):
        checkpoint.save(tmp_path, state(step, epoch), b"w", b"o")

    assert checkpoint.latest(tmp_path).directory.name == "31-10"


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "state.json", "files.json"])
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, name, damage):
    """The one before it is used."""
    checkpoint.save(tmp_path, state(1), b"weights", b"optimizer")
    file = checkpoint.save(tmp_path, state(2), b"weights", b"optimizer").directory / name
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-3])

    assert checkpoint.latest(tmp_path).state.step == 1


def test_a_checkpoint_that_does_not_belong_is_passed_over(tmp_path):
    """The caller knows which steps are in the log."""
    checkpoint.save(tmp_path, state(1, digest="mine"), b"w", b"o")
    checkpoint.save(tmp_path, state(2, digest="foreign"), b"w", b"o")

    assert checkpoint.latest(tmp_path, lambda s: s.digest == "mine").state.step == 1


def test_an_interrupted_save_leaves_nothing_that_counts(tmp_path):
    """A directory without its final name is not a checkpoint, and goes with the next prune."""
    checkpoint.save(tmp_path, state(1), b"w", b"o")
    half = tmp_path / ".0-2.abcd"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"w")

    assert checkpoint.latest(tmp_path).state.step == 1
    checkpoint.prune(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["0-1"]


def test_only_the_newest_are_kept(tmp_path):
    """Retention by steps."""
    for step in range(1, 6):
        checkpoint.save(tmp_path, state(step), b"w", b"o")

    checkpoint.prune(tmp_path, 2)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["0-4", "0-5"]


def test_no_directory_is_no_checkpoint(tmp_path):
    """A run that never saved begins at its model."""
    assert checkpoint.latest(tmp_path / "none") is None
