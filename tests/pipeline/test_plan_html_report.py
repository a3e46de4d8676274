"""The HTML report is self-contained, shows the numbers of the plan, and escapes text."""

import json
import re
from html import unescape
from html.parser import HTMLParser

import numpy as np
import pyarrow as pa
import pytest

from shardyard.pipeline.plan.load import KeySample, Load
from shardyard.pipeline.plan.report import PlanReport, make_plan

pytestmark = pytest.mark.xdist_group("plots")  # a page takes long to draw: one process draws it for all tests
VOID = {"meta", "br"}


class Page(HTMLParser):
    """The tags, ids and attributes of a page. Asserts that only open tags are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def planned(load: Load, *, fan_out_memory: bool = True) -> PlanReport:
    assignors = ["sticky", "contiguous"]
    return make_plan(load, partitions=[64, 256], members=[16], assignors=assignors, fan_out_memory=fan_out_memory)


def render(report: PlanReport, title: str) -> str:
    from shardyard.pipeline.plan import html_report  # noqa: PLC0415 only the process that draws needs Matplotlib

    return html_report.render(report, title)


@pytest.fixture(scope="module")
def measured() -> PlanReport:
    sample = KeySample(pa.array(["a", "b"]), np.array([1e9, 2e9]))
    return planned(Load.measured([10] * 64, [10**9] * 64, rate=64.0, keys=sample))


@pytest.fixture(scope="module")
def page(measured: PlanReport) -> str:
    return render(measured, "What if")


def test_a_page_fetches_nothing(page: str) -> None:
    found = Page(page)
    assert not {"link", "img", "image", "iframe", "object", "embed", "base"} & set(found.tags)
    assert found.tags.count("script") == 1
    fetching = [value for name, value in found.attributes if name in ("src", "href", "xlink:href", "srcset")]
    assert all(value.startswith("#") for value in fetching)
    assert "http" not in page
    assert "@import" not in page
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", page))


def test_tags_are_closed_and_ids_are_unique(page: str) -> None:
    found = Page(page)
    assert found.open == []
    assert len(found.ids) == len(set(found.ids))
    wanted = set(re.findall(r"url\(#([^)]*)\)", page)) | {v[1:] for n, v in found.attributes if n == "xlink:href"}
    assert wanted
    assert wanted <= set(found.ids)


def test_a_page_contains_the_plan_as_json(page: str, measured: PlanReport) -> None:
    script = re.search(r'<script type="application/json" id="plan">(.*?)</script>', page, re.DOTALL)
    assert script is not None
    assert json.loads(script[1]) == measured.to_json()


@pytest.mark.parametrize(
    "text",
    [
        "16 → 17",
        "15 · 5.9 %",
        "120 · 46.9 %",
        "3.6 GB moved",  # 15 of 256 partitions of 64 GB; 3 GB of it on those of the two keys, which stay
        "the formula is\n25.0 % above the table",
        "takes 2.5 GB in each by the\nformula, and 2.5 GB as stated",
        "mean 1.0 GB",
    ],
)
def test_a_page_shows_the_numbers(page: str, text: str) -> None:
    assert text in unescape(page)


def test_the_recommendation_comes_first(page: str, measured: PlanReport) -> None:
    assert unescape(page).index(measured.recommendation) < page.index("<table>")


def test_there_are_four_plots_or_three_if_nothing_was_measured(page: str) -> None:
    assert page.count("<svg ") == 4
    assumed = render(planned(Load(0, 0)), "Nothing yet")
    assert assumed.count("<svg ") == 3
    assert Page(assumed).open == []


def test_memory_of_fan_out_workers_is_shown_only_if_asked_for_and_no_page_names_internal_documents(page: str) -> None:
    without = render(planned(Load(0, 0), fan_out_memory=False), "Nothing yet")
    assert without.count("<svg ") == 2
    assert "routing table" not in without
    assert Page(without).open == []
    assert "ADR" not in page + without


def test_plots_take_their_colours_from_the_page(page: str) -> None:
    assert "prefers-color-scheme: dark" in page
    used = set(re.findall(r"var\(--([\w-]+)\)", page))
    assert {"ink", "faint", "mean", "series-0", "series-1"} <= used
    assert all(page.count(f"--{name}: #") == 2 for name in used)  # light and dark
    svgs = "".join(re.findall(r"<svg .*?</svg>", page, re.DOTALL))
    assert not re.findall(r"(?:fill|stroke): ?#", svgs)


def test_a_title_is_escaped(measured: PlanReport) -> None:
    title = "</title><script>alert('1')</script> & \"more\""
    text = render(measured, title)
    assert Page(text).tags.count("script") == 1
    assert "<script>alert" not in text
    assert title in unescape(text)


def test_the_same_plan_gives_the_same_page(page: str, measured: PlanReport) -> None:
    assert render(measured, "What if") == page


def test_the_size_of_a_page_does_not_grow_with_the_partitions() -> None:
    rng = np.random.default_rng(1)
    sizes = rng.integers(1, 10**6, 20_000).tolist()
    report = make_plan(Load.measured(sizes, sizes), partitions=[10], members=[2], assignors=["sticky"])
    text = render(report, "Many")
    assert "the fullest of every 20" in text
    assert len(text) - len(json.dumps(report.to_json())) < 200_000
