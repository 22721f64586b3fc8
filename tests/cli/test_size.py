"""`twoends size`: the screen, the object, the page, and questions that have no answer."""

from __future__ import annotations

import html.parser
import json
import re

import pytest

from twoends.engine.device import DiskRate, keep_rate

KINDS = {"measured", "arithmetic", "reported"}
HOST = ("--ram", "64GB", "--disk", "6GB/s", "--cores", "16", "--mem-bw", "80GB/s")


def figures(value):
    """Every object of a figure in a report."""
    if isinstance(value, dict):
        if "kind" in value:
            yield value
            return
        for part in value.values():
            yield from figures(part)
    elif isinstance(value, list):
        for part in value:
            yield from figures(part)


def bare_numbers(value):
    """Numbers that stand outside of figures."""
    if isinstance(value, dict):
        if "kind" not in value:
            for part in value.values():
                yield from bare_numbers(part)
    elif isinstance(value, list):
        for part in value:
            yield from bare_numbers(part)
    elif isinstance(value, int | float):
        yield value


@pytest.fixture
def report(twoends):
    """Runs `size ... --json` and gives the object."""

    def run(*words):
        result = twoends("size", *words, "--json")
        assert (result.code, result.err) == (0, "")
        return json.loads(result.out)

    return run


@pytest.mark.parametrize("words", [(), ("kimi-linear",), ("--gpus", "8xB300"), HOST, ("--machine", "h200-8")])
def test_every_number_says_what_it_is_and_whose(report, words):
    found = report(*words)
    shown = list(figures(found))
    assert len(shown) > 50
    for figure in shown:
        assert figure["kind"] in KINDS
        assert figure["source"]
        assert isinstance(figure["value"], int | float)
    assert list(bare_numbers(found)) == []


def test_the_golden_figures_are_in_the_object(report):
    found = report("kimi-k3")
    assert found["footprint"]["parameters"]["value"] == 2_779_931_837_184
    assert found["footprint"]["active_parameters"]["value"] == 104_189_614_848
    assert found["bytes"]["bytes_per_token"]["value"] == 134_641_449_984
    assert found["sequence"]["state_bytes"]["text"] == "0.202 GiB"
    assert found["sequence"]["cache_bytes_per_layer"]["value"] == 1_152


def test_a_described_host_has_its_figures_as_reported(report):
    found = report(*HOST)
    links = {row["link"]: row for row in found["speed"]["links"]["rows"]}
    assert links["disk"]["rate"]["value"] == 6e9
    assert links["disk"]["rate"]["kind"] == "reported"
    assert links["disk"]["rate"]["source"] == "as given on the command line"


def test_without_a_machine_it_is_this_one_where_doctor_measured_it(report, tmp_path):
    assert "speed" not in report()
    rate = DiskRate(bytes_per_s=3e9, date="2026-11-30", is_direct=True, piece_bytes=4 * 2**20, depth=4)
    keep_rate(tmp_path, rate)
    found = report()
    disk = next(row for row in found["speed"]["links"]["rows"] if row["link"] == "disk")
    assert (disk["rate"]["value"], disk["rate"]["kind"]) == (3e9, "measured")


def test_a_directory_with_a_config_is_sized(report, nano):
    found = report(nano, "--ram", "200MB", "--disk", "1GB/s", "--cores", "2")
    assert found["money"]["notes"][0].startswith("No API price of")
    assert found["footprint"]["parameters"]["value"] > 1_000_000


def test_the_options_change_a_machine_of_the_table(report):
    found = report("--machine", "pc-64", "--ram", "128GB")
    assert found["speed"]["tiers"]["rows"][0]["size"]["value"] == 128e9


def test_rent_in_another_currency_is_shown_and_converted(report):
    found = report("--gpus", "8xB300", "--rent", "50EUR", "--exchange", "EUR=0.8")
    assert found["money"]["hourly"]["text"] == "50.00 EUR"
    assert found["money"]["hourly_converted"]["value"] == pytest.approx(62.5)
    assert found["money"]["break_even_tokens_per_s"]["value"] == pytest.approx(62.5 / 15 * 1e6 / 3600)


def test_the_tables_rent_is_taken_for_whole_nodes(report):
    found = report("--gpus", "64xB300")
    assert found["money"]["hourly"]["value"] == 8 * 1_479_084
    assert found["money"]["break_even_tokens_per_s"]["text"] == "8,332 tokens/s"


def test_owning_is_depreciation_and_power(report):
    found = report("--gpus", "8xB300", "--buy", "438000USD", "--years", "5", "--energy", "0.10USD")
    assert found["money"]["depreciation"]["value"] == pytest.approx(10.0)
    assert found["money"]["power"]["value"] == pytest.approx(8 * 1.1 * 0.10)


def test_a_measured_speed_says_how_busy_it_must_be(report):
    found = report("--gpus", "8xB300", "--tokens-per-s", "2000")
    assert found["money"]["needed_utilisation"]["value"] == pytest.approx(1041.47 / 2000, rel=1e-4)


def test_the_example_alone_is_a_screen_of_its_own(twoends):
    out = twoends("size", "--example").out
    assert "1,487.5 GB" in out
    assert "8,332 tokens/s" in out
    assert "What it holds" not in out


