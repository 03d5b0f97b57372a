import base64
import html.parser
import io
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from example_runs import LPIPS_REASON, Recipe, png, read_json, write_json
from PIL import Image

from fedpriv.attacks import metrics
from fedpriv.core import numbers
from fedpriv.core.config.data import ColumnConfig
from fedpriv.core.errors import InputError, RunFailedError, RunInterruptedError
from fedpriv.core.files import WriteError
from fedpriv.core.finding import Picture
from fedpriv.core.records import members_text
from fedpriv.core.report import load_view, page, render_page, reported, write_report
from fedpriv.core.report.filters import PAPERS, picture_uri, plain
from fedpriv.core.runs import RunFolder
from tests.cases import in_one_test

MakeRun = Callable[..., Path]
VOID = {"wbr", "meta", "img", "source", "br", "link", "input", "hr"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str | None]
    parts: list["Element | str"] = field(default_factory=list)

    def find(self, tag: str, name: str = "") -> list["Element"]:
        """All elements below of this tag, and with this class if one is given."""
        found = []
        for part in self.parts:
            if isinstance(part, Element):
                if part.tag == tag and (not name or name in (part.attributes.get("class") or "").split()):
                    found.append(part)
                found += part.find(tag, name)
        return found

    def section(self, name: str) -> "Element":
        """The section with the heading of this id."""
        return next(part for part in self.find("section") if part.attributes.get("aria-labelledby") == name)

    @property
    def text(self) -> str:
        words = [part if isinstance(part, str) else part.text for part in self.parts]
        return " ".join(" ".join(words).split())

    @property
    def everything(self) -> list["Element"]:
        below = [part for part in self.parts if isinstance(part, Element)]
        return [self, *(one for part in below for one in part.everything)]


