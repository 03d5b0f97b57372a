"""The report's section about small changes of an image: certificates, attacks, and what stands between them."""

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from test_report_page import Element, parse, tile

from fedpriv.attacks.evasion.steps import EvasionAttempt
from fedpriv.attacks.intervals import rate_interval
from fedpriv.core.errors import InputError
from fedpriv.core.report import load_view, render_page
from fedpriv.core.runs import RunFolder
from fedpriv.robustness.norms import LayerNorms
from fedpriv.robustness.records import (
    BOUNDS,
    Certificate,
    CertifiedCurve,
    Evasion,
    EvasionCurve,
    MeanRadius,
    NoiseFacts,
    Reach,
    Robustness,
    read_certificates,
    write_certificates,
)
from fedpriv.robustness.report import evasion_title, sandwich
from fedpriv.robustness.sandwich import sandwich_plot

MakeRun = Callable[..., Path]

# Ten images: eight are right, and the radii of these, in l2, are 0.1, 0.2, ... 0.8.
RADII = tuple(number / 10 for number in range(1, 9))
SIZES = (0.15, 0.35, 0.6)
# How many of the eight each attack leaves right at each size; the first images fall first.
LEFT = {"fgsm": (8, 6, 4), "pgd-noiseless": (7, 7, 3)}


def certificates() -> list[Certificate]:
    fields = {"label": 1, "count": 9, "votes": 10, "runner_up": 1, "lower": 0.7, "upper": 0.2}
    weaker = dict(zip(BOUNDS, (1.0, 0.8, 0.5, 0.25, 0.25, 0.0), strict=True))
    right = [
        Certificate(image=image, predicted=1, margins=weaker, radius_l2=radius, radius_linf=radius / 8, **fields)  # type: ignore[arg-type]
        for image, radius in enumerate(RADII)
    ]
    wrong = [
        Certificate(image=image, predicted=2, margins=weaker, radius_l2=0.9, radius_linf=0.1, **fields)  # type: ignore[arg-type]
        for image in (8, 9)
    ]
    return right + wrong


def certify(folder: Path, **noise: Any) -> Path:
    """Add what ``fedpriv certify`` leaves."""
    found = certificates()
    sizes = {"l2": (0.25, 0.5, 0.75), "linf": (0.02, 0.05)}
    robustness = Robustness(
        noise=NoiseFacts(
            **{
                "place": "hidden",
                "redistribution": "uniform",
                "sigma": 0.5,
                "norm": "l2",
                "afterwards": False,
                "dimension": 64,
                "model": "00",
                **noise,
            }
        ),
        norms=LayerNorms(2.0, 16.0, "rows", 15.0),
        examples=10,
        selection=20,
        votes=1000,
        alpha=0.001,
        rivals="each",
        wrong_at_most=1,
        voted=rate_interval(8, 10),
        noiseless=rate_interval(9, 10),
        abstained=0,
        curves=tuple(
            CertifiedCurve(
                norm,
                bound,
                sizes[norm],
                tuple(rate_interval(sum(each.holds(norm, at, bound) for each in found), 10) for at in sizes[norm]),
            )
            for norm in sizes
            for bound in BOUNDS
        ),
        radii=tuple(MeanRadius(bound, 0.36, 0.045) for bound in BOUNDS),
        reach=Reach(0.95, 0.12),
        seconds=3.2,
    )
    run = RunFolder(folder)
    (folder / "robustness").mkdir()
    write_certificates(run, robustness, found)
    return folder


def probe(folder: Path, sizes: tuple[float, ...] = SIZES, broken: int = 0) -> Path:
    """Add what ``fedpriv probe`` leaves; in ``broken`` images it refutes the certificates, at all sizes."""
    run = RunFolder(folder)
    certified = bool(read_certificates(run))
    lines = [
        EvasionAttempt(
            image=image,
            label=1,
            attack=attack,
            norm="l2",
            size=size,
            distance=size,
            predicted=1 if image >= 8 - left else 2,
            count=90 if image >= 8 - left else 10,
            rival=10 if image >= 8 - left else 90,
            votes=100,
            radius=(9.0 if image < broken else RADII[image]) if certified else None,
            broken=image < min(broken, 8 - left),
        )
        for attack, shares in LEFT.items()
        for size, left in zip(sizes, shares, strict=True)
        for image in range(8)
    ]
    (folder / "robustness").mkdir(exist_ok=True)
    evasion = Evasion(
        norm="l2",
        sizes=sizes,
        steps=20,
        restarts=1,
        votes=100,
        victims=10,
        attacked=8,
        clean=rate_interval(8, 10),
        certified=tuple(rate_interval(sum(radius > size for radius in RADII), 10) for size in sizes)
        if certified
        else None,
        least=tuple(rate_interval(min(each[at] for each in LEFT.values()), 10) for at in range(3)),
        curves=tuple(
            EvasionCurve(name, 8, tuple(rate_interval(each, 10) for each in shares), (0, 0, broken))
            for name, shares in LEFT.items()
        ),
        broken=broken,
        wrong_at_most=1 if certified else None,
        seconds=2.0,
    )
    run.write_jsonl("robustness/attacks.jsonl", [asdict(line) for line in lines])
    run.write_json("evasion.json", evasion.model_dump(mode="json"))
    return folder


