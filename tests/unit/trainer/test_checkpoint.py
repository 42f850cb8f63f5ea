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
    prune(tmp_path, keep=1)
    assert names(tmp_path) == ["0-1"]


def test_only_the_newest_are_kept(tmp_path):
    """Retention by steps."""
    for step in range(1, 6):
        checkpoint.save(tmp_path, state(step), b"w", b"o")

    prune(tmp_path, keep=2)

    assert names(tmp_path) == ["0-4", "0-5"]


def test_milestones_are_kept_beside_the_newest(tmp_path):
    """Every third step, for a rollback far back."""
    for step in range(1, 9):
        checkpoint.save(tmp_path, state(step), b"w", b"o")
        prune(tmp_path, keep=1, milestones=3)

    assert names(tmp_path) == ["0-3", "0-6", "0-8"]


def test_a_pinned_step_stays_however_old_it_is(tmp_path):
    """That of the best version, to go back to; once another one is pinned it goes."""
    for step in range(1, 6):
        checkpoint.save(tmp_path, state(step), b"w", b"o")

    prune(tmp_path, keep=1, pinned=(2,))
    assert names(tmp_path) == ["0-2", "0-5"]
    prune(tmp_path, keep=1, pinned=(None,))
    assert names(tmp_path) == ["0-5"]


def test_a_step_that_was_saved_twice_is_one_step_and_the_newer_one_stays(tmp_path):
    """A trainer that was killed again and again does not push the step before out."""
    for step, epoch in ((1, 0), (2, 0), (2, 7), (2, 9)):
        checkpoint.save(tmp_path, state(step, epoch), b"w", b"o")

    prune(tmp_path, keep=2, epoch=9)

    assert names(tmp_path) == ["0-1", "9-2"]


def test_checkpoints_of_steps_that_were_undone_go_and_push_nothing_out(tmp_path):
    """After a rollback from step 7 to 4 the newest is step 5 of the new branch, and 4 stays before it."""
    for step in (4, 6, 7):
        checkpoint.save(tmp_path, state(step, digest="undone" if step > 4 else "d"), b"w", b"o")
    checkpoint.save(tmp_path, state(5, epoch=8), b"w", b"o")

    prune(tmp_path, keep=2, epoch=8)

    assert names(tmp_path) == ["0-4", "8-5"]


def test_what_a_later_trainer_has_begun_to_write_is_left_alone(tmp_path):
    """An older one that woke up prunes only behind itself."""
    checkpoint.save(tmp_path, state(1, epoch=3), b"w", b"o")
    for name in (".3-1.aa", ".12-2.bb"):
        (tmp_path / name).mkdir()

    prune(tmp_path, keep=1, epoch=3)

    assert names(tmp_path) == [".12-2.bb", "3-1"]


def test_an_older_trainer_removes_no_checkpoint_of_its_successor(tmp_path):
    """It does not know their steps, and wakes up on another machine, where no lock stops it."""
    for number, epoch in ((1, 3), (2, 12), (3, 12)):
        checkpoint.save(tmp_path, state(number, epoch=epoch, digest="d" if epoch == 3 else "later"), b"w", b"o")

    prune(tmp_path, keep=1, epoch=3)

    assert names(tmp_path) == ["12-2", "12-3", "3-1"]


def prune(parent, *, keep, milestones=None, epoch=0, pinned=()):
    live = lambda found: found.digest == "d"  # noqa: E731
    checkpoint.prune(parent, keep, milestones=milestones, own=state(1, epoch), live=live, pinned=pinned)


def names(parent):
    return sorted(path.name for path in parent.iterdir())


def test_no_directory_is_no_checkpoint(tmp_path):
    """A run that never saved begins at its model."""
    assert checkpoint.latest(tmp_path / "none") is None