class Parser(html.parser.HTMLParser):
    """Builds the tree and insists that every element is closed where it should be."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Element("", {})
        self._open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs)
        element = Element(tag, dict(attrs))
        self._open[-1].parts.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1].tag == tag
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self._open[-1].parts.append(data)

    def close(self) -> None:
        super().close()
        assert self._open == [self.root]


def parse(text: str) -> Element:
    parser = Parser()
    parser.feed(text)
    parser.close()
    return parser.root


def report(folder: Path) -> Element:
    return parse(write_report(folder).read_text(encoding="utf-8"))


def tile(root: Element, title: str) -> Element:
    return next(one for one in root.find("section", "tile") if one.find("h3")[0].text.startswith(title))


# ---- form -----------------------------------------------------------------------------------------------------------

VARIANTS: list[dict[str, Any]] = [
    {},
    {"mechanism": "vmf", "noise": 50.0, "sampling": "fixed"},
    {"mechanism": "vmf", "noise": 500.0, "sampling": "shuffled", "algorithm": "fedavg", "lpips": True},
    {"mechanism": "none", "sampling": "shuffled", "failures": ()},
    {"attacks": ()},
    {"counterfactual": False, "images": 2, "victims": 2},
    {"clients": 30, "status": "interrupted", "reason": "interrupted", "finished": 3},
    {"target": 8.0, "stops": ((3, 11), (0, 17)), "clients": 4, "reason": "the budget is used up", "finished": 17},
    {"running": False},
]


@pytest.fixture(scope="module", params=VARIANTS, ids=str)
def variant(request: pytest.FixtureRequest, originals: Callable[[Recipe], Path]) -> Element:
    return parse(render_page(load_view(originals(Recipe(**request.param)))))


def test_every_report_is_sound_and_loads_nothing(variant: Element) -> None:
    root = variant
    elements = root.everything
    ids = [one.attributes["id"] for one in elements if "id" in one.attributes]
    assert len(set(ids)) == len(ids)
    for one in elements:
        assert not {name for name in one.attributes if name.startswith("on")}
        for name in ("src", "srcset", "href"):
            address = one.attributes.get(name)
            if address is not None:
                cites = one.tag == "a" and address in PAPERS.values()
                assert address.startswith("data:") or address[1:] in ids or cites
        assert "http" not in (one.attributes.get("style") or "")
    assert not [one for one in elements if one.tag in ("script", "link", "iframe", "object", "base")]
    assert "url(" not in root.find("style")[0].text
    assert "@import" not in root.find("style")[0].text
    references = [name for one in elements for key in ("aria-labelledby",) if (name := one.attributes.get(key))]
    assert set(references) <= set(ids)
    assert root.find("html")[0].attributes["lang"] == "en"
    assert len(root.find("h1")) == len(root.find("main")) == 1


def test_every_picture_decodes_and_is_described(variant: Element) -> None:
    root = variant
    assert root.find("img")
    for image in root.find("img"):
        assert image.attributes["alt"]
        kind, content = decode(image.attributes["src"] or "")
        if kind == "image/png":
            with Image.open(io.BytesIO(content)) as picture:
                picture.load()
                size = str(picture.width), str(picture.height)
            assert (image.attributes["width"], image.attributes["height"]) == size
        else:
            assert content.startswith(b"<?xml")
    for source in root.find("source"):
        assert decode(source.attributes["srcset"] or "")[0] == "image/svg+xml"
        assert "prefers-color-scheme: dark" in (source.attributes["media"] or "")


def decode(address: str) -> tuple[str, bytes]:
    match = re.fullmatch(r"data:([a-z+/]+);base64,([A-Za-z0-9+/=]+)", address)
    assert match is not None
    return match[1], base64.b64decode(match[2], validate=True)


def test_tables_have_headings_with_a_scope(variant: Element) -> None:
    for table in variant.find("table"):
        assert table.find("caption")
        assert all(one.attributes.get("scope") in ("row", "col") for one in table.find("th"))
        columns = len(table.find("thead")[0].find("th"))
        rows = table.find("tbody")[0].find("tr")
        assert {len(row.find("th")) + len(row.find("td")) for row in rows} <= {columns}


def test_the_same_folder_gives_the_same_bytes(make_run: MakeRun) -> None:
    folder = make_run()
    first = write_report(folder).read_bytes()
    copy = shutil.copytree(folder, folder.with_name("copy"))
    assert write_report(folder).read_bytes() == write_report(copy).read_bytes() == first
    assert str(folder) not in first.decode()
    assert [path.name for path in folder.iterdir() if path.name.endswith(".part")] == []


def test_a_report_for_many_stays_small(make_run: MakeRun) -> None:
    path = write_report(make_run(clients=100, victims=16, pictures=16))
    root = parse(path.read_text(encoding="utf-8"))
    assert len(root.find("article", "victim")) == 16
    assert path.stat().st_size < 1_000_000


def test_a_report_that_cannot_be_written_names_itself_and_leaves_nothing(make_run: MakeRun) -> None:
    folder = make_run()
    (folder / "report.html").mkdir()
    with pytest.raises(WriteError) as raised:
        write_report(folder)
    assert raised.value.filename == str(folder / "report.html")
    assert [path.name for path in folder.iterdir() if path.name.endswith(".part")] == []


@pytest.mark.parametrize(
    ("error", "earlier"),
    [
        (None, False),
        (None, True),
        (InputError("no"), False),
        (RunFailedError("no"), True),
        (RunInterruptedError("no"), False),
    ],
)
def test_a_summary_is_followed_by_its_report_however_the_run_ends(
    error: Exception | None, earlier: bool, make_run: MakeRun
) -> None:
    folder = make_run()
    summary = (folder / "summary.json").read_text()
    if not earlier:
        (folder / "summary.json").unlink()
    with nullcontext() if error is None else pytest.raises(type(error), match=r"^no$"), reported(folder):
        RunFolder(folder).write_text("summary.json", summary)
        if error is not None:
            raise error
    assert "digits-example" in (folder / "report.html").read_text()


def test_a_command_that_is_refused_leaves_reports_alone(make_run: MakeRun, tmp_path: Path) -> None:
    for folder in (make_run(), tmp_path / "nowhere"):
        with pytest.raises(InputError, match="exists already"), reported(folder):
            raise InputError("exists already")
        assert not (folder / "report.html").exists()


def test_a_failure_is_told_although_its_report_cannot_be_written(make_run: MakeRun) -> None:
    folder = make_run()
    (folder / "report.html").mkdir()
    with pytest.raises(RunFailedError, match="disk"), reported(folder):
        RunFolder(folder).write_text("summary.json", "{}")
        raise RunFailedError("the disk is full")
    with pytest.raises((InputError, RunFailedError), match=r"damaged|cannot be written"), reported(folder):
        RunFolder(folder).write_text("summary.json", "{}")


# ---- content --------------------------------------------------------------------------------------------------------


@in_one_test("padded", [False, True])
def test_the_scores_of_every_picture_stand_under_it(make_run: MakeRun, padded: bool) -> None:
    folder = make_run(victims=3, lpips=True, padded=padded)
    lines = [json.loads(line) for line in (folder / "reconstructions/scores.jsonl").read_text().splitlines()]
    chosen = {(s["client"], s["attack"], s["upload"]): s for s in lines if s["chosen"]}
    view = load_view(folder)
    for victim, article in zip(view.victims, report(folder).find("article", "victim"), strict=True):
        shots = article.find("figure", "shot")
        assert f"True label {victim.true_label}" in shots[0].text
        assert len(shots) == 1 + len(victim.candidates)
        for candidate, shot in zip(victim.candidates, shots[1:], strict=True):
            score = chosen[victim.client, candidate.attack, candidate.upload]
            shown = {row.find("dt")[0].text: row.find("dd")[0].text for row in shot.find("dl")[0].find("div")}
            second = {"SSIM (padded)": numbers.decimal(score["ssim_padded"])} if padded else {}
            assert shown == {
                "SSIM": f"{score['ssim']:z.3f}".replace("-", "−"),
                **second,
                "PSNR": f"{score['psnr']:.1f} dB",
                "MSE": numbers.figure(score["mse"], 3),
                "LPIPS": f"{score['lpips']:.3f}",
            } | ({} if candidate.upload == "none" else {"Label": f"{score['label']}, true {score['true_label']}"})
            assert isinstance(candidate.content, Picture)
            assert decode(shot.find("img")[0].attributes["src"] or "")[1] == candidate.content.png
            if candidate.upload == "none":
                assert not shot.find("p", "badge")
            else:
                assert shot.find("p", "badge")[0].text == ("recovered" if score["recovered"] else "not recovered")


@in_one_test("padded", [False, True])
def test_a_second_ssim_has_a_column_and_a_word(make_run: MakeRun, padded: bool) -> None:
    folder = make_run(padded=padded)
    root = report(folder)
    table = root.section("pictures").find("table", "scores")[0]
    headings = [heading.text for heading in table.find("thead")[0].find("th")]
    second = ["SSIM (padded)"] if padded else []
    assert headings[headings.index("SSIM") :][: 2 + len(second)] == ["SSIM", *second, "PSNR"]
    assert ("does not decide what counts as recovered" in root.section("scores").text) == padded
    results = read_json(folder / "summary.json")["attacks"]
    for result, row in zip(results, table.find("tbody")[0].find("tr"), strict=True):
        assert len(row.find("th")) + len(row.find("td")) == len(headings)
        cells = row.find("td")
        assert cells[headings.index("PSNR") - 1].text.startswith(numbers.decibel(result["psnr"]))
        for heading in second:
            assert cells[headings.index(heading) - 1].text.startswith(numbers.decimal(result["ssim_padded"]))


@pytest.mark.parametrize(("mechanism", "rows"), [("none", 1), ("vmf", 2)])
def test_what_the_mechanism_changed_starts_a_row_of_its_own(make_run: MakeRun, mechanism: str, rows: int) -> None:
    folder = make_run(mechanism=mechanism, sampling="shuffled")
    victim, article = load_view(folder).victims[0], report(folder).find("article", "victim")[0]
    shots = article.find("figure", "shot")[1:]
    starts = [number for number, shot in enumerate(shots) if "second-row" in (shot.attributes["class"] or "").split()]
    uploads = [candidate.upload for candidate in victim.candidates]
    assert starts == ([uploads.index("protected")] if rows == 2 else [])


def test_the_key_figures_carry_their_conditions(make_run: MakeRun) -> None:
    folder = make_run(mechanism="vmf", noise=50.0, sampling="shuffled")
    worst = read_json(folder / "ledger.json")["clients"][0]
    root = report(folder)
    proven = tile(root, "Proven ε").text
    conditions = [
        numbers.figure(worst["epsilon"]),
        numbers.figure(worst["pure_epsilon"]),
        "10⁻⁵",
        worst["adjacency"],
        "one example at most 20 times",
        "shuffled",
        f"{worst['client']}, the worst",
        worst["theorem"]["epsilon"],
    ]
    assert [text for text in conditions if text not in proven] == []
    nominal = tile(root, "Nominal ε").text
    assert numbers.figure(worst["nominal_epsilon"]) in nominal
    assert "not the run's guarantee" in nominal
    accuracy = tile(root, "Test accuracy").text
    assert "90.4%" in accuracy
    assert "20 of 20 rounds" in accuracy


def test_without_a_finite_figure_the_words_say_so(make_run: MakeRun) -> None:
    folder = make_run(mechanism="vmf", noise=50.0)
    ledger = read_json(folder / "ledger.json")
    for line in (*ledger["clients"], ledger["worst"]):
        line["epsilon"] = line["pure_epsilon"] = None
        line["theorem"]["epsilon"] = "nothing composes here"
    write_json(folder / "ledger.json", ledger)
    root = report(folder)
    assert "No finite figure is proven" in tile(root, "Proven ε").text
    assert "nothing composes here" in tile(root, "Proven ε").text
    assert root.section("ledger").find("table")[0].text.count("none proven") == 16


@pytest.mark.parametrize(
    ("bare_error", "mechanism_error", "bare", "shielded"),
    [(0.02, 3.0, "4 of 4", "0 of 4"), (0.02, 0.02, "4 of 4", "4 of 4"), (4.0, 4.0, "0 of 4", "0 of 4")],
)
def test_a_weak_attack_is_never_a_success_of_the_mechanism(
    make_run: MakeRun, bare_error: float, mechanism_error: float, bare: str, shielded: str
) -> None:
    folder = make_run(unprotected_error=bare_error, protected_error=mechanism_error, success_ssim=0.9)
    root = report(folder)
    first, second = tile(root, "Images recovered without"), tile(root, "Images recovered with Gaussian")
    assert bare in first.text
    assert shielded in second.text
    weak = bare == "0 of 4"
    assert (page.WEAK in first.text) == weak
    assert ("Says nothing about the mechanism" in second.text) == weak
    assert ("alarm" in (second.attributes["class"] or "").split()) == (shielded != "0 of 4")


def test_one_successful_attack_is_enough_for_an_image_to_be_recovered(make_run: MakeRun) -> None:
    folder = make_run()
    path = folder / "reconstructions/scores.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        # Restarts that were not chosen do not count; of the chosen ones DLG wins client 0 and IGA clients 0 and 2.
        wins = {("dlg", 0), ("iga", 0), ("iga", 2)}
        line["recovered"] = not line["chosen"] or (
            line["upload"] == "protected" and (line["attack"], line["client"]) in wins
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    scores = load_view(folder).scores
    assert page.recovered(scores, "protected") == page.Recovered(2, 4)
    assert page.recovered(scores, "unprotected") == page.Recovered(0, 4)
    assert page.recovered((), "protected") is None


def test_an_image_that_no_attack_offered_anything_for_is_one_that_was_not_recovered(make_run: MakeRun) -> None:
    """Poisson batches have more images than an attack may expect; the guesses are scored for each of them."""
    folder = make_run(images=2, victims=2)
    path = folder / "reconstructions/scores.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [line for line in lines if line["upload"] == "none" or line["image"] == 0]
    path.write_text("".join(json.dumps(line) + "\n" for line in kept))
    scores = load_view(folder).scores
    assert page.recovered(scores, "unprotected") == page.Recovered(2, 4)
    assert page.recovered(scores, "none") == page.Recovered(0, 4)


def test_every_fault_is_listed(make_run: MakeRun) -> None:
    faults = [(number, client, f"reason {number}-{client}") for number in range(1, 13) for client in (1, 4)]
    for some in (faults[:20], faults):
        section = report(make_run(failures=tuple(some))).section("training")
        rows = section.find("table")[0].find("tbody")[0].find("tr")
        cells = [tuple(part.text for part in row.everything if part.tag in ("td", "th")) for row in rows]
        assert cells == [(str(number), str(client), reason) for number, client, reason in some]
        assert bool(section.find("details")) == (len(some) > 20)
    assert "No client failed." in report(make_run(failures=())).section("training").text


@pytest.mark.parametrize(("clients", "folded"), [(2, False), (20, False), (21, True)])
def test_the_ledger_lists_all_clients_worst_first(make_run: MakeRun, clients: int, folded: bool) -> None:
    folder = make_run(clients=clients, victims=2, failures=())
    ledger = read_json(folder / "ledger.json")
    for line in ledger["clients"]:
        line["examples"] = 100 + line["client"]
    write_json(folder / "ledger.json", ledger)
    section = report(folder).section("ledger")
    table = section.find("table")[-1]
    rows = table.find("tbody")[0].find("tr")
    assert [row.find("th")[0].text.split()[0] for row in rows] == [str(line["client"]) for line in ledger["clients"]]
    assert [bool(row.find("span", "badge")) for row in rows] == [True] + [False] * (clients - 1)
    for row, line in zip(rows, ledger["clients"], strict=True):
        cells = [cell.text for cell in row.find("td")]
        assert cells[0] == str(line["examples"])
        assert cells[1] == str(line["participations"])
        assert cells[2] == line["sampling"]
        assert cells[6].split()[0] == numbers.figure(line["epsilon"])
        assert cells[7] == "10⁻⁵"
    assert bool(section.find("details")) == folded
    assert len(section.find("table")) == 1 + folded


def test_clients_that_differ_in_what_the_ledger_does_not_show_have_one_line(make_run: MakeRun) -> None:
    folder = make_run(clients=4, victims=2, failures=())
    ledger = read_json(folder / "ledger.json")
    first = ledger["clients"][0]
    for line in ledger["clients"]:
        own = line["client"], line["members"]
        ceiling = {"k0": 0.1 + line["client"] / 10, "gamma": None, "theorem": "none"}
        line |= {**first, "client": own[0], "members": own[1], "ceilings": {"label": ceiling}}
    ledger["clients"][3]["examples"] += 1
    write_json(folder / "ledger.json", ledger)
    others = sorted(line["client"] for line in ledger["clients"][:3])
    alone = ledger["clients"][3]["client"]
    rows = report(folder).section("ledger").find("tbody")[0].find("tr")
    assert [row.find("th")[0].text for row in rows] == [f"{members_text(others)} (3 clients) worst", str(alone)]


def test_clients_that_stopped_are_told_with_their_last_round(make_run: MakeRun) -> None:
    folder = make_run(target=8.0, stops=((3, 11), (0, 0)), clients=4, finished=17, reason="used up", failures=())
    root = report(folder)
    section = root.section("ledger")
    assert "would raise its ε above 8 ( federation.target_epsilon )" in section.text
    assert "2 of 4 clients stopped" in section.text
    table = section.find("table")[-1]
    assert table.find("th")[9].text == "Stopped after round"
    rows = {row.find("th")[0].text.split()[0]: row.find("td")[-1].text for row in table.find("tbody")[0].find("tr")}
    assert rows == {"0": "0", "1": "not stopped", "2": "not stopped", "3": "11"}
    assert "8, at which clients stop" in tile(root, "Proven ε").text
    accuracy = tile(root, "Test accuracy").text
    assert "17 of 20 rounds" in accuracy
    assert "its privacy budget is used up" in accuracy


def test_a_target_that_nobody_reached_is_told(make_run: MakeRun) -> None:
    root = report(make_run(target=500.0))
    assert "No client reached it." in root.section("ledger").text
    assert "Stopped after round" not in root.text
    assert "federation.target_epsilon )" not in report(make_run()).section("ledger").text


@pytest.mark.parametrize(
    ("recipe", "drawn"),
    [({}, True), ({"running": False}, False), ({"mechanism": "none", "sampling": "shuffled"}, False)],
)
def test_the_running_epsilon_is_drawn_where_there_is_one(
    make_run: MakeRun, recipe: dict[str, Any], drawn: bool
) -> None:
    alts = [image.attributes["alt"] or "" for image in report(make_run(**recipe)).section("training").find("img")]
    assert len(alts) == 2 + drawn
    assert any("(the final figure may be lower): 0 at round 0, 8 at round 20" in alt for alt in alts) == drawn


def test_every_theorem_and_note_is_printed_once_and_referred_to(make_run: MakeRun) -> None:
    folder = make_run(mechanism="vmf", noise=50.0, sampling="shuffled")
    lines = read_json(folder / "ledger.json")["clients"]
    section = report(folder).section("ledger")
    printed = [item.text for item in section.find("ol")[0].find("li")]
    texts = list(dict.fromkeys(text for line in lines for text in line["theorem"].values()))
    assert ["".join(text.split()) for text in printed] == ["".join(text.split()) for text in texts]
    for row, line in zip(section.find("tbody")[0].find("tr"), lines, strict=True):
        named = [texts[int(link.text) - 1] for link in row.find("a")]
        assert named == [line["theorem"][key] for key in ("nominal_epsilon", "pure_epsilon", "epsilon")]
    shown = Counter(item.text for block in section.find("ul") for item in block.find("li"))
    for note in lines[0]["notes"]:
        assert shown[note] == 1


def test_a_note_about_some_clients_names_them(make_run: MakeRun) -> None:
    folder = make_run(clients=3, victims=1, failures=())
    ledger = read_json(folder / "ledger.json")
    for line in ledger["clients"]:
        line["notes"] = ["for all", *(["for two"] if line["client"] != 1 else [])]
    write_json(folder / "ledger.json", ledger)
    text = report(folder).section("ledger").text
    assert "for two (clients 0, 2)" in text
    assert "for all (clients" not in text


@in_one_test("shape", [(1, 8), (1, 8, 3), (12, 48), (48, 3)])
def test_each_line_of_a_signal_is_a_curve(shape: tuple[int, ...]) -> None:
    """A few lines of pixels cannot be seen; each colour is a curve, and lines lie in bands below each other."""
    values = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(values).save(buffer, "PNG")
    uri = picture_uri(Picture(buffer.getvalue(), shape[1], shape[0]))
    svg = base64.b64decode(uri.removeprefix("data:image/svg+xml;base64,")).decode()
    drawn = [[int(point.split(",")[1]) for point in line.split()] for line in re.findall('points="(.*?)"', svg)]
    lines = np.atleast_3d(values) if shape[0] <= shape[1] else np.atleast_3d(values.T)
    expected = [
        265 * band + 260 - line[:, colour]
        for band, line in enumerate(lines.astype(int))
        for colour in range(line.shape[1])
    ]
    np.testing.assert_array_equal(drawn, expected)


def test_a_picture_is_no_signal() -> None:
    assert picture_uri(Picture(b"", 28, 8)) == "data:image/png;base64,"


def test_a_setting_is_shown_as_in_the_file() -> None:
    assert plain((ColumnConfig(name="age", low=0, high=9),)) == "[{ name = age, low = 0.0, high = 9.0 }]"


def test_lpips_gives_its_reason_once(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of digits of 8 x 8 that they are too small, whatever else is missing."""
    text = report(make_run()).text
    assert text.count("LPIPS is n/a here: a side of 8 pixels is too short for it") == 1
    assert LPIPS_REASON not in text and "n/a here" not in report(make_run(lpips=True)).text
    monkeypatch.setattr(page, "PERCEIVED", 8)
    assert report(make_run()).text.count(LPIPS_REASON) == 1


