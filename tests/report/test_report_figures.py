import io
import re
import xml.etree.ElementTree as ElementTree

import matplotlib
import pytest
from PIL import Image

from fedpriv.report.figures import Plot, accuracy_plot, epsilon_plot, loss_plot, partition_plot
from fedpriv.report.view import Partition
from fedpriv.runs import Failure, RoundRecord

SVG = "{http://www.w3.org/2000/svg}"


def course(*pairs: tuple[float, float], failed: tuple[int, ...] = ()) -> list[RoundRecord]:
    return [
        RoundRecord(number, loss, accuracy, (), (), (Failure(0, "gone"),) if number in failed else (), 0.1, 1, 1)
        for number, (loss, accuracy) in enumerate(pairs)
    ]


def texts(svg: bytes) -> list[str]:
    return ["".join(node.itertext()) for node in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def heat_map(plot: Plot) -> Image.Image:
    """The picture of the cells, one pixel a cell."""
    encoded = re.search(rb'xlink:href="data:image/png;base64,\s*([^"]+)"[^>]*image-rendering', plot.light)
    assert encoded is not None
    import base64

    return Image.open(io.BytesIO(base64.b64decode(encoded[1])))


def test_curves_say_their_last_value_and_the_chance_level() -> None:
    plot = accuracy_plot(course((2.3, 0.1), (1.0, 0.753)), 10)
    assert plot is not None
    for svg in (plot.light, plot.dark):
        assert "75.3%" in texts(svg)
        assert "guessing among 10" in texts(svg)
    assert plot.alt == "Test accuracy over rounds: 10.0% at round 0, 75.3% at round 1."


@pytest.mark.parametrize(("failed", "words"), [((1,), "1 round in which"), ((1, 2), "2 rounds in which")])
def test_failures_are_marked(failed: tuple[int, ...], words: str) -> None:
    rounds = course((2.3, 0.1), (1.0, 0.7), (0.9, 0.8))
    marked = course((2.3, 0.1), (1.0, 0.7), (0.9, 0.8), failed=failed)
    for draw in (lambda data: accuracy_plot(data, 10), loss_plot):
        calm, alarmed = draw(rounds), draw(marked)
        assert calm is not None
        assert alarmed is not None
        assert words in alarmed.alt
        assert "#b84a00" not in calm.light.decode().lower()
        crosses = re.findall(r"<use[^>]*stroke: #b84a00", alarmed.light.decode().lower())
        assert len(crosses) == len(failed)


def test_without_a_round_there_is_no_curve() -> None:
    assert accuracy_plot([], 10) is None
    assert loss_plot([]) is None


@pytest.mark.parametrize("rounds", [course((2.3, 0.1)), course((0.0, 0.0)), course((1e9, 0.1), (1e-9, 1.0))])
def test_odd_courses_can_be_drawn(rounds: list[RoundRecord]) -> None:
    plots = [accuracy_plot(rounds, None), loss_plot(rounds)]
    assert all(plot is not None and ElementTree.fromstring(plot.dark) is not None for plot in plots)


def test_a_loss_that_explodes_is_drawn_on_a_logarithmic_scale() -> None:
    wide, narrow = loss_plot(course((2.3, 0.1), (5e4, 0.1))), loss_plot(course((2.3, 0.1), (1.0, 0.1)))
    assert wide is not None
    assert narrow is not None
    assert "logarithmic scale" in wide.alt
    assert "logarithmic scale" not in narrow.alt


def proven(*epsilons: float | None) -> list[RoundRecord]:
    return [RoundRecord(number, 1.0, 0.5, (), (), (), 0.1, 1, 1, epsilon) for number, epsilon in enumerate(epsilons)]


def test_the_running_epsilon_is_drawn_with_its_target() -> None:
    plot = epsilon_plot(proven(0.0, 1.5, 2.75), 3.0)
    assert plot is not None
    assert plot.alt == (
        "Proven epsilon of the worst client, an upper bound as the run went on (the final figure may be lower): "
        "0 at round 0, 2.75 at round 2; "
        "clients stop at 3."
    )
    assert {"2.75", "target 3", "Proven ε of the worst client"} <= set(texts(plot.light))
    free = epsilon_plot(proven(0.0, 1.5, 2.75), None)
    assert free is not None
    assert not any("target" in text for text in texts(free.dark))


@pytest.mark.parametrize(
    ("epsilons", "target", "drawn"),
    [
        ((), None, False),
        ((None, None), None, False),
        ((0.0,), 3.0, False),
        ((0.0, 2.0, 2.0), None, False),
        ((0.0, 2.0, 2.0), 3.0, True),
        ((0.0, None, 2.0, 4.0), None, True),
    ],
)
def test_an_epsilon_that_says_nothing_is_not_drawn(
    epsilons: tuple[float | None, ...], target: float | None, drawn: bool
) -> None:
    assert (epsilon_plot(proven(*epsilons), target) is not None) == drawn


@pytest.mark.parametrize(("clients", "classes"), [(1, 2), (8, 10), (17, 10), (100, 100)])
def test_the_partition_has_one_cell_a_client_and_class(clients: int, classes: int) -> None:
    counts = tuple(tuple((client * classes + label) % 7 for label in range(classes)) for client in range(clients))
    plot = partition_plot(Partition(counts, tuple(f"class {label}" for label in range(classes))))
    picture = heat_map(plot)
    assert picture.size == (clients, classes)
    darkness = [[sum(picture.convert("RGB").getpixel((x, y))) for y in range(classes)] for x in range(clients)]
    by_count = {counts[x][y]: darkness[x][y] for x in range(clients) for y in range(classes)}
    shades = [by_count[number] for number in sorted(by_count)]
    assert shades == sorted(shades, reverse=True)
    assert len(set(shades)) == len(shades)
    assert f"{clients} clients" in plot.alt


def test_small_partitions_say_the_numbers() -> None:
    plot = partition_plot(Partition(((1234, 0), (5, 66)), ("cat", "dog")))
    assert {"1,234", "·", "5", "66", "cat", "dog"} <= set(texts(plot.light))
    assert plot.alt == "Who holds what: 71 to 1,234 examples a client, of 1 to 2 of the 2 classes; 2 clients."


def test_names_of_classes_are_text_and_nothing_else() -> None:
    names = ("<script>x</script>", "$\\broken{", "数字", "a & b", "a very long name of a class")
    plot = partition_plot(Partition(((1, 2, 3, 4, 5),), names))
    shown = texts(plot.dark)
    assert {"<script>x</script>"[:15] + "…", "$\\broken{", "数字", "a & b", "a very long nam…"} <= set(shown)


def test_drawing_repeats_to_the_byte_and_leaves_matplotlib_as_it_was() -> None:
    partition = Partition(((1, 2), (3, 4)), ("a", "b"))
    first = partition_plot(partition)
    with matplotlib.rc_context({"font.size": 30, "axes.grid": True, "svg.fonttype": "path"}):
        before = dict(matplotlib.rcParams)
        assert partition_plot(partition) == first
        assert dict(matplotlib.rcParams) == before
    for svg in (first.light, first.dark):
        assert b"<dc:date>" not in svg
        assert b"matplotlib v" not in svg.lower()