def page(folder: Path) -> Element:
    return parse(render_page(load_view(folder)))


def rows(table: Element) -> list[list[str]]:
    """Each row's cells; of a share its figure without the interval."""
    return [[cell.text.split(" ")[0] for cell in row.find("th") + row.find("td")] for row in table.find("tr")[1:]]


def texts(svg: bytes) -> list[str]:
    return ["".join(node.itertext()) for node in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_the_sandwich_stands_in_sentence_table_and_tiles(make_run: MakeRun) -> None:
    root = page(probe(certify(make_run())))
    section = root.section("robustness")
    assert "At ℓ₂ 0.35, 50.0% are proven and at most 60.0% are right under these attacks: the truth lies between." in (
        section.text
    )
    sizes, bounds = section.find("table")
    assert rows(sizes) == [
        ["0.15", "70.0%", "70.0%", "80.0%", "70.0%", "80.0%"],
        ["0.35", "50.0%", "60.0%", "60.0%", "70.0%", "80.0%"],
        ["0.6", "20.0%", "30.0%", "40.0%", "30.0%", "80.0%"],
    ]
    assert "39.7% to 89.2%" in sizes.text  # Wilson, 7 of 10
    assert [cell.text for cell in sizes.find("th")][3:5] == [
        "≤ Fast gradient sign",
        "Projected gradient descent, noiseless",
    ]
    # Margins of 1, 0.8, 0.5, 0.25, 0.25 and 0 times the radius.
    assert rows(bounds)[0][-7:] == ["60.0%", "30.0%", "10.0%", "0.36", "70.0%", "40.0%", "0.045"]
    assert [row[-7] for row in rows(bounds)] == ["60.0%", "50.0%", "30.0%", "0.0%", "0.0%", "0.0%"]
    assert "at most 1, with 95 % confidence" in section.text and "σ = 0.5 in ℓ₂, after the first layer" in section.text
    certified, attacked = tile(root, "Certified at ℓ₂ 0.5"), tile(root, "Right under attack at ℓ₂ 0.35")
    assert "30.0%" in certified.text and "80.0% by vote" in certified.text and "at most 1 of 10" in certified.text
    assert "60.0%" in attacked.text and "50.0% proven and 80.0% unattacked" in attacked.text
    assert "alarm" not in str(attacked.attributes["class"])
    assert not root.find("div", "error") and "No certificate reaches" not in section.text
    assert any(link.attributes["href"] == "#robustness" for link in root.find("nav")[0].find("a"))


def test_the_plot_is_exact(make_run: MakeRun) -> None:
    shown = sandwich(load_view(probe(certify(make_run()))).result("robustness"))
    assert shown is not None
    assert [shown.proven(size) for size in (0.0, 0.1, 0.35, 0.8)] == [0.8, 0.7, 0.5, 0.0]  # below the radius only
    assert [shown.proven(size, "analytic") for size in (0.0, 0.1, 0.35, 0.8)] == [0.8, 0.6, 0.1, 0.0]
    drawn = sandwich_plot(shown)
    assert drawn.alt == (
        "Share of 10 test images that stay right, by size of the change (ℓ₂): unattacked 80.0%; "
        "under every attack 70.0% at 0.15, 60.0% at 0.35, 30.0% at 0.6; "
        "proven 70.0% at 0.15, 50.0% at 0.35, 20.0% at 0.6."
    )
    for svg in (drawn.light, drawn.dark):
        assert {"proven (main)", "Renyi", "under every attack", "under pgd-noiseless"} <= set(texts(svg))
        assert {"right unattacked 80.0%", "proven ≤ truth ≤ attacked"} <= set(texts(svg))
        assert b"fill-opacity: 0.14" in svg


def test_certificates_alone(make_run: MakeRun) -> None:
    root = page(certify(make_run(), afterwards=True, place="input"))
    section = root.section("robustness")
    assert "which it was not trained with" in section.text and "Nobody attacked it" in section.text
    assert "trained without it" in tile(root, "Certified").text
    assert len(section.find("table")) == len(section.find("picture")) == 1
    assert "under every attack" not in section.text and "Right under attack" not in root.text
    shown = sandwich(load_view(certify(make_run())).result("robustness"))
    assert shown is not None and (shown.images, shown.clean) == (10, 0.8)
    drawn = sandwich_plot(shown)
    assert drawn.alt.endswith("unattacked 80.0%; proven 60.0% at 0.25, 30.0% at 0.5, 10.0% at 0.75.")
    assert "proven ≤ truth ≤ attacked" not in texts(drawn.light)


def test_attacks_alone_prove_nothing(make_run: MakeRun) -> None:
    root = page(probe(make_run()))
    section = root.section("robustness")
    assert "at most 60.0% are right under these attacks. Nothing is proven" in section.text
    (table,) = section.find("table")
    assert [row[1] for row in rows(table)] == ["nothing"] * 3
    assert "nothing proven and 80.0% unattacked" in tile(root, "Right under attack").text
    assert "Certified" not in " ".join(one.text for one in root.find("h3"))
    shown = sandwich(load_view(probe(make_run())).result("robustness"))
    assert shown is not None and not shown.radii
    assert not {"proven (main)", "proven ≤ truth ≤ attacked"} & set(texts(sandwich_plot(shown).light))


def test_a_broken_certificate_is_red(make_run: MakeRun) -> None:
    root = page(probe(certify(make_run()), broken=2))
    assert "broken certificates: 2, claimed: at most 0" in root.section("refuted-robustness").text
    section = root.section("robustness")
    (error,) = section.find("div", "error")
    assert "Error: certificates are broken." in error.text and "2, claimed: at most 0" in error.text
    assert "at most 1 of all certificates" in root.section("robustness").text
    assert [row[-1] for row in rows(section.find("table")[0])] == ["1", "2", "2"]
    assert "the truth lies between" not in section.text and "claimed to be proven, and at most" in section.text
    attacked = tile(root, "Right under attack")
    assert "broke a certificate" in attacked.text and "alarm" in str(attacked.attributes["class"])


def test_sizes_beyond_the_reach_and_what_epsilon_names(make_run: MakeRun) -> None:
    text = page(probe(certify(make_run(), epsilon=2.5), sizes=(0.3, 0.95, 1.5))).section("robustness").text
    assert "No certificate reaches beyond ℓ₂ 0.95 here" in text
    assert "At ℓ₂ 0.95 and above nothing can be proven" in text
    assert "robustness.epsilon = 2.5 sets a noise level, as in PixelDP. It is not a privacy budget" in text
    assert "no privacy budget" not in page(certify(make_run())).section("robustness").text


def test_a_run_without_either_has_no_such_section(make_run: MakeRun) -> None:
    text = render_page(load_view(make_run()))
    assert 'id="robustness"' not in text and "Certified at" not in text


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("robustness.json", r"robustness\.json is damaged"),
        ("robustness/certificates.jsonl", r"certificates\.jsonl is damaged: it has 5 lines"),
        ("evasion.json", r"evasion\.json is damaged"),
        ("robustness/attacks.jsonl", r"attacks\.jsonl is damaged: it has 5 lines"),
    ],
)
def test_damage_is_refused(make_run: MakeRun, name: str, said: str) -> None:
    folder = probe(certify(make_run()))
    lines = (folder / name).read_text().splitlines(keepends=True)
    (folder / name).write_text("".join(lines[:5]))
    with pytest.raises(InputError, match=said):
        load_view(folder)