def test_words_about_scores_are_those_of_the_metrics(make_run: MakeRun) -> None:
    text = report(make_run(success_ssim=0.7)).section("scores").text
    assert f"{metrics.SSIM_WINDOW} × {metrics.SSIM_WINDOW} pixels, standard deviation {metrics.SSIM_SIGMA}" in text
    assert "Here the window is 7 × 7" in text
    assert "SSIM is at least 0.7 and MSE is below that of every guess" in text


def test_what_the_attacks_say_is_printed_once(make_run: MakeRun) -> None:
    text = report(make_run(note="labels were ambiguous")).section("pictures").text
    assert text.count("labels were ambiguous") == 2
    assert "Inverting Gradients, without protection: labels were ambiguous (4 images)" in text


def test_threat_model_settings_versions_warnings_and_command_are_told(make_run: MakeRun) -> None:
    folder = make_run()
    summary = read_json(folder / "summary.json")
    root = report(folder)
    threat = summary["threat_model"]
    told = [threat["listener"], threat["conduct"], *threat["sees"], *threat["knows"], *threat["withheld"]]
    adversary = root.section("adversary").text
    assert [text for text in told if text not in adversary] == []
    repeat = root.section("repeat")
    assert repeat.find("code")[0].text == summary["command"]
    assert [name for name in summary["versions"].items() if " ".join(name) not in repeat.text] == []
    assert root.section("warnings").find("li")[0].text == summary["warnings"][0]
    assert [text for text in summary["verdict"] if text not in root.section("verdict").text] == []
    keys = {row.find("code")[0].text: row for row in repeat.find("tbody")[0].find("tr")}
    assert {"seed", "mechanism.sigma", "adversary.iga.restarts"} <= set(keys)
    assert keys["seed"].find("td")[0].text == "7"
    assert keys["seed"].attributes["class"] == "changed"
    assert "class" not in keys["training.optimizer"].attributes


