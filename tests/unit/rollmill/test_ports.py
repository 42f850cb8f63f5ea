import socket

from rollmill import ports


def test_ports_are_kept_from_start_to_start_while_they_are_free(tmp_path):
    """One that somebody took meanwhile is replaced, the others stay."""
    kept = tmp_path / "ports.json"
    first = ports.choose(["broker", "policy"], kept=kept)
    ports.keep(first, kept)
    assert ports.choose(["broker", "policy"], kept=kept) == first

    with socket.socket() as link:
        link.bind(("127.0.0.1", first["policy"]))
        link.listen()
        second = ports.choose(["broker", "policy", "clickhouse"], kept=kept)

    assert second["broker"] == first["broker"]
    assert second["policy"] != first["policy"]
    assert len(set(second.values())) == 3


def test_a_damaged_file_of_ports_is_as_none(tmp_path):
    """It is only a preference."""
    for text in ("{", "[1]", '{"broker": "x", "policy": 0, "clickhouse": 70000}'):
        (tmp_path / "ports.json").write_text(text)
        assert len(set(ports.choose(["broker", "policy", "clickhouse"], kept=tmp_path / "ports.json").values())) == 3
