import base64
import io
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable

import matplotlib
import numpy as np
import pytest
from PIL import Image

from fedpriv.attacks.membership.report import Curve, MembershipAttack, roc_plot
from fedpriv.core.records import Failure, Partition, RoundRecord
from fedpriv.core.report import drawing
from fedpriv.core.report.drawing import (
    DARK,
    Plot,
    accuracy_plot,
    epsilon_plot,
    loss_plot,
    partition_plot,
    recoloured,
)

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
    return Image.open(io.BytesIO(base64.b64decode(encoded[1])))


def test_curves_say_their_last_value_and_the_chance_level() -> None:
    plot = accuracy_plot(course((2.3, 0.1), (1.0, 0.753)), 10)
    assert plot is not None
    for svg in (plot.light, plot.dark):
        assert "75.3%" in texts(svg)
        assert "guessing among 10" in texts(svg)
    assert plot.alt == "Test accuracy over rounds: 10.0% at round 0, 75.3% at round 1."


def test_the_commonest_class_is_the_level_where_it_is_clearly_above_chance() -> None:
    rounds = course((2.3, 0.1), (1.0, 0.753))
    most, none = Partition(("a", "b"), ((20, 4), (56, 20))).majority, Partition(("a", "b"), ((55, 45),)).majority
    assert (most, none) == (0.76, 0.0)
    uneven, even = accuracy_plot(rounds, 2, most), accuracy_plot(rounds, 2, none)
    assert uneven is not None and even is not None
    assert "the most common class" in texts(uneven.light) and "guessing among 2" in texts(even.light)
    plain = accuracy_plot(rounds, 2)
    assert plain is not None and plain.light == even.light


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
    plot = partition_plot(Partition(tuple(f"class {label}" for label in range(classes)), counts))
    picture = heat_map(plot)
    assert picture.size == (clients, classes)
    darkness = [[sum(picture.convert("RGB").getpixel((x, y))) for y in range(classes)] for x in range(clients)]
    by_count = {counts[x][y]: darkness[x][y] for x in range(clients) for y in range(classes)}
    shades = [by_count[number] for number in sorted(by_count)]
    assert shades == sorted(shades, reverse=True)
    assert len(set(shades)) == len(shades)
    assert f"{clients} clients" in plot.alt


def test_small_partitions_say_the_numbers() -> None:
    plot = partition_plot(Partition(("cat", "dog"), ((1234, 0), (5, 66))))
    assert {"1,234", "·", "5", "66", "cat", "dog"} <= set(texts(plot.light))
    assert plot.alt == "Who holds what: 71 to 1,234 examples a client, of 1 to 2 of the 2 classes; 2 clients."


def test_names_of_classes_are_text_and_nothing_else() -> None:
    names = ("<script>x</script>", "$\\broken{", "数字", "a & b", "a very long name of a class")
    plot = partition_plot(Partition(names, ((1, 2, 3, 4, 5),)))
    shown = texts(plot.dark)
    assert {"<script>x</script>"[:15] + "…", "$\\broken{", "数字", "a & b", "a very long nam…"} <= set(shown)


def test_drawing_repeats_to_the_byte_and_leaves_matplotlib_as_it_was() -> None:
    partition = Partition(("a", "b"), ((1, 2), (3, 4)))
    first = partition_plot(partition)
    with matplotlib.rc_context({"font.size": 30, "axes.grid": True, "svg.fonttype": "path"}):
        before = dict(matplotlib.rcParams)
        assert partition_plot(partition) == first
        assert dict(matplotlib.rcParams) == before
    for svg in (first.light, first.dark):
        assert b"<dc:date>" not in svg
        assert b"matplotlib v" not in svg.lower()


def attack(number: int) -> MembershipAttack:
    return MembershipAttack(
        f"lira {number}", 9, 9, 0.6, 0.1, 0.01, 0.2, curve=Curve((0.001, 0.1, 1.0), (0.01, 0.3, 1.0))
    )


NAMED = tuple(f"class {label}" for label in range(5))
DRAWN: dict[str, Callable[[], Plot | None]] = {
    "accuracy": lambda: accuracy_plot(course((2.3, 0.1), (1.0, 0.7), (0.9, 0.8), failed=(1,)), 10),
    "numbers": lambda: partition_plot(Partition(NAMED, ((0, 1, 20, 3, 90), (35, 46, 47, 0, 6)))),
    "colour bar": lambda: partition_plot(Partition(NAMED, tuple(tuple(range(5 * n, 5 * n + 5)) for n in range(60)))),
    "membership": lambda: roc_plot([attack(number) for number in range(4)]),
}


@pytest.mark.parametrize("name", DRAWN)
def test_the_dark_version_is_that_of_drawing_in_the_dark_theme(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the names that matplotlib gives to marks, and to 2/255 in pictures: some light shades stand for several."""
    found = DRAWN[name]()
    assert found is not None
    monkeypatch.setattr(drawing, "LIGHT", DARK)
    wanted_plot = DRAWN[name]()
    assert wanted_plot is not None
    (text, pictures), (wanted_text, wanted_pictures) = (taken_apart(svg) for svg in (found.dark, wanted_plot.light))
    assert text == wanted_text
    assert len(pictures) == len(wanted_pictures) == {"numbers": 1, "colour bar": 2}.get(name, 0)
    for picture, wanted in zip(pictures, wanted_pictures, strict=True):
        assert abs(picture - wanted).max() <= 2
    # The comparison can fail: the light version is another drawing.
    assert taken_apart(found.light)[0] != wanted_text


def taken_apart(svg: bytes) -> tuple[str, list[np.ndarray]]:
    """Everything but pictures and generated names, and the pixels of the pictures."""
    text = re.sub(r'(?<=["#])(m|image)[0-9a-f]{10}', "name", svg.decode())
    encoded = re.findall(r"base64,\s*([A-Za-z0-9+/=]+)", text)
    images = [Image.open(io.BytesIO(base64.b64decode(each))).convert("RGBA") for each in encoded]
    return re.sub(r"base64,\s*[A-Za-z0-9+/=]+", "", text), [np.array(image).astype(int) for image in images]


def test_what_looks_like_a_colour_in_a_text_or_a_name_stays() -> None:
    svg = b'<g id="#ffffff" style="fill: #ffffff; stroke: #FFFFFF"><use xlink:href="#ffffff"/>#ffffff #b84a00</g>'
    changed = recoloured(svg, {"#FFFFFF": "#16191D"})
    assert changed == svg.replace(b": #ffffff", b": #16191d").replace(b": #FFFFFF", b": #16191d")