def test_rates_have_a_section_that_begins_with_the_event_behind_the_mechanism(make_run: MakeRun) -> None:
    """Of those the most successful first; an estimated baseline says at once that nothing is proven."""
    folder = make_run()
    summary = read_json(folder / "summary.json")
    usual = {"images": 4, "interval": [0.0, 1.0], "chance": 0.01, "ceiling": 0.5, "theorem": "T", "candidates": 100}
    kinds = [(event, upload) for event in ("recovered", "label", "told") for upload in ("unprotected", "protected")]
    summary["rates"] = [
        {**usual, "event": event, "upload": upload, "attack": name, "hits": hits, "estimated": event == "recovered"}
        for event, upload in kinds
        for name, hits in (("dlg", 1), ("iga", 2), ("map", 2))
    ]
    write_json(folder / "summary.json", summary)
    root = report(folder)
    assert "Guess to ceiling" in root.find("nav")[0].text
    rows = [
        [cell.text for cell in row.parts if isinstance(cell, Element)] for row in root.section("rates").find("tr")[1:]
    ]
    events = ["picked out of 100"] * 6 + ["label named"] * 6 + ["image recovered"] * 6
    assert [row[2] for row in rows] == events
    assert [row[1] for row in rows] == (["with the mechanism"] * 3 + ["without protection"] * 3) * 3
    assert [row[4].split()[0] for row in rows] == ["2", "2", "1"] * 6
    assert all(("not proven" in row[6]) == (row[2] == "image recovered") for row in rows)
    conditions = tile(root, "Picked out of 100 with").text
    assert "iga, map" in conditions
    assert "dlg" not in conditions
    assert "Guess to ceiling" not in report(make_run()).find("nav")[0].text


