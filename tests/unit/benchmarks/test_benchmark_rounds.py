from benchmarks.rounds import Series, interleaved


async def test_sides_take_turns_and_change_places():
    """What disturbs the machine for a while meets both sides, and neither always comes after the other."""
    order = []

    def side(name):
        async def measure(number):
            order.append((name, number))
            return float(number)

        return measure

    figures = await interleaved({"ours": side("ours"), "rival": side("rival")}, rounds=3)

    assert order == [("ours", 0), ("rival", 0), ("rival", 1), ("ours", 1), ("ours", 2), ("rival", 2)]
    assert figures == {"ours": Series((0.0, 1.0, 2.0)), "rival": Series((0.0, 1.0, 2.0))}


def test_the_figure_of_a_side_is_its_median():
    """One disturbed round does not move it, and the spread shows that there was one."""
    series = Series((10.0, 1.0, 11.0))

    assert series.median == 10.0
    assert series.spread() == {"min": 1.0, "max": 11.0, "rounds": [10.0, 1.0, 11.0]}