@pytest.mark.parametrize(
    "words",
    [
        (),
        HOST,
        ("--gpus", "8xB300", "--sequences", "64", "--mix", "3:7:1"),
        ("kimi-linear", *HOST),
        ("--example",),
    ],
)
def test_no_line_is_wider_than_the_screen(twoends, words):
    result = twoends("size", *words)
    assert result.code == 0
    assert max(map(len, result.out.splitlines())) <= 80


def test_the_screen_names_the_sources_of_its_marks(twoends):
    out = twoends("size", "--gpus", "8xB300").out
    marks = {int(number) for number in re.findall(r"\b[mr](\d+)\b", out)}
    listed = {int(number) for number in re.findall(r"^\s+(\d+)  \w", out.split("reported, by:")[1], re.M)}
    assert marks == listed


class _Page(html.parser.HTMLParser):
    """Tags in order, and whatever points elsewhere."""

    def __init__(self):
        super().__init__()
        self.tags, self.outside, self.open = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag != "meta":
            self.open.append(tag)
        self.outside += [value for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_stands_alone_with_its_plots(twoends, tmp_path):
    path = tmp_path / "k3.html"
    assert twoends("size", "--machine", "b300-8", "--sequences", "64", "--html", path).code == 0
    text = path.read_text()
    page = _Page()
    page.feed(text)
    assert (page.open, page.outside) == ([], [])
    assert "script" not in page.tags
    assert not re.search(r"@import|url\(|https?://[^ )]+\.(js|css|woff)", text)
    assert page.tags.count("figure") == 4
    assert "prefers-color-scheme: dark" in text
    for words in ("Ladder", "Break-even", "Roofline of bytes", "1,560.9 GB", "1,041 tokens/s"):
        assert words in text


def test_a_name_of_the_user_is_escaped_in_the_page(twoends, tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text(
        '[[machine]]\nname = "<b>x"\nram_gb = 96\nmemory_gbs = 90\ncores = 12\ndisk_gbs = 5\n'
        'source = "<script>"\ndate = "2026"\n'
    )
    path = tmp_path / "k3.html"
    assert twoends("size", "--machines", mine, "--machine", "<b>x", "--html", path).code == 0
    assert "<b>x" not in path.read_text()
    assert "<script>" not in path.read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("kimi-k2",), "neither a released model nor a directory"),
        (("--machine", "b300"), "no machine 'b300'"),
        (("--gpus", "8xB400"), "no accelerator 'B400'"),
        (("--gpus", "0xB300"), "it must be 1 to"),
        (("--machine", "b300-8", "--gpus", "8xB300"), "give one of them"),
        (("--ram", "0GB", "--disk", "1GB/s"), "not a size above zero"),
        (("--ram", "-5GB"), "--ram"),
        (("--ram", "64GB", "--disk", "0GB/s"), "not a size above zero"),
        (("--ram", "64GB", "--disk", "6GB"), "is not a rate"),
        (("--disk", "6GB/s"), "needs its memory"),
        (("--ram", "64GB"), "must come from a disk whose rate is not known"),
        (("--cores", "0", "--ram", "1GB"), "too small"),
        (("--context", "0"), "too small"),
        (("--context", "2000000"), "is impossible: the model ends at 1,048,576"),
        (("--sequences", "0"), "too small"),
        (("--sequences", "99999999"), "it must be 1 to"),
        (("--draft", "3"), "needs --acceptance"),
        (("--draft", "3", "--acceptance", "1.5"), "between 0 and 1"),
        (("--draft", "3", "--acceptance", "nan"), "between 0 and 1"),
        (("--draft", "30", "--acceptance", "0.5", *HOST), "it was measured up to 12"),
        (("--acceptance", "0.5"), "no use without --draft"),
        (("--currency", "VDN"), "no exchange rate for VDN"),
        (("--rent", "0USD"), "not an amount above zero"),
        (("--rent", "5XYZ", "--gpus", "8xB300"), "no exchange rate for XYZ"),
        (("--mix", "1:1:0"), "has no output"),
        (("--utilisation", "0", "--gpus", "8xB300"), "--utilisation is 0"),
        (("--tokens-per-s", "0"), "must be above zero"),
        (("--buy", "5USD"), "--buy needs --years"),
        (("--years", "5"), "no use without --buy"),
        (("--buy", "5USD", "--rent", "5USD", "--years", "4", "--energy", "1USD"), "give one of them"),
        (("--buy", "5USD", "--years", "4", "--energy", "1USD", *HOST), "--buy needs --watts"),
        (("--buy", "5USD", "--years", "0", "--energy", "1USD", "--watts", "9"), "--years is 0"),
        (("--html", "page.txt"), "must end in .html"),
        (("--html", "none/page.html"), "no such directory"),
        (("--experts-as", "INT4"), "must be one of"),
        (("kimi-linear", "--example"), "the worked example is of kimi-k3"),
        (("--ram", "300MB", "--disk", "1GB/s"), "state, cache and program take"),
    ],
)
def test_a_question_without_an_answer_is_refused_in_words(twoends, words, said):
    result = twoends("size", *words)
    assert result.code in (2, 3)
    assert said in result.err
    assert "defect" not in result.err
    assert result.out == ""