def test_settings_of_attacks_that_were_not_made_are_left_out(make_run: MakeRun) -> None:
    text = report(make_run(attacks=("iga",))).section("adversary").text
    assert "adversary.iga.restarts" in text
    assert "adversary.dlg" not in text


def test_the_partition_and_its_curves_are_described(make_run: MakeRun) -> None:
    root = report(make_run())
    starts = [(image.attributes["alt"] or "")[:9] for image in root.section("training").find("img")]
    assert starts == ["Test accu", "Test loss", "Proven ep"]
    assert "8 clients" in (root.section("data").find("img")[0].attributes["alt"] or "")


def test_class_names_stand_for_labels(make_run: MakeRun) -> None:
    names = ("nought", *"123456789")
    text = report(make_run(class_names=names, victims=1)).section("pictures").text
    assert "True label nought" in text
    assert "Label nought, true nought" in text


def test_colour_pictures_of_any_shape_are_shown(make_run: MakeRun) -> None:
    folder = make_run(victims=1)
    picture = png(np.random.default_rng(0).random((47, 62, 3)))
    (folder / "reconstructions/0001-0000-original.png").write_bytes(picture)
    root = report(folder)
    image = root.section("pictures").find("img")[0]
    assert (image.attributes["width"], image.attributes["height"]) == ("62", "47")
    assert "Here the window is" not in root.section("scores").text