@pytest.mark.parametrize(
    ("name", "keys", "value", "said"),
    [
        ("robustness.json", ["curves"], [], "curves has none of main in l2"),
        ("robustness.json", ["curves", 0, "sizes"], [0.1, 0.2, 0.3], "curves in l2 have different sizes"),
        ("robustness.json", ["curves", 0, "shares"], [], "not one share for each size"),
        ("robustness.json", ["radii"], [], "radii has none of analytic"),
        ("robustness.json", ["noise", "norm"], "l7", "noise.norm: Input should be 'l2' or 'linf'"),
        ("robustness.json", ["examples"], 0, "examples: "),
        ("evasion.json", ["norm"], "l7", "norm: Input should be"),
        ("evasion.json", ["sizes"], [], "sizes: "),
        ("evasion.json", ["least"], [], "not one figure for each size"),
        ("evasion.json", ["curves", 1, "broken"], [0], "not one figure for each size"),
    ],
)
def test_edited_figures_that_do_not_fit_are_one_line(
    make_run: MakeRun, name: str, keys: list[Any], value: object, said: str
) -> None:
    folder = probe(certify(make_run()))
    tree = json.loads((folder / name).read_text())
    at = tree
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = value
    (folder / name).write_text(json.dumps(tree))
    with pytest.raises(InputError, match=said) as error:
        load_view(folder)
    assert "\n" not in str(error.value) and "is damaged" in str(error.value)


def test_attacks_of_packages_that_are_gone_keep_their_names() -> None:
    assert evasion_title("nobodys") == "nobodys"
    assert evasion_title("nobodys-noiseless") == "nobodys, noiseless"
    assert evasion_title("mim") == "Momentum iterative method"