# ---- incomplete folders ---------------------------------------------------------------------------------------------

GONE: list[tuple[tuple[str, ...], list[str]]] = [
    (("summary.json",), ["This run is not finished", "No verdict was written"]),
    (("ledger.json",), ["This folder has no ledger yet"]),
    (("referee/partition.json",), ["The folder does not say which client holds which data"]),
    (("metrics.jsonl",), ["No round was evaluated, so there are no curves", "No round was finished"]),
    (("reconstructions",), ["There are no pictures", "this folder has no scores"]),
    (("reconstructions/scores.jsonl",), ["this folder has no scores", "Scores n/a"]),
    (("command.txt",), ["fedpriv run configs/digits.toml"]),
    (("command.txt", "summary.json"), ["The folder does not name the command"]),
    (
        ("summary.json", "ledger.json", "referee/partition.json", "metrics.jsonl", "reconstructions", "command.txt"),
        ["This run is not finished", "not measured", "not known yet", "There are no pictures"],
    ),
]


@pytest.mark.parametrize(("gone", "said"), GONE, ids=lambda value: "+".join(value)[:60])
def test_what_is_missing_is_said(make_run: MakeRun, gone: tuple[str, ...], said: list[str]) -> None:
    folder = make_run()
    for name in gone:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    text = report(folder).text
    assert [words for words in said if words not in text] == []
    assert "None" not in text.replace("None of", "")
    assert "nan" not in text.split()


def test_a_single_missing_picture_leaves_its_place(make_run: MakeRun) -> None:
    folder = make_run(victims=2)
    (folder / "reconstructions/0001-0001-iga-protected.png").unlink()
    (folder / "reconstructions/0001-0000-original.png").unlink()
    first, second = report(folder).find("article", "victim")
    for article, place in ((first, 0), (second, 4)):
        missing = [bool(shot.find("p", "absent")) for shot in article.find("figure", "shot")]
        assert missing == [position == place for position in range(6)]


@pytest.mark.parametrize("status", ["failed", "interrupted"])
def test_a_run_that_ended_badly_says_why(make_run: MakeRun, status: str) -> None:
    root = report(make_run(status=status, reason="too few clients: 1 of 4", finished=0, attacks=()))
    assert root.section("status").find("h2")[0].text == f"This run {'was ' * (status == 'interrupted')}{status}"
    assert "too few clients: 1 of 4" in root.section("status").text
    assert not report(make_run()).find("section", "status")


def test_without_mechanism_nothing_is_proven(make_run: MakeRun) -> None:
    root = report(make_run(mechanism="none", sampling="shuffled"))
    assert "no privacy is proven" in tile(root, "Proven privacy").text
    assert [one.find("h3")[0].text for one in root.find("section", "tile")] == [
        "Images recovered without protection",
        "Test accuracy",
        "Proven privacy",
    ]


def test_without_counterfactual_nothing_is_compared(make_run: MakeRun) -> None:
    root = report(make_run(counterfactual=False))
    assert "not tried" in tile(root, "Images recovered without").text
    assert "Not comparable" in tile(root, "Images recovered with Gaussian").text


def test_the_summary_gives_the_worst_line_where_the_ledger_is_missing(make_run: MakeRun) -> None:
    folder = make_run()
    epsilon = read_json(folder / "ledger.json")["worst"]["epsilon"]
    (folder / "ledger.json").unlink()
    assert numbers.figure(epsilon) in tile(report(folder), "Proven ε").text


# ---- hostile text ---------------------------------------------------------------------------------------------------

EVIL = "<img src=x onerror=alert(1)>\"'</style></title><script>alert(1)</script>{{ 7 * 7 }}&amp;"


def test_text_from_the_folder_is_text(make_run: MakeRun) -> None:
    folder = make_run(
        title=EVIL,
        class_names=(EVIL, *"123456789"),
        failures=((1, 0, EVIL),),
        warnings=(EVIL,),
        note=EVIL,
        status="failed",
        reason=EVIL,
    )
    summary = read_json(folder / "summary.json")
    for key in ("device", "engine", "command"):
        summary[key] = EVIL
    summary["verdict"] = [EVIL]
    summary["versions"] = {EVIL: EVIL}
    summary["data"] = {"name": EVIL, "source": EVIL}
    summary["threat_model"] = dict.fromkeys(("name", "listener", "conduct"), EVIL)
    summary["threat_model"] |= {key: [EVIL] for key in ("sees", "knows", "withheld")}
    for result in summary["attacks"]:
        result["attack"] = result["upload"] = result["lpips_reason"] = EVIL
    write_json(folder / "summary.json", summary)
    ledger = read_json(folder / "ledger.json")
    ledger["parameters"] = {EVIL: EVIL}
    for line in ledger["clients"]:
        line |= {"adjacency": EVIL, "sampling": EVIL, "theorem": {"epsilon": EVIL}, "notes": [EVIL]}
    write_json(folder / "ledger.json", ledger)
    root = report(folder)
    assert not root.find("script")
    assert all((image.attributes["src"] or "").startswith("data:") for image in root.find("img"))
    assert root.find("h1")[0].text == " ".join(EVIL.split())
    assert root.find("title")[0].text.startswith(EVIL[:40])
    assert render_page(load_view(folder)).count("{{ 7 * 7 }}") > 20


# ---- style ----------------------------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("ink", ["text", "muted", "link", "alarm"])
@pytest.mark.parametrize("paper", ["page", "surface", "alarm-page"])
def test_text_has_the_contrast_that_wcag_aa_asks_for(scheme: int, ink: str, paper: str) -> None:
    css = files("fedpriv.core.report").joinpath("report.css").read_text(encoding="utf-8")
    block = css.split(":root {")[1 + scheme].split("}")[0]
    colours = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", block))
    light, dark = sorted((luminance(colours[ink]), luminance(colours[paper])), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 4.5
